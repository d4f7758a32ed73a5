# SPDX-License-Identifier: Apache-2.0
"""What each rank of a ring computes and sends at each hop, derived from the tiles.

A block carries on only the rows that some later rank on its way needs, its gradient only the rows that some rank has
touched, and what nobody needs is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span
from megatron.context_parallel.layout.tiles import Rows, Tile, count, key_rows, packed, tiles, union


@dataclass(frozen=True)
class Hop:
    """What one rank does at one hop of the ring. Rows are row numbers of the block's home rank."""

    source: int
    held: Rows  # rows of the block that arrive here
    tiles: tuple[Tile, ...]  # what this rank computes with them; key rows count within ``held``
    forward: Rows  # rows that go on to the next rank
    grads_in: Rows  # rows whose gradients arrive from the rank before
    grads_out: Rows  # rows whose gradients leave ...
    grads_to: int  # ... for this rank: the next one, or the block's home


@dataclass(frozen=True)
class RingPlan:
    """All hops of one rank. ``hops[0]`` is its own block."""

    rank: int
    next: int
    previous: int
    hops: tuple[Hop, ...]
    grads_home: tuple[int, Rows]  # rank and rows of the gradients that return to this rank at the end
    home_hop: int  # the hop after which that rank sends them

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
) -> RingPlan:
    """The plan of ring rank ``rank`` (default: this one): its queries against everybody's keys.

    Keys go round in the direction that sends fewer rows: upwards for a contiguous causal ring, which then never wraps
    around; downwards for zigzag, where after the wrap only half a block is needed.

    Args:
        chunk: only the keys of this chunk of every rank travel (FPDT); default the whole blocks.
        key_layout: of the keys, in cross-attention; default ``layout``.
    """
    ring, key_layout = layout.grid.ring, key_layout or layout
    queries = tuple(layout.ring_spans(r) for r in range(ring.size))
    if chunk is None:
        keys = tuple(key_layout.ring_spans(r) for r in range(ring.size))
    else:
        keys = tuple(key_layout.chunk_spans(chunk, r) for r in range(ring.size))
    return _plan(queries, keys, mask, ring.rank if rank is None else rank)


Blocks = tuple[tuple[Span, ...], ...]
"""Positions of every ring rank's block."""


@lru_cache(maxsize=256)  # with packed documents, each batch has plans of its own
def _plan(queries: Blocks, keys: Blocks, mask: Mask, rank: int) -> RingPlan:
    directions = (_plan_in_direction(queries, keys, mask, rank, step) for step in (1, -1))
    return min(directions, key=lambda plan: plan[0])[1]


def _plan_in_direction(queries: Blocks, keys: Blocks, mask: Mask, rank: int, step: int) -> tuple[int, RingPlan]:
    """The plan for one direction, and the rows that all ranks together send in it."""
    size = len(keys)
    needs = {
        (home, hop): tiles(queries[(home + step * hop) % size], keys[home], mask)
        for home in range(size)
        for hop in range(size)
    }
    rows = {key: key_rows(found) for key, found in needs.items()}
    length = sum(stop - start for start, stop in keys[0])

    def carried(home: int, hop: int) -> Rows:
        """Rows of ``home``'s block that arrive at its hop-th stop: all that is needed there or later."""
        return union(*(rows[home, later] for later in range(hop, size))) if hop < size else ()

    def touched(home: int, hop: int) -> Rows:
        """Rows whose gradients leave the hop-th stop: all that was needed there or before, home excepted."""
        return union(*(rows[home, before] for before in range(1, hop + 1)))

    def last_stop(home: int) -> int:
        return max((hop for hop in range(1, size) if rows[home, hop]), default=0)

    hops = []
    for hop in range(size):
        home = (rank - step * hop) % size
        held = carried(home, hop) if hop else ((0, length),)
        last = last_stop(home)
        active = 0 < hop <= last
        hops.append(
            Hop(
                source=home,
                held=held,
                tiles=tuple(replace(tile, k=packed(tile.k, held)) for tile in needs[home, hop]),
                forward=carried(home, hop + 1),
                grads_in=touched(home, hop - 1) if active and hop > 1 else (),
                grads_out=touched(home, hop) if active else (),
                grads_to=(rank + step) % size if hop < last else home,
            )
        )
    last = last_stop(rank)
    sent = sum(count(carried(home, hop)) for home in range(size) for hop in range(1, size))
    plan = RingPlan(
        rank=rank,
        next=(rank + step) % size,
        previous=(rank - step) % size,
        hops=tuple(hops),
        grads_home=((rank + step * last) % size, touched(rank, last)),
        home_hop=last,
    )
    return sent, plan
