# SPDX-License-Identifier: Apache-2.0
"""The stages' figures as pictures, one for each stage."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.profile import GROUPS, OTHER
from benchmarks.gpu.report import good
from benchmarks.gpu.stage import Figures, read

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
IDLE = "#e6e6e6"
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100)


def draw_all(folder: Path) -> list[Path]:
    """Draw a PNG for each stage that has figures; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    result = []
    for name, draw in DRAW.items():
        report = read(folder, name)
        if report and good(report):
            path = folder / f"{name}.png"
            if draw(report, path):
                result.append(path)
    return result


def figure(report: Figures, title: str, wide: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(4.5 + 3.5 * wide, 4.6), layout="constrained")
    FigureCanvasAgg(made)
    made.suptitle(f"{title} · {report['device']}", fontsize=11)
    axes = made.subplots(1, wide, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return made, axes


def attention(report: Figures, path: Path) -> bool:
    """Share of the GEMM rate over the sequence length, with a line for each kernel."""
    bare = [result for result in good(report).values() if "kernel" in result]
    if not bare:
        return False
    made, axes = figure(report, "Causal attention as a share of the GEMM rate", 2)
    for one, way in zip(axes, ("forward", "backward")):
        for colour, kernel in zip(COLOURS, dict.fromkeys(result["kernel"] for result in bare)):
            points = sorted((f["length"], 100 * f[way]["of_gemm"]) for f in bare if f["kernel"] == kernel)
            one.plot(*zip(*points), "o-", color=colour, label=kernel)
        lengths(one, [result["length"] for result in bare])
        one.set(title=way, ylabel="% of the GEMM rate")
        one.set_ylim(0)
        one.legend(frameon=False)
    made.savefig(path, dpi=130)
    return True


def step(report: Figures, path: Path) -> bool:
    """The time of each step by kind of kernel."""
    cases = {name: f for name, f in good(report).items() if f.get("profile", {}).get("seconds")}
    if not cases:
        return False
    made, (one,) = figure(report, "Where a training step's time goes", 1)
    made.set_size_inches(10, 1.9 + 0.75 * len(cases))
    left = [0.0] * len(cases)
    for colour, kind in zip((*COLOURS, IDLE), (*GROUPS, OTHER, "idle"), strict=True):
        if not any(kind in f["profile"]["groups"] for f in cases.values()):
            continue
        shares = [100 * f["profile"]["groups"].get(kind, 0.0) / f["profile"]["seconds"] for f in cases.values()]
        one.barh(list(cases), shares, left=left, color=colour, label=kind, height=0.6)
        left = [a + b for a, b in zip(left, shares)]
    for row, (end, result) in enumerate(zip(left, cases.values())):
        text = f"{result['layers']} layers, {result['seconds']:.3g} s"
        text += f", MFU {100 * result['mfu']:.1f} %" if result["mfu"] else ""
        one.text(end + 1, row, text, va="center", fontsize=9)
    one.set(xlabel="% of the step (streams overlap)", xlim=(0, max(left) * 1.32), xticks=range(0, 101, 20))
    one.invert_yaxis()
    made.legend(*one.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    made.savefig(path, dpi=130)
    return True


def fpdt(report: Figures, path: Path) -> bool:
    """Speed and device memory over the chunk, compared with full recompute."""
    cases = [result for name, result in good(report).items() if not name.startswith("longest")]
    chunked = [result for result in cases if result["chunk"]]
    if not chunked:
        return False
    made, axes = figure(report, f"FPDT, {chunked[0]['length']:,} tokens, layers: {chunked[0]['layers']}", 2)
    plain = next((result for result in cases if not result["chunk"]), None)
    values: tuple[Callable[[Figures], float], ...] = (
        lambda f: f["tokens_per_second"],
        lambda f: (f["states"] + f["activations"]) / 2**30,
    )
    for one, value_of, label in zip(axes, values, ("tokens per second", "device memory, GiB")):
        for colour, mode in zip(COLOURS, dict.fromkeys(result["mode"] for result in chunked)):
            points = sorted((f["chunk"], value_of(f)) for f in chunked if f["mode"] == mode)
            one.plot(*zip(*points), "o-", color=colour, label=mode)
        if plain:
            one.axhline(value_of(plain), color="black", linestyle="--", linewidth=1, label="full recompute")
        lengths(one, [result["chunk"] for result in chunked])
        one.set(xlabel="chunk, tokens", ylabel=label)
        one.set_ylim(0)
    axes[0].legend(frameon=False)
    made.savefig(path, dpi=130)
    return True


def simulator(report: Figures, path: Path) -> bool:
    """Predicted over measured seconds, with a point for each case."""
    cases, machines = good(report), report.get("machines", {})
    made, axes = figure(report, "Predicted over measured seconds", 1)
    one = axes[0]
    made.set_size_inches(9, 1.6 + 0.24 * len(cases))
    for colour, what in zip(COLOURS, machines):
        points = [(f[f"{what}_over_measured"], row) for row, f in enumerate(cases.values())]
        one.plot(*zip(*points), "o", color=colour, label=f"{what} machine: {machines[what]}")
    one.axvline(1, color="black", linewidth=1)
    one.set_yticks(range(len(cases)), list(cases), fontsize=8)
    one.invert_yaxis()
    result = [f[f"{what}_over_measured"] for f in cases.values() for what in machines]
    ticks = [x for x in RATIOS if min(*result, 0.8) <= x <= max(*result, 1.25)]
    one.set_xscale("log")
    one.set_xticks(ticks, [f"{x:g}" for x in ticks])
    one.minorticks_off()
    one.grid(axis="x", color="#eeeeee")
    made.legend(loc="outside lower center", frameon=False, fontsize=8)
    made.savefig(path, dpi=130)
    return True


def lengths(axis: Any, values: list[int]) -> None:
    """Set ticks at numbers of tokens."""
    ticks = sorted(set(values))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{n // 1024}K" if n >= 1024 else str(n) for n in ticks])
    axis.minorticks_off()
    axis.set_xlabel("tokens")


DRAW = {"attention": attention, "step": step, "fpdt": fpdt, "simulator": simulator}
