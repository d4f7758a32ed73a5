# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: a pattern says to which key blocks a query block attends; other blocks are not computed.

Patterns: Longformer (arXiv 2004.05150), BigBird (2007.14062), strided (Sparse Transformer, 1904.10509), a list, or what
queries choose while the model runs.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.layout.masks import Band, Causal, Mask, NarrowedMask
from megatron.context_parallel.layout.spans import Span, Spans, joined, whole_numbers
from megatron.platform.streams import to_device


class Pattern(Protocol):
    """Which key blocks a query block keeps."""

    def kept(self, row: int, blocks: int) -> set[int]:
        """Key blocks of query block ``row``, among the first ``blocks``, which the outer mask lets it see."""
        ...


@dataclass(frozen=True)
class LongformerBlocks:
    """A window of blocks around the diagonal, and global blocks, which see all blocks and are seen by all.

    Attributes:
        window: number of blocks to each side of the query's block.
        global_blocks: number of global blocks, at the start of the sequence.
    """

    window: int
    global_blocks: int = 0

    def kept(self, row: int, blocks: int) -> set[int]:
        if row < self.global_blocks:
            return set(range(blocks))
        near = range(max(row - self.window, 0), min(row + self.window + 1, blocks))
        return {*range(min(self.global_blocks, blocks)), *near}


@dataclass(frozen=True)
class BigBirdBlocks:
    """The Longformer pattern with additional random blocks.

    Attributes:
        random_blocks: number of blocks drawn for each query block, among all that it may see.
        seed: of the random numbers.
    """

    window: int
    global_blocks: int
    random_blocks: int
    seed: int = 0

    def kept(self, row: int, blocks: int) -> set[int]:
        chosen = LongformerBlocks(self.window, self.global_blocks).kept(row, blocks)
        draw = random.Random(f"{self.seed} {row}")  # the same on every rank
        return chosen | set(draw.sample(range(blocks), min(self.random_blocks, blocks)))


@dataclass(frozen=True)
class StridedBlocks:
    """The last ``stride`` blocks and every ``stride``-th block. Raises ValueError if the stride is below 1."""

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"the stride must be 1 or more, not {self.stride}")

    def kept(self, row: int, blocks: int) -> set[int]:
        near = range(max(row - self.stride + 1, 0), min(row + 1, blocks))
        return {*near, *range(self.stride - 1, blocks, self.stride)}


@dataclass(frozen=True)
class BlockList:
    """A list of key blocks for each query block; a row may be empty. Raises ValueError for what are no such lists."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = (whole_numbers(row, "a row of a list of blocks") for row in self.rows)
        object.__setattr__(self, "rows", tuple(rows))

    @property
    def later(self) -> tuple[int, int] | None:
        """The first query block that keeps a later key block, and this block; None if there is none."""
        rows = ((row, max(kept, default=0)) for row, kept in enumerate(self.rows))
        return next((pair for pair in rows if pair[1] > pair[0]), None)

    def kept(self, row: int, blocks: int) -> set[int]:
        if row >= len(self.rows):
            raise ValueError(f"the list has {len(self.rows)} rows of blocks, but query block {row} needs one")
        return {block for block in self.rows[row] if block < blocks}


def _bands(q: Span, kept: Spans, k: Span, within: Mask) -> Iterator[Band]:
    """The bands of ``within`` between queries and those of the keys ``kept`` that lie in ``k``."""
    kept = tuple(keys for keys in kept if keys[0] < k[1] and k[0] < keys[1])
    if kept:
        for band in within.bands(q, (kept[0][0], kept[-1][1])):
            for keys in kept:
                yield from band.clip(keys)


@dataclass(frozen=True)
class BlockSparse(NarrowedMask):
    """Attention between the blocks that ``pattern`` keeps, within another mask.

    Attributes:
        block: tokens of a block; the last one may be shorter.
        pattern: which blocks are kept.
        seq_length: tokens of the keys' complete sequence.
        within: the mask within the kept blocks.

    Raises:
        ValueError: ``block`` is below 1; a :class:`BlockList` names blocks after the query's block, which a causal mask
            would leave out; or later, it lacks a row.
    """

    block: int
    pattern: Pattern
    seq_length: int
    within: Mask = Causal()
    _spans: dict[int, Spans] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"a block must have 1 token or more, not {self.block}")
        if isinstance(self.pattern, BlockList) and self.within == Causal() and (later := self.pattern.later):
            raise ValueError(
                f"the list keeps key block {later[1]} for query block {later[0]}, but a causal mask leaves it out: "
                "give within=Full(), or lists without later blocks"
            )

    def key_spans(self, row: int) -> Spans:
        """The keys that query block ``row`` keeps."""
        if row not in self._spans:
            queries, end = (row * self.block, (row + 1) * self.block), self.seq_length
            seen = max((band.keys[1] for band in self.within.bands(queries, (0, end))), default=0)
            kept = self.pattern.kept(row, -(-min(seen, end) // self.block))
            self._spans[row] = joined((i * self.block, min((i + 1) * self.block, end)) for i in sorted(kept))
        return self._spans[row]

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        for row in range(q[0] // self.block, -(-q[1] // self.block)):
            queries = (max(q[0], row * self.block), min(q[1], (row + 1) * self.block))
            yield from _bands(queries, self.key_spans(row), k, self.within)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        rows = int(q.max()) // self.block + 1
        kept = torch.zeros(rows, -(-self.seq_length // self.block), dtype=torch.bool)
        for row in range(rows):
            for start, stop in self.key_spans(row):
                kept[row, start // self.block : -(-stop // self.block)] = True
        return kept.to(q.device)[q // self.block, k // self.block] & self.within.allowed(q, k)


@dataclass(frozen=True, eq=False)
class ChosenBlocks(NarrowedMask):
    """Attention to key blocks that the queries of each block chose, within another mask.

    It is made for each call. Therefore it is equal only to itself, and what is derived from it must not be cached.

    Attributes:
        edges: the first position of each block, ascending from 0, and the length of the sequence.
        chosen: for the queries of each block, the numbers of the key blocks, ascending.
        within: the mask within these blocks.
    """

    edges: tuple[int, ...]
    chosen: Sequence[Sequence[int]]
    within: Mask = Causal()

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        for row in range(bisect_right(self.edges, q[0]) - 1, bisect_left(self.edges, q[1])):
            queries = (max(q[0], self.edges[row]), min(q[1], self.edges[row + 1]))
            kept = joined((self.edges[block], self.edges[block + 1]) for block in self.chosen[row])
            yield from _bands(queries, kept, k, self.within)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        kept = torch.zeros(len(self.chosen), len(self.edges) - 1, dtype=torch.bool)
        for row, blocks in enumerate(self.chosen):
            kept[row, list(blocks)] = True
        return kept.to(q.device)[block_of(q, self.edges), block_of(k, self.edges)] & self.within.allowed(q, k)


def block_of(positions: Tensor, edges: tuple[int, ...]) -> Tensor:
    """The number of the block of each position; for ``edges`` see :class:`ChosenBlocks`."""
    inner = torch.tensor(edges[1:-1], dtype=torch.int64)
    return torch.bucketize(positions, to_device(inner, positions.device), right=True)
