# SPDX-License-Identifier: Apache-2.0
"""Attention, written once, over tiles: a source brings key blocks, a kernel computes tiles, partial results merge.

Ring and plain attention differ only in their source. Outputs are merged in fp32 with the true lse of
every tile; the backward pass of a tile gets the *final* out and lse, so the gradients of tiles simply add up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.context_parallel.attention.ring import RingSource
from megatron.context_parallel.attention.tile import TileKernel


def tiled_attention(
    q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *, source: RingSource, kernel: TileKernel
) -> Tensor:
    """Attention of this rank's queries to every key that its source brings.

    Args:
        q_SBHD: [s, b, heads, d]; k_SBHD, v_SBHD: [s, b, kv_heads, d], kv_heads divides heads.
        source: where key blocks come from; its plan says which tiles to compute.
        kernel: computes one tile.

    Returns:
        out [s, b, heads, d], same dtype as q; 0 for queries without any key.
    """
    return _TiledAttention.apply(q_SBHD, k_SBHD, v_SBHD, source, kernel)


class Accumulator:
    """Merges the outputs of tiles of one query block, in fp32 (fp64 for fp64 inputs)."""

    def __init__(self, q_SBHD: Tensor, out_SBHD: Tensor | None = None, lse_SBH: Tensor | None = None) -> None:
        """``out_SBHD, lse_SBH``: what an earlier accumulator for these queries had so far; they are written to."""
        self.shape, self.dtype, self.device = q_SBHD.shape, q_SBHD.dtype, q_SBHD.device
        self.sum_dtype = sum_dtype(q_SBHD.dtype)
        self.out_SBHD, self.lse_SBH = out_SBHD, lse_SBH

    def add(self, rows: tuple[int, int], out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        """Merge a tile: ``out -= sigmoid(lse_t - lse) * (out - out_t); lse = log(exp(lse) + exp(lse_t))``."""
        tile_out, tile_lse = out_BHSD.permute(2, 0, 1, 3), lse_BHS.permute(2, 0, 1)
        if self.out_SBHD is None:
            if rows == (0, self.shape[0]):
                self.out_SBHD, self.lse_SBH = tile_out, tile_lse
                return
            self._start()
        if self.out_SBHD.dtype != self.sum_dtype:
            self.out_SBHD = self.out_SBHD.to(self.sum_dtype)
        out, lse = self.out_SBHD[rows[0] : rows[1]], self.lse_SBH[rows[0] : rows[1]]
        # Where neither side has attended to anything both lse are -inf, and nothing changes.
        share = torch.sigmoid(tile_lse - lse).nan_to_num_(0.0)
        out -= share.unsqueeze(-1) * (out - tile_out)
        lse.copy_(torch.logaddexp(lse, tile_lse))

    def finish(self) -> tuple[Tensor, Tensor]:
        """out [s, b, h, d] in the inputs' dtype, lse [s, b, h]; 0 and -inf for queries without any key."""
        if self.out_SBHD is None:
            self._start()
        return self.out_SBHD.to(self.dtype), self.lse_SBH

    def _start(self) -> None:
        self.out_SBHD = torch.zeros(self.shape, dtype=self.sum_dtype, device=self.device)
        self.lse_SBH = torch.full(self.shape[:3], -torch.inf, dtype=self.sum_dtype, device=self.device)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype partial results are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, source: RingSource, kernel: TileKernel) -> Tensor:
        result = Accumulator(q)
        for block in source.blocks(k, v):
            for tile in kernel.parts(block.tiles):
                result.add(tile.q, *kernel.forward(tile, q, block.k, block.v))
        out, lse = result.finish()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.source, ctx.kernel = source, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        source, kernel = ctx.source, ctx.kernel
        tile = source.single_tile(q.size(0), k.size(0))
        if tile is not None and list(kernel.parts([tile])) == [tile]:  # nothing to add up
            return *kernel.backward(tile, q, k, v, dout, out, lse), None, None
        dq: Tensor | None = None
        for block in source.blocks_with_grads(k, v, sum_dtype(q.dtype)):
            for tile in kernel.parts(block.tiles):
                dq_tile, dk_tile, dv_tile = kernel.backward(tile, q, block.k, block.v, dout, out, lse)
                if dq is None and tile.q == (0, q.size(0)):
                    dq = dq_tile.to(sum_dtype(q.dtype))
                else:
                    dq = torch.zeros_like(q, dtype=sum_dtype(q.dtype)) if dq is None else dq
                    dq[slice(*tile.q)] += dq_tile
                block.add_grad(tile, dk_tile, dv_tile)
        dk, dv = source.take_grads()
        dq = torch.zeros_like(q) if dq is None else dq.to(q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None
