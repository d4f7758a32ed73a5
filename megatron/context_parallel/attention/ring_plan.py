# SPDX-License-Identifier: Apache-2.0
"""What each rank of a ring computes and sends at each hop, derived from the tiles.

A rank sends on only those rows of a block that a later rank on the block's path needs. It sends only those rows of the
block's gradient to which some rank has added.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate

from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, count, numbered, place, union
from megatron.context_parallel.layout.tiles import Tile, reach, tiles


@dataclass(frozen=True)
class Hop:
    """What one rank does at one hop of the ring. Rows are row numbers of the block's home rank."""

    source: int
    held: Spans  # rows of the block that this rank holds at this hop
    tiles: tuple[Tile, ...]  # what this rank computes with them; key rows count within ``held``
    forward: Spans  # rows that are sent on to the next rank
    grads_in: Spans  # rows whose gradients arrive from the previous rank
    grads_out: Spans  # rows whose gradients this rank sends
    grads_to: int  # the rank that receives grads_out: the next one, or the block's home


@dataclass(frozen=True)
class RingPlan:
    """All hops of one rank; ``hops[0]`` is its own block. ``needed``: whether any rank needs any row of any block."""

    rank: int
    next: int
    previous: int
    hops: tuple[Hop, ...]
    grads_home: tuple[int, Spans]  # rank and rows of the gradients that return to this rank at the end
    home_hop: int  # the hop after which that rank sends them
    needed: bool = True

    @property
    def pairs(self) -> int:
        """(query, key) pairs this rank attends to: its share of the work."""
        return sum(tile.pairs for hop in self.hops for tile in hop.tiles)


def ring_plan(
    layout: SequenceLayout,
    mask: Mask,
    rank: int | None = None,
    chunk: int | None = None,
    key_layout: SequenceLayout | None = None,
    query_chunk: int | None = None,
) -> RingPlan:
    """The plan of ring rank ``rank`` (default: this one): its queries against the keys of all ranks.

    Keys travel in the direction that sends fewer rows: upwards on a contiguous causal ring, where they then never wrap
    around; downwards for zigzag, where after wrapping around only half a block is needed.

    Args:
        chunk: only the keys of this chunk of every rank (FPDT); default: all.
        key_layout: layout of the keys in cross-attention; default ``layout``.
        query_chunk: only the queries of this chunk of every rank; default: all.
    """
    ring, key_layout = layout.grid.ring, key_layout or layout
    queries, keys = _blocks(layout, query_chunk), _blocks(key_layout, chunk)
    return _plan(queries, keys, mask, key_layout.seq_length, ring.rank if rank is None else rank)


Blocks = tuple[Spans, ...]
"""Positions of every ring rank's block."""


def _blocks(layout: SequenceLayout, chunk: int | None) -> Blocks:
    spans = layout.ring_spans if chunk is None else partial(layout.chunk_spans, chunk)
    return tuple(spans(rank) for rank in range(layout.grid.ring.size))


@lru_cache(maxsize=4096)  # one plan for each pair of chunks; packed documents need new plans for each batch
def _plan(queries: Blocks, keys: Blocks, mask: Mask, length: int, rank: int) -> RingPlan:
    size, needed = len(keys), _needed(queries, keys, mask, length)
    paths = {step: [_Path(needed[home], home, step) for home in range(size)] for step in (1, -1)}
    step = min(paths, key=lambda step: sum(path.sent for path in paths[step]))
    hops = []
    for hop in range(size):
        home = (rank - step * hop) % size
        path = paths[step][home]
        held = path.carried[hop] if hop else ((0, count(keys[home])),)
        computed = tiles(queries[rank], keys[home], mask) if path.stops[hop] else ()
        active = 0 < hop <= path.last
        hops.append(
            Hop(
                source=home,
                held=held,
                tiles=tuple(replace(tile, k=place(tile.k, held)) for tile in computed),
                forward=path.carried[hop + 1],
                grads_in=path.touched[hop - 1] if active else (),
                grads_out=path.touched[hop] if active else (),
                grads_to=(rank + step) % size if hop < path.last else home,
            )
        )
    own = paths[step][rank]
    return RingPlan(
        rank=rank,
        next=(rank + step) % size,
        previous=(rank - step) % size,
        hops=tuple(hops),
        grads_home=((rank + step * own.last) % size, own.touched[own.last]),
        home_hop=own.last,
        needed=any(rows for home in needed for rows in home),
    )


class _Path:
    """A block's path around the ring, with the rows at each stop.

    Args:
        needed: for each rank, the rows of the block that it needs.
        home: the rank that holds the block.
        step: 1 or -1, the direction.
    """

    def __init__(self, needed: list[Spans], home: int, step: int) -> None:
        self.stops = [needed[(home + step * hop) % len(needed)] for hop in range(len(needed))]
        # Rows that arrive at a stop: all that are needed at this or a later stop; after the last stop none.
        self.carried = [*accumulate(reversed(self.stops), union, initial=())][::-1]
        # Rows whose gradients leave a stop: all that were needed at this or an earlier stop, except at home.
        self.touched = [*accumulate(self.stops[1:], union, initial=())]
        self.last = max((hop for hop, rows in enumerate(self.stops) if hop and rows), default=0)
        self.sent = sum(count(rows) for rows in self.carried[1:])


def _needed(queries: Blocks, keys: Blocks, mask: Mask, length: int) -> list[list[Spans]]:
    """``[home][rank]``: the rows of the block of rank ``home`` that rank ``rank`` needs."""
    held = sorted((*span, home, row) for home, spans in enumerate(keys) for row, span in numbered(spans))
    starts, stops = [item[0] for item in held], [item[1] for item in held]
    needed: list[list[list[Span]]] = [[[] for _ in queries] for _ in keys]
    for rank, q_spans in enumerate(queries):
        for first, end in reach(q_spans, mask, length):
            for start, stop, home, row in held[bisect_right(stops, first) : bisect_left(starts, end)]:
                needed[home][rank].append((row + max(first, start) - start, row + min(end, stop) - start))
    return [[union(spans) for spans in by_rank] for by_rank in needed]
