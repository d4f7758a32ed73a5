# SPDX-License-Identifier: Apache-2.0
"""PyTorch's flash attention for the CPU.

Limits of the operator (torch 2.13), and what this file does about them:

- It reads q, k, v, out by their strides, but computes wrong results if the last stride is not 1: we copy.
- It supports only additive masks, and computes wrong results in fp64 if their dtype differs from q's: we make them in
  the dtype of q.
- It returns lse 0 for a row without keys, and NaN gradients for a final lse of -inf: we return -inf, and pass +inf.
- It needs value heads of the key heads' size: we pad the smaller ones with zeros.
- It has no dropout and no soft-cap: tiles with either use the math kernel, whose blocks fit the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megatron.context_parallel.attention.kernels.base import Capability
from megatron.context_parallel.attention.kernels.fused_kernel import compact
from megatron.context_parallel.attention.kernels.math_kernel import MathKernel
from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.attention.kernels.tile_by_tile import (
    TileByTile,
    TileScores,
    lse_for_backward,
    row_blocks,
)
from megatron.context_parallel.layout.masks import ROW_MASK_BYTES

MATH = MathKernel()


class CpuKernel(TileByTile):
    """Supports fp32, fp64, bf16, fp16, grouped heads and masks. It is the default on a machine without a GPU."""

    name = "cpu"
    supports_mask = supports_bias = True
    supports_dropout = True
    supports_softcap = True
    supports_value_dim = True

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cpu":
            return "needs tensors on the CPU"
        return MATH.why_not(device=device, dtype=dtype, head_dim=head_dim)

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        return "needs tensors on the CPU"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        if how.dropout or how.softcap:
            return MATH.forward(q, k, v, how)
        self.check_tile(q, k, v, how)
        value_dim = v.shape[3]
        q, k, v = _one_size(compact(q), compact(k), compact(v))
        if how.plain:
            out, lse = _forward(q, k, v, 0.0, how.causal, scale=how.scale)
            return out[..., :value_dim], lse
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
        for start, end, keys, allowed, bias in _blocks(q, k, how):
            bias, rows = _additive(allowed, bias, q.dtype), slice(start, end)
            out[:, :, rows], lse_rows = _forward(
                q[:, :, rows], k[:, :, :keys], v[:, :, :keys], 0.0, False, attn_mask=bias, scale=how.scale
            )
            if allowed is not None:
                without_keys = allowed.view(torch.uint8).amax(-1) == 0  # `any` on booleans takes twenty times as long
                lse_rows = lse_rows.masked_fill(without_keys, float("-inf"))
            lse[:, :, rows] = lse_rows
        return out[..., :value_dim], lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        if how.dropout or how.softcap:
            return MATH.backward(dout, q, k, v, out, lse, how)
        self.check_tile(q, k, v, how)
        lse = lse_for_backward(lse, accumulation_dtype(q.dtype))
        unpadded = [slice(x.shape[3]) for x in (q, k, v)]  # without the padding of _one_size
        q, k, v, out, dout = _one_size(*map(compact, (q, k, v, out.to(q.dtype))), dout.to(q.dtype))
        if how.plain:
            grads = _backward(dout, q, k, v, out, lse, 0.0, how.causal, scale=how.scale)
            return tuple(grad[..., part] for grad, part in zip(grads, unpadded))
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
        for start, end, keys, allowed, bias in _blocks(q, k, how):
            bias, rows = _additive(allowed, bias, q.dtype), slice(start, end)
            rows_and_keys = (dout[:, :, rows], q[:, :, rows], k[:, :, :keys], v[:, :, :keys])
            dq[:, :, rows], dk_part, dv_part = _backward(
                *rows_and_keys, out[:, :, rows], lse[:, :, rows], 0.0, False, attn_mask=bias, scale=how.scale
            )
            dk[:, :, :keys] += dk_part
            dv[:, :, :keys] += dv_part
        return tuple(grad[..., part].to(q.dtype) for grad, part in zip((dq, dk, dv), unpadded))


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _one_size(*tensors: Tensor) -> list[Tensor]:
    """The tensors with all heads padded to the largest head size; the zeros do not change the products."""
    size = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == size else functional.pad(x, (0, size - x.shape[3])) for x in tensors]


def _blocks(q: Tensor, k: Tensor, how: TileScores):
    """(first row, end row, number of keys, boolean mask of these pairs or None, bias or None), block by block."""
    sq, sk = q.shape[2], k.shape[2]
    for start, end in row_blocks(sq, how.bytes_per_row(sk, q.dtype.itemsize), ROW_MASK_BYTES):
        keys = end if how.causal else sk
        yield start, end, keys, *how.rows(start, end, keys, q.device, and_causal=True)


def _additive(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The additive mask: the bias (or 0) where a pair is allowed, -inf where it is not.

    It is computed as ``1 - 1 / allowed``, which is ten times as fast on the CPU as `masked_fill`.
    """
    if allowed is None:
        return bias.to(dtype)[None]
    additive = allowed.view(torch.uint8).to(dtype).reciprocal_().neg_().add_(1)
    return additive if bias is None else bias.to(dtype).add_(additive)[None]
