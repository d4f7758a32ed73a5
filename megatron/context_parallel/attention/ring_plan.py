# SPDX-License-Identifier: Apache-2.0
"""What each rank of a ring computes and sends at each hop, derived from the tiles.

A rank sends on only those rows of a block that a later rank on the block's path needs. It sends only those rows of the
block's gradient to which some rank has added.

Where few ranks need a row, for example under a window with zigzag, most ranks on its path would only pass it on. The
plan is then direct: a rank sends its own rows to each rank that needs them, and that rank sends their gradients back.
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
class Message:
    """Rows of a block, numbered as on its home rank, sent to or received from ``peer``; without rows, no message."""

    rows: Spans = ()
    peer: int = 0


@dataclass(frozen=True)
class Hop:
    """What one rank does at one hop of the ring: its tiles, and the messages around them.

    ``keys_out`` and ``keys_in`` start before the tiles and overlap with them. The other three start after the tiles
    have added to the block's gradients, and overlap with the tiles of the next hop; a forward pass leaves them out.

    Attributes:
        source: the block's home rank. Rows are row numbers on this rank.
        held: rows of the block that this rank holds at this hop.
        tiles: what this rank computes with them; key rows count within ``held``.
        needed: rows that the tiles read; all rows on a ring of one rank.
        keys_out: the block, to the next rank; in a direct plan, rows of this rank's own block.
        keys_in: the next hop's block.
        grads_out: gradients of the block, to the next rank or to the block's home.
        grads_home: gradients of this rank's own block, from the last rank that added to them.
        grads_in: the gradients of the next hop's block that other ranks have added so far.
    """

    source: int
    held: Spans
    tiles: Tiles
    needed: Spans = ()
    keys_out: Message = Message()
    keys_in: Message = Message()
    grads_out: Message = Message()
    grads_home: Message = Message()
    grads_in: Message = Message()


@dataclass(frozen=True)
class RingPlan:
    """All hops of one rank; ``hops[0]`` is its own block.

    Attributes:
        step: 1 if blocks travel up the ranks, -1 if down.
        any_needed: whether any rank needs any row of any block.
        direct: each block comes from its home. At hop n a rank computes with the block of the rank n before it, and
            sends own rows to the rank n + 1 after it.
    """

    rank: int
    step: int
    hops: tuple[Hop, ...]
    any_needed: bool = True
    direct: bool = False

    @property
    def pairs(self) -> int:
        """(query, key) pairs this rank attends to: its share of the work."""
        return sum(tile.pairs for hop in self.hops for tile in hop.tiles)


def memoized(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a plan's methods: the result for each combination of arguments is kept."""

    @wraps(method)
    def kept(self: AttentionPlan, *args: Hashable, **options: Hashable) -> Any:
        key = method.__name__, args, *options.items()
        if key not in self.memo:
            self.memo[key] = method(self, *args, **options)
        return self.memo[key]

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
        self.memo: dict[Hashable, Any] = {}
        self.shared: dict[Hashable, Any] = {}  # of all tiles

    @memoized
    def ring(self, *, chunk: int | None = None, query_chunk: int | None = None, rank: int | None = None) -> RingPlan:
        """The hops of ring rank ``rank`` (default: this one): its queries against the keys of all ranks.

        Keys travel in the direction that sends fewer rows. On a contiguous causal ring they go upwards, and never wrap
        around. With zigzag they go downwards, and only half a block is needed after wrapping around. If direct messages
        would be at most half of these rows, the plan is direct.

        Args:
            chunk: only the keys of this chunk of every rank (FPDT); default: all.
            query_chunk: only the queries of this chunk of every rank; default: all.
        """
        rank = self.layout.grid.ring.rank if rank is None else rank
        queries, keys = _blocks(self.layout, query_chunk), _blocks(self.key_layout, chunk)
        return _plan(queries[rank], keys, self._tiles, self._paths(chunk, query_chunk), rank)

    @memoized
    def gathered(self, *, rank: int | None = None) -> Hop:
        """One block with the keys of all ring ranks, in the order of an all-gather over the ring; see :meth:`ring`."""
        ring = self.layout.grid.ring
        own = ring.rank if rank is None else rank
        spans = tuple(span for home in range(ring.size) for span in self.key_layout.ring_spans(home))
        return Hop(own, ((0, count(spans)),), self._tiles(self.layout.ring_spans(own), spans))

    @memoized
    def tiles_of_chunks(self, query: int, key: int, ring: int) -> Tiles:
        """The tiles between a query chunk of this rank and key chunk ``key`` of ring rank ``ring``, perhaps none."""
        spans = self.layout.chunk_spans
        return self._tiles(spans(query, self.layout.grid.ring.rank), spans(key, ring))

    @memoized
    def tiles_in_ring_rows(self, query: int, key: int, ring: int) -> Tiles:
        """:meth:`tiles_of_chunks`, with key rows numbered as this rank holds them while they go around the ring."""
        (hop,) = (hop for hop in self.ring(chunk=key).hops if hop.source == ring)
        return self.tiles_of_chunks(query, key, ring).within(hop.held)

    @memoized
    def keys_of(self, query: int) -> list[int]:
        """The key chunks that a query chunk meets; on a ring, those that it meets on any pair of ranks."""
        chunks, ring = range(self.layout.chunks), self.layout.grid.ring
        if ring.size == 1:
            return [key for key in chunks if self.tiles_of_chunks(query, key, 0)]
        return [key for key in chunks if self.ring(chunk=key, query_chunk=query).any_needed]

    @memoized
    def queries_of(self, key: int, ring: int) -> list[int]:
        """The query chunks that meet key chunk ``key`` of ring rank ``ring``."""
        return [query for query in range(self.layout.chunks) if self.tiles_of_chunks(query, key, ring)]

    @memoized
    def last_keys(self) -> list[int]:
        """For each query chunk the last key chunk, of any ring rank, that it meets; 0 if it meets none."""
        last = [0] * self.layout.chunks
        for key in range(self.layout.chunks):
            for ring in range(self.layout.grid.ring.size):
                for query in self.queries_of(key, ring):
                    last[query] = key
        return last

    def _tiles(self, queries: Spans, keys: Spans) -> Tiles:
        return tiles(queries, keys, self.mask, self.shared)

    @memoized
    def _paths(self, chunk: int | None, query_chunk: int | None) -> dict[int, list[_Path]]:
        keys = _blocks(self.key_layout, chunk)
        alone = len(keys) == 1  # then nothing is sent
        needed = [[((0, count(keys[0])),)]] if alone else _needed(self._reach(query_chunk), keys)
        return {step: [_Path(needed[home], home, step) for home in range(len(needed))] for step in (1, -1)}

    @memoized
    def _reach(self, query_chunk: int | None) -> list[Spans]:
        length = self.key_layout.seq_length
        return [reach(spans, self.mask, length) for spans in _blocks(self.layout, query_chunk)]


def attention_plan(layout: SequenceLayout, mask: Mask, key_layout: SequenceLayout | None = None) -> AttentionPlan:
    """The plan for a layout and a mask; the layers of a step, and its backward pass, get the same one."""
    # The cache outlives the run, so it must not hold process groups.
    return _attention_plan(layout.without_groups(), mask, key_layout and key_layout.without_groups())


# Packed documents need a plan for each sample of a step.
_attention_plan = lru_cache(maxsize=128)(AttentionPlan)


Blocks = tuple[Spans, ...]
"""Positions of every ring rank's block."""


def _blocks(layout: SequenceLayout, chunk: int | None) -> Blocks:
    spans = layout.ring_spans if chunk is None else partial(layout.chunk_spans, chunk)
    return tuple(spans(rank) for rank in range(layout.grid.ring.size))


def _plan(
    queries: Spans, keys: Blocks, tiles_of: Callable[[Spans, Spans], Tiles], by_step: dict[int, list[_Path]], rank: int
) -> RingPlan:
    size = len(keys)
    sent = {step: sum(path.sent for path in paths) for step, paths in by_step.items()}
    step = min(sent, key=sent.__getitem__)
    direct = sent[step] > 0 and 2 * sum(path.wanted for path in by_step[step]) <= sent[step]
    step = 1 if direct else step
    paths, hops = by_step[step], []
    above, below, own = (rank + step) % size, (rank - step) % size, paths[rank]
    for hop in range(size):
        home, after = (rank - step * hop) % size, (rank - step * (hop + 1)) % size  # of this block and the next
        reader, path, following = (rank + step * hop) % size, paths[home], paths[after]  # reader: of own rows
        needed, arriving = path.needed_at[hop], path.needed_at if direct else path.carried
        held = arriving[hop] if hop else ((0, count(keys[home])),)
        computed = tiles_of(queries, keys[home]) if needed else Tiles()
        if direct:
            messages = {
                "keys_out": Message(own.needed_at[hop + 1], (reader + 1) % size),
                "keys_in": Message(following.needed_at[hop + 1], after),
                "grads_out": Message(needed if hop else (), home),
                "grads_home": Message(own.needed_at[hop] if hop else (), reader),
            }
        else:
            messages = {
                "keys_out": Message(path.carried[hop + 1], above),
                "keys_in": Message(following.carried[hop + 1], below),
                "grads_out": Message(path.leaving(hop), above if hop < path.last else home),
                "grads_home": Message(own.leaving(hop) if hop == own.last else (), reader),
                "grads_in": Message(following.leaving(hop) if hop < following.last else (), below),
            }
        hops.append(Hop(source=home, held=held, tiles=computed.within(held), needed=needed, **messages))
    return RingPlan(rank, step, tuple(hops), any(any(path.needed_at) for path in paths), direct)


class _Path:
    """A block's path around the ring, with the rows that are needed and sent at each hop.

    Args:
        needed: for each rank, the rows of the block that it needs.
        home: the rank that holds the block.
        step: 1 or -1, the direction.
    """

    def __init__(self, needed: list[Spans], home: int, step: int) -> None:
        # By hop, the rows needed there; none after the last hop.
        self.needed_at = [*(needed[(home + step * hop) % len(needed)] for hop in range(len(needed))), ()]
        # By hop, the rows that arrive: all that are needed at this or a later hop.
        self.carried = [*accumulate(reversed(self.needed_at), union)][::-1]
        self.touched = [*accumulate(self.needed_at[1:], union, initial=())]
        self.last = max((hop for hop, rows in enumerate(self.needed_at) if hop and rows), default=0)
        self.sent = sum(count(rows) for rows in self.carried[1:])
        self.wanted = sum(count(rows) for rows in self.needed_at[1:])  # rows that its home would send directly

    def leaving(self, hop: int) -> Spans:
        """Rows whose gradients leave at a hop: all that were needed at this or an earlier hop, except at home."""
        return self.touched[hop] if hop <= self.last else ()


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
