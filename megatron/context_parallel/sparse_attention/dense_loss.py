# SPDX-License-Identifier: Apache-2.0
"""The indexer's loss over all keys that the mask allows: for its warm-up, before attention is sparse.

The divergence is that of chosen_attention.py. It is computed block by block, twice: first the sums of both softmaxes,
then the loss together with its gradient, which is linear in the one number that the backward pass multiplies it by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.layout.masks import Causal, Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, positions, positions_of, split
from megatron.context_parallel.layout.tiles import reach
from megatron.context_parallel.sparse_attention.blocks_of_scores import (
    KEYS,
    ROWS,
    key_blocks,
    masks_of_samples,
    one_by_one,
)
from megatron.context_parallel.sparse_attention.chosen_attention import Indexer, mean_over_heads
from megatron.platform.autograd import once_differentiable, refuse_transforms, without_autocast


def dense_indexer_loss(
    q: Tensor,
    k: Tensor,
    indexer: Indexer,
    counted: Tensor,
    *,
    layout: SequenceLayout,
    scale: float,
    mask: Mask | Sequence[Mask] = Causal(),
    heads_group: Any = None,
) -> Tensor:
    """The sum of the losses of this rank's queries over all keys, of which only the indexer gets gradients.

    All ranks of ``layout.grid.context`` and of ``heads_group`` call it together. The largest temporary tensor has
    heads x 128 x 1,024 scores.

    Args:
        q: queries of attention [s_local, b, heads, d].
        k: the keys that all heads share [s_local, b, D], D >= d; entries after the first d are not read.
        indexer: as for ``sparse_attention``.
        counted: factor of each query's loss [s_local, b].
        layout, scale, heads_group: as for ``sparse_attention``.
        mask: which keys may be read; a sequence has one for each sample.
    """
    refuse_transforms("dense_indexer_loss")
    call = _Call(layout, tuple(masks_of_samples(mask, q.size(1))), scale, heads_group, torch.is_grad_enabled())
    return _DenseLoss.apply(*indexer, q.detach(), k.detach()[..., : q.size(3)], counted, call)


@dataclass(frozen=True)
class _Call:
    """Arguments that are no tensors.

    Attributes:
        masks: one for each sample.
        heads: the group over which heads are distributed.
        learns: whether gradients are needed.
    """

    layout: SequenceLayout
    masks: tuple[Mask, ...]
    scale: float
    heads: Any
    learns: bool


class _Part(NamedTuple):
    """Some queries of a sample and its keys: q [r, heads, d], k [s, d], the indexer's, its weights [r, index heads]."""

    q: Tensor
    index_q: Tensor
    weights: Tensor
    k: Tensor
    index_k: Tensor
    scale: float

    def attention(self, keys: slice, allowed: Tensor) -> Tensor:
        """Scores of attention [heads, r, n]."""
        scores = torch.einsum("rhd,nd->hrn", self.q, self.k[keys].to(self.q.dtype)) * self.scale
        return scores.masked_fill(~allowed, float("-inf"))

    def index(self, keys: slice, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """relu(q . k) of the indexer [r, index heads, n], and its scores [r, n]."""
        each = torch.relu(torch.einsum("rhd,nd->rhn", self.index_q, self.index_k[keys].to(self.q.dtype)))
        return each, torch.einsum("rh,rhn->rn", self.weights, each).masked_fill(~allowed, float("-inf"))


def _blocks(rows: Span, mask: Mask, layout: SequenceLayout) -> list[Span]:
    """The blocks of keys that some of the rows may read."""
    reached = reach(positions_of([rows], layout.local_spans), mask, layout.seq_length)
    return list(key_blocks(reached, layout.seq_length, KEYS))


def _alike(block: Any) -> int:
    """The work on a block of keys, which have the same size."""
    return 1


class _DenseLoss(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        q: Tensor,
        k: Tensor,
        counted: Tensor,
        call: _Call,
    ) -> Tensor:
        layout, wide = call.layout, torch.promote_types(q.dtype, torch.float32)
        complete, index_complete = layout.gather(k.contiguous()), layout.gather(index_k)
        total = q.new_zeros((), dtype=wide)
        d_q, d_weights = torch.zeros_like(index_q, dtype=wide), torch.zeros_like(index_weights, dtype=wide)
        d_complete = torch.zeros_like(index_complete, dtype=wide)

        def work(rows: Span) -> int:
            return sum(len(_blocks(rows, mask, layout)) for mask in call.masks)

        for rows in one_by_one(split((0, len(q)), ROWS), work):
            own, at = slice(*rows), positions(positions_of([rows], layout.local_spans), q.device)[:, None]
            for sample, mask in enumerate(call.masks):
                parts = (x[own, sample].to(wide) for x in (q, index_q, index_weights))
                part = _Part(*parts, complete[:, sample], index_complete[:, sample], call.scale)
                blocks = [
                    (slice(*keys), mask.allowed(at, torch.arange(*keys, device=q.device)[None]))
                    for keys in _blocks(rows, mask, layout)
                ]
                lse = _sums(part.attention(*one) for one in one_by_one(blocks, _alike))
                index_lse = _sums(part.index(*one)[1] for one in one_by_one(blocks, _alike))
                for keys, allowed in one_by_one(blocks, _alike):
                    weights = (part.attention(keys, allowed) - lse[..., None]).exp()
                    target = mean_over_heads(weights.sum(0), len(weights), call.heads)
                    each, scores = part.index(keys, allowed)
                    logs = (scores - index_lse[:, None]).masked_fill(~allowed, 0)
                    weight = counted[own, sample, None].to(wide)
                    total += (weight * (torch.special.xlogy(target, target) - target * logs)).sum()
                    if call.learns:
                        d_scores = weight * (logs.exp() - target).masked_fill(~allowed, 0)
                        d_each = d_scores[:, None] * part.weights[..., None] * (each > 0)
                        d_q[own, sample] += torch.einsum("rhn,nd->rhd", d_each, part.index_k[keys].to(wide))
                        d_weights[own, sample] += torch.einsum("rn,rhn->rh", d_scores, each)
                        d_complete[keys, sample] += torch.einsum("rhn,rhd->nd", d_each, part.index_q)
        if call.learns:
            grads = zip((d_q, layout.sum_parts(d_complete), d_weights), (index_q, index_k, index_weights))
            ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in grads))
        return total

    @staticmethod
    @once_differentiable("dense_indexer_loss")
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad * d_total.to(grad.dtype) for grad in ctx.saved_tensors), None, None, None, None


def _sums(scores: Iterator[Tensor]) -> Tensor:
    """The log-sum-exp of [..., n] over the last dim of all; 0 where all are -inf."""
    total = None
    for one in scores:
        part = one.logsumexp(-1)
        total = part if total is None else torch.logaddexp(total, part)
    return total.masked_fill(total == float("-inf"), 0)
