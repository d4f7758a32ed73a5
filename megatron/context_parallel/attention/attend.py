# SPDX-License-Identifier: Apache-2.0
"""Attention over tiles: a source gives key blocks, and a kernel adds their tiles to sums.

Plain attention, the ring, gathered keys and FPDT's chunks differ only in where key blocks come from. Outputs are merged
by the true lse of every tile. The backward pass of a tile gets the *final* out and lse, so that the gradients of tiles
can be added.

See ring.py for the sources of blocks, and kernels/ for the contract of kernels and the sums.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.latent_blocks import LatentSource
from megatron.context_parallel.attention.ring import KeySource
from megatron.context_parallel.attention.rule import TileKernel
from megatron.platform.autograd import once_differentiable

Source = KeySource | LatentSource
Kept = deque[tuple[Tensor, Tensor]]  # outputs and lse of passes that will run again, the oldest first


def tiled_attention(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    *,
    source: KeySource,
    kernel: TileKernel,
    sinks: Tensor | None = None,
    up: Tensor | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Attention of this rank's queries to all keys that ``source`` gives.

    Args:
        q_SBHD: [s, b, heads, d]; k_SBHD: [s, b, kv_heads, d], kv_heads divides heads; v_SBHD: like k, but its head size
            may differ.
        source: gives key blocks with the tiles to compute.
        kernel: computes tiles.
        sinks: fp32 [heads], one additional score for each query of a head.
        up: [heads, N + V, C] makes keys and values of latents (latent_blocks.py): ``v_SBHD`` are the latents
            [s, b, 1, C], and ``k_SBHD`` the part of the keys that all heads share, [s, b, 1, d - N]. A rank's gradient
            has the part of its own queries and heads alone.
        kept: of a layer that recompute runs twice. The pass without gradients adds its result; the pass with gradients
            takes it and computes no tile. Both make their calls in the same order.

    Returns:
        out [s, b, heads, head size of v (V)], in the dtype of q; 0 for queries without any key.
    """
    if kept is not None and not torch.is_grad_enabled():
        kept.append(attend_all(q_SBHD, k_SBHD, v_SBHD, _of_latents(source, up, q_SBHD, k_SBHD), kernel, sinks))
        return kept[-1][0]
    known = None if kept is None else kept.popleft()
    return _TiledAttention.apply(q_SBHD, k_SBHD, v_SBHD, sinks, up, source, kernel, known)


def attend_all(
    q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, source: Source, kernel: TileKernel, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The forward pass of :func:`tiled_attention`: out [s, b, heads, head size of v] and lse [s, b, heads]."""
    value_dim = source.value_dim if isinstance(source, LatentSource) else v_SBHD.size(3)
    result = Accumulator(q_SBHD, value_dim, only=source.single and sinks is None)
    for block in source.blocks(k_SBHD, v_SBHD):
        kernel.attend(block.hop.tiles, q_SBHD, block.k, block.v, result)
    return result.finish(sinks)


def attend_all_grad(
    dout_SBHD: Tensor,
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    out_SBHD: Tensor,
    lse_SBH: Tensor,
    source: Source,
    kernel: TileKernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of :func:`attend_all`: dq, dk and dv, in the dtype of q; out and lse are its results."""
    final, dq = kernel.final(dout_SBHD, out_SBHD, lse_SBH), GradientSum(q_SBHD, only=source.single)
    dkv = KeyGradients(k_SBHD, v_SBHD, only=source.single)
    for block in source.blocks(k_SBHD, v_SBHD, dkv):
        kernel.attend_grad(block.hop.tiles, q_SBHD, block.k, block.v, final, dq, block.grads)
    return tuple(total.finish().to(q_SBHD.dtype) for total in (dq, dkv.dk, dkv.dv))


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
        up: Tensor | None,
        source: KeySource,
        kernel: TileKernel,
        known: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        out, lse = known or attend_all(q, k, v, _of_latents(source, up, q, k), kernel, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks, up)
        ctx.source, ctx.kernel = source, kernel
        return out

    @staticmethod
    @once_differentiable("attention")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, up = ctx.saved_tensors
        source = _of_latents(ctx.source, up, q, k)
        grads = attend_all_grad(dout, q, k, v, out, lse, source, ctx.kernel)
        dsinks = sinks_grad(sinks, dout, out, lse).to(sinks.dtype) if ctx.needs_input_grad[3] else None
        return *grads, dsinks, source.up_grad() if up is not None else None, None, None, None


def _of_latents(source: KeySource, up: Tensor | None, q: Tensor, k: Tensor) -> Source:
    return source if up is None else LatentSource(source, up, q.size(3) - k.size(3))
