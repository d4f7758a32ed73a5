# SPDX-License-Identifier: Apache-2.0
"""The picture of a replay: one lane a stream, coloured by what it does.

A lane is cut into columns. The height that a colour fills is the share of the column's time in which the stream did
that: blocks where events are long, a measure of how busy the stream is where they are too short to be seen. So a
million spans draw as fast as a hundred.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron.simulator.dry_run.replay import HOST, Interval, Replay, duration

COLUMNS = 1200
COLOURS = {
    "gemm": "#0072b2",
    "attention": "#e69f00",
    "memory": "#8a8a8a",
    "tp": "#009e73",
    "ulysses": "#56b4e9",
    "ring": "#cc6677",
    "dp": "#aa4499",
    "pp": "#999933",
    "host load": "#d55e00",
    "host store": "#882255",
}
OTHER = "#444444"
LANES = ("compute", "tp", "ulysses", "ring", "dp", "pp")
NAMES = {"gemm": "matrix products", "memory": "other kernels"}
PHASES = {"forward": "#dde6ee", "backward": "#f3e3d3", "optimizer": "#dcebdf"}
INK, GREY = "#222222", "#8a8a8a"


def lanes(result: Replay) -> list[str]:
    """The streams that occur, compute first, the host last."""
    return lanes_of({span.stream for span in result.spans})


def lanes_of(there: set[str]) -> list[str]:
    """Streams in the order in which they are drawn."""
    last = tuple(HOST.values())
    others = sorted(there - {*LANES, *last})
    return [name for name in (*LANES, *others, *last) if name in there]


def coverage(begins: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of each column, between two ``edges``, that spans cover; they are in order and do not overlap."""
    if not len(begins):
        return np.zeros(len(edges) - 1)
    lengths = ends - begins
    before = np.concatenate(([0.0], lengths.cumsum()))
    last = np.searchsorted(begins, edges, side="right") - 1  # the span that began last, at each edge
    inside = np.clip(edges - begins[last], 0.0, lengths[last])
    covered = np.where(last >= 0, before[last] + inside, 0.0)
    return np.diff(covered) / np.diff(edges)


def shares(spans: list[Interval], edges: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    """Share of each column by (stream, kind)."""
    grouped: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for stream, kind, begin, end, _ in spans:
        begins, ends = grouped.setdefault((stream, kind), ([], []))
        begins.append(begin)
        ends.append(end)
    return {key: coverage(np.array(begins), np.array(ends), edges) for key, (begins, ends) in grouped.items()}


def draw(result: Replay, output: str | Path, title: str = "one step") -> None:
    """Writes the picture; the replay must have kept its spans.

    Raises:
        ValueError: it has none, or they take no time.
    """
    if not result.spans or not result.seconds:
        raise ValueError("nothing to draw: the replay has no spans, or none that takes time")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scale, unit = (1e3, "ms") if result.seconds < 10 else (1.0, "s")
    edges = np.linspace(0.0, result.seconds, COLUMNS + 1)
    filled, names = shares(result.spans, edges), lanes(result)
    figure = pyplot.figure(figsize=(12, 1.5 + 0.62 * len(names)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(names):
        base = float(len(names) - 1 - row) + np.zeros(COLUMNS)
        axes.axhline(base[0], color=GREY, linewidth=0.5, alpha=0.6)
        for (stream, kind), share in filled.items():
            if stream == name:
                top = base + 0.8 * share
                axes.fill_between(scale * edges, closed(base), closed(top), step="post", lw=0, color=colour(kind))
                base = top
    draw_phases(axes, result, scale, len(names))
    axes.set_yticks([len(names) - 1 - row + 0.4 for row in range(len(names))], [label(name) for name in names])
    axes.set_xlim(0, scale * result.seconds)
    axes.set_ylim(-0.08, len(names) + 0.32)
    axes.set_xlabel(f"time in the step ({unit})", color=INK)
    axes.set_title(f"{title}: {duration(result.seconds)}", fontsize=12, color=INK, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    draw_legend(figure, [kind for kind in ("gemm", "attention", "memory") if ("compute", kind) in filled])
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def colour(kind: str) -> str:
    return COLOURS.get(kind, OTHER)


def label(stream: str) -> str:
    return stream if stream == "compute" or stream in HOST.values() else f"{stream} communication"


def closed(heights: np.ndarray) -> np.ndarray:
    """With the last height once more: a step for the last edge."""
    return np.append(heights, heights[-1])


def draw_phases(axes: Any, result: Replay, scale: float, top: int) -> None:
    """A strip above the lanes that says which phase it is, where there is room to say so."""
    ends = [begin for _, begin in result.phases[1:]] + [result.seconds]
    drawn = [(*phase, end) for phase, end in zip(result.phases, ends) if end - phase[1] > result.seconds / COLUMNS]
    for name, begin, end in drawn:
        shade = PHASES.get(name, "#eeeeee")
        axes.broken_barh([(scale * begin, scale * (end - begin))], (top + 0.02, 0.26), facecolor=shade, edgecolor="w")
        if end - begin > 0.06 * result.seconds:
            middle = scale * (begin + end) / 2
            axes.text(middle, top + 0.14, name, ha="center", va="center", fontsize=9, color=INK)


def draw_legend(figure: Any, kinds: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour(kind), label=NAMES.get(kind, kind)) for kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
