# SPDX-License-Identifier: Apache-2.0
"""Which spans of tokens lie on which ranks, and how states and their gradients go from one to the next.

Spans are in the order of positions, whatever the layout. A span is *fresh* if a document of every sample begins with
it; it then needs no state. A span *hands on* its state if the next one is not fresh. Nothing is sent for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, numbered, positions
from megatron.context_parallel.linear_attention.rules import LinearRule
from megatron.context_parallel.linear_attention.span_maps import apply_map, apply_map_grad
from megatron.decisions.state_exchange import SpanCounts
from megatron.platform.autograd import without_autocast

Ends = tuple[tuple[int, ...], ...]
"""One past the last token of each document: one tuple for all samples, or one for each; () for one document."""


def checked_ends(documents: Sequence[Sequence[int]], batch: int, layout: SequenceLayout) -> Ends:
    """The ends of documents, as tuples; () if each sample is one document.

    Raises:
        ValueError: they are no lists, are for another number of samples, do not ascend or do not end with the sequence.
    """
    if any(isinstance(one, int) for one in documents):
        raise ValueError("documents is a list of numbers: give [[...]], one list for all samples or one for each")
    ends = tuple(tuple(one) for one in documents)
    if len(ends) not in (0, 1, batch):
        raise ValueError(f"documents has {len(ends)} lists for {batch} samples: give one, or one for each sample")
    for one in ends:
        if not one or one[-1] != layout.seq_length or any(a >= b for a, b in zip((0, *one), one)):
            raise ValueError(f"the ends of documents must ascend to the length of the sequence, {layout.seq_length}")
    return () if all(len(one) == 1 for one in ends) else ends


def begins(ends: Ends) -> set[int]:
    """The positions at which a document of every sample begins."""
    return {0} | (set.intersection(*map(set, ends)) if ends else set())


@dataclass(frozen=True)
class Place:
    """A span of the sequence: the rank that holds it, and its number among the rank's spans."""

    rank: int
    index: int
    span: Span
    fresh: bool
    hands_on: bool


@dataclass(frozen=True)
class SpanOrder:
    """All ranks' spans, in the order of positions."""

    places: tuple[Place, ...]
    ranks: int

    def of(self, rank: int) -> list[Place]:
        """A rank's spans in its local order."""
        return sorted((place for place in self.places if place.rank == rank), key=lambda place: place.index)

    @cached_property
    def counts(self) -> SpanCounts:
        links = [(a, b) for a, b in zip(self.places, self.places[1:]) if a.hands_on and a.rank != b.rank]
        sent = [sum(a.rank == rank for a, _ in links) for rank in range(self.ranks)]
        slots = [sum(place.hands_on for place in self.of(rank)) for rank in range(self.ranks)]
        return SpanCounts(self.ranks, max(slots), len(links), max(sent))


def rows_of(spans: Spans) -> list[Span]:
    """The rows of each span of a block."""
    return [(row, row + stop - start) for row, (start, stop) in numbered(spans)]


def document_starts(ends: Ends, spans: Spans) -> Tensor:
    """Whether a document begins at each position of ``spans``: bool [rows, samples, or 1 for all], on the CPU."""
    at = positions(spans, torch.device("cpu"))
    return torch.stack([torch.isin(at, torch.tensor((0, *one[:-1]))) for one in ends], dim=1)


@lru_cache(maxsize=64)
def span_order(layout: SequenceLayout, ends: Ends, by_heads: bool) -> SpanOrder:
    """The spans of the ring ranks, whose Ulysses ranks have all their tokens (``by_heads``), or of all context ranks.

    Args:
        layout: without groups.
    """
    ulysses, ring = layout.grid.ulysses.size, layout.grid.ring.size
    if by_heads:
        held = [layout.ring_spans(r) for r in range(ring)]
    else:
        held = [layout.spans(ulysses=u, ring=r) for r in range(ring) for u in range(ulysses)]
    fresh = begins(ends) | {layout.seq_length}
    places = [
        Place(rank, index, span, span[0] in fresh, span[1] not in fresh)
        for rank, spans in enumerate(held)
        for index, span in enumerate(spans)
    ]
    return SpanOrder(tuple(sorted(places, key=lambda place: place.span)), len(held))


@without_autocast
def entry_states(
    rule: LinearRule, order: SpanOrder, axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, relay: bool
) -> dict[int, Tensor]:
    """The state before each span of this rank.

    Args:
        maps: by number, the maps of this rank's spans that hand on their states.
        empty: the state 0 [b, heads, K, V].
    """
    if relay:
        return _relayed(order.places, axis, empty, lambda place, state: apply_map(rule, maps[place.index], state))
    columns = empty.size(-1) + rule.map_columns(empty.size(-2))
    known = _gathered([p for p in order.places if p.hands_on], axis, maps, empty, columns)
    state, entries = empty, {}
    for place in order.places:
        state = empty if place.fresh else state
        if place.rank == axis.rank:
            entries[place.index] = state
        if place.hands_on:
            state = apply_map(rule, known[place], state)
    return entries


@without_autocast
def exit_grads(
    rule: LinearRule, order: SpanOrder, axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, relay: bool
) -> dict[int, Tensor]:
    """The gradient of the state after each span of this rank, the last spans first.

    Args:
        maps: by number, M and E of this rank's spans that are not fresh; M is 0 if a span does not hand on its state.
    """
    turned = tuple(Place(p.rank, p.index, p.span, not p.hands_on, not p.fresh) for p in reversed(order.places))
    if relay:
        return _relayed(turned, axis, empty, lambda place, grad: apply_map_grad(rule, maps[place.index], grad))
    columns = empty.size(-1) + rule.map_columns(empty.size(-2))
    known = _gathered([p for p in turned if p.hands_on], axis, maps, empty, columns)
    grad, grads = empty, {}
    for place in turned:
        grad = empty if place.fresh else grad
        if place.rank == axis.rank:
            grads[place.index] = grad
        if place.hands_on:
            grad = apply_map_grad(rule, known[place], grad)
    return grads


def _gathered(
    sending: Sequence[Place], axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, columns: int
) -> dict[Place, Tensor]:
    """The maps of the places ``sending`` of all ranks; every rank of the axis calls this."""
    by_rank: list[list[Place]] = [[] for _ in range(axis.size)]
    for place in sending:
        by_rank[place.rank].append(place)
    slots = max(map(len, by_rank))
    if axis.size == 1 or not slots:
        return {place: maps[place.index] for place in sending}
    mine = empty.new_zeros((slots, *empty.shape[:-1], columns))
    for slot, place in enumerate(by_rank[axis.rank]):
        mine[slot] = maps[place.index]
    every = mine.new_empty((axis.size * slots, *mine.shape[1:]))
    dist.all_gather_into_tensor(every, mine, group=axis.group)
    return {place: every[r * slots + slot] for r, places in enumerate(by_rank) for slot, place in enumerate(places)}


def _relayed(places: Sequence[Place], axis: Axis, empty: Tensor, step) -> dict[int, Tensor]:
    """The state before each place of this rank; a place sends the state after it to the next one.

    All ranks go through the places in the same order, so that each message meets a rank that waits for it.
    """
    state, entries = empty, {}
    for before, place, after in zip([None, *places], places, [*places[1:], None]):
        if place.rank != axis.rank:
            continue
        if place.fresh:
            state = empty
        elif before.rank != axis.rank:
            state = torch.empty_like(empty)
            _message(dist.irecv, state, axis, before.rank)
        entries[place.index] = state
        if place.hands_on:
            state = step(place, state)
            if after.rank != axis.rank:
                _message(dist.isend, state.contiguous(), axis, after.rank)
    return entries


def _message(kind, x: Tensor, axis: Axis, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(kind, x, axis.global_rank(peer), axis.group)]):
        work.wait()
