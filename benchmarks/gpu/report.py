# SPDX-License-Identifier: Apache-2.0
"""The stages' figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.stage import Figures, clock, compared, read

GIB = 2**30
STEP_HEAD = ["", "layers", "step, s", "tokens/s", "device, GiB", "host, GiB"]


def write_report(folder: Path, names: list[str]) -> Path:
    """Write report.md with all stages that have figures."""
    reports = {name: report for name in names if (report := read(folder, name))}
    lines: list[str] = []
    if reports:
        about = next(iter(reports.values()))
        lines.append(f"# {about['device']}{', tiny' if about['tiny'] else ''}")
        memory = f"{about['host_memory'] / GIB:.0f} GiB of host memory"
        lines.append(f"torch {about['torch']}, {about['cores']} cores, {memory}")
    for name, report in reports.items():
        lines += ["", f"## {name}", "", *TABLES[name](report), *beside(report), *left_out(report)]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def good(report: Figures) -> dict[str, Figures]:
    return {name: result for name, result in report["cases"].items() if "failed" not in result}


def beside(report: Figures) -> list[str]:
    """Every figure that the simulator predicts, next to the measured one."""
    rows = []
    for name, result in good(report).items():
        for what, measured, predicted in compared(result, result.get("prediction", {})):
            figures = f"{measured:.4g}", f"{predicted:.4g}", ratio(predicted, measured)
            rows.append([name, what.replace("/", ", "), *figures])
    lines = table(["", "", "measured", "predicted", "predicted/measured"], rows)
    return ["", *lines] if lines else []


def left_out(report: Figures) -> Iterator[str]:
    """Lines about failures and their reasons."""
    failed = {name: result["failed"] for name, result in report["cases"].items() if "failed" in result}
    if report.get("failed"):
        yield from ("", f"**The stage failed: {report['failed']}**")
    elif not report["finished"]:
        yield from ("", "**The stage was stopped before its end; start it again for the remaining cases.**")
    if failed:
        yield from ("", *(f"- {name}: {why}" for name, why in failed.items()))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return [f"| {' | '.join(line)} |" for line in lines]


def tests(report: Figures) -> list[str]:
    rows, wrong = [], []
    for name, result in good(report).items():
        skipped = "; ".join(f"{count}: {why}" for why, count in result["skipped"].items())
        rows.append([name, str(result["passed"]), str(len(result["wrong"])), skipped, clock(result["took"])])
        wrong += [f"- **{test}**: {why}" for test, why in result["wrong"].items()]
    return [*table(["file", "passed", "wrong", "skipped", "took"], rows), *([""] if wrong else []), *wrong]


def rates(report: Figures) -> list[str]:
    rows = []
    for name, result in good(report).items():
        if "flops_per_second" in result:
            rows.append([name, tera(result["flops_per_second"])])
        elif "forward" in result:
            rows.append([f"{name}, forward and backward", f"{tera(result['forward'])}, {tera(result['backward'])}"])
        elif "bytes_per_second" in result:
            rows.append([name, f"{result['bytes_per_second'] / 1e9:,.1f} GB/s"])
        else:
            rows.append([name, f"{1e6 * result['seconds']:.1f} µs"])
    return table(["", "rate"], rows)


def attention(report: Figures) -> list[str]:
    bare = [result for result in good(report).values() if "kernel" in result]
    rows = []
    for result in sorted(bare, key=lambda result: result["length"]):
        passes = [result[name] for name in ("forward", "backward")]
        texts = [text for one in passes for text in (tera(one["flops_per_second"]), share(one["of_gemm"]))]
        rows.append([f"{result['length']:,}", result["kernel"], *texts])
    masked = {name: result for name, result in good(report).items() if "kernel" not in result}
    causal = {result["length"]: result["seconds"] for name, result in masked.items() if name.startswith("causal, auto")}
    more = []
    for name, result in masked.items():
        of_causal = ratio(result["seconds"], causal.get(result["length"]))
        more.append([name, f"{1e3 * result['seconds']:.2f}", share(result["pairs_of_causal"]), of_causal])
    why = [f"- {name}: {reason}" for name, reason in report.get("why_not", {}).items()]
    return [
        f"The GEMM rate is {tera(report.get('gemm_flops_per_second', 0))}. Not available:",
        *why,
        "",
        *table(["tokens", "kernel", "forward", "of GEMM", "backward", "of GEMM"], rows),
        "",
        *table(["mask, kernel, tokens", "ms, both ways", "pairs of causal", "time of causal"], more),
        "",
        *by_tiles(report),
    ]


def kernels(report: Figures) -> list[str]:
    """Each variant next to today's launches for the same mask and way."""
    cases, rows = good(report), []
    today = {(one["mask"], one["way"]): one["seconds"] for one in cases.values() if one["name"] == "today"}
    for one in sorted(cases.values(), key=lambda one: (one["mask"], one["way"], one["seconds"])):
        took = one["seconds"]
        speed = f"{1e3 * took:.2f}", tera(one["flops_per_second"]), ratio(took, today.get((one["mask"], one["way"])))
        rows.append([one["mask"], one["way"], one["name"], *speed, str(one["launches"])])
    lines = table(["mask", "way", "variant", "ms", "rate", "time of today's", "launches"], rows)
    if compiled := report.get("compiled"):
        lines += ["", f"{compiled['kernels']} kernels compiled in {compiled['seconds']:.0f} s by {compiled['cores']} "
                  "processes.", *(f"- not compiled: {why}" for why in compiled["not_compiled"])]  # fmt: skip
    return lines


def by_tiles(report: Figures) -> list[str]:
    """Equal documents: which kernel is chosen by the predicted crossover, and which was the fastest."""
    names, cases, rows = report.get("kernels", []), good(report), []
    for length, chosen in report.get("chosen", {}).items():
        found = {name: cases.get(f"documents of {length}, {name}", {}).get("seconds") for name in names}
        taken = {name: seconds for name, seconds in found.items() if seconds}
        times = [f"{1e3 * taken[name]:.2f}" if name in taken else "" for name in names]
        rows.append([f"{int(length):,}", *times, chosen, min(taken, key=taken.get, default="")])
    return table(["tokens of a document", *(f"{name}, ms" for name in names), "predicted", "fastest"], rows)


def linear(report: Figures) -> list[str]:
    cases, rows = good(report), []
    for result in cases.values():
        other = cases.get(f"{result['rule']}, blocks, {result['length']}", {})
        took = f"{1e3 * result['forward_seconds']:.2f}", f"{1e3 * result['seconds']:.2f}"
        peak = f"{result.get('device_peak_bytes', 0) / GIB:.2f}"
        which = result["rule"], str(result["length"]), result["form"]
        rows.append([*which, *took, ratio(result["seconds"], other.get("seconds")), peak])
    head = ["rule", "tokens", "kernels", "forward, ms", "both ways, ms", "time of blocks", "device, GiB"]
    why = [f"- {name}: {reason}" for name, reason in report.get("why_not", {}).items()]
    return [*table(head, rows), "", *why]


def step(report: Figures) -> list[str]:
    rows, groups = [], []
    for name, result in good(report).items():
        rows.append([name, *figures_of(result), share(result["mfu"]), share(result["of_gemm_rate"])])
        profile = result.get("profile", {})
        if total := profile.get("seconds"):
            kinds = {group: seconds for group, seconds in profile["groups"].items() if seconds > 0.001 * total}
            groups.append([name, ", ".join(f"{group} {share(seconds / total)}" for group, seconds in kinds.items())])
            for top in profile["top"][:5]:
                groups.append(["", f"{top['name'][:70]}: {share(top['seconds'] / total)}, {top['count']} times"])
    steps = table([*STEP_HEAD, "MFU", "of the GEMM rate"], rows)
    return [*steps, "", *table(["", "where the time goes"], groups)]


def first(report: Figures) -> list[str]:
    parts = ("start_seconds", "first_seconds", "later_seconds")
    rows = [[name, *(f"{result[part]:.2f}" for part in parts)] for name, result in good(report).items()]
    return table(["", "start of the process, s", "first step, s", "a later step, s"], rows)


def figures_of(result: Figures) -> list[str]:
    device = (result["states"] + result["activations"]) / GIB
    sizes = [f"{device:.1f}", f"{result['host'] / GIB:.1f}"]
    return [str(result["layers"]), f"{result['seconds']:.3f}", f"{result['tokens_per_second']:,.0f}", *sizes]


def fpdt(report: Figures) -> list[str]:
    cases = good(report)
    reference = cases.get("recompute", {}).get("seconds")
    rows = [[name, *figures_of(result), ratio(reference, result["seconds"])] for name, result in cases.items()]
    lines = table([*STEP_HEAD, "speed of recompute"], rows)
    if report.get("copies"):
        result = report["copies"]
        lines += ["", f"Copies of {result['copy_seconds']:.3f} s per step, {share(result['hidden'])} overlapped (rest: "
                  f"{result['exposed_seconds']:.3f} s); profiler: {share(result['hidden_by_profiler'])}."]  # fmt: skip
    return lines


def longest(report: Figures) -> list[str]:
    lines = table(STEP_HEAD, [[name, *figures_of(result)] for name, result in good(report).items()])
    if report.get("longest"):
        result = report["longest"]
        text = f"Longest context that ran: {result['tokens']:,} tokens, layers: {result['layers']}; {result['ended']}."
        fits = ", ".join(f"{tokens:,} tokens with {layers}" for layers, tokens in result.get("by_formula", {}).items())
        lines += ["", text + (f" By the formula, memory is sufficient for {fits}." if fits else "")]
    return lines


def simulator(report: Figures) -> list[str]:
    machines = report.get("machines", {})
    rows = [
        [
            name,
            f"{result['seconds']:.4g}",
            *(ratio(result["predicted"].get(what), result["seconds"]) for what in machines),
        ]
        for name, result in good(report).items()
    ]
    return table(["", "measured, s", *(f"predicted/measured, {what} machine" for what in machines)], rows)


def tera(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate > 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def share(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.1f} %"


def ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.3f}" if a and b else ""


TABLES = {
    "tests": tests,
    "rates": rates,
    "attention": attention,
    "kernels": kernels,
    "linear": linear,
    "step": step,
    "first": first,
    "fpdt": fpdt,
    "longest": longest,
    "simulator": simulator,
}
