#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw how a sequence is shared out: which tokens each rank holds, which tiles it computes, what travels on the ring.

    python tools/plot_tiles.py --show layout --ulysses 2 --ring 4 --output layout.png
    python tools/plot_tiles.py --show tiles --ring 4 --output tiles.png
    python tools/plot_tiles.py --show tiles --mask window --window-size 47,0 --seq-length 256 --output window.png
    python tools/plot_tiles.py --show tiles --mask document --window-size 47,0 --chunks 3 --output documents.png
    python tools/plot_tiles.py --show ring --ring 4 --output ring.png
    python tools/plot_tiles.py --show gallery --output gallery.png

The flags of masks are those of a training run. Nothing here is drawn from memory: every shape comes from
SequenceLayout, ring_plan and tiles, as a training run uses them.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.context_parallel.attention.ring_plan import Hop, RingPlan, ring_plan
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Documents, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout, length_unit
from megatron.context_parallel.layout.spans import count
from megatron.training.arguments.config import AttentionConfig, Config
from megatron.training.arguments.validate_attention import OWN_FLAGS, check_attention
from megatron.training.model.attention_rule import attention_mask
from tools.tile_drawing import (
    GREY,
    INK,
    PALE,
    colour,
    document_ends,
    draw_gallery,
    draw_tiles,
    frame,
    polygon,
    ticks,
)

MASKS = ["causal", "full", "window", "document", "block-sparse", "function"]
MASK_FLAGS = [name for names in OWN_FLAGS.values() for name in names if name != "mask_cpu_threshold"]


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
        axes.set_xticks(*ticks(layout))
        axes.set_xlabel("position in the sequence", color=INK)
        axes.set_yticks([])
        frame(axes)
    u, r = layouts[0].grid.ulysses.size, layouts[0].grid.ring.size
    figure.suptitle(f"Who holds which tokens: Ulysses {u} x Ring {r}", fontsize=15, color=INK)


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
        frame(axes)
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


def _box(x: float, y: float, width: float, height: float, **style: Any) -> Any:
    return polygon([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], **style)


PICTURES = {"layout": draw_layout, "tiles": draw_tiles, "ring": draw_ring}


def figure_size(show: str, ulysses: int, ring: int, columns: int) -> tuple[float, float]:
    """Width and height in inches."""
    if show == "gallery":
        return 13.0, 6.9
    if show == "layout":
        return 5.4 * columns, 1.9 + 0.34 * ring * (ulysses + 0.4)
    if show == "ring":
        return max(5.4, 1.25 * ring + 0.6) * columns, 1.6 + 0.72 * ring
    return 5.4 * columns, 7.2 + 0.17 * ring


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if min(options.ulysses, options.ring) < 1:
            raise ValueError("--ulysses and --ring must be at least 1")
        if options.seq_length is not None and options.seq_length < 1:
            raise ValueError(f"--seq-length {options.seq_length} must be at least 1")
        if options.output.is_dir():
            raise ValueError(f"--output {options.output} is a folder: name a file in it")
        _check_read(parser, options)
        length = options.seq_length or 16 * length_unit(options.ulysses, options.ring, "zigzag")
        if options.show == "gallery":
            length = options.seq_length or 64 * options.ring
            _save(options, 1, lambda figure: draw_gallery(figure, options.ring, length))
        else:
            mask, ends = mask_of(options, length)
            layouts = layouts_of(options, length, ends)
            _save(options, len(layouts), lambda figure: PICTURES[options.show](figure, layouts, mask))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {options.show} of {length} tokens on Ulysses {options.ulysses} x Ring {options.ring}")
    return 0


def mask_of(options: argparse.Namespace, length: int) -> tuple[Mask, tuple[int, ...]]:
    """The mask that the flags describe, and where documents end: () without documents.

    Raises:
        Refusal: as a training run.
    """
    config = Config()
    config.data.seq_length, config.data.micro_batch_size = length, 1
    config.attention.attention_mask = options.mask
    for name in MASK_FLAGS:
        setattr(config.attention, name, getattr(options, name))
    check_attention(config)
    mask = attention_mask(config)
    if not config.data.reset_attention_mask and options.document_ends is None:
        return mask, ()
    ends = tuple(options.document_ends or document_ends(length))
    if ends[-1] != length:
        raise ValueError(f"--document-ends: the last document ends with the sequence, at {length}, not at {ends[-1]}")
    return Documents(ends, mask), ends


def layouts_of(options: argparse.Namespace, length: int, ends: tuple[int, ...]) -> list[SequenceLayout]:
    """One for each balance."""
    grid = abstract_grid(ulysses=options.ulysses, ring=options.ring)
    balances = options.balance or ["zigzag", "documents" if ends else "contiguous"]
    if "documents" in balances and not ends:
        raise ValueError("--balance documents deals documents: add --mask document or --document-ends")
    return [
        SequenceLayout(
            length, grid, balance, chunks=options.chunks, document_ends=ends if balance == "documents" else ()
        )
        for balance in balances
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--show", choices=[*PICTURES, "gallery"], default="tiles",
        help="which picture (default: tiles); gallery: every mask on one ring",
    )  # fmt: skip
    parser.add_argument("--seq-length", type=int, help="tokens (default: 16 for each block that the grid cuts)")
    parser.add_argument("--ulysses", type=int, default=1, help="Ulysses degree (default: 1)")
    parser.add_argument("--ring", type=int, default=4, help="Ring degree (default: 4)")
    parser.add_argument("--chunks", type=int, default=1, help="FPDT chunks of a ring rank's tokens (default: 1)")
    parser.add_argument(
        "--balance", nargs="+", choices=["zigzag", "contiguous", "documents"],
        help="drawn beside each other (default: zigzag and contiguous, or documents where there are some)",
    )  # fmt: skip
    parser.add_argument("--mask", choices=MASKS, help="attention mask (default: causal, or window with --window-size)")
    parser.add_argument(
        "--document-ends", type=int, nargs="+", metavar="END",
        help="one past the last token of each document, around any mask (default of --mask document: some)",
    )  # fmt: skip
    for field in fields(AttentionConfig):
        if field.name in MASK_FLAGS:
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=field.metadata.get("type") or type(field.default),
                default=field.default,
                help=field.metadata["help"],
            )
    parser.add_argument("--output", type=Path, required=True, metavar="PNG", help="picture to write")
    return parser


def _check_read(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that the picture does not show."""
    unread = {"gallery": ["ulysses", "chunks", "balance", "mask", "document_ends", *MASK_FLAGS], "ring": ["chunks"]}
    unread["layout"] = ["mask", *MASK_FLAGS]
    for name in unread.get(options.show, ()):
        if getattr(options, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is not read by --show {options.show}: leave it out")


def _save(options: argparse.Namespace, columns: int, draw: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = figure_size(options.show, options.ulysses, options.ring, columns)
    figure = pyplot.figure(figsize=size, dpi=110, layout="constrained")
    draw(figure)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
