# SPDX-License-Identifier: Apache-2.0
"""Attention over tiles: a source gives key blocks, a kernel computes tiles, and the results are merged.

Plain attention, the ring, gathered keys and FPDT's chunks differ only in where key blocks come from. Outputs are merged
by the true lse of every tile. The backward pass of a tile gets the *final* out and lse, so that the gradients of tiles
can be added.

See ring.py for the sources of blocks, tile.py for the computation of one tile, and merge.py for the merging.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.merge import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.ring import GatherSource, KeyBlock, RingSource
from megatron.context_parallel.attention.tile import TileKernel
from megatron.context_parallel.layout.spans import Span, union
from megatron.context_parallel.layout.tiles import Tiles
from megatron.platform.autograd import once_differentiable


def tiled_attention(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    *,
    source: RingSource | GatherSource,
    kernel: TileKernel,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to all keys that ``source`` gives.

    Args:
        q_SBHD: [s, b, heads, d]; k_SBHD: [s, b, kv_heads, d], kv_heads divides heads; v_SBHD: like k, but its head size
            may differ.
        source: gives key blocks with the tiles to compute.
        kernel: computes one tile.
        sinks: fp32 [heads], one additional score for each query of a head.

    Returns:
        out [s, b, heads, head size of v], in the dtype of q; 0 for queries without any key.
    """
    return _TiledAttention.apply(q_SBHD, k_SBHD, v_SBHD, sinks, source, kernel)


def attend_all(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    source: RingSource | GatherSource,
    kernel: TileKernel,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward pass of :func:`tiled_attention`: out and lse [s, b, heads]."""
    result = Accumulator(q_SBHD, v_SBHD.size(3))
    for block in source.blocks(k_SBHD, v_SBHD):
        attend(block.tiles, q_SBHD, block.k, block.v, kernel=kernel, result=result)
    return result.finish(sinks)


def attend_all_grad(
    dout_SBHD: Tensor,
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    out_SBHD: Tensor,
    lse_SBH: Tensor,
    source: RingSource | GatherSource,
    kernel: TileKernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of :func:`attend_all`: dq, dk and dv."""
    delta = kernel.delta(out_SBHD, dout_SBHD)
    final = {"dout_SBHD": dout_SBHD, "out_SBHD": out_SBHD, "lse_SBH": lse_SBH, "delta_SBH": delta}
    dq, dkv = GradientSum(q_SBHD, q_SBHD.size(0)), KeyGradients(k_SBHD, v_SBHD, ((0, k_SBHD.size(0)),))
    for block in source.blocks(k_SBHD, v_SBHD, dkv):
        attend_grad(block.tiles, q_SBHD, block.k, block.v, **final, kernel=kernel, dq=dq, dkv=block)
    return tuple(total.finish().to(q_SBHD.dtype) for total in (dq, dkv.dk, dkv.dv))


def attend(
    tiles: Tiles, q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *, kernel: TileKernel, result: Accumulator
) -> None:
    """Merge the tiles between a query block [s, b, heads, d] and a key block [s, b, kv_heads, d] into ``result``."""
    if kernel.at_once:
        kernel.attend(tiles, q_SBHD, k_SBHD, v_SBHD, *result.sums())
        return
    for tile in kernel.parts(tiles):
        result.add(tile.q, *kernel.forward(tile, q_SBHD, k_SBHD, v_SBHD))


def attend_grad(
    tiles: Tiles,
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    *,
    dout_SBHD: Tensor,
    out_SBHD: Tensor | None,
    lse_SBH: Tensor,
    delta_SBH: Tensor | None,
    kernel: TileKernel,
    dq: GradientSum,
    dkv: KeyGradients | KeyBlock,
) -> None:
    """The backward pass of :func:`attend`: adds the tiles' gradients to ``dq`` and ``dkv``.

    Args:
        dout_SBHD: gradient of the final output, [s, b, heads, d].
        out_SBHD, lse_SBH: the *final* results, merged over all tiles of these queries.
        delta_SBH: from ``kernel.delta``, for kernels that use it in place of ``out``; else None.
    """
    if kernel.at_once:
        _attend_grad_at_once(
            tiles, (q_SBHD, k_SBHD, v_SBHD), (dout_SBHD, lse_SBH, delta_SBH), kernel=kernel, dq=dq, dkv=dkv
        )
        return
    for tile in kernel.parts(tiles):
        dq_tile, *dkv_tile = kernel.backward(tile, q_SBHD, k_SBHD, v_SBHD, dout_SBHD, out_SBHD, lse_SBH)
        dq.add(tile.q, dq_tile)
        dkv.add(tile.k, *dkv_tile)


def _attend_grad_at_once(
    tiles: Tiles,
    qkv: tuple[Tensor, Tensor, Tensor],
    final: tuple[Tensor, Tensor, Tensor],
    *,
    kernel: TileKernel,
    dq: GradientSum,
    dkv: KeyGradients | KeyBlock,
) -> None:
    """The gradients of all tiles in one call, added directly to the sums if their rows have the same order as the keys.

    On a ring the orders may differ: a block holds keys that are needed later and gradients of keys used before.
    """
    q, k, v = qkv
    moved, (first, stop), offset = tiles.derived(dkv.numbering, lambda: _one_block(tiles, dkv))
    if offset is not None:
        moved = moved or tiles
        dk, dv = (total[first + offset : stop + offset] for total in dkv.sums())
        kernel.attend_grad(moved, (q, k[first:stop], v[first:stop]), *final, (dq.sum(), dk, dv))
        return
    fresh = KeyGradients(k, v, ((0, k.size(0)),))
    dk, dv = fresh.sums()
    kernel.attend_grad(tiles, qkv, *final, (dq.sum(), dk, dv))
    for start, stop in union(tile.k for tile in tiles):
        dkv.add((start, stop), dk[start:stop], dv[start:stop])


def _one_block(tiles: Tiles, dkv: KeyGradients | KeyBlock) -> tuple[Tiles | None, Span, int | None]:
    """(the tiles, counted from their first key, if it is not 0; the rows of their keys; their offset in the sums).

    The offset is None if the rows are in another order in the sums.
    """
    rows = min(tile.k[0] for tile in tiles), max(tile.k[1] for tile in tiles)
    offsets = {dkv.at(tile.k)[0] - tile.k[0] for tile in tiles}
    moved = Tiles(replace(tile, k=(tile.k[0] - rows[0], tile.k[1] - rows[0])) for tile in tiles) if rows[0] else None
    return moved, rows, offsets.pop() if len(offsets) == 1 else None


def sinks_grad(sinks: Tensor, dout_SBHD: Tensor, out_SBHD: Tensor, lse_SBH: Tensor) -> Tensor:
    """These queries' part of the gradient of ``sinks`` [heads], fp32 (fp64), from the *final* ``out`` and ``lse``.

    A sink's share p of a softmax multiplies no value. Therefore ``d sink = -p * delta``, where delta is the row sum of
    dout * out.
    """
    wide = lse_SBH.dtype
    delta = (dout_SBHD.to(wide) * out_SBHD.to(wide)).sum(-1)
    return -(torch.exp(sinks.to(wide) - lse_SBH) * delta).sum((0, 1))


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        source: RingSource | GatherSource,
        kernel: TileKernel,
    ) -> Tensor:
        out, lse = attend_all(q, k, v, source, kernel, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.source, ctx.kernel = source, kernel
        return out

    @staticmethod
    @once_differentiable("attention")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grads = attend_all_grad(dout, q, k, v, out, lse, ctx.source, ctx.kernel)
        dsinks = sinks_grad(sinks, dout, out, lse).to(sinks.dtype) if ctx.needs_input_grad[3] else None
        return *grads, dsinks, None, None
