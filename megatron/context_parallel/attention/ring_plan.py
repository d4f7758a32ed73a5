# SPDX-License-Identifier: Apache-2.0
"""What each rank of a ring computes and sends at each hop, derived from the tiles.

A rank sends on only those rows of a block that a later rank on the block's path needs. It sends only those rows of the
block's gradient to which some rank has added.

Where few ranks need a row, such as under a window with zigzag, whose two halves see keys of both neighbours, most ranks
on its path would only pass it on. The plan is then direct: a rank sends its own rows to each rank that needs them, and
that rank sends their gradients back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from itertools import accumulate
from typing import Any

from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, count, numbered, union
from megatron.context_parallel.layout.tiles import Tiles, reach, tiles


@dataclass(frozen=True)
class Hop:
    """What one rank does at one hop of the ring. Rows are row numbers of the block's home rank."""

    source: int
    held: Spans  # rows of the block that this rank holds at this hop
    tiles: Tiles  # what this rank computes with them; key rows are numbered within ``held``
    forward: Spans  # rows that are sent on to the next rank; if direct, own rows for the rank that is next in turn
    grads_in: Spans  # rows whose gradients arrive from the previous rank
    grads_out: Spans  # rows whose gradients this rank sends
    grads_to: int  # the rank that receives grads_out: the next one, or the block's home
    needed: Spans = ()  # rows that the tiles read; all rows on a ring of one rank


@dataclass(frozen=True)
class RingPlan:
    """All hops of one rank; ``hops[0]`` is its own block.

    Attributes:
        needed: whether any rank needs any row of any block.
        direct: each block comes from its home. At hop n a rank computes with the block of the rank n before it, and
            sends own rows to the rank n + 1 after it.
    """

    rank: int
    next: int
    previous: int
    hops: tuple[Hop, ...]
    grads_home: tuple[int, Spans]  # rank and rows of the gradients that return to this rank at the end
    home_hop: int  # the hop after which that rank sends them
    needed: bool = True
    direct: bool = False

    @property
    def pairs(self) -> int:
        """(query, key) pairs this rank attends to: its share of the work."""
        return sum(tile.pairs for hop in self.hops for tile in hop.tiles)


def once(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a plan's methods: the result for each combination of arguments is kept."""

    @wraps(method)
    def kept(self: AttentionPlan, *args: Hashable, **options: Hashable) -> Any:
        key = method.__name__, args, *options.items()
        if key not in self.known:
            self.known[key] = method(self, *args, **options)
        return self.known[key]

    return kept


class AttentionPlan:
    """Everything that attention derives from a layout and a mask. Each part is made when it is first asked for.

    All layers of a batch share one plan: see :func:`attention_plan`.

    Args:
        layout: of the queries.
        mask: which keys a query attends to.
        key_layout: of the keys, in cross-attention; default ``layout``.
    """

    def __init__(self, layout: SequenceLayout, mask: Mask, key_layout: SequenceLayout | None = None) -> None:
        self.layout, self.mask, self.key_layout = layout, mask, key_layout or layout
        self.known: dict[Hashable, Any] = {}
        self._shared: dict[Hashable, Any] = {}  # of all tiles

    @once
    def ring(self, *, chunk: int | None = None, query_chunk: int | None = None, rank: int | None = None) -> RingPlan:
        """The hops of ring rank ``rank`` (default: this one): its queries against the keys of all ranks.

        Keys travel in the direction that sends fewer rows. On a contiguous causal ring they go upwards, and never wrap
        around. With zigzag they go downwards, and only half a block is needed after wrapping around. If at
        most half of these rows would be sent directly, the plan is direct.

        Args:
            chunk: only the keys of this chunk of every rank (FPDT); default: all.
            query_chunk: only the queries of this chunk of every rank; default: all.
        """
        rank = self.layout.grid.ring.rank if rank is None else rank
        queries, keys = _blocks(self.layout, query_chunk), _blocks(self.key_layout, chunk)
        return _plan(queries[rank], keys, self._tiles, self._paths(chunk, query_chunk), rank)

    @once
    def gathered(self) -> Hop:
        """One block with the keys of all ring ranks, in the order of an all-gather over the ring."""
        ring = self.layout.grid.ring
        spans = tuple(span for rank in range(ring.size) for span in self.key_layout.ring_spans(rank))
        computed = self._tiles(self.layout.ring_spans(ring.rank), spans)
        return Hop(ring.rank, ((0, count(spans)),), computed, (), (), (), ring.rank)

    @once
    def between(self, query: int, key: int, ring: int) -> Tiles:
        """The tiles between a query chunk of this rank and key chunk ``key`` of ring rank ``ring``, perhaps none."""
        spans = self.layout.chunk_spans
        return self._tiles(spans(query, self.layout.grid.ring.rank), spans(key, ring))

    @once
    def keys_of(self, query: int) -> list[int]:
        """The key chunks that a query chunk meets; on a ring, those that it meets on any pair of ranks."""
        chunks, ring = range(self.layout.chunks), self.layout.grid.ring
        if ring.size == 1:
            return [key for key in chunks if self.between(query, key, ring.rank)]
        return [key for key in chunks if self.ring(chunk=key, query_chunk=query).needed]

    @once
    def queries_of(self, key: int, ring: int) -> list[int]:
        """The query chunks that meet key chunk ``key`` of ring rank ``ring``."""
        return [query for query in range(self.layout.chunks) if self.between(query, key, ring)]

    @once
    def last_keys(self) -> list[int]:
        """For each query chunk the last key chunk, of any ring rank, that it meets; 0 if it meets none."""
        last = [0] * self.layout.chunks
        for key in range(self.layout.chunks):
            for ring in range(self.layout.grid.ring.size):
                for query in self.queries_of(key, ring):
                    last[query] = key
        return last

    def _tiles(self, queries: Spans, keys: Spans) -> Tiles:
        return tiles(queries, keys, self.mask).sharing(self._shared)

    @once
    def _paths(self, chunk: int | None, query_chunk: int | None) -> dict[int, list[_Path]]:
        keys = _blocks(self.key_layout, chunk)
        alone = len(keys) == 1  # then nothing is sent
        needed = [[((0, count(keys[0])),)]] if alone else _needed(self._reach(query_chunk), keys)
        return {step: [_Path(needed[home], home, step) for home in range(len(needed))] for step in (1, -1)}

    @once
    def _reach(self, query_chunk: int | None) -> list[Spans]:
        length = self.key_layout.seq_length
        return [reach(spans, self.mask, length) for spans in _blocks(self.layout, query_chunk)]


def attention_plan(layout: SequenceLayout, mask: Mask, key_layout: SequenceLayout | None = None) -> AttentionPlan:
    """The plan for a layout and a mask; the layers of a step, and its backward pass, get the same one."""
    # The cache outlives the run, so it must not hold process groups.
    return _attention_plan(layout.without_groups(), mask, key_layout and key_layout.without_groups())


# Packed documents need a plan for each sample of a step.
_attention_plan = lru_cache(maxsize=128)(AttentionPlan)


def ring_plan(
    layout: SequenceLayout,
    mask: Mask,
    rank: int | None = None,
    chunk: int | None = None,
    key_layout: SequenceLayout | None = None,
    query_chunk: int | None = None,
) -> RingPlan:
    """The hops of one ring rank: see :meth:`AttentionPlan.ring`."""
    return attention_plan(layout, mask, key_layout).ring(chunk=chunk, query_chunk=query_chunk, rank=rank)


Blocks = tuple[Spans, ...]
"""Positions of every ring rank's block."""


def _blocks(layout: SequenceLayout, chunk: int | None) -> Blocks:
    spans = layout.ring_spans if chunk is None else partial(layout.chunk_spans, chunk)
    return tuple(spans(rank) for rank in range(layout.grid.ring.size))


def _plan(
    queries: Spans,
    keys: Blocks,
    tiles_of: Callable[[Spans, Spans], Tiles],
    paths: dict[int, list[_Path]],
    rank: int,
) -> RingPlan:
    size = len(keys)
    sent = {step: sum(path.sent for path in paths[step]) for step in paths}
    step = min(sent, key=sent.__getitem__)
    if sent[step] and 2 * sum(path.wanted for path in paths[step]) <= sent[step]:
        return _direct(queries, keys, tiles_of, paths[1], rank)
    hops = []
    for hop in range(size):
        home = (rank - step * hop) % size
        path = paths[step][home]
        held = path.carried[hop] if hop else ((0, count(keys[home])),)
        computed = tiles_of(queries, keys[home]) if path.stops[hop] else Tiles()
        active = 0 < hop <= path.last
        hops.append(
            Hop(
                source=home,
                held=held,
                tiles=computed.within(held),
                forward=path.carried[hop + 1],
                grads_in=path.touched[hop - 1] if active else (),
                grads_out=path.touched[hop] if active else (),
                grads_to=(rank + step) % size if hop < path.last else home,
                needed=path.stops[hop],
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
        needed=any(path.stops[hop] for path in paths[step] for hop in range(size)),
    )


def _direct(
    queries: Spans, keys: Blocks, tiles_of: Callable[[Spans, Spans], Tiles], paths: list[_Path], rank: int
) -> RingPlan:
    """A plan in which each rank sends its own rows to those that need them; ``paths``: in direction 1."""
    size = len(keys)
    hops = []
    for hop in range(size):
        home = (rank - hop) % size
        needed = paths[home].stops[hop]
        held = needed if hop else ((0, count(keys[home])),)
        computed = tiles_of(queries, keys[home]) if needed else Tiles()
        given = paths[rank].stops[hop + 1] if hop + 1 < size else ()
        grads = needed if hop else ()
        hops.append(Hop(home, held, computed.within(held), given, (), grads, home, needed))
    return RingPlan(
        rank=rank,
        next=(rank + 1) % size,
        previous=(rank - 1) % size,
        hops=tuple(hops),
        grads_home=(rank, ()),
        home_hop=0,
        needed=any(rows for path in paths for rows in path.stops),
        direct=True,
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
        self.wanted = sum(count(rows) for rows in self.stops[1:])  # rows that its home would send directly


def _needed(reached: Sequence[Spans], keys: Blocks) -> list[list[Spans]]:
    """``[home][rank]``: the rows of the block of rank ``home`` that rank ``rank`` needs.

    Args:
        reached: by rank, the positions to which its queries attend.
        keys: by home, the positions of its block.
    """
    held = sorted((*span, home, row) for home, spans in enumerate(keys) for row, span in numbered(spans))
    starts, stops = [item[0] for item in held], [item[1] for item in held]
    needed: list[list[list[Span]]] = [[[] for _ in reached] for _ in keys]
    for rank, positions in enumerate(reached):
        for first, end in positions:
            for start, stop, home, row in held[bisect_right(stops, first) : bisect_left(starts, end)]:
                needed[home][rank].append((row + max(first, start) - start, row + min(end, stop) - start))
    return [[union(spans) for spans in by_rank] for by_rank in needed]
