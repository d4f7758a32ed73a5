# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one sequence: where they end, positions that restart, and how a ring shares their work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from megatron.context_parallel.masks import Span

UNEVEN = 0.03  # a rank's work may be this much above the mean before one more document is cut


def document_ends(tokens: Tensor, eod: int) -> tuple[int, ...]:
    """One past each end-of-document token of ``tokens`` [s], and the length of the sequence."""
    ends = (torch.nonzero(tokens == eod).flatten() + 1).tolist()
    return tuple(ends if ends and ends[-1] == len(tokens) else [*ends, len(tokens)])


def document_rows(ends: Tensor) -> list[tuple[int, ...]]:
    """The ends of each sample's documents, from a tensor [b, n] whose rows are filled up with their last one."""
    return [tuple(dict.fromkeys(row)) for row in ends.tolist()]


def restart(positions: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Positions within their documents, from positions in the sequence; int64, any shape."""
    starts = torch.tensor((0, *ends[:-1]), device=positions.device)
    return positions - starts[torch.bucketize(positions, starts, right=True) - 1]


@lru_cache(maxsize=64)
def deal(ends: tuple[int, ...], ranks: int) -> tuple[tuple[Span, ...], ...]:
    """Deal the tokens of packed documents over ring ranks: equally many tokens, and nearly equal causal work, for each.

    A document that stays whole on one rank costs no transfer. But a long one is too much work for one rank: it is cut
    like a zigzag sequence of its own, in twice as many pieces as ranks. As few documents are cut, the longest first, as
    an even share of the work allows.

    Args:
        ends: one past the last token of each document; ``ranks`` divides the last.
        ranks: ring ranks.

    Returns:
        For each rank its positions, ascending.
    """
    documents = sorted(zip((0, *ends), ends), key=lambda span: (span[0] - span[1], span[0]))
    best, least, cut = [_Hand()], float("inf"), 0
    while True:
        hands = _deal(documents[:cut], documents[cut:], ranks, ends[-1] // ranks)
        uneven = max(hand.work for hand in hands) * ranks / sum(hand.work for hand in hands) - 1
        if uneven < least:
            best, least = hands, uneven
        if least <= UNEVEN or cut >= len(documents):
            return tuple(_joined(hand.spans) for hand in best)
        cut = min(max(cut + 1, cut * 5 // 4), len(documents))


class _Hand:
    """What one rank has been dealt."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tokens = self.work = 0

    def take(self, span: Span, document: Span) -> None:
        """Work counts (query, key) pairs under a causal mask."""
        if span[0] < span[1]:
            first, stop = span[0] - document[0], span[1] - document[0]
            self.spans.append(span)
            self.tokens += stop - first
            self.work += (stop * (stop + 1) - first * (first + 1)) // 2


def _deal(cut: list[Span], whole: list[Span], ranks: int, room: int) -> list[_Hand]:
    hands = [_Hand() for _ in range(ranks)]
    rest: list[tuple[Span, Span]] = []  # (tokens, their document) that found no place yet
    for document in cut:
        start, length = document[0], document[1] - document[0]
        size = length // (2 * ranks)
        for rank, hand in enumerate(hands):
            for piece in (rank, 2 * ranks - 1 - rank):
                hand.take((start + piece * size, start + (piece + 1) * size), document)
        rest.append(((start + 2 * ranks * size, document[1]), document))
    for document in whole:
        fits = [hand for hand in hands if hand.tokens + document[1] - document[0] <= room]
        if fits:
            min(fits, key=lambda hand: hand.work).take(document, document)
        else:
            rest.append((document, document))
    for (start, stop), document in rest:
        while start < stop:
            hand = min((hand for hand in hands if hand.tokens < room), key=lambda hand: hand.work)
            share = min(stop - start, room - hand.tokens)
            hand.take((start, start + share), document)
            start += share
    return hands


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    found: list[Span] = []
    for span in sorted(spans):
        if found and found[-1][1] == span[0]:
            found[-1] = (found[-1][0], span[1])
        else:
            found.append(span)
    return tuple(found)
