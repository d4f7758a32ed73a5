#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""FPDT against plain recompute: tokens per second and device memory over the chunk size (FPDT paper, figure 12).

    python benchmarks/fpdt.py                                   # the sweep: out/fpdt/sweep.json, .csv and .png
    python benchmarks/fpdt.py --compare recompute fpdt --chunks 8 --repeats 5
    python benchmarks/fpdt.py --plot out/fpdt/sweep.json        # draw again

Every configuration trains in a separate process, on random tokens. On a CPU the configurations of one chunk size and
the reference run their steps alternately, so that other programs affect all of them; ratios are medians of the rounds'
ratios. Memory is metered in another step, because metering is slow. On a GPU, where clocks are steady and memory is
scarce, configurations run one after another.

In every mode, and in the reference, the loss is in chunks (--loss-chunks), so that the modes differ in FPDT only.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import QUIET  # noqa: E402
from benchmarks.train import gemm_rates  # noqa: E402

DESCRIPTIONS = {
    "plain": "no recompute",
    "recompute": "full recompute",
    "fpdt": "FPDT, chunks in host memory",
    "fpdt-device": "FPDT, chunks on the device",
    "fpdt-inputs": "FPDT, chunks and layer inputs in host memory",
    "fpdt-recompute": "FPDT and full recompute",
    "fpdt-stream": "FPDT, hidden states streamed",
}
REFERENCE = "recompute"
GOALS = {1: 0.97, 8: 0.92}  # FPDT's share of the reference's speed, by number of chunks
GIB = 2**30
LIMIT = 1e6  # seconds to wait for a step: there is no limit in practice

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
MODES: dict[str, list[str]] = {
    "plain": [],
    "recompute": RECOMPUTE,
    "fpdt": ["--fpdt"],
    "fpdt-device": ["--fpdt", "--no-fpdt-offload"],
    "fpdt-inputs": ["--fpdt", "--offload-checkpoints"],
    "fpdt-recompute": ["--fpdt", *RECOMPUTE],
    "fpdt-stream": ["--fpdt", "--fpdt-stream-hidden"],
}
SWEEP = ["recompute", "fpdt", "fpdt-device", "fpdt-stream"]


@dataclass
class Run:
    """A mode with a chunk size, and its measurements.

    Attributes:
        chunks: number of attention chunks; None for modes without chunks.
        steps: {"seconds", "cpu_seconds", "foreign"} of each round.
        memory: bytes: "states" before a step, "activations" in addition at the peak, "host" at the peak, "to_host" and
            "to_device" copied in a step.
        failed: why there are no measurements.
    """

    mode: str
    chunks: int | None
    steps: list[dict] = field(default_factory=list)
    memory: dict = field(default_factory=dict)
    failed: str | None = None

    @property
    def name(self) -> str:
        return self.mode if self.chunks is None else f"{self.mode}, {self.chunks} chunks"


def main() -> None:
    args = arguments()
    if args.plot:
        report = json.loads(Path(args.plot).read_text())
        draw(report, Path(args.plot).with_suffix(".png"))
        show(report)
        return
    peak = max(gemm_rates(args).values()) if args.device == "cpu" else None
    report: dict = {"problem": {**vars(args), "peak_flops": peak}, "load_at_start": os.getloadavg()[0], "rows": []}
    for number, chunks in enumerate(args.chunks):
        if args.seq_length % chunks:
            raise SystemExit(f"error: --chunks {chunks} does not divide --seq-length {args.seq_length}")
        # Modes without chunks are measured once, except the reference, which is measured with every chunk size.
        modes = [mode for mode in args.modes if "--fpdt" in MODES[mode] or number == 0 or mode == REFERENCE]
        group = [Run(mode, chunks if "--fpdt" in MODES[mode] else None) for mode in modes]
        report["rows"] += measure(group, args, peak)
        write(report, Path(args.output))
    show(report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a named shape instead of the sizes below, for example gpt-2.7b")
    parser.add_argument("--num-layers", type=int, help="default: 2, or the model's")
    parser.add_argument("--hidden-size", type=int, help="default: 512, or the model's")
    parser.add_argument("--num-attention-heads", type=int, help="default: 8, or the model's")
    parser.add_argument("--kv-heads", type=int, help="key/value heads; default: as many as query heads, or the model's")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seq-length", type=int, default=16384)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--chunks", type=int, nargs="+", help="chunks of the sequence; default: 1 2 4 8 16 32")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=SWEEP, metavar="MODE", help=_modes())
    parser.add_argument(
        "--compare", nargs="+", choices=list(MODES), metavar="MODE", help="only these modes, with 8 chunks"
    )
    parser.add_argument(
        "--loss-chunks", type=int, help="for all modes; default: 2 x vocabulary / width; 0: the default of each mode"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count; figures are medians over them")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not meter memory")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="default: fp32, on a GPU bf16")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--output", default="out/fpdt/sweep", metavar="PREFIX", help="of the .json, .csv and .png")
    parser.add_argument("--plot", metavar="FILE", help="draw the figures of an earlier run's JSON, and stop")
    parser.add_argument("more", nargs="*", metavar="-- FLAG", help="further flags of the training program")
    args = parser.parse_args()
    if args.compare:
        args.modes = args.compare
    if REFERENCE not in args.modes:
        args.modes = [REFERENCE, *args.modes]
    args.chunks = args.chunks or ([8] if args.compare else [1, 2, 4, 8, 16, 32])
    if args.device == "auto":
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    if not args.model:
        args.num_layers, args.hidden_size = args.num_layers or 2, args.hidden_size or 512
        args.num_attention_heads = args.num_attention_heads or 8
    return args


def _modes() -> str:
    listed = "; ".join(f"{mode}: {text}" for mode, text in DESCRIPTIONS.items())
    return f"what to measure; default: {' '.join(SWEEP)}. {listed}"


def flags(run: Run, args: argparse.Namespace) -> list[str]:
    """Flags of the training program."""
    settings = {
        "--model": args.model,
        "--num-layers": args.num_layers,
        "--hidden-size": args.hidden_size,
        "--num-attention-heads": args.num_attention_heads,
        "--num-query-groups": args.kv_heads,
        "--vocab-size": args.vocab_size - 1,  # one more for the end of a document
        "--loss-chunks": _loss_chunks(args),
        "--fpdt-chunk-size": args.seq_length // run.chunks if run.chunks else None,
    }
    words = [str(word) for flag, value in settings.items() if value is not None for word in (flag, value)]
    words += (
        f"--seq-length {args.seq_length} --max-position-embeddings {args.seq_length} --position-embedding-type rope "
        f"--micro-batch-size {args.micro_batch_size} --global-batch-size {args.micro_batch_size} --lr 1e-4 --mock-data "
        f"--train-iters {args.repeats + 100} --tokenizer-type NullTokenizer --num-workers 0 --eval-iters 0 "
        f"--device {args.device} --no-progress"
    ).split()
    words += ["--bf16"] * (args.dtype == "bf16") + ["--group-query-attention"] * bool(args.kv_heads)
    return words + MODES[run.mode] + args.more


def _loss_chunks(args: argparse.Namespace) -> int | None:
    """The paper's number of chunks of the loss, for all modes; None: the default of each mode."""
    if args.loss_chunks == 0:
        return None
    from megatron.training.families.named import shape

    width = args.hidden_size or shape(args.model)["hidden_size"]
    return args.loss_chunks or 2 * ceil(args.vocab_size / width)


def measure(group: list[Run], args: argparse.Namespace, peak: float | None) -> list[dict]:
    """The rows of a group of configurations: their steps alternate on a CPU, and follow one another on a GPU."""
    for together in [group] if args.device == "cpu" else [[run] for run in group]:
        _rounds(together, args)
    reference = next(run for run in group if run.mode == REFERENCE)
    return [row(run, reference, args, peak) for run in group]


def _rounds(group: list[Run], args: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    warnings.simplefilter("ignore")  # core warns at import about packages that are not installed
    import torch

    from benchmarks.gpu.program import Failed, Program

    torch.set_num_threads(args.threads)  # of the programs too, which on a CPU are forks of this process
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        programs = [Program(flags(run, args), logs / run.name) for run in group]
        for program in programs:
            stack.enter_context(program)

        def answers(what: str) -> Iterator[tuple[Run, dict]]:
            """The answer of each program that has not run out of memory."""
            for run, program in zip(group, programs):
                try:
                    if not run.failed:
                        yield run, program.ask(what, LIMIT)
                except Failed as error:
                    if not re.search("out of (host )?memory", str(error)):
                        text = (logs / run.name).read_text()[-3000:]
                        raise SystemExit(f"error: {run.name}: the training program ended:\n{text}") from None
                    run.failed = "out of memory"
                    _progress(f"{run.name}: out of memory")

        # The first step allocates memory that later ones use again, and does not count.
        for number in range(args.repeats + 1):
            for run, step in answers("step"):
                run.steps += [step] if number else []
            _progress(f"{', '.join(run.name for run in group)}: round {number} of {args.repeats}")
        for run, memory in answers("meter") if args.memory else ():
            run.memory = memory


def row(run: Run, reference: Run, args: argparse.Namespace, peak: float | None) -> dict:
    """The figures of a configuration, without disturbed rounds if at least two others remain."""
    figures = {
        "mode": run.mode,
        "chunks": run.chunks,
        "chunk_size": args.seq_length // run.chunks if run.chunks else None,
        "failed": run.failed,
        **run.memory,
        "steps": run.steps,
    }
    if not run.steps:
        return figures
    seconds = statistics.median(step["seconds"] for step in run.steps)
    figures |= {"seconds": seconds, "tokens_per_second": args.seq_length * args.micro_batch_size / seconds}
    figures["mfu"] = run.steps[0]["flops"] / seconds / (peak or run.steps[0]["peak_flops"])
    pairs = list(zip(reference.steps, run.steps))
    quiet = [pair for pair in pairs if all(step["foreign"] <= QUIET for step in pair)]
    counted = quiet if len(quiet) >= 2 else pairs
    if counted:
        by_cpu_time = statistics.median(a["cpu_seconds"] / max(b["cpu_seconds"], 1e-9) for a, b in counted)
        figures |= {
            "of_reference": statistics.median(a["seconds"] / b["seconds"] for a, b in counted),
            "of_reference_by_cpu_time": by_cpu_time,
            "rounds_that_count": len(counted),
            "undisturbed": counted is quiet,
        }
    return figures


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write(report: dict, prefix: Path) -> None:
    """Write all figures so far to PREFIX.json, .csv and .png, so that an interrupted run keeps its results."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".json").write_text(json.dumps(report, indent=2) + "\n")
    columns = [name for name in dict.fromkeys(name for row in report["rows"] for name in row) if name != "steps"]
    with prefix.with_name(prefix.name + ".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(report["rows"])
    if any(row["chunks"] for row in report["rows"]):
        draw(report, prefix.with_name(prefix.name + ".png"))


def merged(report: dict) -> list[dict]:
    """One row for each configuration; the reference's row has medians, as it is measured with every chunk size."""
    reference = [row for row in report["rows"] if row["mode"] == REFERENCE]
    median = dict(reference[0])
    for name in ("seconds", "tokens_per_second", "mfu"):
        values = [row[name] for row in reference if name in row]
        median |= {name: statistics.median(values)} if values else {}
    return [median] + [row for row in report["rows"] if row["mode"] != REFERENCE]


def show(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    problem, console = report["problem"], Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{describe(problem)}; load at start {report['load_at_start']:.2f}")
    for mode in dict.fromkeys(row["mode"] for row in report["rows"]):
        console.print(f"  {mode}: {DESCRIPTIONS[mode]}")
    table = Table(
        "", "chunk", "step, s", "tokens/s", "MFU", "vs recompute", "by CPU time", "activations", "states", "host",
        "to host", "to device",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for row in merged(report):
        cells = [row["mode"], _size(row["chunk_size"])]
        if row["failed"]:
            table.add_row(*cells, row["failed"])
            continue
        cells += [f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.0f}", f"{row['mfu']:.1%}"]
        goal = GOALS.get(row["chunks"]) if row["mode"] == "fpdt" else None
        share, by_cpu_time = row.get("of_reference"), row.get("of_reference_by_cpu_time")
        cells += [f"{share:.1%}" + (f" (goal {goal:.0%})" if goal else "") if share else ""]
        cells += [f"{by_cpu_time:.1%}" if by_cpu_time and problem["device"] == "cpu" else ""]
        cells += [_bytes(row.get(name)) for name in ("activations", "states", "host", "to_host", "to_device")]
        table.add_row(*cells)
    console.print(table)
    if not all(row.get("undisturbed", True) for row in report["rows"]):
        console.print("Other programs ran during the steps of some rows: use the ratios by CPU time there.")


def describe(problem: dict) -> str:
    size = problem["model"] or f"{problem['num_layers']} layers of {problem['hidden_size']}"
    cpu = f"CPU, {problem['threads']} thread{'s' * (problem['threads'] > 1)}"
    return (
        f"Llama, {size}, {problem['seq_length']:,} tokens, vocabulary {problem['vocab_size']:,}, {problem['dtype']}, "
        f"{cpu if problem['device'] == 'cpu' else 'one GPU'}"
    )


def _size(tokens: int | None) -> str:
    if tokens is None:
        return ""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.2f} GiB"


def draw(report: dict, file: Path) -> None:
    """Two panels over the chunk size: speed, and device memory in activations and model states."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ink, grey, states_colour = "#222222", "#8a8a8a", "#d9d9d4"
    colours = {"plain": "#999933", "recompute": "#222222", "fpdt": "#0072b2", "fpdt-device": "#e69f00",
               "fpdt-stream": "#009e73", "fpdt-inputs": "#cc6677", "fpdt-recompute": "#aa4499"}  # fmt: skip
    problem, rows = report["problem"], merged(report)
    sizes = sorted({row["chunk_size"] for row in rows if row["chunk_size"]}, reverse=True)
    chunked = [mode for mode in DESCRIPTIONS if any(row["mode"] == mode and row["chunks"] for row in rows)]
    unchunked = [row for row in rows if not row["chunks"] and "seconds" in row]
    at = {size: place for place, size in enumerate(sizes)}
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    reference = next((row for row in unchunked if row["mode"] == REFERENCE), None)
    dashed = {"linestyle": "--", "linewidth": 1.2}
    for row in unchunked:
        speed.axhline(row["tokens_per_second"], color=colours[row["mode"]], label=DESCRIPTIONS[row["mode"]], **dashed)
    for mode in chunked:
        points = [row for row in rows if row["mode"] == mode and "seconds" in row]
        # Relative to the reference of the same rounds, so that the machine's load has less effect.
        levels = [row["of_reference"] * reference["tokens_per_second"] if reference and "of_reference" in row
                  else row["tokens_per_second"] for row in points]  # fmt: skip
        style = {"color": colours[mode], "label": DESCRIPTIONS[mode]}
        speed.plot([at[row["chunk_size"]] for row in points], levels, "o-", **style)
    speed.set(ylabel="tokens per second", ylim=(0, 1.08 * speed.dataLim.ymax))
    per_token = next((row["mfu"] / row["tokens_per_second"] for row in rows if "mfu" in row), None)
    if per_token:
        second = speed.secondary_yaxis("right", functions=(lambda y: y * per_token, lambda y: y / per_token))
        second.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
        second.set_ylabel("MFU")
        second.spines["right"].set_visible(False)
    speed.set_title("Speed, compared with full recompute" if reference else "Speed", color=ink)
    speed.legend(frameon=False, fontsize=9, loc="lower left")

    bars = 0.8 / max(len(chunked), 1)
    tallest = max((row["states"] + row["activations"] for row in rows if "states" in row), default=0) / GIB
    for number, mode in enumerate(chunked):
        for row in rows:
            if row["mode"] != mode or not row["chunks"]:
                continue
            x = at[row["chunk_size"]] + (number - (len(chunked) - 1) / 2) * bars
            if row["failed"]:
                style = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 8, "color": grey}
                memory.text(x, 0.02 * tallest, row["failed"], **style)
            elif "states" in row:
                memory.bar(x, row["states"] / GIB, bars * 0.92, color=states_colour)
                memory.bar(x, row["activations"] / GIB, bars * 0.92, bottom=row["states"] / GIB, color=colours[mode])
    for row in unchunked:
        if "states" in row:
            memory.axhline((row["states"] + row["activations"]) / GIB, color=colours[row["mode"]], **dashed)
    memory.bar(0, 0, color=states_colour, label="weights, gradients, optimizer")
    memory.set(ylabel="device memory at the peak, GiB", ylim=(0, 1.18 * tallest or None))
    memory.set_title("Device memory: activations in colour, on top of the model states", color=ink)
    memory.legend(frameon=False, fontsize=9, loc="upper right")
    for axes in (speed, memory):
        axes.set_xticks(range(len(sizes)), [f"{_size(size)}\n{problem['seq_length'] // size}" for size in sizes])
        axes.set_xlim(-0.6, len(sizes) - 0.4)
        axes.set_xlabel("chunk size in tokens, and number of chunks", color=ink)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink, length=0)
        axes.grid(axis="y", color="#ececea")
        axes.set_axisbelow(True)
    figure.suptitle(describe(problem), color=ink, fontsize=13)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
