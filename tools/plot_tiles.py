#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw how a sequence is shared out: which tokens each rank holds, which tiles it computes, what travels on the ring.

    python tools/plot_tiles.py --show layout --ulysses 2 --ring 4 --output layout.png
    python tools/plot_tiles.py --show tiles --ring 4 --output tiles.png
    python tools/plot_tiles.py --show ring --ring 4 --output ring.png

Nothing here is drawn from memory: every rectangle comes from SequenceLayout and ring_plan, as a training run uses them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.context_parallel.grid import abstract_grid
from megatron.context_parallel.layout import SequenceLayout, length_unit
from megatron.context_parallel.masks import Causal, Full, Mask, Span
from megatron.context_parallel.ring import Hop, RingPlan, ring_plan, unpacked
from megatron.context_parallel.tiles import count

MASKS: dict[str, Mask] = {"causal": Causal(), "full": Full()}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc6677", "#56b4e9", "#aa4499", "#999933", "#661100")
INK, GREY, PALE = "#222222", "#8a8a8a", "#f1f1ef"


def colour(rank: int, ranks: int, fade: float = 0.0) -> tuple[float, float, float]:
    """The colour of a ring rank, faded towards white from 0 (not) to 1 (white)."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(COLOURS[rank] if ranks <= len(COLOURS) else colormaps["turbo"]((rank + 0.5) / ranks))
    return red + (1 - red) * fade, green + (1 - green) * fade, blue + (1 - blue) * fade


def positions(rows: Span, spans: tuple[Span, ...]) -> list[Span]:
    """The global positions of some local rows of a block."""
    found, first = [], 0
    for start, stop in spans:
        low, high = max(rows[0], first), min(rows[1], first + stop - start)
        if low < high:
            found.append((start + low - first, start + high - first))
        first += stop - start
    return found


def tile_shapes(plan: RingPlan, layout: SequenceLayout) -> list[tuple[int, list[tuple[float, float]]]]:
    """What a rank computes, as (hop, corners) with x = key position and y = query position."""
    shapes = []
    for number, hop in enumerate(plan.hops):
        for tile in hop.tiles:
            queries = positions(tile.q, layout.ring_spans(plan.rank))
            keys = positions(unpacked(tile.k, hop.held), layout.ring_spans(hop.source))
            for q in queries:
                for k in keys:
                    box = [(k[0], q[0]), (k[1], q[0]), (k[1], q[1]), (k[0], q[1])]
                    if tile.kind == "full" or k[1] <= q[0]:
                        shapes.append((number, box))
                    elif q == k:  # the diagonal
                        shapes.append((number, [box[0], box[2], box[3]]))
    return shapes


def draw_layout(figure: Any, layouts: list[SequenceLayout], mask: Mask) -> None:
    """The sequence above, and below it one line a rank: the positions it holds."""
    for axes, layout in zip(figure.subplots(1, len(layouts), squeeze=False)[0], layouts):
        ulysses, ring = layout.grid.ulysses.size, layout.grid.ring.size
        lines = ulysses * ring
        for r in range(ring):
            for u in range(ulysses):
                line = 2.0 + r * (ulysses + 0.4) + u
                axes.barh(line, layout.seq_length, color=PALE, height=0.8, left=0)
                axes.text(-0.02 * layout.seq_length, line, f"R {r}   U {u}", ha="right", va="center", color=INK)
                shade = colour(r, ring, 0.55 * u / max(ulysses - 1, 1))
                held = layout.spans(ulysses=u, ring=r)
                for start, stop in held:
                    for y, height in ((0, 1.1), (line, 0.8)):
                        axes.barh(
                            y, stop - start, left=start, color=shade, height=height, edgecolor="white", linewidth=0.8
                        )
                    if lines <= 16 and len(held) == 1:
                        beside = stop < 0.8 * layout.seq_length
                        gap = 0.012 * layout.seq_length
                        axes.text(
                            stop + gap if beside else start - gap, line, f"{start} .. {stop - 1}",
                            ha="left" if beside else "right", va="center", fontsize=8, color=GREY,
                        )  # fmt: skip
        axes.text(-0.02 * layout.seq_length, 0, "sequence", ha="right", va="center", color=INK)
        axes.set_title(layout.balance, fontsize=13, color=INK, pad=10)
        axes.set(ylim=(2.0 + ring * (ulysses + 0.4), -0.9), xlim=(0, layout.seq_length))
        axes.set_xticks(*_ticks(layout))
        axes.set_xlabel("position in the sequence", color=INK)
        axes.set_yticks([])
        _frame(axes)
    u, r = layouts[0].grid.ulysses.size, layouts[0].grid.ring.size
    figure.suptitle(f"Who holds which tokens: Ulysses {u} x Ring {r}", fontsize=15, color=INK)


def draw_tiles(figure: Any, layouts: list[SequenceLayout], mask: Mask) -> None:
    """Queries against keys, coloured by the ring rank that computes; below, the work of each rank."""
    grid = figure.subplots(2, len(layouts), squeeze=False, height_ratios=[3.4, 1])
    busiest = 0
    for (top, below), layout in zip(zip(*grid), layouts):
        ring, length = layout.grid.ring.size, layout.seq_length
        top.add_patch(_polygon([(0, 0), (length, 0), (length, length), (0, length)], facecolor=PALE))
        plans = [ring_plan(layout, mask, rank) for rank in range(ring)]
        for plan in plans:
            for hop, corners in tile_shapes(plan, layout):
                shade = colour(plan.rank, ring, _fade(hop, ring))
                top.add_patch(_polygon(corners, facecolor=shade, edgecolor="white", linewidth=0.8))
                if ring <= 8:
                    x, y = (sum(c) / len(corners) for c in zip(*corners))
                    top.text(x, y, str(hop), ha="center", va="center", fontsize=8, color=_ink_on(shade))
        top.set(xlim=(0, length), ylim=(length, 0), aspect="equal")
        top.set_xticks(*_ticks(layout))
        top.set_yticks(*_ticks(layout))
        top.set_xlabel("key position", color=INK)
        top.set_ylabel("query position", color=INK)
        _frame(top)
        mean = sum(plan.pairs for plan in plans) / ring
        for plan in plans:
            done = 0
            for hop, work in enumerate(sum(tile.pairs for tile in hop.tiles) for hop in plan.hops):
                below.barh(
                    plan.rank, work / mean, left=done / mean, color=colour(plan.rank, ring, _fade(hop, ring)),
                    edgecolor="white", linewidth=0.8, height=0.75,
                )  # fmt: skip
                done += work
        below.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        slowest = max(plan.pairs for plan in plans) / mean
        busiest = max(busiest, slowest)
        top.set_title(
            f"{layout.balance}: the busiest rank does {slowest:.2f} x the mean", fontsize=12, color=INK, pad=8
        )
        below.set_xlabel("work of a ring rank, 1 = mean", color=INK)
        below.set_yticks(range(ring), [f"R {rank}" for rank in range(ring)])
        below.set_ylim(ring - 0.4, -0.6)
        _frame(below)
    for below in grid[1]:
        below.set_xlim(0, 1.05 * busiest)
    figure.suptitle(
        f"Who computes what: Ring {layouts[0].grid.ring.size}, {type(mask).__name__.lower()} mask "
        "(number: the hop at which it is computed)",
        fontsize=14, color=INK,
    )  # fmt: skip


def draw_ring(figure: Any, layouts: list[SequenceLayout], mask: Mask) -> None:
    """For every rank and hop, the key block at hand: filled what has arrived, pale what was never sent."""
    for axes, layout in zip(figure.subplots(1, len(layouts), squeeze=False)[0], layouts):
        ring, block = layout.grid.ring.size, layout.seq_length // layout.grid.ring.size
        plans = [ring_plan(layout, mask, rank) for rank in range(ring)]
        for plan in plans:
            for number, hop in enumerate(plan.hops):
                _draw_hop(axes, plan, number, hop, ring, block)
        sent = sum(count(hop.held) for plan in plans for hop in plan.hops[1:])
        share = sent / (ring * (ring - 1) * block) if ring > 1 else 0.0
        towards = "up" if plans[0].next == 1 % ring else "down"
        axes.set_title(
            f"{layout.balance}: blocks travel {towards} the ranks,\n{share:.0%} of what a full ring would send",
            fontsize=12, color=INK, pad=10,
        )  # fmt: skip
        axes.set_xticks([hop + 0.44 for hop in range(ring)], ["own block", *(f"hop {hop}" for hop in range(1, ring))])
        axes.set_yticks([rank + 0.25 for rank in range(ring)], [f"R {rank}" for rank in range(ring)])
        axes.set(xlim=(-0.1, ring), ylim=(ring, -0.15))
        axes.xaxis.tick_top()
        _frame(axes)
        axes.tick_params(length=0)
    figure.suptitle(f"What travels: keys and values on a ring of {layouts[0].grid.ring.size}", fontsize=14, color=INK)


def _draw_hop(axes: Any, plan: RingPlan, number: int, hop: Hop, ring: int, block: int) -> None:
    width, height = 0.88, 0.5
    axes.add_patch(_box(number, plan.rank, width, height, facecolor=PALE))
    for start, stop in hop.held:
        axes.add_patch(
            _box(
                number + width * start / block, plan.rank, width * (stop - start) / block, height,
                facecolor=colour(hop.source, ring), edgecolor="white", linewidth=0.8,
            )
        )  # fmt: skip
    if hop.held:
        text = f"block of R {hop.source}"
        axes.text(
            number, plan.rank + height + 0.06, text, fontsize=8, color=INK if hop.tiles else GREY, va="top", ha="left"
        )
    else:
        axes.text(number + width / 2, plan.rank + height / 2, "idle", fontsize=8, color=GREY, va="center", ha="center")


def _ticks(layout: SequenceLayout) -> tuple[list[int], list[str]]:
    """Where the blocks begin, if they are few, and how that is written."""
    fitting = (n for n in (2 * layout.grid.ring.size, 8, 4, 1) if n <= 8 and layout.seq_length % n == 0)
    parts = next(fitting)
    places = [layout.seq_length * part // parts for part in range(parts + 1)]
    if all(place % 1024 == 0 for place in places):
        return places, [f"{place // 1024}K" for place in places]
    return places, [f"{place:,}" for place in places]


def _fade(hop: int, ring: int) -> float:
    return 0.65 * hop / max(ring - 1, 1)


def _ink_on(shade: tuple[float, float, float]) -> str:
    return "white" if 0.3 * shade[0] + 0.59 * shade[1] + 0.11 * shade[2] < 0.55 else INK


def _polygon(corners: list[tuple[float, float]], **style: Any) -> Any:
    from matplotlib.patches import Polygon

    return Polygon(corners, closed=True, **style)


def _box(x: float, y: float, width: float, height: float, **style: Any) -> Any:
    return _polygon([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], **style)


def _frame(axes: Any) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, length=3)


PICTURES = {"layout": draw_layout, "tiles": draw_tiles, "ring": draw_ring}


def figure_size(show: str, ulysses: int, ring: int, columns: int) -> tuple[float, float]:
    """Width and height in inches."""
    if show == "layout":
        return 5.4 * columns, 1.9 + 0.34 * ring * (ulysses + 0.4)
    if show == "ring":
        return max(5.4, 1.25 * ring + 0.6) * columns, 1.6 + 0.72 * ring
    return 5.4 * columns, 6.4 + 0.17 * ring


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=list(PICTURES), default="tiles", help="which picture (default: tiles)")
    parser.add_argument("--seq-length", type=int, help="tokens (default: 16 for each block that the grid cuts)")
    parser.add_argument("--ulysses", type=int, default=1, help="Ulysses degree (default: 1)")
    parser.add_argument("--ring", type=int, default=4, help="Ring degree (default: 4)")
    parser.add_argument(
        "--balance", nargs="+", choices=["zigzag", "contiguous"], default=["zigzag", "contiguous"],
        help="drawn beside each other (default: both)",
    )  # fmt: skip
    parser.add_argument("--mask", choices=list(MASKS), default="causal", help="attention mask (default: causal)")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG", help="picture to write")
    options = parser.parse_args(argv)
    try:
        if min(options.ulysses, options.ring) < 1:
            raise ValueError("--ulysses and --ring must be at least 1")
        grid = abstract_grid(ulysses=options.ulysses, ring=options.ring)
        length = options.seq_length or 16 * length_unit(options.ulysses, options.ring, "zigzag")
        layouts = [SequenceLayout(length, grid, balance) for balance in options.balance]
        _save(options, layouts)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {options.show} of {length} tokens on Ulysses {options.ulysses} x Ring {options.ring}")
    return 0


def _save(options: argparse.Namespace, layouts: list[SequenceLayout]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = figure_size(options.show, options.ulysses, options.ring, len(layouts))
    figure = pyplot.figure(figsize=size, dpi=110, layout="constrained")
    PICTURES[options.show](figure, layouts, MASKS[options.mask])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
