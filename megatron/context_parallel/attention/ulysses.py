# SPDX-License-Identifier: Apache-2.0
"""Ulysses: all-to-all over heads around any attention (DeepSpeed-Ulysses paper, sections 3.1 and 3.4).

Before attention each rank holds some tokens of all heads; after the all-to-all it holds all tokens (of its ring rank)
of some heads. One fused all-to-all sends queries, keys and values. If there are fewer key/value heads than ranks, heads
are replicated: each rank gets just the heads that its queries need, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.layout.grid import Axis
from megatron.decisions.division import HeadSpans, head_plan
from megatron.platform.autograd import once_differentiable, refuse_transforms

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses_attention(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *, axis: Axis, attention: Attention) -> Tensor:
    """Run ``attention`` over all tokens of the Ulysses ranks, each on its share of the heads.

    Args:
        q_SBHD: [s_local, b, heads, d]; k_SBHD: [s_local, b, kv_heads, d]; v_SBHD: like k, but its head size may differ.
        axis: the Ulysses axis of the grid.
        attention: any function (dense, sparse, ring, cross-attention) of q, k, v [s, b, heads / ranks, d] that returns
            [s, b, heads / ranks, head size of v].

    Returns:
        [s_local, b, heads, head size of v].
    """
    if axis.size == 1:
        return attention(q_SBHD, k_SBHD, v_SBHD)
    refuse_transforms("ulysses_attention")
    q, k, v = _SequenceToHeads.apply(q_SBHD, k_SBHD, v_SBHD, axis)
    return _HeadsToSequence.apply(attention(q, k, v), axis)


def sequence_to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """[s_local, b, all heads, d] -> [s_local * ranks, b, heads of this rank, d], for q, k and v in one all-to-all.

    The results are views of the received tensor, in which a token's heads of q, k and v are next to each other. If the
    keys belong to another sequence than the queries, they are sent in a second all-to-all.

    Not differentiable: its callers, such as layers in chunks, call :func:`sequence_to_heads_grad` in backward passes of
    their own. :func:`ulysses_attention` is differentiable.
    """
    if axis.size == 1:
        return q, k, v
    plan = head_plan(q.size(2), k.size(2), axis.size)
    if q.size(0) == k.size(0):
        q, k, v = to_heads((q, k, v), (plan.q_spans, plan.kv_spans, plan.kv_spans), axis)
    else:
        (q,) = to_heads((q,), (plan.q_spans,), axis)
        k, v = to_heads((k, v), (plan.kv_spans, plan.kv_spans), axis)
    if plan.needs_expansion(axis.rank):
        # Head by head: an index would be a tensor from the host, for which the GPU would have to wait.
        k, v = (torch.stack([x[:, :, head] for head in plan.kv_index[axis.rank]], dim=2) for x in (k, v))
        q = q.contiguous()  # a view would keep the memory of the received keys and values
    return q, k, v


def sequence_to_heads_grad(
    dq: Tensor, dk: Tensor, dv: Tensor, axis: Axis, *, heads: int, kv_heads: int
) -> tuple[Tensor, ...]:
    """Gradients of the inputs of :func:`sequence_to_heads`, which had ``heads`` and ``kv_heads`` heads."""
    if axis.size == 1:
        return dq, dk, dv
    plan = head_plan(heads, kv_heads, axis.size)
    if plan.needs_expansion(axis.rank):
        dk, dv = (summed_by_head(x, plan.kv_index[axis.rank]) for x in (dk, dv))
    if dq.size(0) == dk.size(0):
        return to_sequence((dq, dk, dv), (plan.q_spans, plan.kv_spans, plan.kv_spans), axis)
    dq = to_sequence((dq,), (plan.q_spans,), axis)
    return *dq, *to_sequence((dk, dv), (plan.kv_spans, plan.kv_spans), axis)


def heads_to_sequence(out: Tensor, axis: Axis) -> Tensor:
    """[s_local * ranks, b, heads of this rank, d] -> [s_local, b, all heads, d].

    Differentiable, as a layer in chunks differentiates all that follows attention by autograd.
    """
    return out if axis.size == 1 else _HeadsToSequence.apply(out, axis)


def heads_to_sequence_grad(grad: Tensor, axis: Axis) -> Tensor:
    """The gradient of the input of :func:`heads_to_sequence`."""
    if axis.size == 1:
        return grad
    sent = torch.cat(grad.chunk(axis.size, dim=2))
    received = torch.empty_like(sent)
    all_to_all(received, sent, axis.group)
    return received


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis, ctx.heads, ctx.kv_heads = axis, q.size(2), k.size(2)
        return sequence_to_heads(q, k, v, axis)

    @staticmethod
    @once_differentiable("ulysses_attention")
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return *sequence_to_heads_grad(dq, dk, dv, ctx.axis, heads=ctx.heads, kv_heads=ctx.kv_heads), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        sent = out.contiguous()
        received = torch.empty_like(sent)
        all_to_all(received, sent, axis.group)
        return torch.cat(received.chunk(axis.size), dim=2)

    @staticmethod
    @once_differentiable("ulysses_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return heads_to_sequence_grad(grad, ctx.axis), None


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup,
    receive_sizes: list[int] | None = None,
    send_sizes: list[int] | None = None,
) -> None:
    """``dist.all_to_all_single`` that uses both directions of a link at once, on gloo too.

    gloo's own all-to-all posts each send before its receive. If one rank is late, its message "ready to receive" waits
    behind the data that it sends, and the two directions take turns. This function posts all receives first.

    Args:
        received, sent: contiguous; their first dimension is split by rank.
        receive_sizes, send_sizes: rows from and to each rank; None: equal parts.
    """
    if dist.get_backend(group) != "gloo":
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
        return
    size, rank = group.size(), group.rank()
    arriving = received.split(receive_sizes or [len(received) // size] * size)
    leaving = sent.split(send_sizes or [len(sent) // size] * size)

    def messages(kind: Callable, parts: Sequence[Tensor]) -> list[dist.P2POp]:
        peers = [(rank + step) % size for step in range(1, size)]
        return [dist.P2POp(kind, parts[peer], group=group, group_peer=peer) for peer in peers if parts[peer].numel()]

    both = messages(dist.irecv, arriving) + messages(dist.isend, leaving)
    works = dist.batch_isend_irecv(both) if both else []
    arriving[rank].copy_(leaving[rank])
    for work in works:
        work.wait()


def to_heads(tensors: Sequence[Tensor], spans: Sequence[HeadSpans], axis: Axis) -> list[Tensor]:
    """Send each rank its heads of every tensor [s, b, heads, d]; returns views of the received tensor.

    Args:
        spans: for each tensor, the heads of each rank.
    """
    widths = _widths(tensors, spans)
    s, b = tensors[0].shape[:2]
    sent = tensors[0].new_empty(s * b * sum(widths))
    sizes = [s * b * width for width in widths]
    for rank, part in enumerate(sent.split(sizes)):
        heads = [x[:, :, slice(*of_rank[rank])] for x, of_rank in zip(tensors, spans)]
        for place, x in zip(_by_tensor(part.view(s, b, -1), tensors, spans, rank), heads):
            place.copy_(x)
    received = sent.new_empty((axis.size * s, b, widths[axis.rank]))
    all_to_all(received.view(-1), sent, axis.group, [sizes[axis.rank]] * axis.size, sizes)
    return _by_tensor(received, tensors, spans, axis.rank)


def to_sequence(tensors: Sequence[Tensor], spans: Sequence[HeadSpans], axis: Axis) -> tuple[Tensor, ...]:
    """The reverse of :func:`to_heads`, for gradients: the gradients of replicated heads are summed."""
    widths = _widths(tensors, spans)
    s, b = tensors[0].size(0) // axis.size, tensors[0].size(1)
    sent = torch.cat([x.flatten(2) for x in tensors], dim=2)
    sizes = [s * b * width for width in widths]
    received = sent.new_empty(sum(sizes))
    all_to_all(received, sent.view(-1), axis.group, sizes, [sizes[axis.rank]] * axis.size)
    parts = [part.view(s, b, -1) for part in received.split(sizes)]
    by_rank = [_by_tensor(part, tensors, spans, rank) for rank, part in enumerate(parts)]
    return tuple(_joined(pieces, of_rank) for pieces, of_rank in zip(zip(*by_rank), spans))


def _joined(pieces: Sequence[Tensor], spans: HeadSpans) -> Tensor:
    """All heads [s, b, heads, d], from one piece for each of ``spans``; overlapping pieces are added."""
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return torch.cat(pieces, dim=2)
    (s, b, _, size), heads = pieces[0].shape, spans[-1][1]
    total = pieces[0].new_zeros((s, b, heads, size))
    for piece, span in zip(pieces, spans):
        total[:, :, slice(*span)] += piece
    return total


def _widths(tensors: Sequence[Tensor], spans: Sequence[HeadSpans]) -> list[int]:
    """For each rank, the number of elements of one token's heads."""
    by_tensor = [[(stop - start) * x.size(3) for start, stop in of_rank] for x, of_rank in zip(tensors, spans)]
    return [sum(of_rank) for of_rank in zip(*by_tensor)]


def _by_tensor(x_SBW: Tensor, tensors: Sequence[Tensor], spans: Sequence[HeadSpans], rank: int) -> list[Tensor]:
    """Split a token's packed heads into views [s, b, heads of the rank, d], one for each tensor."""
    counts = [stop - start for start, stop in (of_rank[rank] for of_rank in spans)]
    parts = x_SBW.split([count * x.size(3) for count, x in zip(counts, tensors)], dim=2)
    return [part.unflatten(2, (count, -1)) for part, count in zip(parts, counts)]


def summed_by_head(x_SBHD: Tensor, index: tuple[int, ...]) -> Tensor:
    """[s, b, len(index), d] -> [s, b, heads, d]: the i-th head is added to head ``index[i]``."""
    total = x_SBHD.new_zeros((*x_SBHD.shape[:2], max(index) + 1, x_SBHD.size(3)))
    for i, head in enumerate(index):
        total[:, :, head] += x_SBHD[:, :, i]
    return total
