# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one sequence: where they end, positions that restart, and how a ring shares their work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span, Spans, union
from megatron.platform.hooks import replaceable
from megatron.platform.streams import to_device

UNEVEN = 0.04  # a rank's work may be this far from the mean before documents are cut in smaller parts


def document_ends(tokens: Tensor, eod: int) -> tuple[int, ...]:
    """One past each end-of-document token of ``tokens`` [s], and the length of the sequence."""
    ends = (torch.nonzero(tokens == eod).flatten() + 1).tolist()
    return tuple(ends if ends and ends[-1] == len(tokens) else [*ends, len(tokens)])


def document_rows(ends: Tensor) -> list[tuple[int, ...]]:
    """The ends of each sample's documents, from a tensor [b, n] whose rows are filled up with their last one.

    Raises:
        ValueError: it is something else, a dense mask say.
    """
    if ends.dim() != 2 or ends.dtype != torch.int64:
        raise ValueError(
            f"where documents end is an int64 tensor [b, n], not {ends.dtype} {list(ends.shape)}: masks are values "
            "such as cp.Documents, never tensors"
        )
    return [tuple(dict.fromkeys(row)) for row in ends.tolist()]


def restart(positions: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Positions within their documents, from positions in the sequence; int64, any shape."""
    starts = to_device(torch.tensor((0, *ends[:-1])), positions.device)
    return positions - starts[torch.bucketize(positions, starts, right=True) - 1]


@lru_cache(maxsize=64)
def deal(ends: tuple[int, ...], ranks: int) -> tuple[Spans, ...]:
    """Deal the tokens of packed documents over ring ranks: equally many tokens, and nearly equal causal work, for each.

    A document that stays whole on one rank costs no transfer, and its tiles are large. But a long one is too much work
    for one rank: it is cut like a zigzag sequence of its own, over no more ranks than keep each one's part of it below
    a limit, which falls until the work is even.

    Args:
        ends: one past the last token of each document; ``ranks`` divides the last.
        ranks: ring ranks.

    Returns:
        For each rank its positions, ascending.
    """
    documents = sorted(zip((0, *ends), ends), key=lambda span: (span[0] - span[1], span[0]))
    mean = sum(_pairs(stop - start) for start, stop in documents) / ranks
    smallest = _pairs(documents[-1][1] - documents[-1][0]) / ranks
    best, least, limit = [_Hand()], float("inf"), mean
    while True:
        hands = _deal(documents, ranks, ends[-1] // ranks, limit)
        uneven = max(abs(hand.work - mean) for hand in hands) / mean
        if uneven < least:
            best, least = hands, uneven
        if least <= UNEVEN or limit < smallest:
            return tuple(union(hand.spans) for hand in best)
        limit *= 0.7


def _pairs(tokens: int) -> int:
    """(query, key) pairs of a document under a causal mask: its work."""
    return tokens * (tokens + 1) // 2


class _Hand:
    """What one rank has been dealt."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tokens = self.work = 0

    def take(self, span: Span, document: Span) -> None:
        first, stop = span[0] - document[0], span[1] - document[0]
        if first < stop:
            self.spans.append(span)
            self.tokens += stop - first
            self.work += _pairs(stop) - _pairs(first)


def _deal(documents: list[Span], ranks: int, room: int, limit: float) -> list[_Hand]:
    """Deal documents, longest first, each over so many ranks that none has more of its work than ``limit``."""
    hands = [_Hand() for _ in range(ranks)]
    rest: list[tuple[Span, Span]] = []  # (tokens, their document) that found no place yet
    for document in documents:
        start, length = document[0], document[1] - document[0]
        shares = min(max(ceil(_pairs(length) / limit), 1), ranks)
        blocks = 1 if shares == 1 else 2 * shares  # under a causal mask, of a long document a block from either end
        size = length // blocks
        fit = [rank for rank in range(ranks) if hands[rank].tokens + size * blocks // shares <= room]
        if len(fit) < shares:
            rest.append((document, document))
            continue
        chosen = sorted(sorted(fit, key=lambda rank: hands[rank].work)[:shares])
        for index, rank in enumerate(chosen):
            for block in {index, blocks - 1 - index}:
                hands[rank].take((start + block * size, start + (block + 1) * size), document)
        rest.append(((start + blocks * size, document[1]), document))
    for (start, stop), document in rest:
        while start < stop:
            hand = min((hand for hand in hands if hand.tokens < room), key=lambda hand: hand.work)
            share = min(stop - start, room - hand.tokens)
            hand.take((start, start + share), document)
            start += share
    return hands


# What layers are told of a batch's samples, in the one tensor that megatron-core hands through to each of them.
#
# It is int64 [b, n] in host memory: where documents end, after a first column of negative numbers that says which
# samples of the run these are. Either may be missing. A tensor, because recompute keeps nothing else of a layer's
# arguments.


@dataclass(frozen=True)
class Samples:
    """The samples of a batch.

    Attributes:
        numbers: of each, among all samples of the run; () where nobody said.
        ends: of each, where its documents end; () where each is one document.
    """

    numbers: tuple[int, ...] = ()
    ends: tuple[tuple[int, ...], ...] = ()


@replaceable
def samples_tensor(numbers: Tensor | None, ends: Tensor | None) -> Tensor | None:
    """The tensor that says both: of ``numbers`` [b] and ``ends`` [b, n], int64; None where there is nothing to say."""
    if numbers is None:
        return ends
    first = (-1 - numbers)[:, None]
    return first if ends is None else torch.cat((first, ends), dim=1)


def samples(said: Tensor | None) -> Samples:
    """What such a tensor says.

    Raises:
        ValueError: it is something else, a dense mask say.
    """
    if said is None:
        return Samples()
    rows = document_rows(said)
    if not all(row and row[0] < 0 for row in rows):
        return Samples(ends=tuple(rows))
    ends = tuple(row[1:] for row in rows)
    return Samples(tuple(-1 - row[0] for row in rows), ends if all(ends) else ())
