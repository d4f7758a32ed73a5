# SPDX-License-Identifier: Apache-2.0
"""Latent attention to chosen keys: what the indexer adds, and the sizes of queries that read latents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron.decisions.division import GATHERED, GATHERED_ON_CPU
from megatron.formulas.kinds.latent_figures import Latent
from megatron.formulas.sizes import WIDE, Tensor, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload

INT32 = 4
PARTS = 4  # tensors of gathered numbers that PyTorch's operations make


@dataclass(frozen=True)
class SparseLatent(Latent):
    """Multi-latent attention whose queries choose their keys.

    Attributes:
        index_heads, index_dim: of the indexer, which every TP rank has completely.
        chosen: keys of a query.
        learns: whether the indexer is trained.
        choosing: by layer, whether it chooses; the others use its choice and have no indexer. Empty: all choose.
    """

    index_heads: int
    index_dim: int
    chosen: int
    learns: bool
    choosing: tuple[bool, ...] = ()
    operations: ClassVar[str] = "sparse_operations"

    @property
    def differs(self) -> bool:
        return not all(self.choosing)

    def of_layer(self, layer: int) -> SparseLatent:
        if not self.choosing:
            return self
        return replace(self, choosing=(), **({} if self.choosing[layer] else {"index_heads": 0, "index_dim": 0}))

    def index(self, shape: Shape) -> tuple[Tensor, ...]:
        """The parameters of the indexer."""
        queries, heads, dim = self.queries or shape.hidden, self.index_heads, self.index_dim
        if not heads:
            return ()
        return ((heads * dim, queries), (dim, shape.hidden), (dim, 1), (dim, 1), (heads, shape.hidden))

    def inputs(self, shape: Shape, tensor: int) -> tuple[Tensor, ...]:
        """As of latents; the indexer is part of the attention before them."""
        return (*self.index(shape), *super().inputs(shape, tensor))

    def vectors(self, shape: Shape) -> int:
        """Elements that TP does not split."""
        return super().vectors(shape) + sum(rows * columns for rows, columns in self.index(shape))

    def products(self, shape: Shape) -> int:
        """Also those of the indexer. Up-projections of queries and results count as those of keys and values would."""
        return super().products(shape) + sum(rows * columns for rows, columns in self.index(shape) if columns > 1)

    def pairs(self, shape: Shape, seq_length: int) -> int:
        """Those with the chosen keys, in latents; twice as many as under a causal mask."""
        chosen = min(self.chosen, seq_length)
        return (2 * chosen - chosen**2 // seq_length) * shape.heads * (2 * self.keys + self.rotated)

    def choice(self, shape: Shape, seq_length: int) -> int:
        """The indexer's, with all keys."""
        return seq_length * self.index_heads * self.index_dim

    def score_share(self, shape: Shape) -> float:
        """Keys are latents with the rotated part, values are latents."""
        return (self.keys + self.rotated) / (2 * self.keys + self.rotated)

    def kept(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Latents, queries for latents, latents as keys, the choice, the result in latents and in values, lse."""
        sizes, (tokens, heads) = sizes_of(workload, strategy, itemsize), self._rows(workload, strategy, itemsize)
        before = self.before(workload, strategy, itemsize, fused) + sizes.q
        index = self._index(tokens, itemsize)
        if strategy.recompute == "selective":
            return before + index + sizes.out
        return before + 2 * index * self.learns + self._mixed(workload, tokens, heads, itemsize) + sizes.out

    def forward(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """What attention keeps, and the complete sequence of latents and of the indexer's keys."""
        keys = self.index_dim if self.learns else 0
        return self.kept(workload, strategy, itemsize, fused) + self._complete(workload, strategy, itemsize, keys)

    def working(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """The gradients of queries and results, and the complete sequence with its gradient in fp32.

        In addition, parts of gradients or, when these are added, the gradients of the indexer and a copy of the
        complete gradient, which is sent. The result in values is not in use any more.
        """
        sizes, (tokens, heads) = sizes_of(workload, strategy, itemsize), self._rows(workload, strategy, itemsize)
        working = self._in_latents(tokens, heads, itemsize) + self._complete(workload, strategy, itemsize + WIDE)
        gathered = tokens * min(self.chosen, workload.seq_length) * (self.keys + self.rotated)
        parts = WIDE * (min(GATHERED, gathered) if fused else PARTS * min(GATHERED_ON_CPU, gathered))
        index = self._index(tokens, itemsize) + self._complete(workload, strategy, itemsize + WIDE, self.index_dim, 0)
        sent = self._complete(workload, strategy, WIDE) * (strategy.context > 1)
        working += max(parts, index * self.learns + sent) - sizes.out
        if strategy.recompute == "selective":  # choice and attention run again, beside the gradient of their result
            working += self._mixed(workload, tokens, heads, itemsize) + sizes.q + 2 * sizes.out
            working += self._index(tokens, itemsize) * self.learns
        return working

    def _rows(self, workload: Workload, strategy: Strategy, itemsize: int) -> tuple[int, int]:
        """(tokens of a TP group's rank, heads of a rank)."""
        shape = workload.shape
        return sizes_of(workload, strategy, itemsize).whole // shape.hidden // itemsize, shape.heads // strategy.tensor

    def _index(self, tokens: int, itemsize: int) -> int:
        """Bytes of the indexer's queries, keys and weights of heads."""
        return tokens * ((self.index_heads + 1) * self.index_dim * itemsize + self.index_heads * WIDE)

    def _mixed(self, workload: Workload, tokens: int, heads: int, itemsize: int) -> int:
        """Bytes that choice and attention keep, without the result in values."""
        choice = tokens * min(self.chosen, workload.seq_length) * INT32 * bool(self.index_heads)
        return choice + tokens * (self.keys + self.rotated) * itemsize + self._in_latents(tokens, heads, itemsize)

    def _in_latents(self, tokens: int, heads: int, itemsize: int) -> int:
        """Bytes of the queries for latents, of results in latents, and of lse."""
        return tokens * heads * ((2 * self.keys + self.rotated) * itemsize + WIDE)

    def _complete(self, workload: Workload, strategy: Strategy, itemsize: int, index: int = 0, keys: int = 1) -> int:
        """Bytes of the latents of all ranks, if ``keys``, and of ``index`` numbers of each of the indexer's keys."""
        each = keys * (self.keys + self.rotated) + index
        return workload.seq_length * strategy.micro_batch * each * itemsize
