# SPDX-License-Identifier: Apache-2.0
"""A span of tokens as a map of the state, its outputs after an entry state, and the backward pass of both.

The state after a span is ``M @ S + N``, where S is the state before it. Without a delta rule, M is diagonal and kept as
one column. An output is ``R @ S + o``: R is a row for each token and head, what the token reads of S. The gradient goes
the other way: with ``dS`` of the state after the span, that of the state before it is ``M^T @ dS + R^T @ dout``. So
one pass over a span whose entry state is not known yet gives all that others need of it in both directions.

A span is computed in segments of a few blocks, which limits memory. For the backward pass only the inputs, R and the
state before each segment are kept; a segment is prepared again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.layout.spans import Span, split
from megatron.context_parallel.linear_attention.block_scan import (
    as_columns,
    as_heads,
    block_size,
    state_after,
    state_grads,
    states,
)
from megatron.context_parallel.linear_attention.rules import LinearRule, Prepared, prepare
from megatron.decisions.state_exchange import BLOCK, SEGMENT
from megatron.platform.autograd import without_autocast

ROWS = 1024  # of R that are multiplied at a time, in fp32
Inputs = Sequence[Tensor]
"""q, k, v, g and beta of some rows, as linear_attention takes them: [s, b, heads, ..]; with a skip, six tensors."""


def segments(inputs: Inputs, rows: Span) -> list[Span]:
    """The parts of a span that are prepared together."""
    b, heads, size = inputs[2].shape[1:]
    most = SEGMENT // (b * heads * (2 * inputs[0].size(3) + size)) // BLOCK * BLOCK
    return split(rows, max(most, BLOCK))


def prepared(rule: LinearRule, inputs: Inputs, rows: Span) -> Prepared:
    """Prepare the blocks of some rows. Differentiable. Rows are added to fill the last block: they change nothing."""
    count = rows[1] - rows[0]
    block = block_size(count, inputs[2], inputs[0].size(3))
    dtype = accumulation_dtype(inputs[2].dtype)

    def arrange(x: Tensor) -> Tensor:
        x = x[slice(*rows)].permute(1, 2, 0, *range(3, x.dim())).to(dtype).contiguous()
        return F.pad(x, (0, 0) * (x.dim() - 3) + (0, -count % block)) if count % block else x

    return prepare(rule, *(arrange(x) for x in inputs), block=block)


def identity(rule: LinearRule, inputs: Inputs) -> Tensor:
    """The map of no tokens."""
    q, _, v = inputs[:3]
    keys, dtype = q.size(3), accumulation_dtype(v.dtype)
    if rule.delta:
        columns = torch.eye(keys, dtype=dtype, device=v.device).expand(*v.shape[1:3], keys, keys)
    else:
        columns = torch.ones(*v.shape[1:3], keys, 1, dtype=dtype, device=v.device)
    return F.pad(columns, (0, v.size(3)))


@without_autocast
def span_map(rule: LinearRule, inputs: Inputs, rows: Span) -> Tensor:
    """The map [b, heads, K, columns of M + V] of a span, fp32 (fp64): M and N next to each other."""
    result = identity(rule, inputs)
    for part in segments(inputs, rows):
        ready = _widened(prepared(rule, inputs, part), result)
        result = as_heads(state_after(ready, as_columns(result, ready)), ready)
    return result


def apply_map(rule: LinearRule, packed: Tensor, state: Tensor) -> Tensor:
    """The state after a span, from its map and the state before it."""
    matrix, offset = packed.split((packed.size(-1) - state.size(-1), state.size(-1)), dim=-1)
    return (matrix @ state if rule.delta else matrix * state) + offset


def apply_map_grad(rule: LinearRule, packed: Tensor, dstate: Tensor) -> Tensor:
    """The gradient of the state before a span, from M and E next to each other and the gradient of the state after."""
    matrix, offset = packed.split((packed.size(-1) - dstate.size(-1), dstate.size(-1)), dim=-1)
    return (matrix.mT @ dstate if rule.delta else matrix * dstate) + offset


@dataclass(frozen=True)
class BlockSpans:
    """Spans by the functions below, which every device runs. Documents begin where a log-decay is -inf."""

    rule: LinearRule

    def outputs(self, *args: Any, **options: Any) -> tuple[list[Tensor], Tensor]:
        return span_outputs(self.rule, *args, **options)

    def grads(self, *args: Any) -> Tensor:
        return span_grads(self.rule, *args)


@without_autocast
def span_outputs(
    rule: LinearRule, inputs: Inputs, rows: Span, state: Tensor, out: Tensor, reads: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Write the outputs of a span to ``out``; returns the state before each segment, and that after the span.

    Args:
        state: before the span. With ``reads``: a map from some earlier state S to it, as :func:`span_map` packs them;
            so are the states that are returned. N is the state if S is 0.
        reads: [tokens of the span, b, heads, K], gets R for S.
    """
    entries, columns = [], state.size(-1) - out.size(3)
    for part in segments(inputs, rows):
        entries.append(state)
        ready = _widened(prepared(rule, inputs, part), state)
        before, new, state = states(ready, as_columns(state, ready))
        state = as_heads(state, ready)
        result = ready.reads @ before
        if rule.delta:
            result += ready.inside @ new
            read, result = result[..., :columns], result[..., columns:]
        else:
            carried, result = result.unflatten(-1, ready.own.shape[-2:])[..., columns:], ready.inside @ ready.values
            by_key = result.unflatten(1, (-1, ready.own.size(4)))  # a view of heads that share a key
            by_key.addcmul_(carried.movedim(4, 2), ready.entry.movedim(4, 2))
            read = None if reads is None else _diagonal(ready, before)  # M has one number for each head
        _write(out, part, result)
        if reads is not None:
            _write(reads, (part[0] - rows[0], part[1] - rows[0]), read)
    return entries, state


def _diagonal(ready: Prepared, before: Tensor) -> Tensor:
    """R of blocks without a delta rule, of whose states ``before`` the first column of each head is that of M."""
    matrix = before.unflatten(-1, ready.own.shape[-2:])[..., 0].movedim(-1, -2).unsqueeze(-3)  # [.., 1, group, K]
    return as_heads((ready.reads.unsqueeze(-2) * (ready.entry * matrix)).flatten(-2), ready)


def _widened(ready: Prepared, state: Tensor) -> Prepared:
    """For a packed state: no value changes the columns of M."""
    return ready._replace(own=F.pad(ready.own, (state.size(-1) - ready.own.size(-1), 0)))


def _write(to: Tensor, rows: Span, blocks: Tensor) -> None:
    """Write blocks [b, heads, blocks, c, ..] to rows of [s, b, heads, ..]."""
    to[slice(*rows)] = blocks.flatten(2, 3)[:, :, : rows[1] - rows[0]].permute(2, 0, 1, 3)


@without_autocast
def add_reads(out: Tensor, reads: Tensor, state: Tensor) -> None:
    """Add to the outputs of a span what its tokens read of the state before it."""
    for part in split((0, len(out)), ROWS):
        q, to = reads[slice(*part)].permute(1, 2, 0, 3), out[slice(*part)]
        to += (q.to(state.dtype) @ state).permute(2, 0, 1, 3)


@without_autocast
def reads_grad(dout: Tensor, reads: Tensor, empty: Tensor) -> Tensor:
    """R^T @ dout of a span, [b, heads, K, V]."""
    result = empty
    for part in split((0, len(dout)), ROWS):
        q, dpart = (x[slice(*part)].permute(1, 2, 0, 3).to(empty.dtype) for x in (reads, dout))
        result = result + q.mT @ dpart
    return result


def empty_state(inputs: Inputs) -> Tensor:
    """The state 0 [b, heads, K, V], fp32 (fp64)."""
    q, _, v = inputs[:3]
    return v.new_zeros((*v.shape[1:3], q.size(3), v.size(3)), dtype=accumulation_dtype(v.dtype))


@without_autocast
def span_grads(
    rule: LinearRule, inputs: Inputs, rows: Span, entries: Sequence[Tensor], dout: Tensor, dstate: Tensor,
    grads: Inputs,
) -> Tensor:  # fmt: skip
    """Write the gradients of a span's inputs to ``grads``; returns that of the state before it.

    Args:
        entries: from :func:`span_outputs`.
        dstate: the gradient of the state after the span.
    """
    for part, state in reversed(list(zip(segments(inputs, rows), entries))):
        leaves = [x[slice(*part)].detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            graph = prepared(rule, leaves, (0, part[1] - part[0]))
        ready = Prepared(*(None if x is None else x.detach() for x in graph))
        dready, dstate = _blocks_grad(ready, state, _blocks_of(dout, part, ready), dstate)
        pairs = [(x, dx) for x, dx in zip(graph, dready) if x is not None]
        results = torch.autograd.grad([x for x, _ in pairs], leaves, [dx for _, dx in pairs])
        for grad, result in zip(grads, results):
            grad[slice(*part)] = result
    return dstate


def _blocks_grad(ready: Prepared, state: Tensor, dout: Tensor, dstate: Tensor) -> tuple[Prepared, Tensor]:
    """The gradients of prepared blocks, and of the state before them.

    Args:
        state: before them; ``dout``: of their outputs [b, heads, blocks, c, V]; ``dstate``: of the state after them.
    """
    state, dstate = as_columns(state, ready), as_columns(dstate, ready)
    before, new, _ = states(ready, state)
    if ready.erase is not None:
        dstate, dafter = state_grads(ready, dout, dstate)
        dnew = ready.inside.mT @ dout + ready.writes @ dafter
        if ready.keep.size(-2) > 1:
            dkeep = (before * dafter).sum(-1, keepdim=True)
        else:  # a dot product, without their product in memory
            dkeep = before.flatten(-2).unsqueeze(-2) @ dafter.flatten(-2).unsqueeze(-1)
        return Prepared(
            erase=-dnew @ before.mT,
            own=dnew,
            writes=new @ dafter.mT,
            reads=dout @ before.mT,
            inside=dout @ new.mT,
            keep=dkeep,
        ), dstate
    sizes = ready.own.shape[-2:]
    given = dout.unflatten(1, (-1, sizes[0])).movedim(2, 4)  # [b, key heads, blocks, c, group, V]
    dread = torch.mul(given, ready.entry, out=given.new_empty(ready.own.shape)).flatten(-2)
    dstate, dafter = state_grads(ready, dread, dstate)
    return Prepared(
        erase=None,
        own=(ready.writes @ dafter).unflatten(-1, sizes),
        writes=new @ dafter.mT,
        reads=dread @ before.mT,
        inside=dout @ ready.values.mT,
        keep=(before * dafter).sum(-2, keepdim=True).unflatten(-1, sizes).sum(-1, keepdim=True),
        entry=(given * (ready.reads @ before).unflatten(-1, sizes)).sum(-1, keepdim=True),
        values=ready.inside.mT @ dout,
    ), as_heads(dstate, ready)


def _blocks_of(x: Tensor, rows: Span, ready: Prepared) -> Tensor:
    """Rows of [s, b, heads, V] in the blocks of ``ready``."""
    blocks, block = ready.own.shape[2:4]
    part = x[slice(*rows)].to(ready.own.dtype).permute(1, 2, 0, 3)
    return F.pad(part, (0, 0, 0, blocks * block - part.size(2))).unflatten(2, (blocks, block))
