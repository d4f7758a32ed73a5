# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen keys, and the loss that teaches the indexer which keys attention reads.

No gradient reaches attention from that loss (index_loss.py), and none the indexer from attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.kernels import KernelUnavailable
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, split
from megatron.context_parallel.sparse_attention import chosen_math, chosen_triton
from megatron.context_parallel.sparse_attention.blocks_of_scores import one_by_one
from megatron.context_parallel.sparse_attention.chosen_math import Choice, Form, wide
from megatron.context_parallel.sparse_attention.index_loss import Indexer, index_loss, index_loss_grads
from megatron.platform.autograd import autocast_inputs, once_differentiable, refuse_transforms, without_autocast

__all__ = ["KERNELS", "Indexer", "delta", "mean_over_heads", "queries_at_a_time", "select", "sparse_attention"]

KERNELS = ("auto", "triton", "math")


@dataclass(frozen=True)
class _Rule:
    """How chosen keys are attended to.

    Attributes:
        layout: of the sequence.
        form: the scale of scores, and the entries of a value.
        heads: the group over which the heads of attention are distributed, for the loss; None: this rank has all.
        kernel: one of :data:`KERNELS`.
    """

    layout: SequenceLayout
    form: Form
    heads: Any
    kernel: str


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    chosen: Tensor,
    *,
    layout: SequenceLayout,
    value_size: int,
    scale: float,
    indexer: Indexer | None = None,
    heads_group: Any = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attention of this rank's queries to the keys that they chose. All ranks of ``layout.grid.context`` call it.

    Args:
        q: [s_local, b, heads, d].
        kv: [s_local, b, key heads, D]: the first d entries of a row are a key, the last ``value_size`` a value; they
            may overlap, as in latent attention, whose value is a part of the key.
        chosen: from :func:`~megatron.context_parallel.sparse_attention.choice.choose_keys`.
        layout: of the sequence.
        value_size: entries of a value.
        scale: of scores.
        indexer: compute its loss, too.
        heads_group: process group over which the heads are distributed (TP), for this loss.
        kernel: ``auto``, ``triton`` or ``math``. Triton's kernels sum in a fixed order, so that a run gives the same
            bits again; on a GPU ``math`` does so in PyTorch's deterministic mode.

    Returns:
        [s_local, b, heads, value_size], and the loss of each query [s_local, b], in fp32 at least; None without an
        indexer. Queries without keys have the output and the loss 0.

    Raises:
        ValueError: shapes that do not fit, or a kernel that cannot run.
    """
    refuse_transforms("sparse_attention")
    if q.size(2) % kv.size(2) or kv.size(3) < max(q.size(3), value_size) or q.shape[:2] != chosen.shape[:2]:
        raise ValueError(
            f"queries {list(q.shape)}, keys with values {list(kv.shape)} and choices {list(chosen.shape)} do not fit"
        )
    rule = _Rule(layout, Form(scale, value_size), heads_group, kernel)
    given = (None, None, None) if indexer is None else indexer
    q, kv = autocast_inputs(q, kv)
    out, loss = _SparseAttention.apply(q, kv, *given, chosen, rule)
    return out, None if indexer is None else loss


def select(kernel: str, q: Tensor, kv: Tensor, value_size: int) -> ModuleType:
    """The module whose functions compute attention: ``auto`` takes Triton's kernels on a GPU where they can run.

    Raises:
        KernelUnavailable: an unknown name, or the kernel cannot run.
    """
    if kernel not in KERNELS:
        raise KernelUnavailable(kernel, f"no such kernel for chosen keys, only {', '.join(KERNELS)}")
    if kernel == "math" or (kernel == "auto" and not chosen_triton.on_gpu(q)):
        return chosen_math
    reason = chosen_triton.why_not(q.device, q.dtype, q.size(3), kv.size(3), value_size)
    if reason is None:
        return chosen_triton
    if kernel == "auto":
        return chosen_math
    raise KernelUnavailable(kernel, f"{reason}; use math")


def delta(out: Tensor, dout: Tensor) -> Tensor:
    """``sum(dout * out)`` of each head, in fp32 at least; without a copy of both for a few rows at a time."""
    dtype = wide(out.dtype)
    result = out.new_empty(out.shape[:3], dtype=dtype)
    for rows in one_by_one(split((0, len(out)), max(1, chosen_math.ENTRIES // max(1, out[:1].numel())))):
        torch.sum(out[slice(*rows)].to(dtype) * dout[slice(*rows)].to(dtype), -1, out=result[slice(*rows)])
    return result


def queries_at_a_time(q: Tensor, kv: Tensor, chosen: Tensor, kernel: ModuleType) -> list[Span]:
    """The queries whose keys are gathered, or whose parts of gradients are written, at a time."""
    row = max(1, chosen[0].numel() * kv[0, 0].numel()) if len(chosen) else 1
    return split((0, len(q)), max(1, kernel.ENTRIES // row))


def mean_over_heads(weights: Tensor, heads: int, group: Any) -> Tensor:
    """The mean over all heads of weights that are summed over this rank's ``heads``; ``group`` has the others."""
    if group is not None and group.size() > 1:
        dist.all_reduce(weights, group=group)
        heads *= group.size()
    return weights / heads


def _index_spans(spans: list[Span], chosen: Tensor, complete: Tensor) -> list[Span]:
    """The same queries, so few at a time that the indexer's keys of their choices can be gathered as well."""
    if not spans:
        return spans
    most = chosen_math.ENTRIES // max(1, chosen[0].numel() * complete.size(-1))
    return split((0, len(chosen)), max(1, min(spans[0][1], most)))


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        index_q: Tensor | None,
        index_k: Tensor | None,
        index_weights: Tensor | None,
        chosen: Tensor,
        rule: _Rule,
    ) -> tuple[Tensor, Tensor]:
        complete = rule.layout.gather(kv)
        index_complete = None if index_k is None else rule.layout.gather(index_k)
        out = q.new_empty(*q.shape[:3], rule.form.value_size)
        lse = q.new_empty(q.shape[:3], dtype=wide(q.dtype))
        loss = q.new_zeros(q.shape[:2], dtype=wide(q.dtype))
        choice, kernel = Choice.of(chosen), select(rule.kernel, q, kv, rule.form.value_size)
        spans = queries_at_a_time(q, kv, chosen, kernel)
        for start, stop in one_by_one(spans):
            rows = slice(start, stop)
            kernel.forward(q[rows], complete, choice.rows(start, stop), rule.form, out[rows], lse[rows])
        for start, stop in one_by_one([] if index_complete is None else _index_spans(spans, chosen, index_complete)):
            rows = slice(start, stop)
            given = kernel.mean_weights(q[rows], complete, choice.rows(start, stop), rule.form, lse[rows])
            index = Indexer(index_q[rows], index_complete, index_weights[rows])
            loss[rows] = index_loss(index, chosen[rows], mean_over_heads(given, q.size(2), rule.heads))
        ctx.rule = rule
        ctx.save_for_backward(q, kv, index_q, index_k, index_weights, chosen, out, lse)
        return out, loss

    @staticmethod
    @once_differentiable("sparse_attention")
    @without_autocast
    def backward(ctx: Any, d_out: Tensor, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, index_q, index_k, index_weights, chosen, out, lse = ctx.saved_tensors
        rule: _Rule = ctx.rule
        sums = wide(q.dtype)
        complete = rule.layout.gather(kv)
        dq, d_complete = q.new_empty(q.shape), torch.zeros_like(complete, dtype=sums)
        choice, kernel = Choice.of(chosen), select(rule.kernel, q, kv, rule.form.value_size)
        spans, of_rows = queries_at_a_time(q, kv, chosen, kernel), delta(out, d_out)
        for start, stop in one_by_one(spans):
            rows = slice(start, stop)
            final = d_out[rows], lse[rows], of_rows[rows]
            kernel.grads(q[rows], complete, choice.rows(start, stop), rule.form, *final, dq[rows], d_complete)
        teaches = index_k is not None and any(ctx.needs_input_grad[2:5])
        if teaches:
            index_complete = rule.layout.gather(index_k)
            d_keys_complete = torch.zeros_like(index_complete, dtype=sums)
            d_index_q, d_index_weights = torch.empty_like(index_q), torch.empty_like(index_weights)
            for start, stop in one_by_one(_index_spans(spans, chosen, index_complete)):
                rows = slice(start, stop)
                given = kernel.mean_weights(q[rows], complete, choice.rows(start, stop), rule.form, lse[rows])
                index = Indexer(index_q[rows], index_complete, index_weights[rows])
                taught = chosen[rows], mean_over_heads(given, q.size(2), rule.heads), d_loss[rows]
                d_index_q[rows], d_index_weights[rows] = index_loss_grads(index, *taught, d_keys_complete)
        dkv = rule.layout.sum_parts(d_complete).to(kv.dtype)
        if not teaches:
            return dq, dkv, None, None, None, None, None
        d_index_k = rule.layout.sum_parts(d_keys_complete).to(index_k.dtype)
        return dq, dkv, d_index_q, d_index_k, d_index_weights, None, None
