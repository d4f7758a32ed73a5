# SPDX-License-Identifier: Apache-2.0
"""Stand-ins on CPUs for libraries that compute attention by tables: they obey the tables as the libraries' documents
say, by plain PyTorch, and refuse tables that the libraries refuse. tests/gpu compares the libraries themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels import cudnn_flex_kernel
from megatron.context_parallel.attention.kernels.cudnn_flex_kernel import CudnnFlexKernel


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
def cudnn_flex_stand_in(**changed: Any) -> Iterator[list[str]]:
    """Within it, ``cudnn_flex`` runs on CPUs; yields the names of the calls. ``changed``: other functions."""
    calls: list[str] = []
    functions = {"plan": create_mask_plan, "forward": _flex_attention_forward, "backward": _flex_attention_backward}

    def recorded(name: str, function: Any) -> Any:
        return lambda *args, **options: (calls.append(name), function(*args, **options))[1]

    library = SimpleNamespace(**{name: recorded(name, one) for name, one in {**functions, **changed}.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn_flex_kernel, "library", lambda: library)
        patch.setattr(CudnnFlexKernel, "why_not", lambda self, **_: None)
        yield calls
