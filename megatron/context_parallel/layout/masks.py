# SPDX-License-Identifier: Apache-2.0
"""Attention masks, as answers about positions.

A mask never sees a rank or a backend. It is asked which keys consecutive queries attend to, and answers in bands;
tiles, ring transfers and chunk loops follow from those. A new mask is one small class, and works everywhere at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span
from megatron.decisions.division import NARROW
from megatron.platform.streams import to_device


@dataclass(frozen=True)
class Band:
    """Consecutive queries that each attend to consecutive keys.

    The i-th query of ``q`` attends to keys ``first + i * first_step`` to ``end + i * end_step - 1``; a step is 0 (the
    edge is the same for all queries) or 1 (the edge moves on with the query). Every query has a key.
    """

    q: Span
    first: int
    end: int
    first_step: int = 0
    end_step: int = 0

    @property
    def pairs(self) -> int:
        """(query, key) pairs in the band."""
        rows = self.q[1] - self.q[0]
        return rows * (self.end - self.first) + (self.end_step - self.first_step) * rows * (rows - 1) // 2

    @property
    def keys(self) -> Span:
        """All keys that some query of the band attends to."""
        return self.first, self.end + (self.q[1] - self.q[0] - 1) * self.end_step

    def clip(self, k: Span) -> Iterator[Band]:
        """What is left of the band among the keys ``k``."""
        start, stop = 0, self.q[1] - self.q[0]
        if self.end_step:
            start = max(start, k[0] - self.end + 1)
        elif self.end <= k[0]:
            return
        if self.first_step:
            stop = min(stop, k[1] - self.first)
        elif self.first >= k[1]:
            return
        if start >= stop:
            return
        enters = k[0] - self.first if self.first_step else start  # the query from which the lower edge counts
        leaves = k[1] - self.end + 1 if self.end_step else start  # the query from which the upper edge counts no more
        cuts = sorted({start, stop, *(cut for cut in (enters, leaves) if start < cut < stop)})
        for low, high in zip(cuts, cuts[1:]):
            yield Band(
                (self.q[0] + low, self.q[0] + high),
                max(self.first + low * self.first_step, k[0]),
                min(self.end + low * self.end_step, k[1]),
                self.first_step if low >= enters else 0,
                self.end_step if low < leaves else 0,
            )


class Mask(Protocol):
    """Which keys a query attends to.

    Attributes:
        pairwise: whether bands are an upper bound only, and ``allowed`` has to be asked about each pair.
        fine: whether the kernel needs to take masks: bands too narrow for tiles, or pairwise.
    """

    @property
    def pairwise(self) -> bool: ...

    @property
    def fine(self) -> bool: ...

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        """Disjoint bands of the queries ``q``, at least all that meet the keys ``k``; they may reach beyond ``k``."""
        ...

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether the query attends to the key: bool, broadcast from int64 positions q [.., 1] and k [1, ..]."""
        ...


@dataclass(frozen=True)
class Causal:
    """A query attends to itself and to what came before."""

    pairwise = fine = False

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        yield Band(q, 0, q[0] + 1, end_step=1)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q


@dataclass(frozen=True)
class Full:
    """Every query attends to every key."""

    pairwise = fine = False

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        yield Band(q, *k)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool, device=q.device)


@dataclass(frozen=True)
class Window:
    """A sliding window, and tokens that everybody sees (Longformer, arXiv 2004.05150).

    Attributes:
        left: a query attends to itself and this many keys before it.
        right: and to this many after it; 0 keeps the mask causal.
        global_tokens: the first tokens, which all queries attend to and which attend to all keys (under a causal mask:
            to all before them).

    Raises:
        ValueError: a size below 0.
    """

    left: int
    right: int = 0
    global_tokens: int = 0

    pairwise = False

    def __post_init__(self) -> None:
        if min(self.left, self.right, self.global_tokens) < 0:
            raise ValueError(f"a window's sizes are counts of tokens, 0 or more: {self}")

    @property
    def fine(self) -> bool:
        return self.left + self.right < NARROW

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        (start, stop), tokens, right = q, self.global_tokens, self.right
        if start < tokens:
            everything = (start, min(stop, tokens))
            yield Band(everything, 0, k[1]) if right else Band(everything, 0, start + 1, end_step=1)
            start = everything[1]
        # As long as a query's window reaches the global tokens, its keys are one run from the first token on.
        joined = min(stop, tokens + self.left + 1)
        if start < joined:
            yield Band((start, joined), 0, start + right + 1, end_step=1)
            start = joined
        if start < stop:
            if tokens:
                yield Band((start, stop), 0, tokens)
            yield Band((start, stop), start - self.left, start + right + 1, 1, 1)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        near = (k >= q - self.left) & (k <= q + self.right)
        reach = (k < self.global_tokens) | (q < self.global_tokens)
        return near | (reach if self.right else reach & (k <= q))


class NarrowedMask:
    """A mask that keeps rectangles of another one, ``within``, and so needs masks of pairs where that does."""

    within: Mask

    @property
    def pairwise(self) -> bool:
        return self.within.pairwise

    @property
    def fine(self) -> bool:
        return self.within.fine


@dataclass(frozen=True)
class Documents(NarrowedMask):
    """Documents packed into one sequence never see each other.

    Attributes:
        ends: ascending, one past the last token of each document; the last is the length of the sequence.
        within: what a query attends to inside its document.

    Raises:
        ValueError: the ends do not ascend from 1.
    """

    ends: tuple[int, ...]
    within: Mask = Causal()

    def __post_init__(self) -> None:
        if not self.ends or any(a >= b for a, b in zip((0, *self.ends), self.ends)):
            raise ValueError("the ends of documents ascend from 1 to the length of the sequence")

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        for document in range(bisect_right(self.ends, max(q[0], k[0], 0)), len(self.ends)):
            keys = (self.ends[document - 1] if document else 0, self.ends[document])
            if keys[0] >= min(q[1], k[1]):
                return
            for band in self.within.bands((max(q[0], keys[0]), min(q[1], keys[1])), keys):
                yield from band.clip(keys)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        ends = to_device(torch.tensor(self.ends), q.device)
        same = torch.bucketize(q, ends, right=True) == torch.bucketize(k, ends, right=True)
        return same & self.within.allowed(q, k)


def inside_tiles(mask: Mask) -> Mask:
    """What is left to ask about the pairs of a tile.

    Tiles are cut from bands, which never leave the rectangles that a :class:`NarrowedMask` keeps. So nobody looks up
    documents or blocks for a pair, for which a GPU would wait for the host.
    """
    if isinstance(mask, NarrowedMask):
        return inside_tiles(mask.within)
    return replace(mask, within=inside_tiles(mask.within)) if isinstance(mask, MaskFunction) else mask


@dataclass(frozen=True)
class MaskFunction:
    """A mask of the user's own, asked in host memory or on the device for blocks of rows (DeepSpeed4Science).

    Attributes:
        function: (positions of queries [.., 1], of keys [1, ..], int64) -> bool, True = attend; on any device.
        within: a bound that the function only narrows: what lies outside is neither asked, computed nor sent.

    Raises:
        ValueError: when it is asked, the function's answer is not of dtype bool.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    within: Mask = Causal()

    pairwise = fine = True

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        return self.within.bands(q, k)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        chosen = self.function(q, k)
        if chosen.dtype != torch.bool:
            raise ValueError(f"a mask function gives booleans, True = attend; this one gives {chosen.dtype}")
        return chosen & self.within.allowed(q, k)
