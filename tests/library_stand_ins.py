# SPDX-License-Identifier: Apache-2.0
"""Stand-ins on CPUs for libraries that compute attention by tables: they obey the tables as the libraries' documents
say, by plain PyTorch, and refuse tables that the libraries refuse. tests/gpu compares the libraries themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.attention import ring_plan
from megatron.context_parallel.attention.kernels.interval_kernels import cudnn_flex_kernel, flash_attn_4_kernel
from megatron.context_parallel.attention.kernels.interval_kernels.cudnn_flex_kernel import CudnnFlexKernel
from megatron.context_parallel.attention.kernels.interval_kernels.flash_attn_4_kernel import FlashAttn4Kernel


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """out [b, s, h, dv], lse and scores [b, h, s(, t)] of [b, s, h, d]; ``seen``: bool [b or 1, h or 1, s, t]. Rows
    without a key have NaN, as such rows may have in a library."""
    k, v = (x.repeat_interleave(q.size(2) // k.size(2), dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhst,bthd->bshd", (scores - lse.unsqueeze(-1)).exp(), v), lse, scores


def masked_attention_grad(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, seen: Tensor, scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv from out and lse as they are given; a row whose lse is -inf is computed as if it were 0."""
    scores = masked_attention(q, k, v, seen, scale, softcap)[2]
    group = q.size(2) // k.size(2)
    wide_k, wide_v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    delta = (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (torch.einsum("bshd,bthd->bhst", dout, wide_v) - delta)
    if softcap:
        dscores = dscores * (1 - (scores.masked_fill(~seen, 0.0) / softcap) ** 2)
    dq = torch.einsum("bhst,bthd->bshd", dscores, wide_k) * scale
    dk = torch.einsum("bhst,bshd->bthd", dscores, q) * scale
    dv = torch.einsum("bhst,bshd->bthd", weights, dout)
    return dq, *(x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))


# --- cuDNN's FlexAttention ---


@dataclass
class FlexPlan:
    """A plan for tensors of these shapes; ``seen``: bool [b, 1 or heads, s, t]."""

    seen: Tensor
    shapes: tuple[torch.Size, ...]


def create_mask_plan(mask_func: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> FlexPlan:
    """Query i of sample b sees keys [0, F0), [F1, F2) .. of column ``b * s + i`` of F [1 or heads, odd n, b * s]."""
    b, s, heads = q.shape[:3]
    assert mask_func.dtype == torch.int32 and mask_func.is_contiguous() and mask_func.dim() == 3 and build_backward
    assert mask_func.size(0) in (1, heads) and mask_func.size(1) % 2 and mask_func.size(2) == b * s
    ends = mask_func.unflatten(2, (b, s)).movedim(2, 0).long()  # [b, heads, n, s]
    if (ends.diff(dim=2) < 0).any() or ends.min() < 0 or ends.max() > k.size(1):
        raise ValueError("mask_func endpoints must lie in each row's local-K range and be nondecreasing")
    key = torch.arange(k.size(1))
    seen = key < ends[:, :, 0, :, None]
    for start in range(1, ends.size(2), 2):
        seen = seen | ((key >= ends[:, :, start, :, None]) & (key < ends[:, :, start + 1, :, None]))
    return FlexPlan(seen, (q.shape, k.shape, v.shape))


def _flex_attention_forward(
    q_tensor: Tensor, k_tensor: Tensor, v_tensor: Tensor, *, mask_plan: FlexPlan, softmax_scale: float, return_lse: bool
) -> tuple[Tensor, Tensor, None]:
    assert (q_tensor.shape, k_tensor.shape, v_tensor.shape) == mask_plan.shapes and return_lse
    return *masked_attention(q_tensor, k_tensor, v_tensor, mask_plan.seen, softmax_scale)[:2], None


def _flex_attention_backward(
    q_tensor: Tensor, k_tensor: Tensor, v_tensor: Tensor, o_tensor: Tensor, do_tensor: Tensor, lse_tensor: Tensor, *,
    mask_plan: FlexPlan, softmax_scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert (q_tensor.shape, k_tensor.shape, v_tensor.shape) == mask_plan.shapes and lse_tensor.is_contiguous()
    assert o_tensor.shape == do_tensor.shape and lse_tensor.shape == o_tensor.transpose(1, 2).shape[:3]
    args = q_tensor, k_tensor, v_tensor, o_tensor, do_tensor, lse_tensor, mask_plan.seen, softmax_scale
    return masked_attention_grad(*args)


@contextmanager
def replaced_library(module: Any, kernel: type, library: SimpleNamespace) -> Iterator[None]:
    """The kernel runs on CPUs by ``library``. Plans keep what a library made of them, and are made anew."""
    ring_plan._attention_plan.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "library", lambda: library)
        patch.setattr(kernel, "why_not", lambda self, **_: None)
        yield
    ring_plan._attention_plan.cache_clear()


@contextmanager
def cudnn_flex_stand_in(**changed: Any) -> Iterator[list[str]]:
    """Within it, ``cudnn_flex`` runs on CPUs; yields the names of the calls. ``changed``: other functions."""
    calls: list[str] = []
    functions = {"plan": create_mask_plan, "forward": _flex_attention_forward, "backward": _flex_attention_backward}

    def recorded(name: str, function: Any) -> Any:
        return lambda *args, **options: (calls.append(name), function(*args, **options))[1]

    library = SimpleNamespace(**{name: recorded(name, one) for name, one in {**functions, **changed}.items()})
    with replaced_library(cudnn_flex_kernel, CudnnFlexKernel, library):
        yield calls


# --- flash-attn 4 ---


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None


def in_window(queries: int, keys: int, left: int | None, right: int | None, causal: bool = False) -> Tensor:
    """bool [queries, keys]: the last query is at the place of the last key."""
    far = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
    seen = torch.ones_like(far, dtype=torch.bool) if left is None else far >= -left
    right = 0 if causal else right
    return seen if right is None else seen & (far <= right)


def in_blocks(lists: BlockSparseTensorsTorch, seen: Tensor, by_keys: bool) -> Tensor:
    """Pairs of complete blocks, and those that are ``seen`` of the blocks in part; blocks are listed by queries, or
    by keys in a backward pass."""
    rows, columns = lists.block_size
    result = torch.zeros_like(seen)
    assert rows % 128 == 0 and columns == 128
    for counts, numbers, some in (lists[:2] + (True,), lists[2:4] + (False,)):
        assert counts.dtype == numbers.dtype == torch.int32 and counts.shape == numbers.shape[:3]
        for first, count in enumerate(counts[0, 0].tolist()):
            for second in numbers[0, 0, first, :count].tolist():
                row, column = (second, first) if by_keys else (first, second)
                block = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
                assert not result[block].any() and seen[block].any() and (some or seen[block].all())
                result[block] = seen[block] if some else True
    return result


def interval_mask(ends: int):
    def seen(batch, head, query, key, lengths, tables):
        (table,) = tables
        assert table.shape[0] == ends
        result = key < table[0, query]
        for index in range(1, ends, 2):
            result = result | ((key >= table[index, query]) & (key < table[index + 1, query]))
        return result

    return seen


def _seen(
    q: Tensor, k: Tensor, by_keys: bool, *, causal=False, window_size_left=None, window_size_right=None, mask_mod=None,
    aux_tensors=None, block_sparse_tensors=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None,
) -> Tensor:  # fmt: skip
    """bool [1, 1, queries, keys] of all rows."""
    if mask_mod is not None:
        assert not causal and window_size_left is None and window_size_right is None and cu_seqlens_q is None
        at = torch.arange(q.size(1))[:, None], torch.arange(k.size(1))[None]
        return in_blocks(block_sparse_tensors, mask_mod(0, 0, *at, None, aux_tensors), by_keys)[None, None]
    window = window_size_left, window_size_right, causal
    if cu_seqlens_q is None:
        return in_window(q.size(1), k.size(1), *window)[None, None]
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(map(int.__sub__, q_ends[1:], q_ends)) and q_ends[-1] == len(q) and k_ends[-1] == len(k)
    sizes = zip(map(int.__sub__, q_ends[1:], q_ends), map(int.__sub__, k_ends[1:], k_ends))
    return torch.block_diag(*(in_window(*size, *window).int() for size in sizes)).bool()[None, None]


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, softcap: float, return_lse: bool, pack_gqa: bool,
    **mask: Any,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    seen = _seen(q, k, False, **mask)
    wide = (x.unsqueeze(0) for x in (q, k, v)) if q.dim() == 3 else (q, k, v)
    out, lse, _ = masked_attention(*wide, seen, softmax_scale, softcap)
    return (out[0], lse[0], None, None) if q.dim() == 3 else (out, lse, None, None)


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: float, softcap: float,
    **mask: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    seen = _seen(q, k, True, **mask)
    args = [x.unsqueeze(0) for x in (q, k, v, out, dout, lse)] if q.dim() == 3 else [q, k, v, out, dout, lse]
    assert lse.is_contiguous()
    grads = masked_attention_grad(*args, seen, softmax_scale, softcap)
    return tuple(grad[0] for grad in grads) if q.dim() == 3 else grads


@contextmanager
def flash_attn_4_stand_in(**changed: Any) -> Iterator[list[str]]:
    """Within it, ``flash_attn_4`` runs on CPUs; yields how each forward call says its mask."""
    calls: list[str] = []

    def forward(*args: Any, **options: Any) -> tuple:
        kinds = {"mask_mod": "function", "cu_seqlens_q": "documents"}
        calls.append(next((kind for name, kind in kinds.items() if name in options), "window"))
        return _flash_attn_fwd(*args, **options)

    functions = {"lists": BlockSparseTensorsTorch, "interval_mask": interval_mask, "backward": _flash_attn_bwd}
    library = SimpleNamespace(**{"forward": forward, **functions, **changed})
    with replaced_library(flash_attn_4_kernel, FlashAttn4Kernel, library):
        yield calls
