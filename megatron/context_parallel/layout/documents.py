# SPDX-License-Identifier: Apache-2.0
"""Documents or trees in one sequence: their ends, restarting positions, and an even distribution over a ring."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span, Spans, union
from megatron.context_parallel.layout.tree import Tree
from megatron.platform.hooks import replaceable
from megatron.platform.streams import to_device

UNEVEN = 0.04  # a rank's work may differ from the mean by this share before documents are cut into smaller parts


def document_ends(tokens: Tensor, eod: int) -> tuple[int, ...]:
    """One past each end-of-document token of ``tokens`` [s], and the length of the sequence."""
    ends = (torch.nonzero(tokens == eod).flatten() + 1).tolist()
    return tuple(ends if ends and ends[-1] == len(tokens) else [*ends, len(tokens)])


def document_rows(ends: Tensor) -> list[tuple[int, ...]]:
    """The ends of each sample's documents, from a tensor [b, n] whose rows are padded with their last value.

    A tensor [b, n, 2] has the ends and the parents of a tree's segments.

    Raises:
        ValueError: the tensor is something else, for example a dense mask.
    """
    if ends.dim() == 3 and ends.size(2) == 2 and ends.dtype == torch.int64:
        return [Tree(*zip(*dict.fromkeys(map(tuple, row)))) for row in ends.tolist()]
    if ends.dim() != 2 or ends.dtype != torch.int64:
        raise ValueError(
            f"the ends of documents must be an int64 tensor [b, n], not {ends.dtype} {list(ends.shape)}: pass masks "
            "as values such as cp.Documents, not as tensors"
        )
    return [tuple(dict.fromkeys(row)) for row in ends.tolist()]


def restart(positions: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Positions within their documents, or along a tree's paths, from positions in the sequence; int64, any shape."""
    starts = to_device(torch.tensor((0, *ends[:-1])), positions.device)
    segment = torch.bucketize(positions, starts, right=True) - 1
    firsts = starts - to_device(torch.tensor(ends.depths), positions.device) if isinstance(ends, Tree) else starts
    return positions - firsts[segment]


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document, or of a segment of a tree.

    ``origin`` is the first position to which they attend: the document's start. A segment also attends to its path, n
    tokens that may lie anywhere before it; they are counted as the n positions right before the segment.
    """

    start: int
    stop: int
    origin: int

    @property
    def pairs(self) -> int:
        """(query, key) pairs under a causal mask."""
        return _pairs(self.stop - self.origin) - _pairs(self.start - self.origin)


@lru_cache(maxsize=64)
def balance_documents(ends: tuple[int, ...], ranks: int) -> tuple[Spans, ...]:
    """Distribute the tokens of packed documents over ring ranks, with equally many tokens and nearly equal causal work.

    A document that stays on one rank needs no transfer and has large tiles. But a long one is too much work for one
    rank: it is cut in zigzag order over the fewest ranks that keep each rank's part below a limit. The limit is lowered
    until the work is even. A tree's segments are distributed in the same way; their work includes their paths.

    Args:
        ends: one past the last token of each document, or a tree; ``ranks`` divides the last end.
        ranks: number of ring ranks.

    Returns:
        For each rank its positions, ascending.
    """
    depths = ends.depths if isinstance(ends, Tree) else (0,) * len(ends)
    pieces = [Piece(start, stop, start - depth) for start, stop, depth in zip((0, *ends), ends, depths)]
    pieces.sort(key=lambda piece: (-piece.pairs, piece.start))
    mean = sum(piece.pairs for piece in pieces) / ranks
    cuttable = [piece.pairs for piece in pieces if piece.stop - piece.start >= 2 * ranks]
    smallest = min(cuttable, default=_pairs(ends[-1])) / ranks
    best, least, limit = [_Share()], float("inf"), mean
    while True:
        shares = _deal(pieces, ranks, ends[-1] // ranks, limit)
        uneven = max(abs(share.work - mean) for share in shares) / mean
        if uneven < least:
            best, least = shares, uneven
        if least <= UNEVEN or limit < smallest:
            return tuple(union(share.spans) for share in best)
        limit *= 0.7


def _pairs(tokens: int) -> int:
    """(query, key) pairs of a document under a causal mask."""
    return tokens * (tokens + 1) // 2


class _Share:
    """What one rank holds so far: spans, tokens, and work in (query, key) pairs."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tokens = self.work = 0

    def take(self, piece: Piece) -> None:
        if piece.start < piece.stop:
            self.spans.append(piece[:2])
            self.tokens += piece.stop - piece.start
            self.work += piece.pairs


def _deal(pieces: list[Piece], ranks: int, capacity: int, limit: float) -> list[_Share]:
    """Distribute pieces, those with most work first, each over the fewest ranks whose parts of it stay below ``limit``.

    Args:
        capacity: tokens of a rank.
    """
    shares = [_Share() for _ in range(ranks)]
    rest: list[Piece] = []  # what no rank holds yet
    whole = bisect_left(pieces, -limit, key=lambda piece: -piece.pairs)
    for piece in pieces[:whole]:
        start, length = piece.start, piece.stop - piece.start
        parts = min(ceil(piece.pairs / limit), ranks)
        blocks = 2 * parts if parts > 1 else 1  # zigzag: two blocks for each rank
        size = length // blocks
        fit = [share for share in shares if share.tokens <= capacity - size * blocks // parts]
        if len(fit) < parts:
            rest.append(piece)
            continue
        chosen = sorted(sorted(fit, key=attrgetter("work"))[:parts], key=shares.index)
        for index, share in enumerate(chosen):
            for block in {index, blocks - 1 - index}:
                share.take(Piece(start + block * size, start + (block + 1) * size, piece.origin))
        rest.append(piece._replace(start=start + blocks * size))
    for piece in pieces[whole:]:
        room, least = capacity - (piece.stop - piece.start), None
        for share in shares:  # a loop, because min() over the shares that fit takes twice as long
            if share.tokens <= room and (least is None or share.work < least.work):
                least = share
        if least is None:
            rest.append(piece)
        else:
            least.take(piece)
    for start, stop, origin in rest:
        while start < stop:
            share = min((share for share in shares if share.tokens < capacity), key=lambda share: share.work)
            taken = min(stop - start, capacity - share.tokens)
            share.take(Piece(start, start + taken, origin))
            start += taken
    return shares


@dataclass(frozen=True)
class Samples:
    """The samples of a batch, as layers get them.

    Attributes:
        numbers: the number of each sample among all samples of the run; () if unknown.
        ends: the ends of each sample's documents; () if each sample is one document.
        plans: attention's plans by mask, if the loader's processes made them; of others, layers make their own.
        counted: 1 for this rank's tokens that the loss counts, 0 for the others, [s_local, b]; None: all count.
        handed_on: what a layer leaves for later ones in the same batch, by its number.
        shares: whether some layers do.
    """

    numbers: tuple[int, ...] = ()
    ends: tuple[tuple[int, ...], ...] = ()
    plans: Mapping[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    counted: Tensor | None = field(default=None, compare=False, repr=False)
    handed_on: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    shares: bool = False

    def each(self) -> list[Samples]:
        """One of these for each sample whose documents are known."""
        numbers = [(number,) for number in self.numbers] or [()] * len(self.ends)
        return [Samples(number, (row,), self.plans) for number, row in zip(numbers, self.ends, strict=True)]


class SamplesArgument(Tensor):
    """:class:`Samples` as megatron-core's layers pass them on, in the place of a dense mask.

    It is a tensor, of no elements, because core's recompute keeps no other arguments, and stays the same object when
    recompute detaches it.

    Attributes:
        samples: what it holds.
    """

    samples: Samples
    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self) -> SamplesArgument:
        return self

    @property
    def data(self) -> SamplesArgument:
        return self  # core asks for its dtype, also among the fake tensors of a dry run, which know no subclass


@replaceable
def passed_on(samples: Samples) -> SamplesArgument | None:
    """The argument ``attention_mask`` of core's layers that holds ``samples``; None if there is nothing to know."""
    if not samples.numbers and not samples.ends and samples.counted is None and not samples.shares:
        return None
    argument = torch.empty(0, dtype=torch.int64).as_subclass(SamplesArgument)
    argument.samples = samples
    return argument


def samples_of(argument: Tensor | None) -> Samples:
    """The samples that a layer was passed. A plain tensor [b, n] has the ends of documents.

    Raises:
        ValueError: the tensor is something else, for example a dense mask.
    """
    if argument is None:
        return Samples()
    if isinstance(argument, SamplesArgument):
        return argument.samples
    return Samples(ends=tuple(document_rows(argument)))
