# SPDX-License-Identifier: Apache-2.0
"""The reference: attention in plain PyTorch for any device, float dtype, mask and dropout, in bounded memory.

Scores are computed for a block of rows and heads at a time. On a CPU a block fits the cache of a core; on a GPU it is
large enough to keep the GPU busy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability
from megatron.context_parallel.attention.kernels.fused_kernel import head_slices
from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.attention.kernels.tile_by_tile import (
    TileByTile,
    TileScores,
    lse_for_backward,
    row_blocks,
)
from megatron.context_parallel.layout.masks import ROW_MASK_BYTES

SCORE_BYTES = {"cpu": 2**21, "cuda": 2**26}  # limit for a block's scores; a few buffers of this size exist at once
FEW_ROWS = 128  # a block with fewer rows has only one head
FEWEST_ROWS = 16  # of a block on a CPU, for any number of keys, so that products stay efficient

Block = tuple[slice, slice, slice]


class MathKernel(TileByTile):
    """Computes in fp32 for bf16 and fp16 inputs, and in the inputs' dtype for fp32 and fp64."""

    name = "math"
    supports_mask = supports_bias = True
    supports_dropout = True
    supports_softcap = True
    supports_value_dim = True

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return self.why_not_on((0, 0), dtype, head_dim)

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return "needs fp64, fp32, bf16 or fp16"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        self.check_tile(q, k, v, how)
        dtype, dropout, softcap = accumulation_dtype(q.dtype), how.dropout, how.softcap
        k_all, v_all = k.to(dtype).contiguous(), v.to(dtype).contiguous()
        out = q.new_empty((q.size(2), *q.shape[:2], v.size(3))).permute(1, 2, 0, 3)
        lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        for start, end, keys, heads_at_once in _blocks(q, k_all, how):
            rows, (allowed, bias) = slice(start, end), how.rows(start, end, keys, q.device)
            for batch, heads, key_heads in heads_at_once:
                k_in, v_in = k_all[batch, key_heads, :keys], v_all[batch, key_heads, :keys]
                q_in = _fold(q[batch, heads, rows].to(dtype), k_in)
                p = _products(q_in, k_in, how.scale, end - start)
                if softcap:
                    p.div_(softcap).tanh_().mul_(softcap)
                _mask_(p, allowed, None if bias is None else bias[heads], how.causal)
                top = p.amax(-1, keepdim=True)
                top.masked_fill_(top == float("-inf"), 0.0)  # rows without keys
                total = p.sub_(top).exp_().sum(-1, keepdim=True)
                lse[batch, heads, rows] = (total.log() + top).squeeze(-1)
                if dropout:
                    p.mul_(dropout.rows(start, end, keys, batch, heads))
                    total.div_(dropout.scale)
                o = (_fold(p, k_in) @ v_in).view(*p.shape[:3], -1)
                out[batch, heads, rows] = o.div_(total.masked_fill_(total == 0, 1.0))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.check_tile(q, k, v, how)
        dtype, dropout, softcap = accumulation_dtype(q.dtype), how.dropout, how.softcap
        k_all, v_all = k.to(dtype).contiguous(), v.to(dtype).contiguous()
        lse = lse_for_backward(lse, dtype)
        dq, dk_all, dv_all = torch.empty_like(q), torch.zeros_like(k_all), torch.zeros_like(v_all)
        for start, end, keys, heads_at_once in _blocks(q, k_all, how):
            rows, (allowed, bias) = slice(start, end), how.rows(start, end, keys, q.device)
            for batch, heads, key_heads in heads_at_once:
                k_in, v_in = k_all[batch, key_heads, :keys], v_all[batch, key_heads, :keys]
                q_in, dout_in = _fold(q[batch, heads, rows].to(dtype), k_in), dout[batch, heads, rows].to(dtype)
                delta = (dout_in * out[batch, heads, rows].to(dtype)).sum(-1, keepdim=True)
                p, slope = _products(q_in, k_in, how.scale, end - start), None
                if softcap:
                    p.div_(softcap).tanh_()
                    slope = 1 - p * p  # derivative of the cap
                    p.mul_(softcap)
                _mask_(p, allowed, None if bias is None else bias[heads], how.causal)
                p.sub_(lse[batch, heads, rows].unsqueeze(-1)).exp_()
                dout_in = _fold(dout_in, k_in)
                weights = p  # the weights that multiply v
                if dropout:
                    dout_in = dout_in * dropout.scale
                    weights = p * dropout.rows(start, end, keys, batch, heads)
                _add_product(dv_all[batch, key_heads, :keys], _fold(weights, k_in), dout_in)
                ds = (dout_in @ v_in.mT).view(p.shape).mul_(weights).addcmul_(p, delta, value=-1)
                ds = _fold(ds if slope is None else ds.mul_(slope), k_in)
                dq[batch, heads, rows] = (ds @ k_in).mul_(how.scale).view(*p.shape[:3], -1)
                _add_product(dk_all[batch, key_heads, :keys], ds, q_in, how.scale)
        return dq, dk_all.to(k.dtype), dv_all.to(v.dtype)


def _blocks(q: Tensor, k: Tensor, how: TileScores) -> Iterator[tuple[int, int, int, list[Block]]]:
    """(first row, end row, number of keys that these rows can see, [(batch, query heads, key heads)]).

    The outer loop is over rows, so that masks are computed once for all heads.
    """
    b, h, sq, _ = q.shape
    hk, keys = k.shape[1:3]
    limit, group = SCORE_BYTES["cpu" if k.device.type == "cpu" else "cuda"], h // hk
    if k.device.type == "cpu":
        limit *= torch.get_num_threads()  # each core has its own cache
    row = group * keys * k.dtype.itemsize  # bytes of a row's scores with one key head
    at_once = min(max(limit // (row * -(-min(sq, FEW_ROWS) // group)), 1), b * hk)  # pairs of a sample and a key head
    heads = head_slices(b, h, hk, at_once * group)
    at_once = at_once // hk * hk or at_once
    rows = max(limit // (row * at_once), FEWEST_ROWS if k.device.type == "cpu" else 1)
    if how.allowed or how.bias:
        rows = min(rows, max(ROW_MASK_BYTES // how.bytes_per_row(keys, k.dtype.itemsize), 1))
    for start, end in row_blocks(sq, 1, rows):
        yield start, end, end if how.causal else keys, heads


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """``total += factor * a^T b`` for [b, hk, n, d] of contiguous heads, [b, hk, r, n] and [b, hk, r, d]."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1).mT, b.flatten(0, 1), alpha=factor)


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """[b, h, r, n] -> [b, hk, (h / hk) * r, n]: the query heads of a key head as one matrix."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[3])


def _products(q: Tensor, k: Tensor, scale: float, rows: int) -> Tensor:
    """``scale * q k^T`` for folded q, as [b, h, rows, keys]."""
    return ((q * scale) @ k.mT).view(q.shape[0], -1, rows, k.shape[2])


def _mask_(scores: Tensor, allowed: Tensor | None, bias: Tensor | None, causal: bool) -> None:
    """Add the bias to scores [b, h, rows, keys], and set the scores that ``allowed`` excludes to -inf.

    ``causal``: the last row sees all keys, each earlier row one key less.
    """
    if bias is not None:
        scores += bias
    if allowed is not None:
        scores.masked_fill_(~allowed, float("-inf"))
    if causal:
        rows = scores.shape[2]
        above = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., -rows:].masked_fill_(above, float("-inf"))
