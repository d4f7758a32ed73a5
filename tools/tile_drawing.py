# SPDX-License-Identifier: Apache-2.0
"""Draw tiles, queries against keys, coloured by the ring rank that computes them; for one mask, or for all masks."""

from __future__ import annotations

from typing import Any

import megatron.context_parallel as cp
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from tools.tile_shapes import Outline, Shape, centre, extent, shapes

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc6677", "#56b4e9", "#aa4499", "#999933", "#661100")
INK, GREY, PALE = "#222222", "#8a8a8a", "#f1f1ef"
HATCHES = {"full": "", "causal": "\\\\\\", "anticausal": "///"}
LEGEND = {
    "full": "full: every pair",
    "causal": "causal: up to the diagonal",
    "anticausal": "anticausal: from the diagonal on",
    "masked": "masked: all pairs are computed (pale), the mask permits some (dark)",
}


def colour(rank: int, ranks: int, fade: float = 0.0) -> tuple[float, float, float]:
    """The RGB colour of a ring rank; ``fade`` mixes it with white, 1 is white."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(COLOURS[rank] if ranks <= len(COLOURS) else colormaps["turbo"]((rank + 0.5) / ranks))
    return red + (1 - red) * fade, green + (1 - green) * fade, blue + (1 - blue) * fade


def draw_tiles(figure: Any, layouts: list[SequenceLayout], mask: Mask) -> None:
    """Queries against keys, and below them the work of each rank."""
    grid = figure.subplots(2, len(layouts), squeeze=False, height_ratios=[3.4, 1])
    kinds: set[str] = set()
    busiest = 0.0
    for (top, below), layout in zip(zip(*grid), layouts):
        ring = layout.grid.ring.size
        by_rank = [shapes(layout, mask, rank) for rank in range(ring)]
        kinds |= plot_pairs(top, layout, by_rank, numbers=ring <= 8)
        top.set_xticks(*ticks(layout))
        top.set_yticks(*ticks(layout))
        top.set_xlabel("key position", color=INK)
        top.set_ylabel("query position", color=INK)
        frame(top)
        slowest = _plot_work(below, layout, by_rank)
        busiest = max(busiest, slowest)
        top.set_title(
            f"{layout.balance}: the busiest rank does {slowest:.2f} x the mean\n{_amount(layout, by_rank)}",
            fontsize=11, color=INK, pad=8,
        )  # fmt: skip
        frame(below)
    for below in grid[1]:
        below.set_xlim(0, 1.05 * busiest)
    _legend(figure, kinds, len(layouts))
    first = layouts[0]
    step = "hop" if first.chunks == 1 else f"key chunk (of {first.chunks})"
    figure.suptitle(
        f"Who computes what: Ring {first.grid.ring.size}, {name_of(mask)} mask\n(number: the {step} of a tile)",
        fontsize=13, color=INK,
    )  # fmt: skip


def plot_pairs(axes: Any, layout: SequenceLayout, by_rank: list[list[Shape]], *, numbers: bool) -> set[str]:
    """All tiles of all ranks; returns the kinds that were drawn."""
    ring, length = layout.grid.ring.size, layout.seq_length
    axes.add_patch(polygon([(0, 0), (length, 0), (length, length), (0, length)], facecolor=PALE))
    for rank, its_shapes in enumerate(by_rank):
        for shape in its_shapes:
            shade = colour(rank, ring, _fade(shape.step, layout))
            _plot_shape(axes, shape, shade)
            for outline in shape.outlines:
                parts = 24 if len(outline) == 4 else 12  # a number fits into 1/24 of the width; triangles need more
                if numbers and min(extent(outline)) * parts >= length:
                    axes.text(
                        *centre(outline), str(shape.step), ha="center", va="center", fontsize=8, color=_ink_on(shade),
                        bbox={"facecolor": shade, "edgecolor": "none", "pad": 0.8},
                    )  # fmt: skip
    axes.set(xlim=(0, length), ylim=(length, 0), aspect="equal")
    return {"masked" if shape.tile.masked else shape.tile.kind for its_shapes in by_rank for shape in its_shapes}


def draw_gallery(figure: Any, ring: int, length: int) -> None:
    """Every mask on one ring."""
    panels = gallery(ring, length)
    columns = 5
    grid = figure.subplots(-(-len(panels) // columns), columns)
    kinds: set[str] = set()
    for axes, (title, layout, mask) in zip(grid.flat, panels):
        by_rank = [shapes(layout, mask, rank) for rank in range(ring)]
        kinds |= plot_pairs(axes, layout, by_rank, numbers=False)
        axes.set_xticks([])
        axes.set_yticks([])
        work = _work(by_rank)
        axes.set_title(title, fontsize=11, color=INK, pad=4)
        axes.set_xlabel(
            f"{layout.balance}: busiest {max(work) * ring / sum(work):.2f} x mean\n{_amount(layout, by_rank)}",
            fontsize=9, color=INK,
        )  # fmt: skip
        frame(axes)
    _legend(figure, kinds, 2)
    figure.suptitle(f"Masks on a ring of {ring}: one colour per rank, paler for later hops", fontsize=13, color=INK)


def gallery(ring: int, length: int) -> list[tuple[str, SequenceLayout, Mask]]:
    """(title, layout, mask) of each panel, with a training run's default balance, and documents also in zigzag."""
    ends, block = document_ends(length), length // 16
    dilated = cp.MaskFunction(lambda q, k: (q - k) % (length // 8) < length // 16, cp.Causal())
    masks: list[tuple[str, str, Mask]] = [
        ("causal", "zigzag", cp.Causal()),
        ("full", "zigzag", cp.Full()),
        ("window", "contiguous", cp.Window(length // 6)),
        ("window, global tokens", "contiguous", cp.Window(length // 6, 0, length // 16)),
        ("documents, zigzag", "zigzag", cp.Documents(ends)),
        ("documents, balanced", "documents", cp.Documents(ends)),
        ("block-sparse: longformer", "contiguous", cp.BlockSparse(block, cp.LongformerBlocks(1, 1), length)),
        ("block-sparse: bigbird", "contiguous", cp.BlockSparse(block, cp.BigBirdBlocks(1, 1, 2), length)),
        ("block-sparse: strided", "zigzag", cp.BlockSparse(block, cp.StridedBlocks(4), length)),
        ("mask function", "zigzag", dilated),
    ]
    grid = cp.abstract_grid(ring=ring)
    return [
        (title, cp.SequenceLayout(length, grid, balance, document_ends=ends if balance == "documents" else ()), mask)
        for title, balance, mask in masks
    ]


def document_ends(length: int) -> tuple[int, ...]:
    """Example documents of unequal lengths, one of them longer than a rank's share."""
    shares = (4, 1, 4, 5, 6, 28, 6, 1, 2, 1, 2, 3, 1)
    ends = {length * sum(shares[: index + 1]) // sum(shares) for index in range(len(shares))}
    return tuple(sorted(ends - {0}))


def name_of(mask: Mask) -> str:
    """A mask's name for a title."""
    if isinstance(mask, cp.Documents):
        return f"{len(mask.ends)} documents, {name_of(mask.within)}"
    if isinstance(mask, cp.Window):
        both = f"window {mask.left},{mask.right}"
        return f"{both} and {mask.global_tokens} global tokens," if mask.global_tokens else both
    if isinstance(mask, cp.BlockSparse):
        return f"block-sparse ({type(mask.pattern).__name__.removesuffix('Blocks').lower()})"
    return "function" if isinstance(mask, cp.MaskFunction) else type(mask).__name__.lower()


def ticks(layout: SequenceLayout) -> tuple[list[int], list[str]]:
    """(positions, labels) of an axis's ticks: the blocks' boundaries if there are at most 8 blocks."""
    fitting = (n for n in (2 * layout.grid.ring.size, 8, 4, 1) if n <= 8 and layout.seq_length % n == 0)
    parts = next(fitting)
    places = [layout.seq_length * part // parts for part in range(parts + 1)]
    if all(place % 1024 == 0 for place in places):
        return places, [f"{place // 1024}K" for place in places]
    return places, [f"{place:,}" for place in places]


def polygon(corners: list[Any], **style: Any) -> Any:
    from matplotlib.patches import Polygon

    return Polygon(corners, closed=True, **style)


def frame(axes: Any) -> None:
    """Remove the box around the axes, and make ticks small."""
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, length=3)


def _plot_shape(axes: Any, shape: Shape, shade: tuple[float, float, float]) -> None:
    if shape.tile.masked:
        pale = tuple(1 - (1 - part) * 0.25 for part in shade)
        _fill(axes, shape.outlines, pale, "")
        _fill(axes, shape.allowed, shade, "", linewidth=0, antialiased=False)
        _fill(axes, shape.outlines, "none", "", edgecolor="white")
    else:
        _fill(axes, shape.outlines, shade, HATCHES[shape.tile.kind])


def _fill(axes: Any, outlines: list[Outline], shade: Any, hatch: str, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    style = {"edgecolor": "white", "linewidth": 0.8, **style}
    axes.add_collection(PolyCollection(outlines, facecolor=shade, hatch=hatch or None, **style))


def _plot_work(axes: Any, layout: SequenceLayout, by_rank: list[list[Shape]]) -> float:
    """Draw a bar per rank, divided by steps; returns the busiest rank's work over the mean."""
    ring, work = layout.grid.ring.size, _work(by_rank)
    mean = sum(work) / ring
    for rank, its_shapes in enumerate(by_rank):
        done = 0.0
        for step in sorted({shape.step for shape in its_shapes}):
            pairs = sum(shape.tile.pairs for shape in its_shapes if shape.step == step)
            axes.barh(
                rank, pairs / mean, left=done / mean, color=colour(rank, ring, _fade(step, layout)),
                edgecolor="white", linewidth=0.8, height=0.75,
            )  # fmt: skip
            done += pairs
    axes.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlabel("work of a ring rank, 1 = mean", color=INK)
    axes.set_yticks(range(ring), [f"R {rank}" for rank in range(ring)])
    axes.set_ylim(ring - 0.4, -0.6)
    return max(work) / mean


def _work(by_rank: list[list[Shape]]) -> list[int]:
    return [sum(shape.tile.pairs for shape in its_shapes) for its_shapes in by_rank]


def _amount(layout: SequenceLayout, by_rank: list[list[Shape]]) -> str:
    pairs, number = sum(_work(by_rank)), sum(map(len, by_rank))
    return f"{pairs:,} pairs ({pairs / layout.seq_length**2:.0%}) in {number} tiles"


def _legend(figure: Any, kinds: set[str], columns: int) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor="#8fb8d4" if kind == "masked" else COLOURS[0], edgecolor="white", hatch=HATCHES.get(kind, ""),
            label=text,
        )
        for kind, text in LEGEND.items() if kind in kinds
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns, frameon=False, fontsize=9)


def _fade(step: int, layout: SequenceLayout) -> float:
    last = (layout.grid.ring.size if layout.chunks == 1 else layout.chunks) - 1
    return 0.65 * step / max(last, 1)


def _ink_on(shade: tuple[float, float, float]) -> str:
    return "white" if 0.3 * shade[0] + 0.59 * shade[1] + 0.11 * shade[2] < 0.55 else INK
