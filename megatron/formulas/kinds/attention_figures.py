# SPDX-License-Identifier: Apache-2.0
"""Attention to keys of all heads: parameters, products, and the memory of the part of a layer that mixes tokens."""

from __future__ import annotations

from typing import ClassVar

from megatron.decisions.key_exchange import KEY_EXCHANGES
from megatron.formulas.sizes import WIDE, Tensor, heads_of, norm_of, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload


class Attention:
    """What mixes tokens in a layer. Other kinds have the same functions, each of one layer.

    Attributes:
        operations: the module of simulator/cost/kinds/ with its work.
        rule: how a token changes the state that the layer carries; None: it carries none.
    """

    operations: ClassVar[str] = "attention_operations"
    rule: str | None = None

    def tensors(self, shape: Shape, tensor: int) -> tuple[Tensor, ...]:
        """Parameters on one of ``tensor`` TP ranks in the order of the model, with the norm before them."""
        h, sinks, bias = shape.hidden, ((shape.heads // tensor, 1),), ((shape.hidden, 1),)
        out = h, self.out_width(shape) // tensor
        return (*norm_of(shape), *sinks * shape.sinks, out, *bias * shape.bias, *self.inputs(shape, tensor))

    def inputs(self, shape: Shape, tensor: int) -> tuple[Tensor, ...]:
        """The parameters that make queries, keys and values."""
        h, d, norms = shape.hidden, shape.head_dim, 2 if shape.layer_norm else 1
        heads, groups = shape.heads, shape.kv_heads
        qkv = ((1 + shape.output_gate) * heads + 2 * groups) * d // tensor
        return (
            (qkv, h),
            *(((qkv, 1),) if shape.bias or shape.qkv_bias else ()),
            *(((d, 1),) * (2 * norms) if shape.qk_norm else ()),
            *(((heads * d // tensor, 1), (groups * d // tensor, 1)) if shape.wide_qk_norm else ()),
        )

    def vectors(self, shape: Shape) -> int:
        """Elements of the norms inside, which TP does not split."""
        return (2 if shape.layer_norm else 1) * shape.qk_norm * 2 * shape.head_dim

    def cut(self) -> list[int]:
        """Widths, besides that of heads, that TP must divide."""
        return []

    def products(self, shape: Shape) -> int:
        """Multiplications for a token before the output projection, without those with other tokens."""
        return shape.hidden * ((1 + shape.output_gate) * shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def out_width(self, shape: Shape) -> int:
        """Numbers of a token that enter the output projection."""
        return shape.heads * shape.value_dim

    def pairs(self, shape: Shape, seq_length: int) -> int:
        """Multiplications of a token with others, without a mask."""
        return seq_length * shape.heads * (shape.head_dim + shape.value_dim)

    def choice(self, shape: Shape, seq_length: int) -> int:
        """Multiplications of a token with others, without a mask, that have no backward pass."""
        return 0

    def score_share(self, shape: Shape) -> float:
        """The share of the scores in the multiplications of :meth:`pairs`."""
        return shape.head_dim / (shape.head_dim + shape.value_dim)

    def kept(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes kept for backward between the norm and the output projection, whose input is included.

        They are q, k and v as the kernel reads them (with the tensor that they are views of), its output and lse.
        """
        shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
        copied, before = self.copied(workload, strategy, itemsize), self.before(workload, strategy, itemsize, fused)
        if shape.output_gate:  # the sigmoid in fp32, and the product, which enters the output projection
            before += sizes.out * WIDE // itemsize + sizes.out
        if strategy.recompute == "selective":
            return before + sizes.qkv + copied + sizes.out
        # A CPU's kernel computes with values as large as keys, and its output is a part of that.
        padded = not fused and strategy.ring == 1 and shape.value_dim < shape.head_dim
        if strategy.ulysses > 1:  # before and after the all-to-all back
            return before + sizes.local_q + sizes.local_kv + sizes.lse + sizes.out + (sizes.q if padded else sizes.out)
        rotated = sizes.q + sizes.k if not shape.positions else copied
        return before + sizes.qkv + rotated + sizes.out + sizes.lse + sizes.q * padded

    def copied(self, workload: Workload, strategy: Strategy, itemsize: int) -> int:
        """Bytes of queries and keys that are copied before they are rotated; core copies interleaved GQA queries."""
        shape = workload.shape
        groups = max(shape.kv_heads // strategy.tensor, 1)
        return sizes_of(workload, strategy, itemsize).q if shape.heads > shape.kv_heads and groups > 1 else 0

    def before(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes kept of what makes q, k and v: norms of queries and keys over a head.

        Without Ulysses their inputs are kept anyway.
        """
        shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
        if not shape.qk_norm:
            return 0
        copies = (1 if fused else 2 if itemsize == WIDE else 4) + (strategy.ulysses > 1)
        normed = sizes.q + sizes.k
        return copies * normed + normed // (shape.head_dim * itemsize) * WIDE

    def forward(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes of a forward pass at its peak that keeps nothing, without the norm before it."""
        sizes, spread = sizes_of(workload, strategy, itemsize), strategy.ulysses > 1
        return sizes.qkv + 2 * sizes.q + sizes.k + sizes.out + 2 * (sizes.local_q + sizes.local_kv) * spread

    def working(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes of the backward pass, in addition to what is kept."""
        sizes, spread = sizes_of(workload, strategy, itemsize), strategy.ulysses > 1
        working = attention_working(workload, strategy, itemsize)
        if strategy.recompute == "selective":  # attention runs again, in addition to what is kept
            working += sizes.q + sizes.k + sizes.local_out + sizes.lse + (sizes.local_q + sizes.local_kv) * spread
        return working


ATTENTION = Attention()


def attention_working(workload: Workload, strategy: Strategy, itemsize: int) -> int:
    """Bytes of attention's backward pass without what attention keeps: dout, dq, dk, dv and blocks on the ring."""
    sizes, ring = sizes_of(workload, strategy, itemsize), strategy.ring
    working = sizes.local_out + sizes.local_q + sizes.local_kv + sizes.lse
    held, wide = KEY_EXCHANGES[strategy.key_exchange].held, WIDE // itemsize
    if ring > 1 and held is not None:
        working += held(ring, wide) * sizes.local_kv
    elif ring > 1:
        working = sizes.local_out + sizes.local_q * wide + ring_blocks(sizes.local_kv, ring, itemsize)
        working += sizes.local_q // 2 + sizes.local_kv  # dq, dk, dv of a tile
        if ring > 2 and workload.causal and (workload.whole or not workload.keys):
            # This rank's dk and dv are those of one tile, in its dtype, until the other ranks' sums return. The peak
            # is when a block's sums are packed for sending while others arrive, or at the end of a tile.
            sums = max((3 + 3 * wide) * sizes.local_kv, (4 + 2 * wide) * sizes.local_kv + sizes.local_q // 2)
            working = sizes.local_out + sizes.local_q * wide + sums
    if strategy.ulysses > 1:
        shape = workload.shape
        heads = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
        sent = sizes.local_q + sizes.local_kv * heads.sent_kv // heads.local_kv
        # Queries, keys, values, outputs and lse are freed before gradients return through the all-to-all.
        working = max(working, 2 * sent + sizes.kv - sizes.out - sizes.lse)
    return working


def ring_blocks(block: int, ring: int, itemsize: int) -> int:
    """Bytes of blocks on a ring in backward.

    Keys and values: the block in use and the one that arrives. Gradients in fp32: this rank's and the block's, with
    three ranks or more also those that arrive and leave.
    """
    wide = WIDE // itemsize
    return (2 + 2 * wide) * block if ring == 2 else (2 + 4 * wide) * block
