# SPDX-License-Identifier: Apache-2.0
"""A list of tiles as intervals of keys for each query, and as lists of key blocks for each block of queries.

Libraries that compute any mask in one call read it in one of these forms. Tiles are rectangles and triangles, so that
nearly every mask has few intervals a query; a masked tile adds one for each run of allowed keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.layout.masks import PAIR_BYTES, ROW_MASK_BYTES, Mask
from megatron.context_parallel.layout.spans import Span, positions
from megatron.context_parallel.layout.tiles import KINDS, Tile, Tiles


@dataclass(frozen=True)
class Intervals:
    """The keys of each query as the union of intervals, for the smallest blocks that contain all tiles.

    Attributes:
        q, k: the rows of the query block and of the key block; what follows counts from their first rows.
        table: int32 [n, queries], n odd: a query sees keys [0, t0), [t1, t2), [t3, t4) and so on. Ends do not decrease;
            intervals may be empty.
    """

    q: Span
    k: Span
    table: np.ndarray

    @cached_property
    def empty(self) -> np.ndarray:
        """bool [queries]: without any key."""
        return (self.table[0] == 0) & (self.table[2::2] == self.table[1::2]).all(0)

    def pairs(self) -> np.ndarray:
        """bool [queries, keys]."""
        key = np.arange(self.k[1] - self.k[0])
        seen = key < self.table[0][:, None]
        for start, stop in zip(self.table[1::2], self.table[2::2]):
            seen |= (key >= start[:, None]) & (key < stop[:, None])
        return seen


def intervals(tiles: Tiles, mask: Mask | None = None) -> Intervals | None:
    """The intervals of some tiles, which do not overlap; None without tiles.

    Args:
        mask: of the masked tiles.
    """
    if not len(tiles):
        return None
    numbers = tiles.table
    (q0, _, k0, _, _, _), (_, q1, _, k1, _, _) = numbers.min(0).tolist(), numbers.max(0).tolist()
    row, start, stop = _rows(numbers[numbers[:, 5] == 0])
    masked = [_masked_rows(tiles, tile, mask) for tile in tiles if tile.masked] if tiles.masked else []
    if masked:
        row, start, stop = (np.concatenate(parts) for parts in zip((row, start, stop), *masked))
    order = np.lexsort((start, row))
    row, start, stop = row[order] - q0, start[order] - k0, stop[order] - k0
    begins = np.ones(len(row), bool)  # intervals that touch become one
    begins[1:] = (row[1:] != row[:-1]) | (start[1:] != stop[:-1])
    first = np.nonzero(begins)[0]
    row, start, stop = row[first], start[first], stop[np.append(first[1:], len(stop)) - 1] if len(first) else stop
    number = np.arange(len(row)) - np.searchsorted(row, row)
    number += np.where(start[np.searchsorted(row, row)] > 0, 1, 0)  # the first place is for one that begins with key 0
    table = np.full((2 * int(number.max(initial=0)) + 1, q1 - q0), k1 - k0, np.int32)
    table[0] = 0
    table[2 * number, row] = stop
    later = number > 0
    table[2 * number[later] - 1, row[later]] = start[later]
    return Intervals((q0, q1), (k0, k1), table)


def table_of(tiles: Tiles, mask: Mask | None) -> Intervals | None:
    """:func:`intervals`, made once for these tiles, to whose plan the mask belongs."""
    return tiles.derived("intervals", lambda: intervals(tiles, mask))


Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""int64: query rows, and the first key and one past the last key of an interval of each."""


def _rows(numbers: np.ndarray) -> Rows:
    """Those of tiles without a mask of pairs."""
    q0, q1, k0, k1, kind, _ = numbers.T
    tile = np.repeat(np.arange(len(numbers)), q1 - q0)
    begin = np.cumsum(q1 - q0) - (q1 - q0)
    place = np.arange(len(tile)) - begin[tile]
    start = np.where(kind[tile] == KINDS.index("anticausal"), k0[tile] + place, k0[tile])
    stop = np.where(kind[tile] == KINDS.index("causal"), k0[tile] + place + 1, k1[tile])
    return q0[tile] + place, start, stop


def _masked_rows(tiles: Tiles, tile: Tile, mask: Mask) -> Rows:
    """Those of one tile: the runs of allowed keys of each query."""
    results = [*_runs(tiles, tile, mask)]
    return tuple(np.concatenate(parts) for parts in zip(*results))


def _runs(tiles: Tiles, tile: Tile, mask: Mask) -> Iterator[Rows]:
    cpu = torch.device("cpu")
    q_at, k_at = positions(tiles.q_at(tile), cpu)[:, None], positions(tiles.k_at(tile), cpu)[None]
    step = max(1, ROW_MASK_BYTES // (PAIR_BYTES * k_at.size(1)))
    for first in range(0, len(q_at), step):
        allowed: Tensor = mask.allowed(q_at[first : first + step], k_at)
        if tile.kind != "full":
            allowed = allowed.tril(first) if tile.kind == "causal" else allowed.triu(first)
        edges = np.diff(np.pad(allowed.numpy().astype(np.int8), ((0, 0), (1, 1))), axis=1)
        row, start = np.nonzero(edges > 0)
        yield row + tile.q[0] + first, start + tile.k[0], np.nonzero(edges < 0)[1] + tile.k[0]


# --- the forms that a library has arguments for ---


@dataclass(frozen=True)
class Pieces:
    """Consecutive queries and keys that meet only each other, as documents do, all with the same window.

    Attributes:
        q, k: 0 and the end of each piece.
        left, right: keys before and after its own that a query sees; None: all. A piece's last query and last key have
            the same place.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    left: int | None
    right: int | None


def pieces(table: Intervals) -> Pieces | None:
    """The intervals as pieces with one window; None if they have another form."""
    if len(table.table) > 3 or table.empty.any():
        return None
    start, stop = _single(table)
    if start is None:
        return None
    before = np.maximum.accumulate(stop)[:-1]
    cuts = np.nonzero(start[1:] >= before)[0] + 1  # here begins a query that shares no key with those before it
    q = (0, *cuts.tolist(), len(start))
    k = (int(start[0]), *start[cuts].tolist(), int(stop.max()))
    if k[0] or k[-1] != table.k[1] - table.k[0]:
        return None
    sizes = [(b - a, d - c) for a, b, c, d in zip(q, q[1:], k, k[1:])]
    place = np.concatenate([np.arange(n) + m - n for n, m in sizes])  # of each query among the keys of its piece
    first = np.repeat(k[:-1], [n for n, _ in sizes])
    length = np.repeat([m for _, m in sizes], [n for n, _ in sizes])
    left = _reach(place - (start - first), start > first)
    right = _reach(stop - first - 1 - place, stop - first < length)
    if left == "varies" or right == "varies":
        return None
    seen_from = np.zeros_like(place) if left is None else np.maximum(place - left, 0)
    seen_to = length if right is None else np.minimum(place + right + 1, length)
    same = (seen_from == start - first).all() and (seen_to == stop - first).all()
    return Pieces(q, k, left, right) if same and (right is None or right >= 0) and (left is None or left >= 0) else None


def _single(table: Intervals) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """The one interval of each query; None if some query has two."""
    if len(table.table) == 1:
        return np.zeros_like(table.table[0]), table.table[0]
    end, start, stop = table.table
    if ((end > 0) & (start < stop)).any():
        return None, None
    return np.where(end > 0, 0, start), np.where(end > 0, end, stop)


def _reach(far: np.ndarray, bounded: np.ndarray) -> int | str | None:
    """How far queries see on one side, from those whose edge is not the piece's; None: to its end."""
    if not bounded.any():
        return None
    values = np.unique(far[bounded])
    return int(values[0]) if len(values) == 1 else "varies"


@dataclass(frozen=True)
class BlockLists:
    """For each block of queries the blocks of keys that it meets, completely or in part; or the reverse.

    Attributes:
        part_count, full_count: int32 [blocks]; ``part``, ``full``: int32 [blocks, most], ascending, of which the first
            ``count`` are meant.
    """

    part_count: np.ndarray
    part: np.ndarray
    full_count: np.ndarray
    full: np.ndarray


def block_lists(table: Intervals, rows: int, columns: int) -> tuple[BlockLists, BlockLists]:
    """The lists of blocks of ``rows`` queries and ``columns`` keys: by blocks of queries, and by blocks of keys."""
    queries, keys = table.q[1] - table.q[0], table.k[1] - table.k[0]
    shape = (-(-queries // rows), -(-keys // columns))
    pairs, middle = np.zeros(shape, np.int64), np.zeros((shape[0], shape[1] + 1), np.int64)
    row = np.arange(queries) // rows
    ends = table.table.astype(np.int64)
    for start, stop in ((np.zeros_like(ends[0]), ends[0]), *zip(ends[1::2], ends[2::2])):
        kept = start < stop
        at, a, b = row[kept], start[kept], stop[kept]
        first, last = a // columns, (b - 1) // columns
        np.add.at(pairs, (at, first), np.minimum(b, (first + 1) * columns) - a)
        more = last > first
        np.add.at(pairs, (at[more], last[more]), (b - last * columns)[more])
        np.add.at(middle, (at[more], first[more] + 1), columns)
        np.add.at(middle, (at[more], last[more]), -columns)
    pairs += middle.cumsum(axis=1)[:, :-1]
    size = np.minimum(rows, queries - np.arange(shape[0]) * rows)[:, None]
    full = pairs == size * np.minimum(columns, keys - np.arange(shape[1]) * columns)
    part = (pairs > 0) & ~full
    return BlockLists(*_listed(part), *_listed(full)), BlockLists(*_listed(part.T), *_listed(full.T))


def _listed(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many are chosen in each row, and which: int32."""
    count = chosen.sum(axis=1)
    order = np.argsort(~chosen, axis=1, kind="stable")[:, : max(int(count.max(initial=0)), 1)]
    return count.astype(np.int32), np.ascontiguousarray(order, np.int32)


def split_intervals(table: Intervals, most: int) -> list[Intervals]:
    """The same keys in several tables of at most ``most`` intervals a query."""
    slots = len(table.table) // 2 + 1
    if slots <= most:
        return [table]
    keys, result = table.k[1] - table.k[0], []
    for first in range(0, slots, most):
        part = table.table[2 * first - 1 : 2 * (first + most) - 1] if first else table.table[: 2 * most - 1]
        if first:  # the first place is for an interval that begins with key 0
            part = np.concatenate((np.zeros_like(part[:1]), part))
        result.append(Intervals(table.q, table.k, np.minimum(part, keys)))
    return result
