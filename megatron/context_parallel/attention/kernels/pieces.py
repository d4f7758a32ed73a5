# SPDX-License-Identifier: Apache-2.0
"""A tile in as many calls as a fused kernel needs that counts elements in int32, and memory that it can read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import accumulation_dtype, lse_for_backward

INT32_ELEMENTS = 2**31  # some GPU kernels index with int32: no tensor of one call reaches this many elements


def compact(x: Tensor, limit: int = INT32_ELEMENTS) -> Tensor:
    """``x`` itself where a fused kernel can read it in place, else a contiguous copy.

    In place means: last dimension contiguous, no expanded dimension, all elements within ``limit`` of the first.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if x.stride(-1) != 1 or expanded or span > limit else x


def pieces(q: Tensor, k: Tensor, limit: int = INT32_ELEMENTS) -> list[tuple[slice, slice, slice]]:
    """Cuts (batch, query heads, key heads) so that no tensor of a piece reaches ``limit`` elements, if a head allows.

    Counts keys and values at the number of query heads, since kernels expand their gradients. A single head is never
    cut. Nearly always returns one piece.
    """
    b, h, sq, d = q.shape
    hk, sk = k.shape[1:3]
    group, per_call = h // hk, max(1, (limit - 1) // (max(sq, sk) * d))  # per_call: query heads in one call
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
    call: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limit: int = INT32_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """``out, lse = call(q, k, v)``, in as many calls as ``limit`` asks for, on tensors the kernel can read."""
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
    """``dq, dk, dv = call(dout, q, k, v, out, lse)``, in pieces; lse arrives contiguous, without -inf."""
    dout, out, lse = dout.to(q.dtype), out.to(q.dtype), lse_for_backward(lse, accumulation_dtype(q.dtype))
    cuts = pieces(q, k, limit)
    if len(cuts) == 1:
        return call(*(compact(x, limit) for x in (dout, q, k, v, out)), lse.contiguous())
    dq = torch.empty_like(q)
    # In fp32: several pieces add up in one key head where its query heads had to be cut.
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for batch, heads, key_heads in cuts:
        rows, columns = (batch, heads), (batch, key_heads)
        parts = (compact(x, limit) for x in (dout[rows], q[rows], k[columns], v[columns], out[rows]))
        dq[rows], dk_part, dv_part = call(*parts, lse[rows].contiguous())
        dk[columns] += dk_part
        dv[columns] += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)
