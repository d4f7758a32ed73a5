# SPDX-License-Identifier: Apache-2.0
"""What the fused kernels of GPU libraries have in common: bf16 and fp16, grouped heads, no masks.

They read strided tensors in place. They index with int32, so tensors with more elements are computed in several calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import Capability, gpu_reason
from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.attention.kernels.tile_by_tile import TileByTile, TileScores, lse_for_backward
from megatron.decisions.kernel_order import fused_lacks


class FusedKernel(TileByTile):
    """Base class of these kernels. A subclass has a ``name`` and three methods, on tensors that the library can read:

    - ``missing(device, head_dim)``: why the library cannot run on this machine's GPU, or None;
    - ``call(q, k, v, *, causal, scale)`` returns out [b, h, sq, d] and lse [b, h, sq];
    - ``call_grad(dout, q, k, v, out, lse, *, causal, scale)`` returns dq, dk, dv; lse is contiguous and without -inf.
    """

    name: str
    supports_mask = supports_bias = supports_dropout = supports_softcap = supports_value_dim = False

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = gpu_reason(device) or self.why_not_on(torch.cuda.get_device_capability(device), dtype, head_dim)
        return reason or self.missing(device, head_dim)

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        return fused_lacks(self.name, capability, head_dim, half=dtype in (torch.bfloat16, torch.float16))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        self.check_tile(q, k, v, how)
        return forward_in_pieces(partial(self.call, causal=how.causal, scale=how.scale), q, k, v)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.check_tile(q, k, v, how)
        call = partial(self.call_grad, causal=how.causal, scale=how.scale)
        return backward_in_pieces(call, dout, q, k, v, out, lse)


INT32_ELEMENTS = 2**31  # some GPU kernels index with int32: tensors of one call must have fewer elements


def compact(x: Tensor, limit: int = INT32_ELEMENTS) -> Tensor:
    """``x`` itself if a fused kernel can read it in place, else a contiguous copy.

    A kernel reads a tensor in place if its last dimension is contiguous, no dimension is expanded, and all elements are
    within ``limit`` of the first.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if x.stride(-1) != 1 or expanded or span > limit else x


def pieces(q: Tensor, k: Tensor, limit: int = INT32_ELEMENTS) -> list[tuple[slice, slice, slice]]:
    """Slices (batch, query heads, key heads) of pieces whose tensors have fewer than ``limit`` elements.

    Keys and values are counted with the number of query heads, since kernels expand their gradients. A piece has at
    least one head, even if that head exceeds ``limit``. Nearly always one piece is enough.
    """
    b, h, sq, d = q.shape
    hk, sk = k.shape[1:3]
    return head_slices(b, h, hk, max(1, (limit - 1) // (max(sq, sk) * d)))


def head_slices(b: int, h: int, hk: int, per_call: int) -> list[tuple[slice, slice, slice]]:
    """Slices (batch, query heads, key heads) with at most ``per_call`` query heads of all their samples together."""
    group = h // hk
    if per_call >= h:
        step = per_call // h
        return [(slice(i, min(i + step, b)), slice(0, h), slice(0, hk)) for i in range(0, b, step)]
    cuts: list[tuple[slice, slice]] = []
    if per_call >= group:
        step = per_call // group
        for i in range(0, hk, step):
            end = min(i + step, hk)
            cuts.append((slice(i * group, end * group), slice(i, end)))
    else:
        for i in range(hk):
            for j in range(i * group, (i + 1) * group, per_call):
                cuts.append((slice(j, min(j + per_call, (i + 1) * group)), slice(i, i + 1)))
    return [(slice(i, i + 1), heads, key_heads) for i in range(b) for heads, key_heads in cuts]


def forward_in_pieces(
    call: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, limit: int = INT32_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """``out, lse = call(q, k, v)``, in as many calls as ``limit`` requires, on tensors that the kernel can read."""
    cuts = pieces(q, k, limit)
    if len(cuts) == 1:
        return call(compact(q, limit), compact(k, limit), compact(v, limit))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    for batch, heads, key_heads in cuts:
        q_part, k_part, v_part = q[batch, heads], k[batch, key_heads], v[batch, key_heads]
        out[batch, heads], lse[batch, heads] = call(*(compact(x, limit) for x in (q_part, k_part, v_part)))
    return out, lse


def backward_in_pieces(
    call: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    limit: int = INT32_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv = call(dout, q, k, v, out, lse)``, in pieces; ``call`` gets lse contiguous and without -inf."""
    dout, out, lse = dout.to(q.dtype), out.to(q.dtype), lse_for_backward(lse, accumulation_dtype(q.dtype))
    cuts = pieces(q, k, limit)
    if len(cuts) == 1:
        return call(*(compact(x, limit) for x in (dout, q, k, v, out)), lse.contiguous())
    dq = torch.empty_like(q)
    # In fp32, because several pieces are summed in one key head if its query heads are in different pieces.
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for batch, heads, key_heads in cuts:
        rows, columns = (batch, heads), (batch, key_heads)
        parts = (compact(x, limit) for x in (dout[rows], q[rows], k[columns], v[columns], out[rows]))
        dq[rows], dk_part, dv_part = call(*parts, lse[rows].contiguous())
        dk[columns] += dk_part
        dv[columns] += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)
