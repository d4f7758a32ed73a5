# SPDX-License-Identifier: Apache-2.0
"""Attention masks, as functions of positions.

A mask does not depend on ranks or kernels. It gives the keys that consecutive queries attend to as bands; tiles, ring
transfers and chunk loops are derived from the bands. A new mask is one small class; a line in the table MASKS of
training/settings/attention_settings.py gives it a name for --attention-mask.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span
from megatron.context_parallel.layout.tree import Tree, segment_ends
from megatron.decisions.division import NARROW
from megatron.platform.streams import to_device

ROW_MASK_BYTES = 32 * 2**20  # memory limit for the mask of one block of rows
PAIR_BYTES = 24  # for each pair while its mask is computed: two int64 for positions, and booleans


class Band(NamedTuple):
    """Consecutive queries that each attend to consecutive keys.

    The i-th query of ``q`` attends to keys ``first + i * first_step`` to ``end + i * end_step - 1``; a step is 0 (the
    edge is the same for all queries) or 1 (the edge moves with the query). Every query has at least one key.
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
        """All keys to which some query of the band attends."""
        return self.first, self.end + (self.q[1] - self.q[0] - 1) * self.end_step

    def clip(self, k: Span) -> list[Band]:
        """The part of the band among the keys ``k``."""
        if k[0] <= self.first and self.keys[1] <= k[1]:
            return [self]
        if not self.first_step and self.first < k[1] <= self.end:  # every query sees the same of these keys
            return [Band(self.q, max(self.first, k[0]), k[1])]
        start, stop = 0, self.q[1] - self.q[0]
        if self.end_step:
            start = max(start, k[0] - self.end + 1)
        elif self.end <= k[0]:
            return []
        if self.first_step:
            stop = min(stop, k[1] - self.first)
        elif self.first >= k[1]:
            return []
        if start >= stop:
            return []
        enters = k[0] - self.first if self.first_step else start  # first query whose lower edge is within k
        leaves = k[1] - self.end + 1 if self.end_step else start  # first query whose upper edge is beyond k
        cuts = sorted({start, stop, *(cut for cut in (enters, leaves) if start < cut < stop)})
        return [
            Band(
                (self.q[0] + low, self.q[0] + high),
                max(self.first + low * self.first_step, k[0]),
                min(self.end + low * self.end_step, k[1]),
                self.first_step if low >= enters else 0,
                self.end_step if low < leaves else 0,
            )
            for low, high in zip(cuts, cuts[1:])
        ]


class Mask(Protocol):
    """Which keys a query attends to.

    Attributes:
        pairwise: whether bands are only an upper bound, so that ``allowed`` decides about each pair.
        fine: whether the kernel must support masks: the mask is pairwise, or its bands are too narrow for tiles.
    """

    @property
    def pairwise(self) -> bool: ...

    @property
    def fine(self) -> bool: ...

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        """Disjoint bands of the queries ``q``: at least all that contain keys of ``k``; they may go beyond ``k``."""
        ...

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether the query attends to the key: bool, broadcast from int64 positions q [.., 1] and k [1, ..]."""
        ...


@dataclass(frozen=True)
class Causal:
    """A query attends to itself and to all tokens before it."""

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
    """A sliding window with optional global tokens (Longformer, arXiv 2004.05150).

    Attributes:
        left: a query attends to itself and to this many keys before it.
        right: and to this many keys after it; 0 makes the mask causal.
        global_tokens: number of tokens, at the start, to which all queries attend and which attend to all keys (in a
            causal mask: to all before them).

    Raises:
        ValueError: a size is below 0.
    """

    left: int
    right: int = 0
    global_tokens: int = 0

    pairwise = False

    def __post_init__(self) -> None:
        if min(self.left, self.right, self.global_tokens) < 0:
            raise ValueError(f"the sizes of a window must be 0 or more: {self}")

    @property
    def fine(self) -> bool:
        return self.left + self.right < NARROW

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        (start, stop), tokens, right = q, self.global_tokens, self.right
        if start < tokens:
            everything = (start, min(stop, tokens))
            yield Band(everything, 0, k[1]) if right else Band(everything, 0, start + 1, end_step=1)
            start = everything[1]
        # If a query's window reaches the global tokens, its keys are one span that begins at the first token.
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
    """A mask that keeps rectangles of another mask, ``within``, and is pairwise or fine if ``within`` is."""

    within: Mask

    @property
    def pairwise(self) -> bool:
        return self.within.pairwise

    @property
    def fine(self) -> bool:
        return self.within.fine


@dataclass(frozen=True)
class Documents(NarrowedMask):
    """Documents packed into one sequence; no query attends to another document.

    Attributes:
        ends: ascending, one past the last token of each document; the last is the length of the sequence. Any sequence
            of whole numbers; it becomes a tuple. Or a :class:`~.tree.Tree`, of which a query attends to its own path.
        within: what a query attends to inside its document, by positions in the complete sequence (global tokens of a
            window are the sequence's first); in a tree, along its path, whose positions count from 0.

    Raises:
        ValueError: the ends are no whole numbers, or do not ascend from 1 or more.
    """

    ends: tuple[int, ...]
    within: Mask = Causal()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", segment_ends(self.ends, "the ends of documents"))
        if not self.ends or any(a >= b for a, b in zip((0, *self.ends), self.ends)):
            raise ValueError("the ends of documents must ascend, from 1 or more to the length of the sequence")

    @cached_property
    def rows(self) -> float:
        """Tokens of a typical document: the root of the mean square, because work grows with the square."""
        return (sum((b - a) ** 2 for a, b in zip((0, *self.ends), self.ends)) / len(self.ends)) ** 0.5

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        if isinstance(self.ends, Tree):
            yield from self._bands_of_tree(self.ends, q, k)
            return
        for document in range(bisect_right(self.ends, max(q[0], k[0], 0)), len(self.ends)):
            keys = (self.ends[document - 1] if document else 0, self.ends[document])
            if keys[0] >= min(q[1], k[1]):
                return
            for band in self.within.bands((max(q[0], keys[0]), min(q[1], keys[1])), keys):
                yield from band.clip(keys)

    def _bands_of_tree(self, tree: Tree, q: Span, k: Span) -> Iterator[Band]:
        for segment in range(bisect_right(tree, max(q[0], 0)), len(tree)):
            start, stop = tree.spans[segment]
            if start >= q[1]:
                return
            down = tree.depths[segment] - start
            rows = (max(q[0], start) + down, min(q[1], stop) + down)
            for band in self.within.bands(rows, (0, stop + down)):
                for other in tree.paths[segment]:
                    first, end = tree.spans[other]
                    if first < k[1] and k[0] < end:
                        right = tree.depths[other] - first
                        for part in band.clip((first + right, end + right)):
                            at = (part.q[0] - down, part.q[1] - down)
                            yield part._replace(q=at, first=part.first - right, end=part.end - right)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        ends = to_device(torch.tensor(self.ends), q.device)
        if isinstance(self.ends, Tree):
            segments = [torch.bucketize(at, ends, right=True) for at in (q, k)]
            places = to_device(torch.tensor(self.ends.depths) - torch.tensor((0, *self.ends[:-1])), q.device)
            depths = [at + places[segment] for at, segment in zip((q, k), segments)]
            return to_device(self.ends.on_path, q.device)[tuple(segments)] & self.within.allowed(*depths)
        same = torch.bucketize(q, ends, right=True) == torch.bucketize(k, ends, right=True)
        return same & self.within.allowed(q, k)


def tile_rows(mask: Mask) -> float:
    """Rows of a typical tile, by which a kernel is chosen; infinity: tiles are few and large."""
    if isinstance(mask, Causal | Full):
        return inf
    if isinstance(mask, Documents):
        return min(mask.rows, tile_rows(mask.within))
    return float(max(mask.left, mask.right) + 1) if isinstance(mask, Window) and not mask.global_tokens else 0.0


def inside_tiles(mask: Mask) -> Mask:
    """The mask that decides about the pairs within a tile.

    Tiles are cut from bands, which are always inside the rectangles that a :class:`NarrowedMask` keeps. Therefore no
    pair has to be looked up in documents or blocks, for which a GPU would wait for the host.
    """
    if isinstance(mask, Documents) and isinstance(mask.ends, Tree):  # positions along a path are looked up
        return replace(mask, within=inside_tiles(mask.within))
    if isinstance(mask, NarrowedMask):
        return inside_tiles(mask.within)
    return replace(mask, within=inside_tiles(mask.within)) if isinstance(mask, MaskFunction) else mask


def check_mask(mask: Mask, seq_length: int) -> None:
    """Refuse what is no mask, and documents that do not fill the sequence: tokens behind the last would see nothing.

    Raises:
        TypeError: it, or the ``within`` of a mask, is no mask. ValueError: documents end at another length.
    """
    if not hasattr(mask, "bands"):
        how = "wrap a function: cp.MaskFunction(function, within=cp.Full())" if callable(mask) else "use one of cp's"
        raise TypeError(f"{mask!r} is no mask: {how}")
    if isinstance(mask, Documents) and mask.ends[-1] != seq_length:
        raise ValueError(
            f"the last document ends at {mask.ends[-1]}, but the sequence has {seq_length} tokens: give the end of the "
            "last one too, or of the padding as a document"
        )
    if hasattr(mask, "within"):
        check_mask(mask.within, seq_length)


def has_tree(mask: Mask) -> bool:
    """Whether distances between tokens are not those of their positions in the sequence."""
    within = getattr(mask, "within", None)
    return isinstance(getattr(mask, "ends", None), Tree) or (within is not None and has_tree(within))


@dataclass(frozen=True)
class MaskFunction:
    """A user-defined mask, evaluated for blocks of rows in host memory or on the device (DeepSpeed4Science).

    Attributes:
        function: (positions of queries [.., 1], of keys [1, ..], int64) -> bool, True = attend; on any device.
        within: an outer mask, which the function can only narrow: pairs outside it are not evaluated, computed or sent.
            It must be given: ``Full()`` for exactly the pairs of the function, ``Causal()`` for those without later
            keys, or a tighter bound.

    Raises:
        ValueError: ``within`` is not given; or at the call, if the function's result is not of dtype bool.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    within: Mask | None = None

    pairwise = fine = True

    def __post_init__(self) -> None:
        if self.within is None:
            raise ValueError(
                "MaskFunction needs within=, the pairs for which the function is asked: within=cp.Full() for all, "
                "within=cp.Causal() without later keys"
            )

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        return self.within.bands(q, k)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        chosen = self.function(q, k)
        if chosen.dtype != torch.bool:
            raise ValueError(f"a mask function must return booleans (True = attend); this one returns {chosen.dtype}")
        return chosen & self.within.allowed(q, k)
