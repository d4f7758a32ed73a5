# SPDX-License-Identifier: Apache-2.0
"""Outlines of the tiles that a rank computes, in the plane of key position (x) and query position (y), for pictures.

The tiles come from the plan of attention, or from the loops over chunks; only their outlines are computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, count, positions
from megatron.context_parallel.layout.tiles import Tile, Tiles, tiles

Outline = list[tuple[int, int]]
"""Corners of a polygon, (key position, query position); a pair of tokens is a square of area 1."""


@dataclass(frozen=True)
class Shape:
    """A tile in the plane of key and query positions.

    Attributes:
        step: the hop at which it is computed; with chunks, the key chunk.
        tile: as the kernel gets it.
        outlines: around all pairs that the kernel computes; several if the positions of the rows have gaps.
        allowed: around the pairs that the mask permits; they differ from ``outlines`` only for a masked tile.
    """

    step: int
    tile: Tile
    outlines: list[Outline]
    allowed: list[Outline]


def computed(layout: SequenceLayout, mask: Mask, rank: int) -> Iterator[tuple[int, Tiles]]:
    """(step, tiles) of ring rank ``rank``, in the order of a training run."""
    if layout.chunks == 1:
        for number, hop in enumerate(attention_plan(layout, mask).ring(rank=rank).hops):
            yield number, hop.tiles
        return
    for key in range(layout.chunks):
        for hop in attention_plan(layout, mask).ring(rank=rank, chunk=key).hops:
            keys = layout.chunk_spans(key, hop.source)
            for query in range(layout.chunks):
                yield key, tiles(layout.chunk_spans(query, rank), keys, mask)


def shapes(layout: SequenceLayout, mask: Mask, rank: int) -> list[Shape]:
    """Everything that ring rank ``rank`` computes."""
    result = []
    for step, together in computed(layout, mask, rank):
        for tile in together:
            at = together.q_at(tile), together.k_at(tile)
            around = outlines(tile, *at)
            result.append(Shape(step, tile, around, allowed_pairs(tile, *at, mask) if tile.masked else around))
    return result


def outlines(tile: Tile, q_at: Spans, k_at: Spans) -> list[Outline]:
    """Around a tile: one polygon for each run of queries and run of keys in it."""
    polygons = []
    for q_row, q in _with_rows(q_at):
        for k_row, k in _with_rows(k_at):
            width = k[1] - k[0]
            edges = []  # (query position, first key, end of keys)
            for y in range(*q):
                diagonal = q_row + y - q[0] - k_row  # the diagonal's key in this row, counted from the run's first key
                low = max(diagonal, 0) if tile.kind == "anticausal" else 0
                high = min(diagonal + 1, width) if tile.kind == "causal" else width
                if low < high:
                    edges.append((y, k[0] + low, k[0] + high))
            if edges:
                polygons.append(_staircase(edges))
    return polygons


def allowed_pairs(tile: Tile, q_at: Spans, k_at: Spans, mask: Mask) -> list[Outline]:
    """The pairs of a masked tile that the mask permits, as boxes of one row each."""
    q, k = (positions(at, torch.device("cpu")) for at in (q_at, k_at))
    allowed = mask.allowed(q[:, None], k[None])
    allowed = {"full": allowed, "causal": allowed.tril(), "anticausal": allowed.triu()}[tile.kind]
    boxes = []
    for y, row in zip(q.tolist(), allowed):
        runs: list[list[int]] = []
        for x in k[row].tolist():
            if runs and runs[-1][1] == x:
                runs[-1][1] = x + 1
            else:
                runs.append([x, x + 1])
        boxes.extend(_staircase([(y, start, stop)]) for start, stop in runs)
    return boxes


def centre(outline: Outline) -> tuple[float, float]:
    """The centroid, where a number is written."""
    x = y = total = 0.0
    for (x0, y0), (x1, y1) in zip(outline, [*outline[1:], outline[0]]):
        cross = x0 * y1 - x1 * y0
        x, y, total = x + (x0 + x1) * cross, y + (y0 + y1) * cross, total + cross
    return x / (3 * total), y / (3 * total)


def extent(outline: Outline) -> tuple[int, int]:
    """(width in keys, height in queries)."""
    xs, ys = zip(*outline)
    return max(xs) - min(xs), max(ys) - min(ys)


def _with_rows(spans: tuple[Span, ...]) -> Iterator[tuple[int, Span]]:
    """(first row in the tile, run of positions) for each run."""
    for index, span in enumerate(spans):
        yield count(spans[:index]), span


def _staircase(edges: list[tuple[int, int, int]]) -> Outline:
    """The outline of adjacent rows, each (y, first x, end x)."""
    left: Outline = []
    right: Outline = []
    for y, low, high in edges:
        for side, x in ((left, low), (right, high)):
            if side and side[-1][0] == x:
                side[-1] = (x, y + 1)
            else:
                side.extend([(x, y), (x, y + 1)])
    return [*left, *reversed(right)]
