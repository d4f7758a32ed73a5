# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: a pattern says which key blocks a query block keeps; the rest costs nothing.

Patterns of the Longformer (arXiv 2004.05150), BigBird (2007.14062) and strided kind (Sparse Transformer, 1904.10509),
or a list of one's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.layout.masks import Band, Causal, Mask, PartOfAnother
from megatron.context_parallel.layout.spans import Span


class Pattern(Protocol):
    """Which key blocks a query block keeps."""

    def kept(self, row: int, blocks: int) -> set[int]:
        """Key blocks of query block ``row`` among the first ``blocks``, all that the mask around lets it see."""
        ...


@dataclass(frozen=True)
class LongformerBlocks:
    """A window of blocks around the diagonal, and blocks at the start that everybody sees and that see everybody.

    Attributes:
        window: blocks to each side, besides the query's own.
        global_blocks: at the start of the sequence.
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
    """Longformer's, and some blocks by chance.

    Attributes:
        random_blocks: drawn for each query block, among all that it may see.
        seed: of the drawing.
    """

    window: int
    global_blocks: int
    random_blocks: int
    seed: int = 0

    def kept(self, row: int, blocks: int) -> set[int]:
        chosen = LongformerBlocks(self.window, self.global_blocks).kept(row, blocks)
        draw = random.Random(f"{self.seed} {row}")  # by name: the same on every rank
        return chosen | set(draw.sample(range(blocks), min(self.random_blocks, blocks)))


@dataclass(frozen=True)
class StridedBlocks:
    """The last ``stride`` blocks, and every ``stride``-th one of all."""

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"a stride is 1 or more, not {self.stride}")

    def kept(self, row: int, blocks: int) -> set[int]:
        near = range(max(row - self.stride + 1, 0), min(row + 1, blocks))
        return {*near, *range(self.stride - 1, blocks, self.stride)}


@dataclass(frozen=True)
class BlockList:
    """Rows of key blocks of one's own; a row may be empty."""

    rows: tuple[tuple[int, ...], ...]

    def kept(self, row: int, blocks: int) -> set[int]:
        if row >= len(self.rows):
            raise ValueError(f"the list has {len(self.rows)} rows of blocks, and query block {row} needs one")
        return {block for block in self.rows[row] if block < blocks}


@dataclass(frozen=True)
class BlockSparse(PartOfAnother):
    """Attention between blocks of ``block`` tokens, those that ``pattern`` keeps, within another mask.

    Attributes:
        block: tokens of a block; the last one may be shorter.
        pattern: which blocks are kept.
        seq_length: tokens of the keys' whole sequence.
        within: what a kept block's queries attend to.
    """

    block: int
    pattern: Pattern
    seq_length: int
    within: Mask = Causal()
    _runs: dict[int, list[Span]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"a block has 1 token or more, not {self.block}")

    def runs(self, row: int) -> list[Span]:
        """Runs of keys, ascending, that query block ``row`` keeps."""
        if row not in self._runs:
            queries = (row * self.block, (row + 1) * self.block)
            bands = self.within.bands(queries, (0, self.seq_length))
            reach = max(
                (band.end + (band.q[1] - band.q[0] - 1) * band.end_step for band in bands),
                default=0,
            )
            blocks = -(-min(reach, self.seq_length) // self.block)
            found: list[list[int]] = []
            for block in sorted(self.pattern.kept(row, blocks)):
                if found and found[-1][1] == block * self.block:
                    found[-1][1] += self.block
                else:
                    found.append([block * self.block, (block + 1) * self.block])
            self._runs[row] = [(start, min(stop, self.seq_length)) for start, stop in found]
        return self._runs[row]

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        for row in range(q[0] // self.block, -(-q[1] // self.block)):
            queries = (max(q[0], row * self.block), min(q[1], (row + 1) * self.block))
            for keys in self.runs(row):
                if keys[0] < k[1] and k[0] < keys[1]:
                    for band in self.within.bands(queries, keys):
                        yield from band.clip(keys)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        rows = int(q.max()) // self.block + 1
        kept = torch.zeros(rows, -(-self.seq_length // self.block), dtype=torch.bool)
        for row in range(rows):
            for start, stop in self.runs(row):
                kept[row, start // self.block : -(-stop // self.block)] = True
        return kept.to(q.device)[q // self.block, k // self.block] & self.within.allowed(q, k)
