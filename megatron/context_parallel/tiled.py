# SPDX-License-Identifier: Apache-2.0
"""Attention, written once, over tiles: a source brings key blocks, a kernel computes tiles, partial results merge.

Ring, plain and (later) chunked attention differ only in their source. Outputs are merged in fp32 with the true lse of
every tile; the backward pass of a tile gets the *final* out and lse, so the gradients of tiles simply add up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.context_parallel.kernels.base import Kernel
from megatron.context_parallel.ring import KeyBlock, RingSource
from megatron.context_parallel.tiles import Tile


def tiled_attention(
    q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *, source: RingSource, kernel: Kernel, scale: float
) -> Tensor:
    """Attention of this rank's queries to every key that its source brings.

    Args:
        q_SBHD: [s, b, heads, d]; k_SBHD, v_SBHD: [s, b, kv_heads, d], kv_heads divides heads.
        source: where key blocks come from; its plan says which tiles to compute.
        kernel: computes one tile.
        scale: factor on q @ k^T.

    Returns:
        out [s, b, heads, d], same dtype as q.
    """
    return _TiledAttention.apply(q_SBHD, k_SBHD, v_SBHD, source, kernel, scale)


class Accumulator:
    """Merges the outputs of tiles of one query block, in fp32 (fp64 for fp64 inputs)."""

    def __init__(self, q_SBHD: Tensor, out_SBHD: Tensor | None = None, lse_SBH: Tensor | None = None) -> None:
        """``out_SBHD, lse_SBH``: what an earlier accumulator for these queries had so far; they are written to."""
        self.shape, self.dtype = q_SBHD.shape, q_SBHD.dtype
        self.sum_dtype = sum_dtype(q_SBHD.dtype)
        self.out_SBHD, self.lse_SBH = out_SBHD, lse_SBH

    def add(self, rows: tuple[int, int], out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        """Merge a tile: ``out -= sigmoid(lse_t - lse) * (out - out_t); lse = log(exp(lse) + exp(lse_t))``."""
        tile_out, tile_lse = out_BHSD.permute(2, 0, 1, 3), lse_BHS.permute(2, 0, 1)
        if self.out_SBHD is None:
            if rows == (0, self.shape[0]):
                self.out_SBHD, self.lse_SBH = tile_out, tile_lse
                return
            self.out_SBHD = tile_out.new_zeros(self.shape, dtype=self.sum_dtype)
            self.lse_SBH = tile_lse.new_full(self.shape[:3], -torch.inf)
        if self.out_SBHD.dtype != self.sum_dtype:
            self.out_SBHD = self.out_SBHD.to(self.sum_dtype)
        out, lse = self.out_SBHD[rows[0] : rows[1]], self.lse_SBH[rows[0] : rows[1]]
        # Where neither side has attended to anything both lse are -inf, and nothing changes.
        share = torch.sigmoid(tile_lse - lse).nan_to_num_(0.0)
        out -= share.unsqueeze(-1) * (out - tile_out)
        lse.copy_(torch.logaddexp(lse, tile_lse))

    def finish(self) -> tuple[Tensor, Tensor]:
        """out [s, b, h, d] in the inputs' dtype, lse [s, b, h]."""
        if self.out_SBHD is None:
            raise ValueError("no tile was computed: the mask leaves these queries without any key")
        return self.out_SBHD.to(self.dtype), self.lse_SBH


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype partial results are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, source: RingSource, kernel: Kernel, scale: float) -> Tensor:
        result = Accumulator(q)
        for block in source.blocks(k, v):
            for tile in block.tiles:
                qkv = tile_of(tile, q, block.k, block.v)
                out, lse = kernel.forward(*qkv, causal=tile.kind == "causal", mask=None, scale=scale)
                result.add(tile.q, out, lse)
        out, lse = result.finish()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.source, ctx.kernel, ctx.scale = source, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        source = ctx.source

        def grads_of(tile: Tile, block: KeyBlock) -> list[Tensor]:
            return tile_grads(ctx.kernel, tile, q, block.k, block.v, dout, out, lse, ctx.scale)

        if source.single_tile:  # nothing to add up
            (block,) = source.blocks(k, v)
            (tile,) = block.tiles
            return *grads_of(tile, block), None, None, None
        dq: Tensor | None = None
        for block in source.blocks_with_grads(k, v, sum_dtype(q.dtype)):
            for tile in block.tiles:
                dq_tile, dk_tile, dv_tile = grads_of(tile, block)
                if dq is None and tile.q == (0, q.size(0)):
                    dq = dq_tile.to(sum_dtype(q.dtype))
                else:
                    dq = torch.zeros_like(q, dtype=sum_dtype(q.dtype)) if dq is None else dq
                    dq[slice(*tile.q)] += dq_tile
                block.add_grad(tile, dk_tile, dv_tile)
        dk, dv = source.take_grads()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def tile_of(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tile's part of q, k, v [s, b, h, d], as [b, h, s, d] views."""
    keys = slice(*tile.k)
    return _heads_first(q[slice(*tile.q)]), _heads_first(k[keys]), _heads_first(v[keys])


def tile_grads(
    kernel: Kernel,
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> list[Tensor]:
    """dq, dk, dv of a tile as [s, b, h, d]; ``out`` [s, b, h, d] and ``lse`` [s, b, h] are the final ones."""
    rows = slice(*tile.q)
    grads = kernel.backward(
        _heads_first(dout[rows]),
        *tile_of(tile, q, k, v),
        _heads_first(out[rows]),
        lse[rows].permute(1, 2, 0),
        causal=tile.kind == "causal",
        mask=None,
        scale=scale,
    )
    return [grad.permute(2, 0, 1, 3) for grad in grads]


def _heads_first(x_SBHD: Tensor) -> Tensor:
    return x_SBHD.permute(1, 2, 0, 3)
