# SPDX-License-Identifier: Apache-2.0
"""Which (query block, key block) pairs to compute, and how each is masked: the one source of truth for work done.

Ring steps, zigzag balance, chunk loops, windows, documents and sparse blocks are all the same thing: a mask's bands
between the positions of two blocks, cut in squares and rectangles. Empty tiles never appear, so they are neither
computed nor sent, and counting tiles counts FLOPs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron.context_parallel.layout.masks import NARROW, Band, Mask
from megatron.context_parallel.layout.spans import Span

Rows = tuple[Span, ...]
"""Disjoint, ascending runs of local row numbers."""

Kind = Literal["full", "causal", "anticausal"]


@dataclass(frozen=True)
class Tile:
    """Rows ``q`` of the query block against rows ``k`` of the key block (local row numbers).

    Attributes:
        kind: of a square, i being the query's row and j the key's: causal, j <= i; anticausal, j >= i.
        masked: besides, the mask has to be asked about each pair.
        q_at, k_at: the global positions of the rows.
    """

    q: Span
    k: Span
    kind: Kind
    masked: bool = False
    q_at: tuple[Span, ...] = ()
    k_at: tuple[Span, ...] = ()

    @property
    def pairs(self) -> int:
        """(query, key) pairs this tile computes."""
        rows, columns = self.q[1] - self.q[0], self.k[1] - self.k[0]
        return rows * columns if self.kind == "full" else rows * (rows + 1) // 2


@lru_cache(maxsize=4096)
def tiles(q_spans: tuple[Span, ...], k_spans: tuple[Span, ...], mask: Mask) -> tuple[Tile, ...]:
    """The tiles between a query block and a key block.

    Args:
        q_spans, k_spans: the global positions of each block's rows, in local order.
        mask: the attention mask.
    """
    keys = sorted(_rows(k_spans), key=lambda item: item[1])
    starts, stops = [span[0] for _, span in keys], [span[1] for _, span in keys]
    if not keys:
        return ()
    everything = (starts[0], max(stops))
    found = []
    for q_row, q in _rows(q_spans):
        for band in mask.bands(q, everything):
            end = band.end + (band.q[1] - band.q[0] - 1) * band.end_step
            for k_row, k in keys[bisect_right(stops, band.first) : bisect_left(starts, end)]:
                for piece in band.clip(k):
                    for q_at, k_at, kind, masked in _cut(piece):
                        rows = _local(q_at, q, q_row), _local(k_at, k, k_row)
                        found.append(Tile(*rows, kind, masked or mask.pairwise, (q_at,), (k_at,)))
    return tuple(_merge(found))


def _cut(band: Band) -> Iterator[tuple[Span, Span, Kind, bool]]:
    """Rectangles, and squares cut along their diagonal, that make up a band: (queries, keys, kind, masked)."""
    (start, stop), first, end = band.q, band.first, band.end
    rows = stop - start
    if rows == 1 or not (band.first_step or band.end_step):
        yield band.q, (first, end), "full", False
    elif not band.first_step:
        yield from _full(band.q, (first, end - 1))
        yield band.q, (end - 1, end - 1 + rows), "causal", False
    elif not band.end_step:
        yield band.q, (first, first + rows), "anticausal", False
        yield from _full(band.q, (first + rows, end))
    elif end - first < NARROW:
        for low in range(0, rows, 4 * NARROW):
            high = min(low + 4 * NARROW, rows)
            yield (start + low, start + high), (first + low, end + high - 1), "full", True
    else:
        # As many queries at once as keep the two triangles apart: then all that lies between them is full.
        pieces = -(-rows // (end - first - 1))
        for index in range(pieces):
            low, high = rows * index // pieces, rows * (index + 1) // pieces
            q = (start + low, start + high)
            yield q, (first + low, first + high), "anticausal", False
            yield from _full(q, (first + high, end - 1 + low))
            yield q, (end - 1 + low, end - 1 + high), "causal", False


def _full(q: Span, k: Span) -> Iterator[tuple[Span, Span, Kind, bool]]:
    if k[0] < k[1]:
        yield q, k, "full", False


def parts(tile: Tile, size: int) -> Iterator[Tile]:
    """A tile in parts of at most ``size`` queries and keys."""
    q_runs, k_runs = _runs(tile.q, size), _runs(tile.k, size)
    for i, q in enumerate(q_runs):
        for j, k in enumerate(k_runs):
            kind = tile.kind if i == j else "full"
            if (tile.kind == "causal" and j > i) or (tile.kind == "anticausal" and j < i):
                continue
            q_at, k_at = _run_of(tile.q_at, _shifted(q, tile.q)), _run_of(tile.k_at, _shifted(k, tile.k))
            yield Tile(q, k, kind, tile.masked, q_at, k_at)


def _runs(rows: Span, size: int) -> list[Span]:
    return [(start, min(start + size, rows[1])) for start in range(rows[0], rows[1], size)]


def _shifted(rows: Span, whole: Span) -> Span:
    return rows[0] - whole[0], rows[1] - whole[0]


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


def unpacked(span: tuple[int, int], rows: Rows) -> tuple[int, int]:
    """The inverse of :func:`packed`: original row numbers of packed rows."""
    offset = 0
    for start, stop in rows:
        if offset <= span[0] and span[1] <= offset + stop - start:
            return start + span[0] - offset, start + span[1] - offset
        offset += stop - start
    raise ValueError(f"packed rows {span} are not within one run of {rows}")


def _rows(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Each span with the local number of its first row."""
    first, out = 0, []
    for span in spans:
        out.append((first, span))
        first += span[1] - span[0]
    return out


def _local(piece: Span, span: Span, first_row: int) -> Span:
    return piece[0] - span[0] + first_row, piece[1] - span[0] + first_row


def _merge(found: list[Tile]) -> list[Tile]:
    """Fewer, larger kernel calls: join full tiles side by side, triangles along a diagonal, full tiles below."""
    wide: list[Tile] = []
    for tile in sorted(found, key=lambda t: (t.q, t.masked, t.k)):
        last = wide[-1] if wide else None
        if last and _both_full(last, tile) and last.q == tile.q and last.k[1] == tile.k[0]:
            wide[-1] = replace(last, k=(last.k[0], tile.k[1]), k_at=_join(last.k_at, tile.k_at))
        else:
            wide.append(tile)
    tall: list[Tile] = []
    for tile in sorted(_join_triangles(wide), key=lambda t: (t.kind, t.masked, t.k, t.q)):
        last = tall[-1] if tall else None
        if last and _both_full(last, tile) and last.k == tile.k and last.q[1] == tile.q[0]:
            tall[-1] = replace(last, q=(last.q[0], tile.q[1]), q_at=_join(last.q_at, tile.q_at))
        else:
            tall.append(tile)
    return tall


def _join_triangles(found: list[Tile]) -> list[Tile]:
    """Two causal squares one after the other on a diagonal, and what is full below the first: one causal square.

    So a rank's own block is one causal tile, whatever gaps its positions have.
    """
    full = {(tile.q, tile.k[1], tile.masked): tile for tile in found if tile.kind == "full"}
    joined: list[Tile] = []
    for tile in sorted((t for t in found if t.kind == "causal"), key=lambda t: (t.q, t.k)):
        last = joined[-1] if joined else None
        below = full.get((tile.q, last.k[1], tile.masked)) if last else None
        fits = last and last.masked == tile.masked and (last.q[1], last.k[1]) == (tile.q[0], tile.k[0])
        if not (fits and below and below.k[0] <= last.k[0]):
            joined.append(tile)
            continue
        del full[below.q, below.k[1], below.masked]
        if below.k[0] < last.k[0]:
            rest = replace(below, k=(below.k[0], last.k[0]), k_at=_run_of(below.k_at, (0, last.k[0] - below.k[0])))
            full[rest.q, rest.k[1], rest.masked] = rest
        joined[-1] = Tile(
            (last.q[0], tile.q[1]),
            (last.k[0], tile.k[1]),
            "causal",
            tile.masked,
            _join(last.q_at, tile.q_at),
            _join(last.k_at, tile.k_at),
        )
    return [*joined, *full.values(), *(tile for tile in found if tile.kind == "anticausal")]


def _both_full(a: Tile, b: Tile) -> bool:
    return a.kind == b.kind == "full" and a.masked == b.masked


def _join(before: tuple[Span, ...], after: tuple[Span, ...]) -> tuple[Span, ...]:
    if before[-1][1] == after[0][0]:
        return (*before[:-1], (before[-1][0], after[0][1]), *after[1:])
    return before + after


def _run_of(spans: tuple[Span, ...], rows: Span) -> tuple[Span, ...]:
    """The positions of a run of the rows whose positions are ``spans``."""
    found, row = [], 0
    for start, stop in spans:
        low, high = max(rows[0] - row, 0), min(rows[1] - row, stop - start)
        if low < high:
            found.append((start + low, start + high))
        row += stop - start
    return tuple(found)
