# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention: its parameters, products and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.formulas.kinds.attention_figures import Attention
from megatron.formulas.sizes import WIDE, Tensor, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload


@dataclass(frozen=True)
class Latent(Attention):
    """Multi-latent attention: queries, keys and values are made from latents.

    Attributes:
        queries: width of the queries' latent; 0: none.
        keys: width of the latent of keys and values.
        rotated: entries of a key head that all heads share; the others come from the latent.
        value: size of a value head.
    """

    queries: int
    keys: int
    rotated: int
    value: int
    operations: ClassVar[str] = "latent_operations"
    differs: ClassVar[bool] = False  # between layers

    def of_layer(self, layer: int) -> Latent:
        """Those of a model whose layers are all like ``layer``."""
        return self

    def inputs(self, shape: Shape, tensor: int) -> tuple[Tensor, ...]:
        """TP splits both sides of latents, but not their norms."""
        h, heads = shape.hidden, shape.heads // tensor
        norms = (2 if shape.layer_norm else 1) * shape.qk_norm
        queries: tuple[Tensor, ...] = ((heads * shape.head_dim, h),)
        if self.queries:
            queries = (
                (self.queries // tensor, h),
                (heads * shape.head_dim, self.queries),
                *(((self.queries, 1),) * norms),
            )
        return (
            *queries,
            ((self.keys + self.rotated) // tensor, h),
            (heads * (shape.head_dim - self.rotated + self.value), self.keys),
            *(((self.keys, 1),) * norms),
        )

    def vectors(self, shape: Shape) -> int:
        """Elements of the latents' norms."""
        return (2 if shape.layer_norm else 1) * shape.qk_norm * (self.queries + self.keys)

    def cut(self) -> list[int]:
        """The widths of what the first projections make."""
        return [self.queries, self.keys + self.rotated]

    def products(self, shape: Shape) -> int:
        """Those of the projections to latents and from them."""
        h, heads, d = shape.hidden, shape.heads, shape.head_dim
        queries = (h + heads * d) * self.queries if self.queries else h * heads * d
        return queries + h * (self.keys + self.rotated) + self.keys * heads * (d - self.rotated + self.value)

    def copied(self, workload: Workload, strategy: Strategy, itemsize: int) -> int:
        """Queries and keys are joined from their parts."""
        sizes = sizes_of(workload, strategy, itemsize)
        return sizes.q + sizes.k

    def before(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes of the latents of queries, keys and values, and of their norms."""
        shape = workload.shape
        whole = sizes_of(workload, strategy, itemsize).whole // shape.hidden  # one number a token, all TP ranks
        split = strategy.tensor if strategy.sequence_parallel else 1
        kept = whole * (self.queries + self.keys + self.rotated)
        if shape.qk_norm:
            copies = 1 if fused else 2 if itemsize == WIDE else 4
            norms = 1 + bool(self.queries)
            statistics = norms * whole // itemsize * WIDE
            kept += (copies * whole * (self.queries + self.keys) + statistics) // split
        return kept
