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

from megatron.context_parallel.attention.kernels.base import PAIR_BYTES, ROW_MASK_BYTES
from megatron.context_parallel.layout.masks import Mask
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
    numbers = tiles.numbers
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
