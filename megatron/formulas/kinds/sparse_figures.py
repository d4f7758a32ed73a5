# SPDX-License-Identifier: Apache-2.0
"""Latent attention to chosen keys: what the indexer adds, and the sizes of queries that read latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.formulas.kinds.latent_figures import Latent
from megatron.formulas.sizes import WIDE, Tensor, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload

INT32 = 4


@dataclass(frozen=True)
class SparseLatent(Latent):
    """Multi-latent attention whose queries choose their keys.

    Attributes:
        index_heads, index_dim: of the indexer, which every TP rank has completely.
        chosen: keys of a query.
        learns: whether the indexer is trained.
    """

    index_heads: int
    index_dim: int
    chosen: int
    learns: bool
    operations: ClassVar[str] = "sparse_operations"

    def index(self, shape: Shape) -> tuple[Tensor, ...]:
        """The parameters of the indexer."""
        queries, heads, dim = self.queries or shape.hidden, self.index_heads, self.index_dim
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
        """The indexer's with all keys, and attention's with the chosen ones, in latents."""
        chosen = min(self.chosen, seq_length)
        attention = chosen * shape.heads * (2 * self.keys + self.rotated)
        return seq_length * self.index_heads * self.index_dim + attention

    def kept(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Latents, queries for latents, latents as keys, the choice, the result in latents and in values, lse."""
        shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
        tokens, heads = sizes.whole // shape.hidden // itemsize, shape.heads // strategy.tensor
        before = self.before(workload, strategy, itemsize, fused) + sizes.q
        index = tokens * (self.index_heads * (self.index_dim + 1) + self.index_dim) * itemsize * self.learns
        if strategy.recompute == "selective":
            return before + index + sizes.out
        choice = tokens * min(self.chosen, workload.seq_length) * INT32
        latents = tokens * (self.keys + self.rotated) * itemsize
        return before + 2 * index + choice + latents + self._in_latents(tokens, heads, itemsize) + sizes.out

    def forward(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """What attention keeps, and the complete sequence of latents and of the indexer's keys."""
        return self.kept(workload, strategy, itemsize, fused) + self._complete(workload, strategy, itemsize)

    def working(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """The gradients of queries and results, and the complete sequence with its gradient in fp32."""
        shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
        tokens, heads = sizes.whole // shape.hidden // itemsize, shape.heads // strategy.tensor
        complete = self._complete(workload, strategy, itemsize)
        return self._in_latents(tokens, heads, itemsize) + complete + complete // itemsize * WIDE

    def _in_latents(self, tokens: int, heads: int, itemsize: int) -> int:
        """Bytes of the queries for latents, of results in latents, and of lse."""
        return tokens * heads * ((2 * self.keys + self.rotated) * itemsize + WIDE)

    def _complete(self, workload: Workload, strategy: Strategy, itemsize: int) -> int:
        """Bytes of the latents and of the indexer's keys of all ranks."""
        each = self.keys + self.rotated + self.index_dim
        return workload.seq_length * strategy.micro_batch * each * itemsize
