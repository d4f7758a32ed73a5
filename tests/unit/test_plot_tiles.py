# SPDX-License-Identifier: Apache-2.0
"""Pictures of tiles show each pair that a mask allows once, and nothing else."""

from __future__ import annotations

import pytest
import torch

import megatron.context_parallel as cp
from tools import plot_tiles
from tools.tile_drawing import document_ends
from tools.tile_shapes import area, shapes

LENGTH = 120
ENDS = document_ends(LENGTH)
BLOCKS = cp.BlockSparse(16, cp.BigBirdBlocks(1, 1, 2), LENGTH)
MASKS = {
    "causal": cp.Causal(),
    "full": cp.Full(),
    "window": cp.Window(39),
    "both sides": cp.Window(20, 30, 5),
    "narrow window": cp.Window(9),
    "documents": cp.Documents(ENDS),
    "window in documents": cp.Documents(ENDS, cp.Window(39)),
    "blocks": BLOCKS,
    "function": cp.MaskFunction(lambda q, k: (q - k) % 24 < 12),
    "function in blocks": cp.MaskFunction(lambda q, k: (q + k) % 5 < 3, BLOCKS),
}
LAYOUTS = [("zigzag", 4, 1), ("contiguous", 3, 1), ("documents", 4, 1), ("zigzag", 2, 3), ("documents", 1, 5)]


def inside(outline) -> torch.Tensor:
    """Boolean [queries, keys]: the pairs within an outline, by crossings of its upright edges."""
    crossings = torch.zeros(LENGTH, LENGTH, dtype=torch.int)
    for (x0, y0), (x1, y1) in zip(outline, [*outline[1:], outline[0]]):
        assert x0 == x1 or y0 == y1
        crossings[min(y0, y1) : max(y0, y1), x0:] += 1
    return crossings % 2 == 1


@pytest.mark.parametrize("balance, ring, chunks", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_what_is_drawn_is_what_the_mask_allows(name, balance, ring, chunks):
    mask, ends = MASKS[name], ENDS if balance == "documents" else ()
    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid(ring=ring), balance, chunks=chunks, document_ends=ends)
    drawn = torch.zeros(LENGTH, LENGTH, dtype=torch.int)
    queries = torch.zeros(LENGTH, dtype=torch.bool)
    for rank in range(ring):
        queries[:] = False
        for start, stop in layout.ring_spans(rank):
            queries[start:stop] = True
        for shape in shapes(layout, mask, rank):
            assert sum(map(area, shape.outlines)) == shape.tile.pairs
            for outline in shape.allowed:
                pairs = inside(outline)
                assert int(pairs.sum()) == area(outline) and not pairs[~queries].any()
                drawn += pairs
    at = torch.arange(LENGTH)
    assert torch.equal(drawn, mask.allowed(at[:, None], at[None]).int())


@pytest.mark.parametrize(
    "options",
    [
        "--show gallery --ring 2 --seq-length 128",
        "--mask document --window-size 39,0 --chunks 3 --ring 2 --seq-length 192",
        "--show layout --balance documents --document-ends 30 64 --seq-length 64",
    ],
)
def test_masks_are_drawn(options, tmp_path):
    output = tmp_path / "new" / "picture.png"
    assert plot_tiles.main([*options.split(), "--output", str(output)]) == 0
    assert 5000 < output.stat().st_size < 150_000


@pytest.mark.parametrize(
    "options, message",
    [
        ("--mask window", "needs --window-size"),
        ("--sparse-stride 4", "read by --attention-mask block-sparse alone"),
        ("--mask function --mask-function none.py:f", "there is no file none.py"),
        ("--balance documents", "add --mask document"),
        ("--mask document --document-ends 5 --seq-length 64", "must end at 64"),
        ("--show ring --chunks 2", "--chunks has no effect with --show ring"),
        ("--show gallery --mask full", "--mask has no effect with --show gallery"),
    ],
)
def test_bad_options_are_refused(options, message, tmp_path, capsys):
    output = tmp_path / "picture.png"
    assert plot_tiles.main([*options.split(), "--output", str(output)]) == 2
    assert message in capsys.readouterr().err and not output.exists()
