# SPDX-License-Identifier: Apache-2.0
"""Attention in plain PyTorch: the reference. Any device, any float dtype, any mask; memory bounded, speed modest."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import (
    ROW_MASK_BYTES,
    AnyMask,
    RowMask,
    accumulation_dtype,
    bias_rows,
    check_tile,
    lse_for_backward,
    mask_rows,
    row_blocks,
)

SCORE_BYTES = 64 * 2**20  # scores of a block of rows; a few buffers of this size live at once


class MathKernel:
    """Computes in fp32 for bf16 and fp16 inputs, in the dtype of the inputs for fp32 and fp64."""

    name = "math"
    supports_mask = True

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return "needs fp64, fp32, bf16 or fp16"
        return None

    def forward(
        self, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, mask: AnyMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        mask = check_tile(self, q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask)
        dtype = accumulation_dtype(q_BHSD.dtype)
        k, v = k_BHSD.to(dtype), v_BHSD.to(dtype)
        out = torch.empty_like(q_BHSD)
        lse = torch.empty(q_BHSD.shape[:3], dtype=dtype, device=q_BHSD.device)
        for start, end, keys in _blocks(q_BHSD, k, causal, mask, dtype):
            q = _fold(q_BHSD[:, :, start:end].to(dtype), k)
            allowed = mask_rows(mask, causal, start, end, keys, q.device)
            bias = bias_rows(mask, start, end, keys)
            p = _scores(q, k[:, :, :keys], allowed, bias, scale, end - start)
            lse[:, :, start:end] = torch.logsumexp(p, dim=-1)
            p.sub_(lse_for_backward(lse[:, :, start:end], dtype).unsqueeze(-1)).exp_()
            out[:, :, start:end] = (_fold(p, k) @ v[:, :, :keys]).view(*p.shape[:3], -1)
        return out, lse

    def backward(
        self,
        dout_BHSD: Tensor,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        out_BHSD: Tensor,
        lse_BHS: Tensor,
        *,
        causal: bool,
        mask: AnyMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = check_tile(self, q_BHSD, k_BHSD, v_BHSD, causal=causal, mask=mask)
        dtype = accumulation_dtype(q_BHSD.dtype)
        k, v, lse = k_BHSD.to(dtype), v_BHSD.to(dtype), lse_for_backward(lse_BHS, dtype)
        dq, dk, dv = torch.empty_like(q_BHSD), torch.zeros_like(k), torch.zeros_like(v)
        for start, end, keys in _blocks(q_BHSD, k, causal, mask, dtype):
            rows = slice(start, end)
            q = _fold(q_BHSD[:, :, rows].to(dtype), k)
            dout = dout_BHSD[:, :, rows].to(dtype)
            delta = (dout * out_BHSD[:, :, rows].to(dtype)).sum(-1, keepdim=True)
            dout = _fold(dout, k)
            allowed = mask_rows(mask, causal, start, end, keys, q.device)
            bias = bias_rows(mask, start, end, keys)
            p = _scores(q, k[:, :, :keys], allowed, bias, scale, end - start)
            p.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            dv[:, :, :keys] += _fold(p, k).mT @ dout
            ds = (dout @ v[:, :, :keys].mT).view(p.shape).sub_(delta).mul_(p).mul_(scale)
            ds_folded = _fold(ds, k)
            dq[:, :, rows] = (ds_folded @ k[:, :, :keys]).view(*p.shape[:3], -1)
            dk[:, :, :keys] += ds_folded.mT @ q
        return dq, dk.to(k_BHSD.dtype), dv.to(v_BHSD.dtype)


def _blocks(q: Tensor, k: Tensor, causal: bool, mask: AnyMask, dtype: torch.dtype):
    """(first row, end row, number of keys that these rows can see), block by block."""
    b, h, sq, _ = q.shape
    bytes_per_row, limit = b * h * k.shape[2] * dtype.itemsize, SCORE_BYTES
    if isinstance(mask, RowMask):
        bytes_per_row, limit = max(bytes_per_row, mask.bytes_per_row(k.shape[2], dtype.itemsize)), ROW_MASK_BYTES
    for start, end in row_blocks(sq, bytes_per_row, limit):
        yield start, end, end if causal else k.shape[2]


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """[b, h, r, n] -> [b, hk, (h / hk) * r, n]: the query heads of a key head side by side, as one matrix."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[3])


def _scores(q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None, scale: float, rows: int) -> Tensor:
    """``scale * q k^T + bias`` for folded q, as [b, h, rows, keys], with -inf where a pair is not allowed."""
    scores = ((q * scale) @ k.mT).view(q.shape[0], -1, rows, k.shape[2])
    if bias is not None:
        scores += bias
    return scores if allowed is None else scores.masked_fill_(~allowed, float("-inf"))
