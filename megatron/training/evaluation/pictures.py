# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: loss over position, the needle's heat map, right answers over length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.training.evaluation.tasks import Result


def draw(found: dict[str, Result], folder: Path) -> list[str]:
    """Draw what there is to draw; the paths of the pictures."""
    pictures = {}
    if "loss-by-position" in found:
        pictures["loss-by-position.png"] = (draw_losses, found["loss-by-position"])
    if "needle" in found:
        pictures["needle.png"] = (draw_needles, found["needle"])
    ruler = {task: result for task, result in found.items() if task.startswith("ruler-")}
    if ruler:
        pictures["ruler.png"] = (draw_ruler, ruler)
    for name, (function, result) in pictures.items():
        figure = function(result)
        figure.tight_layout()
        figure.savefig(folder / name)
        _pyplot().close(figure)
    return [str(folder / name) for name in pictures]


def draw_losses(result: Result) -> Any:
    """Loss by position, a step a bucket, on an axis of doublings."""
    figure, axes = _pyplot().subplots(figsize=(8, 4.5), dpi=120)
    buckets = result["buckets"]
    edges = [max(bucket["from"], buckets[0]["to"] // 2 + 1) for bucket in buckets] + [buckets[-1]["to"] + 1]
    axes.stairs([bucket["loss"] for bucket in buckets], edges, baseline=None, linewidth=2)
    axes.axhline(result["loss"], color="grey", linestyle="--", linewidth=0.8, label=f"all tokens: {result['loss']:.3f}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges, [_short(0 if n == 0 else edge) for n, edge in enumerate(edges)])
    axes.minorticks_off()
    axes.set(xlabel="position in the document", ylabel="loss (nats a token)", title="Loss by position")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_needles(result: Result) -> Any:
    """Depth over length, green where the answer's tokens are right."""
    cells = result["cells"]
    lengths = list(dict.fromkeys(cell["length"] for cell in cells))
    depths = list(dict.fromkeys(cell["depth"] for cell in cells))
    by_place = {(cell["depth"], cell["length"]): cell["hits"] for cell in cells}
    shares = [[by_place[depth, length] for length in lengths] for depth in depths]
    figure, axes = _pyplot().subplots(figsize=(1.5 + 1.1 * len(lengths), 1.6 + 0.38 * len(depths)), dpi=120)
    image = axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), map(_short, lengths))
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axes.set(xlabel="length (tokens)", ylabel="depth", title=f"Needle: {100 * result['hits']:.1f} % right")
    figure.colorbar(image, ax=axes, label="share of answer tokens right")
    return figure


def draw_ruler(results: dict[str, Result]) -> Any:
    """Share of right answer tokens over length, a line a task."""
    figure, axes = _pyplot().subplots(figsize=(8, 4.5), dpi=120)
    for task, result in results.items():
        cells = result["cells"]
        axes.plot([cell["length"] for cell in cells], [cell["hits"] for cell in cells], marker="o", label=task)
    ticks = sorted({cell["length"] for result in results.values() for cell in result["cells"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(_short, ticks))
    axes.minorticks_off()
    axes.set(
        xlabel="length (tokens)", ylabel="share of answer tokens right", title="Tasks of RULER's kind", ylim=(0, 1.05)
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _short(tokens: int) -> str:
    return f"{tokens >> 10}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
