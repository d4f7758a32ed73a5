# SPDX-License-Identifier: Apache-2.0
"""Which spans of tokens lie on which ranks, and how states and their gradients go from one to the next.

Spans are in the order of positions, whatever the layout. A span is *fresh* if a document of every sample begins with
it; it then needs no state. Another one needs the state after the span before it or, where a tree has a branch, after
the end of the branch's parent; spans are cut at both. That span *hands on* its state. Nothing is sent for the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, numbered, positions
from megatron.context_parallel.layout.tree import Tree, documents_of, segment_ends
from megatron.context_parallel.linear_attention.rules import LinearRule
from megatron.context_parallel.linear_attention.span_maps import apply_map, apply_map_grad
from megatron.decisions.state_exchange import SpanCounts
from megatron.platform.autograd import without_autocast
from megatron.platform.collectives import gathered

Ends = tuple[tuple[int, ...], ...]
"""One past the last token of each document, or a tree: one for all samples, or one for each; () for one document."""


def checked_ends(documents: Sequence[Sequence[int]], batch: int, layout: SequenceLayout) -> Ends:
    """The ends of documents, as tuples; () if each sample is one document.

    Raises:
        ValueError: they are no lists, are for another number of samples, do not ascend or do not end with the sequence.
    """
    if any(isinstance(one, int) for one in documents):
        raise ValueError("documents is a list of numbers: give [[...]], one list for all samples or one for each")
    ends = tuple(segment_ends(one, "the ends of documents") for one in documents)
    if len(ends) not in (0, 1, batch):
        raise ValueError(f"documents has {len(ends)} lists for {batch} samples: give one, or one for each sample")
    for one in ends:
        if not one or one[-1] != layout.seq_length or any(a >= b for a, b in zip((0, *one), one)):
            raise ValueError(f"the ends of documents must ascend to the length of the sequence, {layout.seq_length}")
    if trees_differ(ends):
        raise ValueError("the samples have different trees: call this for each sample")
    return () if all(len(one) == 1 for one in ends) else ends


def trees_differ(documents: Sequence[Sequence[int]]) -> bool:
    """Whether samples must be computed one by one, because their states fork at different places."""
    return any(isinstance(one, Tree) for one in documents) and any(one != documents[0] for one in documents)


def begins(ends: Ends) -> set[int]:
    """The positions at which a document of every sample begins."""
    return {0} | (set.intersection(*(set(documents_of(one)) for one in ends)) if ends else set())


def forks(ends: Ends) -> dict[int, int]:
    """Where a branch begins, in all samples, that does not continue the token before it: the end of its parent."""
    return ends[0].forks if ends and isinstance(ends[0], Tree) else {}


def cut_at_forks(spans: Spans, ends: Ends) -> Spans:
    """The spans, which may touch, so that each begins at most one branch, and a parent's last token ends one."""
    cuts = sorted({at for fork in forks(ends).items() for at in fork})
    result: list[Span] = []
    for start, stop in spans:
        inside = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)]
        result += zip((start, *inside), (*inside, stop))
    return tuple(result)


@dataclass(frozen=True)
class HeldSpan:
    """A span of the sequence: the rank that holds it, and its number among the rank's spans.

    Attributes:
        before: the place, in the order of positions, after which it needs the state; None: it is fresh.
    """

    rank: int
    index: int
    span: Span
    before: int | None
    hands_on: bool

    @property
    def fresh(self) -> bool:
        return self.before is None


@dataclass(frozen=True)
class SpanOrder:
    """All ranks' spans, in the order of positions."""

    places: tuple[HeldSpan, ...]
    ranks: int

    def of(self, rank: int) -> list[HeldSpan]:
        """A rank's spans in its local order."""
        return sorted((place for place in self.places if place.rank == rank), key=lambda place: place.index)

    @cached_property
    def counts(self) -> SpanCounts:
        needed = ((self.places[place.before], place) for place in self.places if not place.fresh)
        links = [(a, b) for a, b in needed if a.rank != b.rank]
        sent = [sum(a.rank == rank for a, _ in links) for rank in range(self.ranks)]
        slots = [sum(place.hands_on for place in self.of(rank)) for rank in range(self.ranks)]
        return SpanCounts(self.ranks, max(slots), len(links), max(sent))


def rows_of(spans: Spans) -> list[Span]:
    """The rows of each span of a block."""
    return [(row, row + stop - start) for row, (start, stop) in numbered(spans)]


def document_starts(ends: Ends, spans: Spans) -> Tensor:
    """Whether a document begins at each position of ``spans``: bool [rows, samples, or 1 for all], on the CPU."""
    at = positions(spans, torch.device("cpu"))
    return torch.stack([torch.isin(at, torch.tensor((0, *documents_of(one)[:-1]))) for one in ends], dim=1)


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
    fresh, parents = begins(ends), forks(ends)
    lying = [
        (span, rank, index) for rank, spans in enumerate(held) for index, span in enumerate(cut_at_forks(spans, ends))
    ]
    lying.sort()
    ending = {span[1]: number for number, (span, _, _) in enumerate(lying)}
    before = [None if span[0] in fresh else ending[parents.get(span[0], span[0])] for span, _, _ in lying]
    handing = set(before)
    places = (
        HeldSpan(rank, index, span, before[number], number in handing)
        for number, (span, rank, index) in enumerate(lying)
    )
    return SpanOrder(tuple(places), len(held))


@without_autocast
def entry_states(
    rule: LinearRule, order: SpanOrder, axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, relay: bool
) -> dict[int, Tensor]:
    """The state before each span of this rank.

    Args:
        maps: by number, the maps of this rank's spans that hand on their states.
        empty: the state 0 [b, heads, K, V].
    """
    step = partial(apply_map, rule)
    if relay:
        return _relayed(order.places, axis, maps, empty, step)
    known = _gathered([p for p in order.places if p.hands_on], axis, maps, empty, _columns(rule, empty))
    after, entries = {}, {}
    for number, place in enumerate(order.places):
        state = empty if place.fresh else after[place.before]
        if place.rank == axis.rank:
            entries[place.index] = state
        if place.hands_on:
            after[number] = step(known[place], state)
    return entries


@without_autocast
def exit_grads(
    rule: LinearRule, order: SpanOrder, axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, relay: bool
) -> dict[int, Tensor]:
    """The gradient of the state after each span of this rank, the last spans first; a parent's is its branches' sum.

    Args:
        maps: by number, M and E of this rank's spans that are not fresh; M is 0 if a span does not hand on its state.
    """
    step = partial(apply_map_grad, rule)
    if relay:
        return _relayed_back(order.places, axis, maps, empty, step)
    known = _gathered([p for p in order.places[::-1] if not p.fresh], axis, maps, empty, _columns(rule, empty))
    after, grads = {}, {}
    for number, place in reversed(list(enumerate(order.places))):
        grad = after.pop(number, empty)
        if place.rank == axis.rank:
            grads[place.index] = grad
        if not place.fresh:
            _add(after, place.before, step(known[place], grad))
    return grads


def _columns(rule: LinearRule, empty: Tensor) -> int:
    return empty.size(-1) + rule.map_columns(empty.size(-2))


def _add(totals: dict[int, Tensor], number: int, grad: Tensor) -> None:
    totals[number] = totals[number] + grad if number in totals else grad


def _gathered(
    sending: Sequence[HeldSpan], axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, columns: int
) -> dict[HeldSpan, Tensor]:
    """The maps of the places ``sending`` of all ranks; every rank of the axis calls this."""
    by_rank: list[list[HeldSpan]] = [[] for _ in range(axis.size)]
    for place in sending:
        by_rank[place.rank].append(place)
    slots = max(map(len, by_rank))
    if axis.size == 1 or not slots:
        return {place: maps[place.index] for place in sending}
    mine = empty.new_zeros((slots, *empty.shape[:-1], columns))
    for slot, place in enumerate(by_rank[axis.rank]):
        mine[slot] = maps[place.index]
    every = gathered(mine, axis.group)
    return {place: every[r * slots + slot] for r, places in enumerate(by_rank) for slot, place in enumerate(places)}


Step = Callable[[Tensor, Tensor], Tensor]


def _relayed(
    places: Sequence[HeldSpan], axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, step: Step
) -> dict[int, Tensor]:
    """The state before each place of this rank, which it gets from the rank of the place before.

    All ranks go through the places in the same order, so that each message meets a rank that waits for it.
    """
    after, entries = {}, {}
    for number, place in enumerate(places):
        source = axis.rank if place.fresh else places[place.before].rank
        if place.rank == axis.rank:
            state = empty if place.fresh else after.get(place.before)
            if state is None:
                state = _message(dist.irecv, torch.empty_like(empty), axis, source)
            entries[place.index] = state
            if place.hands_on:
                after[number] = step(maps[place.index], state)
        elif source == axis.rank and not place.fresh:
            _message(dist.isend, after[place.before].contiguous(), axis, place.rank)
    return entries


def _relayed_back(
    places: Sequence[HeldSpan], axis: Axis, maps: Mapping[int, Tensor], empty: Tensor, step: Step
) -> dict[int, Tensor]:
    """The gradient of the state after each place of this rank; the messages of :func:`_relayed`, turned."""
    after, grads = {}, {}
    for number, place in reversed(list(enumerate(places))):
        target = place.rank if place.fresh else places[place.before].rank
        if place.rank == axis.rank:
            grads[place.index] = after.pop(number, empty)
            if not place.fresh:
                grad = step(maps[place.index], grads[place.index])
                if target == axis.rank:
                    _add(after, place.before, grad)
                else:
                    _message(dist.isend, grad.contiguous(), axis, target)
        elif target == axis.rank and not place.fresh:
            _add(after, place.before, _message(dist.irecv, torch.empty_like(empty), axis, place.rank))
    return grads


def _message(kind: Any, x: Tensor, axis: Axis, peer: int) -> Tensor:
    for work in dist.batch_isend_irecv([dist.P2POp(kind, x, axis.global_rank(peer), axis.group)]):
        work.wait()
    return x
