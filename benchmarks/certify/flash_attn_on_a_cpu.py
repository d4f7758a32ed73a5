# SPDX-License-Identifier: Apache-2.0
"""A stand-in for flash-attn 2.8 on CPUs, by plain PyTorch: the functions that ring-flash-attn and yunchang call, with
flash-attn's arguments, results and conventions. Everything around the kernel is the library's own."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import Tensor


def weights(
    q: Tensor, k: Tensor, scale: float, causal: bool, window: tuple[int, int], softcap: float, lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities and the derivative of the soft cap [b, h, s, t], and lse [b, h, s]; the last query sees the last
    key, and lse of a query without keys is +inf, as in flash-attn."""
    k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)
    scores = torch.einsum("bshd,bthd->bhst", q.float(), k.float()) * scale
    capped = torch.tanh(scores / softcap) if softcap else None
    scores = scores if capped is None else softcap * capped
    at = torch.arange(q.size(1))[:, None] + k.size(1) - q.size(1) - torch.arange(k.size(1))  # how far back a key is
    left, right = window[0], 0 if causal else window[1]
    seen = ((at <= left) | torch.tensor(left < 0)) & ((at >= -right) | torch.tensor(right < 0))
    scores = scores.masked_fill(~seen, -torch.inf)
    if lse is None:
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return (scores - lse[..., None]).exp(), torch.ones(()) if capped is None else 1 - capped**2, lse


def forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, Tensor]:  # fmt: skip
    assert alibi_slopes is None
    p, _, lse = weights(q, k, softmax_scale, causal, (window_size_left, window_size_right), softcap, None)
    state = torch.random.get_rng_state()
    v = v.repeat_interleave(q.size(2) // v.size(2), dim=2).float()
    return torch.einsum("bhst,bthd->bshd", torch.dropout(p, dropout_p, True), v).to(q.dtype), lse, None, state


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv. Without ``rng_state`` dropout draws another mask, as in flash-attn."""
    assert alibi_slopes is None
    p, slope, _ = weights(q, k, softmax_scale, causal, (window_size_left, window_size_right), softcap, softmax_lse)
    group = q.size(2) // k.size(2)
    wide_k, wide_v, dout, out = (x.float() for x in (*(x.repeat_interleave(group, 2) for x in (k, v)), dout, out))
    if rng_state is not None:
        torch.random.set_rng_state(rng_state)
    kept = torch.dropout(torch.ones_like(p), dropout_p, True)
    delta = (dout * out).sum(-1).transpose(1, 2)
    scores = p * (kept * torch.einsum("bshd,bthd->bhst", dout, wide_v) - delta[..., None]) * slope * softmax_scale
    dq.copy_(torch.einsum("bhst,bthd->bshd", scores, wide_k))
    dk.copy_(torch.einsum("bhst,bshd->bthd", scores, q.float()).unflatten(2, (-1, group)).sum(3))
    dv.copy_(torch.einsum("bhst,bshd->bthd", p * kept, dout).unflatten(2, (-1, group)).sum(3))
    return delta


def pieces(cu_seqlens: Tensor) -> list[slice]:
    ends = cu_seqlens.tolist()
    return [slice(*pair) for pair in zip(ends, ends[1:])]


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: None = None,
    leftpad_k: None = None, seqused_k: None = None, zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor]:  # fmt: skip
    """As :func:`forward` for each piece; tensors are [tokens, h, d], lse [h, tokens]."""
    assert block_table is leftpad_k is seqused_k is None
    state, window = torch.random.get_rng_state(), (window_size_left, window_size_right)
    results = [
        forward(
            q[None, a], k[None, b], v[None, b], dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes, False
        )
        for a, b in zip(pieces(cu_seqlens_q), pieces(cu_seqlens_k))
    ]
    return torch.cat([one[0][0] for one in results]), torch.cat([one[1][0] for one in results], 1), None, state


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> None:  # fmt: skip
    if rng_state is not None:
        torch.random.set_rng_state(rng_state)
    for a, b in zip(pieces(cu_seqlens_q), pieces(cu_seqlens_k)):
        backward(
            dout[None, a], q[None, a], k[None, b], v[None, b], out[None, a], softmax_lse[None, :, a], dq[None, a],
            dk[None, b], dv[None, b], dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
            alibi_slopes, deterministic,
        )  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: tuple, options: tuple) -> Tensor:
        out, lse, _, state = varlen_forward(q, k, v, *cu, 0, 0, *options)
        ctx.save_for_backward(q, k, v, out, lse, *cu, state)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *cu, state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        varlen_backward(dout, q, k, v, out, lse, *grads, *cu, 0, 0, *ctx.options, None, False, state)
        return *grads, None, None


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: None = None,
) -> Tensor:  # fmt: skip
    assert not return_attn_probs
    scale = softmax_scale or q.size(-1) ** -0.5
    return _Attention.apply(q, k, v, (cu_seqlens_q, cu_seqlens_k), (dropout_p, scale, causal, *window_size, softcap))


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    """As :func:`flash_attn_varlen_func` of a batch [b, s, h, d]."""
    lengths = [torch.arange(len(x) + 1) * x.size(1) for x in (q, k)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    return flash_attn_varlen_func(*flat, *lengths, q.size(1), k.size(1), *args, **options).unflatten(0, q.shape[:2])


def install() -> None:
    """Make ``import flash_attn`` find this module where the library is not installed, for this process."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    package.__version__, package.flash_attn_interface, package.__path__ = "2.8.3", interface, []
    interface._flash_attn_forward, interface._flash_attn_backward = forward, backward
    interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward = varlen_forward, varlen_backward
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def install_for_transformers() -> None:
    """As :func:`install`, and let transformers 5 call it where a model's configuration names flash_attention_2."""
    from transformers import modeling_flash_attention_utils as utils

    install()
    package, padding = sys.modules["flash_attn"], types.ModuleType("flash_attn.bert_padding")
    package.flash_attn_with_kvcache = padding.pad_input = padding.unpad_input = None  # not called in training
    sys.modules[padding.__name__] = padding
    utils.is_flash_attn_2_available = lambda: True
