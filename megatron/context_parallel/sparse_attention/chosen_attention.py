# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen keys, and the loss that teaches the indexer which keys attention reads.

The loss of a query is the Kullback-Leibler divergence of the indexer's softmax over the chosen keys from attention's
own distribution, the mean over its heads (DeepSeek V3.2, arXiv 2512.02556, equation 4). No gradient reaches attention
from it, and none the indexer from attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import split
from megatron.platform.autograd import autocast_inputs, once_differentiable, refuse_transforms, without_autocast

ENTRIES = 2**24  # of the keys gathered at a time


class Indexer(NamedTuple):
    """An indexer's queries [s_local, b, heads, d], keys [s_local, b, d] and weights of heads [s_local, b, heads]."""

    q: Tensor
    k: Tensor
    weights: Tensor


@dataclass(frozen=True)
class _Rule:
    """How chosen keys are attended to.

    Attributes:
        layout: of the sequence.
        value_size: entries of a value, the last ones of a row of ``kv``.
        scale: of scores.
        heads: the group over which the heads of attention are distributed, for the loss; None: this rank has all.
    """

    layout: SequenceLayout
    value_size: int
    scale: float
    heads: Any


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

    Returns:
        [s_local, b, heads, value_size], and the loss of each query [s_local, b], in fp32 at least; None without an
        indexer. Queries without keys have the output and the loss 0.

    Raises:
        ValueError: shapes that do not fit.
    """
    refuse_transforms("sparse_attention")
    if q.size(2) % kv.size(2) or kv.size(3) < max(q.size(3), value_size) or q.shape[:2] != chosen.shape[:2]:
        raise ValueError(
            f"queries {list(q.shape)}, keys with values {list(kv.shape)} and choices {list(chosen.shape)} do not fit"
        )
    rule = _Rule(layout, value_size, scale, heads_group)
    given = (None, None, None) if indexer is None else indexer
    q, kv = autocast_inputs(q, kv)
    out, loss = _SparseAttention.apply(q, kv, *given, chosen, rule)
    return out, None if indexer is None else loss


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _take(complete: Tensor, at: Tensor) -> Tensor:
    """Rows of [s, b, ...] at positions [r, b, n]: [r, b, n, ...]."""
    return complete[at, torch.arange(complete.size(1), device=complete.device)[None, :, None]]


def _add(total: Tensor, at: Tensor, parts: Tensor) -> None:
    """Add to ``total`` [s, b, ...] the gradients [r, b, n, ...] of what :func:`_take` gives."""
    for sample in range(total.size(1)):
        total[:, sample].index_add_(0, at[:, sample].flatten(), parts[:, sample].flatten(0, 1))


class _Chunk(NamedTuple):
    """Some queries and the keys that they chose.

    Attributes:
        rows: of the queries.
        at: positions of the keys [r, b, n]; 0 where there is none.
        valid: whether there is one.
        q: [r, b, key heads, heads of each, d].
        kv: [r, b, n, key heads, D].
        scores: [r, b, key heads, heads of each, n].
    """

    rows: slice
    at: Tensor
    valid: Tensor
    q: Tensor
    kv: Tensor
    scores: Tensor


def _chunks(q: Tensor, complete: Tensor, chosen: Tensor, rule: _Rule) -> Iterator[_Chunk]:
    (s, b, heads, d), groups, n = q.shape, complete.size(2), chosen.size(2)
    wide = _wide(q.dtype)
    for start, stop in split((0, s), max(1, ENTRIES // (b * n * groups * complete.size(3)))):
        rows = slice(start, stop)
        at, valid = chosen[rows].long().clamp(min=0), chosen[rows] >= 0
        grouped = q[rows].to(wide).unflatten(2, (groups, heads // groups))
        kv = _take(complete, at).to(wide)
        scores = torch.einsum("rbghd,rbngd->rbghn", grouped, kv[..., :d]) * rule.scale
        yield _Chunk(rows, at, valid, grouped, kv, scores.masked_fill(~valid[:, :, None, None], float("-inf")))


def _mean_weights(weights: Tensor, rule: _Rule) -> Tensor:
    """The mean over all heads, [r, b, n], of weights [r, b, key heads, heads of each, n]."""
    total, heads = weights.sum((2, 3)), weights.size(2) * weights.size(3)
    if rule.heads is not None and rule.heads.size() > 1:
        dist.all_reduce(total, group=rule.heads)
        heads *= rule.heads.size()
    return total / heads


def _index_scores(chunk: _Chunk, q: Tensor, complete: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The indexer's keys [r, b, n, d], relu(q . k) [r, b, heads, n], and scores [r, b, n] of the chosen keys."""
    keys = _take(complete, chunk.at).to(_wide(q.dtype))
    each = torch.relu(torch.einsum("rbhd,rbnd->rbhn", q[chunk.rows].to(keys.dtype), keys))
    scores = torch.einsum("rbh,rbhn->rbn", weights[chunk.rows].to(keys.dtype), each)
    return keys, each, scores.masked_fill(~chunk.valid, float("-inf"))


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
        wide = _wide(q.dtype)
        out = q.new_empty(*q.shape[:3], rule.value_size)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        loss = q.new_zeros(q.shape[:2], dtype=wide)
        for chunk in _chunks(q, complete, chosen, rule):
            total = chunk.scores.logsumexp(-1, keepdim=True)
            weights = (chunk.scores - total.masked_fill(total == float("-inf"), 0)).exp()
            mean = torch.einsum("rbghn,rbngd->rbghd", weights, chunk.kv[..., -rule.value_size :])
            out[chunk.rows] = mean.flatten(2, 3).to(q.dtype)
            lse[chunk.rows] = total.squeeze(-1).flatten(2, 3)
            if index_complete is not None:
                target = _mean_weights(weights, rule)
                scores = _index_scores(chunk, index_q, index_complete, index_weights)[2]
                apart = torch.special.xlogy(target, target) - target * scores.log_softmax(-1)
                loss[chunk.rows] = apart.masked_fill(~chunk.valid, 0).sum(-1)
        ctx.rule = rule
        ctx.save_for_backward(q, kv, index_q, index_k, index_weights, chosen, out, lse)
        return out, loss

    @staticmethod
    @once_differentiable("sparse_attention")
    @without_autocast
    def backward(ctx: Any, d_out: Tensor, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, index_q, index_k, index_weights, chosen, out, lse = ctx.saved_tensors
        rule: _Rule = ctx.rule
        wide, d = _wide(q.dtype), q.size(3)
        complete = rule.layout.gather(kv)
        dq, d_complete = torch.empty_like(q), torch.zeros_like(complete, dtype=wide)
        teaches = index_k is not None and any(ctx.needs_input_grad[2:5])
        if teaches:
            index_complete = rule.layout.gather(index_k)
            d_keys_complete = torch.zeros_like(index_complete, dtype=wide)
            d_index_q, d_index_weights = torch.empty_like(index_q), torch.empty_like(index_weights)
        for chunk in _chunks(q, complete, chosen, rule):
            total = lse[chunk.rows].unflatten(2, chunk.q.shape[2:4]).unsqueeze(-1)
            weights = (chunk.scores - total.masked_fill(total == float("-inf"), 0)).exp()
            d_mine = d_out[chunk.rows].to(wide).unflatten(2, chunk.q.shape[2:4])
            own = (d_mine * out[chunk.rows].to(wide).unflatten(2, chunk.q.shape[2:4])).sum(-1, keepdim=True)
            d_weights = torch.einsum("rbghd,rbngd->rbghn", d_mine, chunk.kv[..., -rule.value_size :])
            d_scores = weights * (d_weights - own) * rule.scale
            dq[chunk.rows] = torch.einsum("rbghn,rbngd->rbghd", d_scores, chunk.kv[..., :d]).flatten(2, 3).to(q.dtype)
            d_kv = torch.zeros_like(chunk.kv)
            d_kv[..., :d] += torch.einsum("rbghn,rbghd->rbngd", d_scores, chunk.q)
            d_kv[..., -rule.value_size :] += torch.einsum("rbghn,rbghd->rbngd", weights, d_mine)
            _add(d_complete, chunk.at, d_kv)
            if teaches:
                target = _mean_weights(weights, rule)
                keys, each, scores = _index_scores(chunk, index_q, index_complete, index_weights)
                d_index_scores = d_loss[chunk.rows].unsqueeze(-1) * (scores.softmax(-1) - target)
                d_index_scores = d_index_scores.masked_fill(~chunk.valid, 0)
                d_each = d_index_scores.unsqueeze(2) * index_weights[chunk.rows].to(wide).unsqueeze(-1) * (each > 0)
                d_index_q[chunk.rows] = torch.einsum("rbhn,rbnd->rbhd", d_each, keys).to(index_q.dtype)
                d_of_heads = torch.einsum("rbn,rbhn->rbh", d_index_scores, each)
                d_index_weights[chunk.rows] = d_of_heads.to(index_weights.dtype)
                d_keys = torch.einsum("rbhn,rbhd->rbnd", d_each, index_q[chunk.rows].to(wide))
                _add(d_keys_complete, chunk.at, d_keys)
        dkv = rule.layout.sum_parts(d_complete).to(kv.dtype)
        if not teaches:
            return dq, dkv, None, None, None, None, None
        d_index_k = rule.layout.sum_parts(d_keys_complete).to(index_k.dtype)
        return dq, dkv, d_index_q, d_index_k, d_index_weights, None, None
