#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw how a sequence is split: the tokens of each rank, the tiles that it computes, the blocks sent around the ring.

    python tools/plot_tiles.py --show layout --ulysses 2 --ring 4 --output layout.png
    python tools/plot_tiles.py --show tiles --ring 4 --output tiles.png
    python tools/plot_tiles.py --show tiles --mask window --window-size 47,0 --seq-length 256 --output window.png
    python tools/plot_tiles.py --show tiles --mask document --window-size 47,0 --chunks 3 --output documents.png
    python tools/plot_tiles.py --show ring --ring 4 --output ring.png
    python tools/plot_tiles.py --show maps --ring 4 --output maps.png
    python tools/plot_tiles.py --show gallery --output gallery.png

The flags of masks are those of a training run. All shapes come from the code that a training run uses: SequenceLayout,
ring_plan.py and tiles.py.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.decisions.division import length_unit
from megatron.system.whole_file import save_figure
from megatron.training.arguments.validate.check_model import complete_attention
from megatron.training.settings.attention_settings import MASKS
from megatron.training.settings.config import AttentionConfig, Config
from megatron.training.settings.flag import reader_of
from tools.option_parser import OptionParser, in_one_line

if TYPE_CHECKING:  # modules that need torch are imported late, so that --help is fast
    from megatron.context_parallel.layout.masks import Mask
    from megatron.context_parallel.layout.sequence_layout import SequenceLayout

PICTURES = ("layout", "tiles", "ring", "maps")
MASK_FLAGS = [name for kind in MASKS.values() for name in kind.flags]


def figure_size(show: str, ulysses: int, ring: int, columns: int) -> tuple[float, float]:
    """Width and height in inches."""
    if show == "gallery":
        return 13.0, 6.9
    if show == "layout":
        return 5.4 * columns, 1.9 + 0.34 * ring * (ulysses + 0.4)
    if show == "maps":
        return 5.8 * columns, 2.6 + 0.4 * ring * ulysses
    if show == "ring":
        return max(5.4, 1.25 * ring + 0.6) * columns, 1.6 + 0.72 * ring
    return 5.4 * columns, 7.2 + 0.17 * ring


@in_one_line(OSError, ValueError)
def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if min(options.ulysses, options.ring) < 1:
        raise ValueError("--ulysses and --ring must be at least 1")
    if options.seq_length is not None and options.seq_length < 1:
        raise ValueError(f"--seq-length {options.seq_length} must be at least 1")
    if options.output.is_dir():
        raise ValueError(f"--output {options.output} is a folder: name a file in it")
    _check_used(parser, options)
    length = options.seq_length or 16 * length_unit(options.ulysses, options.ring, "zigzag")
    from tools import layout_drawing, tile_drawing

    pictures = {"layout": layout_drawing.draw_layout, "tiles": tile_drawing.draw_tiles}
    pictures |= {"ring": layout_drawing.draw_ring, "maps": layout_drawing.draw_maps}
    if options.show == "gallery":
        length = options.seq_length or 64 * options.ring
        _save(options, 1, lambda figure: tile_drawing.draw_gallery(figure, options.ring, length))
    else:
        mask, ends = mask_of(options, length)
        layouts = layouts_of(options, length, ends)
        _save(options, len(layouts), lambda figure: pictures[options.show](figure, layouts, mask))
    print(f"{options.output}: {options.show} of {length} tokens on Ulysses {options.ulysses} x Ring {options.ring}")
    return 0


def mask_of(options: argparse.Namespace, length: int) -> tuple[Mask, tuple[int, ...]]:
    """(mask that the flags describe, ends of documents or () without documents).

    Raises:
        Refusal: as in a training run.
    """
    from megatron.context_parallel.layout.masks import Documents
    from megatron.training.model.attention_rule import attention_mask
    from tools.tile_drawing import document_ends

    config = Config()
    config.data.seq_length, config.data.micro_batch_size = length, 1
    config.attention.attention_mask = options.mask
    for name in MASK_FLAGS:
        setattr(config.attention, name, getattr(options, name))
    complete_attention(config)
    mask = attention_mask(config)
    if not config.data.reset_attention_mask and options.document_ends is None:
        return mask, ()
    ends = tuple(options.document_ends or document_ends(length))
    if ends[-1] != length:
        raise ValueError(f"--document-ends: the last document must end at {length}, not at {ends[-1]}")
    return Documents(ends, mask), ends


def layouts_of(options: argparse.Namespace, length: int, ends: tuple[int, ...]) -> list[SequenceLayout]:
    """A layout for each balance."""
    from megatron.context_parallel.layout.grid import abstract_grid
    from megatron.context_parallel.layout.sequence_layout import SequenceLayout

    grid = abstract_grid(ulysses=options.ulysses, ring=options.ring)
    balances = options.balance or ["zigzag", "documents" if ends else "contiguous"]
    if "documents" in balances and not ends:
        raise ValueError("--balance documents needs documents: add --mask document or --document-ends")
    held = {balance: ends if balance == "documents" else () for balance in balances}
    return [SequenceLayout(length, grid, name, chunks=options.chunks, document_ends=held[name]) for name in balances]


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(__doc__)
    parser.add_argument(
        "--show", choices=[*PICTURES, "gallery"], default="tiles",
        help="which picture (default: tiles); gallery: every mask on one ring",
    )  # fmt: skip
    parser.add_argument("--seq-length", type=int, help="tokens (default: 16 per block of the layout)")
    parser.add_argument("--ulysses", type=int, default=1, help="Ulysses degree (default: 1)")
    parser.add_argument("--ring", type=int, default=4, help="Ring degree (default: 4)")
    parser.add_argument("--chunks", type=int, default=1, help="FPDT chunks of a ring rank's tokens (default: 1)")
    parser.add_argument(
        "--balance", nargs="+", choices=["zigzag", "contiguous", "documents"],
        help="drawn side by side (default: zigzag and contiguous; with documents, zigzag and documents)",
    )  # fmt: skip
    parser.add_argument("--mask", choices=MASKS, help="attention mask (default: causal, or window with --window-size)")
    parser.add_argument(
        "--document-ends", type=int, nargs="+", metavar="END",
        help="one past the last token of each document, with any mask (default with --mask document: an example)",
    )  # fmt: skip
    for field in fields(AttentionConfig):
        if field.name in MASK_FLAGS:
            about = {"type": reader_of(field), "help": field.metadata["help"]}
            parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, **about)
    parser.add_argument("--output", type=Path, required=True, metavar="PNG", help="picture to write")
    return parser


def _check_used(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that have no effect on the picture."""
    unused = {"gallery": ["ulysses", "chunks", "balance", "mask", "document_ends", *MASK_FLAGS], "ring": ["chunks"]}
    unused["layout"] = ["mask", *MASK_FLAGS]
    for name in unused.get(options.show, ()):
        if getattr(options, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --show {options.show}: leave it out")


def _save(options: argparse.Namespace, columns: int, draw: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = figure_size(options.show, options.ulysses, options.ring, columns)
    figure = pyplot.figure(figsize=size, dpi=110, layout="constrained")
    draw(figure)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, options.output)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
