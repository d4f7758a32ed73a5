# SPDX-License-Identifier: Apache-2.0
"""Which (query block, key block) pairs to compute, and how each is masked: the one source of truth for work done.

Ring steps, zigzag balance and chunk loops are all the same thing: compare the positions of two blocks. Empty tiles
never appear, so they are neither computed nor sent, and counting tiles counts FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron.context_parallel.masks import Mask, Span

Rows = tuple[Span, ...]
"""Disjoint, ascending runs of local row numbers."""


@dataclass(frozen=True)
class Tile:
    """Rows ``q`` of the query block against rows ``k`` of the key block (local row numbers)."""

    q: Span
    k: Span
    kind: Literal["full", "causal"]

    @property
    def pairs(self) -> int:
        """(query, key) pairs this tile attends to."""
        rows, columns = self.q[1] - self.q[0], self.k[1] - self.k[0]
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * columns


@lru_cache(maxsize=65536)
def tiles(q_spans: tuple[Span, ...], k_spans: tuple[Span, ...], mask: Mask) -> tuple[Tile, ...]:
    """The tiles between a query block and a key block.

    Args:
        q_spans, k_spans: the global positions of each block's rows, in local order.
        mask: the attention mask.
    """
    if mask.diagonal() and q_spans == k_spans and _ascending(q_spans):
        length = sum(stop - start for start, stop in q_spans)
        return (Tile((0, length), (0, length), "causal"),)
    found = []
    for q_row, q in _rows(q_spans):
        for k_row, k in _rows(k_spans):
            cuts = mask.cuts(q, k)
            for q_piece in _cut(q, cuts):
                for k_piece in _cut(k, cuts):
                    kind = mask.kind(q_piece, k_piece)
                    if kind != "empty":
                        found.append(Tile(_local(q_piece, q, q_row), _local(k_piece, k, k_row), kind))
    return tuple(_merge(found))


def key_rows(computed: Iterable[Tile]) -> Rows:
    """The rows of the key block that some tile needs."""
    return union(tile.k for tile in computed)


def union(*rows: Iterable[Span]) -> Rows:
    """Rows that are in any of the arguments."""
    merged: list[list[int]] = []
    for start, stop in sorted(span for part in rows for span in part):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return tuple((start, stop) for start, stop in merged)


def count(rows: Rows) -> int:
    """How many rows there are."""
    return sum(stop - start for start, stop in rows)


def packed(span: Span, rows: Rows) -> Span:
    """Where ``span`` lies once only ``rows`` are kept, one after another.

    Raises:
        ValueError: ``span`` is not within one run of ``rows``.
    """
    offset = 0
    for start, stop in rows:
        if start <= span[0] and span[1] <= stop:
            return offset + span[0] - start, offset + span[1] - start
        offset += stop - start
    raise ValueError(f"rows {span} are not among {rows}")


def _ascending(spans: Sequence[Span]) -> bool:
    return all(before[1] <= after[0] for before, after in zip(spans, spans[1:]))


def _rows(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Each span with the local number of its first row."""
    first, out = 0, []
    for span in spans:
        out.append((first, span))
        first += span[1] - span[0]
    return out


def _cut(span: Span, cuts: Iterable[int]) -> list[Span]:
    points = [span[0], *sorted({cut for cut in cuts if span[0] < cut < span[1]}), span[1]]
    return list(zip(points, points[1:]))


def _local(piece: Span, span: Span, first_row: int) -> Span:
    return piece[0] - span[0] + first_row, piece[1] - span[0] + first_row


def _merge(found: list[Tile]) -> list[Tile]:
    """Join full tiles that lie side by side, then those that lie one below the other: fewer, larger kernel calls."""
    wide: list[Tile] = []
    for tile in sorted(found, key=lambda t: (t.q, t.k)):
        last = wide[-1] if wide else None
        if last and last.kind == tile.kind == "full" and last.q == tile.q and last.k[1] == tile.k[0]:
            wide[-1] = replace(last, k=(last.k[0], tile.k[1]))
        else:
            wide.append(tile)
    tall: list[Tile] = []
    for tile in sorted(wide, key=lambda t: (t.kind, t.k, t.q)):
        last = tall[-1] if tall else None
        if last and last.kind == tile.kind == "full" and last.k == tile.k and last.q[1] == tile.q[0]:
            tall[-1] = replace(last, q=(last.q[0], tile.q[1]))
        else:
            tall.append(tile)
    return tall
