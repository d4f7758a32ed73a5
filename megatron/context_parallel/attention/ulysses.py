# SPDX-License-Identifier: Apache-2.0
"""Ulysses: all-to-all over heads around any attention (DeepSpeed-Ulysses paper, sections 3.1 and 3.4).

Before attention each rank holds some tokens of all heads; after the all-to-all it holds all tokens (of its ring rank)
of some heads. Queries, keys and values travel in one fused all-to-all; where there are fewer key/value heads than
ranks they are replicated, each rank gets just the heads its queries need, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.context_parallel.layout.grid import Axis

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each Ulysses rank computes, and which key/value heads it gets for them."""

    q_heads: int  # query heads a rank
    kv_heads: tuple[tuple[int, ...], ...]  # by rank: key/value heads it is sent
    kv_index: tuple[tuple[int, ...], ...]  # by rank: which of those each local key/value head is

    def needs_expansion(self, rank: int) -> bool:
        """Whether local query heads fall unevenly on the received key/value heads."""
        return self.kv_index[rank] != tuple(range(len(self.kv_heads[rank])))


@lru_cache(maxsize=256)
def head_plan(heads: int, kv_heads: int, ranks: int) -> HeadPlan:
    """Deal ``heads`` query heads and ``kv_heads`` key/value heads over ``ranks``.

    Raises:
        ValueError: heads cannot be dealt evenly.
    """
    if heads % ranks:
        usable = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"ulysses={ranks} does not divide the {heads} query heads of a rank: use one of {usable}, and ring for the "
            "rest"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of the {kv_heads} key/value heads")
    local, group = heads // ranks, heads // kv_heads
    each = gcd(group, local)  # query heads a local key/value head serves
    sent, index = [], []
    for rank in range(ranks):
        wanted = [q // group for q in range(rank * local, (rank + 1) * local, each)]
        unique = sorted(set(wanted))
        sent.append(tuple(unique))
        index.append(tuple(unique.index(head) for head in wanted))
    return HeadPlan(local, tuple(sent), tuple(index))


def ulysses_attention(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, *, axis: Axis, attention: Attention) -> Tensor:
    """Run ``attention`` over all tokens of the Ulysses ranks, each on its share of the heads.

    Args:
        q_SBHD: [s_local, b, heads, d]; k_SBHD: [s_local, b, kv_heads, d]; v_SBHD: the same, or heads of another size.
        axis: the Ulysses axis of the grid.
        attention: any function of (q, k, v) with [s, b, heads / ranks, d] that returns the same shape as its q, heads
            of v's size: dense, sparse, ring, cross-attention.

    Returns:
        [s_local, b, heads, d], heads of v's size.
    """
    if axis.size == 1:
        return attention(q_SBHD, k_SBHD, v_SBHD)
    q, k, v = _SequenceToHeads.apply(q_SBHD, k_SBHD, v_SBHD, axis)
    return _HeadsToSequence.apply(attention(q, k, v), axis)


def sequence_to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """[s_local, b, all heads, d] -> [s_local * ranks, b, heads of this rank, d], for q, k and v in one all-to-all."""
    if axis.size == 1:
        return q, k, v
    plan = head_plan(q.size(2), k.size(2), axis.size)
    sent = [_heads_for(plan, rank, q, k, v) for rank in range(axis.size)]
    shapes = _shapes(plan, axis.rank, q, k, v)
    parts = _exchange(sent, [_numel(shapes)] * axis.size, axis)
    received = [_unpack(part, shapes) for part in parts]
    q, k, v = (torch.cat(parts) for parts in zip(*received))
    if plan.needs_expansion(axis.rank):
        # Head by head: an index would be a tensor, made on the host, for which a GPU would have to wait.
        k, v = (torch.stack([x[:, :, head] for head in plan.kv_index[axis.rank]], dim=2) for x in (k, v))
    return q, k, v


def sequence_to_heads_grad(
    dq: Tensor, dk: Tensor, dv: Tensor, axis: Axis, *, heads: int, kv_heads: int
) -> tuple[Tensor, ...]:
    """Gradients of the inputs of :func:`sequence_to_heads`, which had ``heads`` and ``kv_heads`` heads."""
    if axis.size == 1:
        return dq, dk, dv
    plan = head_plan(heads, kv_heads, axis.size)
    if plan.needs_expansion(axis.rank):
        dk, dv = (_summed_by_head(x, plan.kv_index[axis.rank]) for x in (dk, dv))
    q_length, k_length = dq.size(0) // axis.size, dk.size(0) // axis.size
    sent = [
        (dq.narrow(0, rank * q_length, q_length), *(x.narrow(0, rank * k_length, k_length) for x in (dk, dv)))
        for rank in range(axis.size)
    ]
    local_dq = dq.new_empty((q_length, dq.size(1), heads, dq.size(3)))
    local_dk, local_dv = (x.new_zeros((k_length, x.size(1), kv_heads, x.size(3))) for x in (dk, dv))
    shapes = [_shapes(plan, rank, local_dq, local_dk, local_dv) for rank in range(axis.size)]
    parts = _exchange(sent, [_numel(shape) for shape in shapes], axis)
    for rank, (part, shape) in enumerate(zip(parts, shapes)):
        q_part, k_part, v_part = _unpack(part, shape)
        local_dq[:, :, rank * plan.q_heads : (rank + 1) * plan.q_heads] = q_part
        received = slice(plan.kv_heads[rank][0], plan.kv_heads[rank][-1] + 1)
        local_dk[:, :, received] += k_part
        local_dv[:, :, received] += v_part
    return local_dq, local_dk, local_dv


def heads_to_sequence(out: Tensor, axis: Axis) -> Tensor:
    """[s_local * ranks, b, heads of this rank, d] -> [s_local, b, all heads, d]. Differentiable."""
    return out if axis.size == 1 else _HeadsToSequence.apply(out, axis)


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis, ctx.heads, ctx.kv_heads = axis, q.size(2), k.size(2)
        return sequence_to_heads(q, k, v, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return *sequence_to_heads_grad(dq, dk, dv, ctx.axis, heads=ctx.heads, kv_heads=ctx.kv_heads), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        sent = out.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=axis.group)
        return torch.cat(received.chunk(axis.size), dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sent = torch.cat(grad.chunk(ctx.axis.size, dim=2))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.axis.group)
        return received, None


def _heads_for(plan: HeadPlan, rank: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The heads of q, k and v that ``rank`` computes with; they lie side by side."""
    first, last = plan.kv_heads[rank][0], plan.kv_heads[rank][-1]
    keys = slice(first, last + 1)
    return q[:, :, rank * plan.q_heads : (rank + 1) * plan.q_heads], k[:, :, keys], v[:, :, keys]


def _summed_by_head(x_SBHD: Tensor, index: tuple[int, ...]) -> Tensor:
    """[s, b, len(index), d] -> [s, b, heads, d]: the i-th head is added to head ``index[i]``."""
    total = x_SBHD.new_zeros((*x_SBHD.shape[:2], max(index) + 1, x_SBHD.size(3)))
    for i, head in enumerate(index):
        total[:, :, head] += x_SBHD[:, :, i]
    return total


def _shapes(plan: HeadPlan, rank: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes of one rank-to-rank part of q, k and v: tokens of the sender, heads of ``rank``."""
    heads = (plan.q_heads, *[len(plan.kv_heads[rank])] * 2)
    return tuple((*x.shape[:2], count, x.size(3)) for x, count in zip((q, k, v), heads))


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _unpack(part: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [x.view(shape) for x, shape in zip(part.split(sizes), shapes)]


def _exchange(sent: list[tuple[Tensor, ...]], receive_sizes: list[int], axis: Axis) -> tuple[Tensor, ...]:
    """All-to-all of parts of unequal sizes; returns, flat, what each rank sent to this one."""
    send_sizes = [_numel(x.shape for x in part) for part in sent]
    tensors = [x for part in sent for x in part]
    flat = tensors[0].new_empty(sum(send_sizes))
    for place, x in zip(flat.split([x.numel() for x in tensors]), tensors):
        place.view(x.shape).copy_(x)
    received = flat.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, flat, receive_sizes, send_sizes, group=axis.group)
    return received.split(receive_sizes)
