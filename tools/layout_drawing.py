# SPDX-License-Identifier: Apache-2.0
"""Pictures of which tokens each rank holds, and of the blocks sent around a ring, for tools/plot_tiles.py."""

from __future__ import annotations

from typing import Any

from megatron.context_parallel.attention.ring_plan import Hop, RingPlan, attention_plan
from megatron.context_parallel.layout.masks import Documents, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import count
from megatron.context_parallel.linear_attention.span_exchange import span_order
from tools.tile_drawing import GREY, INK, PALE, colour, frame, polygon, ticks


def draw_layout(figure: Any, layouts: list[SequenceLayout], mask: Mask) -> None:
    """The sequence at the top, and below it one line per rank with the positions that it holds."""
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
                    style = {"left": start, "color": shade, "edgecolor": "white", "linewidth": 0.8}
                    for y, height in ((0, 1.1), (line, 0.8)):
                        axes.barh(y, stop - start, height=height, **style)
                    if lines <= 16 and len(held) == 1:
                        on_right = stop < 0.8 * layout.seq_length
                        gap = 0.012 * layout.seq_length
                        axes.text(
                            stop + gap if on_right else start - gap, line, f"{start} .. {stop - 1}",
                            ha="left" if on_right else "right", va="center", fontsize=8, color=GREY,
                        )  # fmt: skip
        axes.text(-0.02 * layout.seq_length, 0, "sequence", ha="right", va="center", color=INK)
        axes.set_title(layout.balance, fontsize=13, color=INK, pad=10)
        axes.set(ylim=(2.0 + ring * (ulysses + 0.4), -0.9), xlim=(0, layout.seq_length))
        axes.set_xticks(*ticks(layout))
        axes.set_xlabel("position in the sequence", color=INK)
        axes.set_yticks([])
        frame(axes)
    u, r = layouts[0].grid.ulysses.size, layouts[0].grid.ring.size
    figure.suptitle(f"Who holds which tokens: Ulysses {u} x Ring {r}", fontsize=15, color=INK)


def draw_ring(figure: Any, layouts: list[SequenceLayout], mask: Mask) -> None:
    """For every rank and hop, the key block that the rank holds: sent parts in colour, parts never sent pale."""
    for axes, layout in zip(figure.subplots(1, len(layouts), squeeze=False)[0], layouts):
        ring, block = layout.grid.ring.size, layout.seq_length // layout.grid.ring.size
        plans = [attention_plan(layout, mask).ring(rank=rank) for rank in range(ring)]
        for plan in plans:
            for number, hop in enumerate(plan.hops):
                _draw_hop(axes, plan, number, hop, ring, block)
        sent = sum(count(hop.held) for plan in plans for hop in plan.hops[1:])
        share = sent / (ring * (ring - 1) * block) if ring > 1 else 0.0
        towards = "up" if ring < 3 or plans[0].step == 1 else "down"
        axes.set_title(
            f"{layout.balance}: blocks travel {towards} the ranks,\n{share:.0%} of what a full ring would send",
            fontsize=12, color=INK, pad=10,
        )  # fmt: skip
        axes.set_xticks([hop + 0.44 for hop in range(ring)], ["own block", *(f"hop {hop}" for hop in range(1, ring))])
        axes.set_yticks([rank + 0.25 for rank in range(ring)], [f"R {rank}" for rank in range(ring)])
        axes.set(xlim=(-0.1, ring), ylim=(ring, -0.15))
        axes.xaxis.tick_top()
        frame(axes)
        axes.tick_params(length=0)
    figure.suptitle(f"What travels: keys and values on a ring of {layouts[0].grid.ring.size}", fontsize=14, color=INK)


def draw_maps(figure: Any, layouts: list[SequenceLayout], mask: Mask) -> None:
    """Each rank's spans and, at the top, their maps in the order of positions, from which the states follow."""
    ends = (mask.ends,) if isinstance(mask, Documents) else ()
    for axes, layout in zip(figure.subplots(1, len(layouts), squeeze=False)[0], layouts):
        ulysses, ring = layout.grid.ulysses.size, layout.grid.ring.size
        order = span_order(layout.without_groups(), ends, by_heads=False)
        for number, place in enumerate(order.places):
            (start, stop), line = place.span, 3.2 + 1.1 * place.rank
            middle = (start + stop) / 2
            style = {"facecolor": colour(place.rank // ulysses, ring), "edgecolor": "white", "linewidth": 0.8}
            axes.plot([middle, middle], [1.9, line], color=GREY, linewidth=0.7, linestyle=":", zorder=0)
            axes.add_patch(_box(start, line, stop - start, 0.8, **style))
            if place.hands_on:
                axes.add_patch(_box(start, 1.0, stop - start, 0.9, **style))
                axes.text(middle, 1.45, f"M$_{{{number}}}$ N$_{{{number}}}$", ha="center", va="center", fontsize=8)
                axes.annotate(
                    "", (stop + 0.1 * (stop - start), 0.45), (start + 0.1 * (stop - start), 0.45),
                    arrowprops={"arrowstyle": "->", "color": INK},
                )  # fmt: skip
            state = "0" if place.fresh else f"S$_{{{number}}}$"
            axes.text(start, 0.1, state, ha="left", va="bottom", fontsize=9, color=INK)
        for rank in range(ring * ulysses):
            name = f"R {rank // ulysses}" + (f"   U {rank % ulysses}" if ulysses > 1 else "")
            axes.text(-0.02 * layout.seq_length, 3.6 + 1.1 * rank, name, ha="right", va="center", color=INK)
        for y, name in ((0.0, "state"), (1.45, "map")):
            axes.text(-0.02 * layout.seq_length, y, name, ha="right", va="center", color=INK)
        axes.set_title(layout.balance, fontsize=13, color=INK, pad=10)
        axes.set(ylim=(3.2 + 1.1 * ring * ulysses, -0.7), xlim=(0, layout.seq_length))
        axes.set_xticks(*ticks(layout))
        axes.set_xlabel("position in the sequence", color=INK)
        axes.set_yticks([])
        frame(axes)
    figure.suptitle("Maps of spans compose in the order of positions", fontsize=14, color=INK)


def _draw_hop(axes: Any, plan: RingPlan, number: int, hop: Hop, ring: int, block: int) -> None:
    width, height = 0.88, 0.5
    axes.add_patch(_box(number, plan.rank, width, height, facecolor=PALE))
    style = {"facecolor": colour(hop.source, ring), "edgecolor": "white", "linewidth": 0.8}
    for start, stop in hop.held:
        x, part = number + width * start / block, width * (stop - start) / block
        axes.add_patch(_box(x, plan.rank, part, height, **style))
    if hop.held:
        style = {"fontsize": 8, "color": INK if hop.tiles else GREY, "va": "top", "ha": "left"}
        axes.text(number, plan.rank + height + 0.06, f"block of R {hop.source}", **style)
    else:
        axes.text(number + width / 2, plan.rank + height / 2, "idle", fontsize=8, color=GREY, va="center", ha="center")


def _box(x: float, y: float, width: float, height: float, **style: Any) -> Any:
    return polygon([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], **style)
