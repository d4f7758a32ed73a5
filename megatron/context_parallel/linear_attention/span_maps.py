# SPDX-License-Identifier: Apache-2.0
"""A span of tokens as a map of the state, its outputs after an entry state, and the backward pass of both.

The state after a span is ``M @ S + N``, where S is the state before it. Without a delta rule, M is diagonal and kept as
one column. The gradient goes the other way: with ``dS`` of the state after the span, that of the state before it is
``M^T @ dS + E``, where E comes from the span's own outputs.

A span is computed in segments of a few blocks, which limits memory. For the backward pass only the inputs and the state
before each segment are kept; a segment is prepared again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.layout.spans import Span, split
from megatron.context_parallel.linear_attention.block_scan import (
    block_size,
    outputs,
    state_after,
    state_grads,
    states,
)
from megatron.context_parallel.linear_attention.rules import LinearRule, Prepared, prepare
from megatron.decisions.state_exchange import BLOCK, SEGMENT
from megatron.platform.autograd import without_autocast

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
    dtype, heads = accumulation_dtype(inputs[2].dtype), inputs[2].size(2)

    def arrange(x: Tensor) -> Tensor:
        x = x[slice(*rows)].permute(1, 2, 0, *range(3, x.dim())).to(dtype)
        x = x.contiguous() if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), dim=1)
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
def span_map(rule: LinearRule, inputs: Inputs, rows: Span, before: Tensor | None = None) -> Tensor:
    """The map [b, heads, K, columns of M + V] of a span, fp32 (fp64): M and N next to each other.

    Args:
        before: the map of the tokens before the span, if the result is to include them.
    """
    result = identity(rule, inputs) if before is None else before
    for part in segments(inputs, rows):
        ready = prepared(rule, inputs, part)
        # The columns of M are states that no value changes.
        own = F.pad(ready.own, (result.size(-1) - ready.own.size(-1), 0))
        result = state_after(ready._replace(own=own), result)
    return result


def apply_map(rule: LinearRule, packed: Tensor, state: Tensor) -> Tensor:
    """The state after a span, from its map and the state before it."""
    matrix, offset = packed.split((packed.size(-1) - state.size(-1), state.size(-1)), dim=-1)
    return (matrix @ state if rule.delta else matrix * state) + offset


def apply_map_grad(rule: LinearRule, packed: Tensor, dstate: Tensor) -> Tensor:
    """The gradient of the state before a span, from M and E next to each other and the gradient of the state after."""
    matrix, offset = packed.split((packed.size(-1) - dstate.size(-1), dstate.size(-1)), dim=-1)
    return (matrix.mT @ dstate if rule.delta else matrix * dstate) + offset


@without_autocast
def span_outputs(
    rule: LinearRule, inputs: Inputs, rows: Span, state: Tensor, out: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Write the outputs of a span to ``out``; returns the state before each segment, and that after the span."""
    entries = []
    for part in segments(inputs, rows):
        entries.append(state)
        ready = prepared(rule, inputs, part)
        result, state = outputs(ready, state)
        out[slice(*part)] = result.flatten(2, 3)[:, :, : part[1] - part[0]].permute(2, 0, 1, 3)
    return entries, state


def empty_state(inputs: Inputs) -> Tensor:
    """The state 0 [b, heads, K, V], fp32 (fp64)."""
    q, _, v = inputs[:3]
    return v.new_zeros((*v.shape[1:3], q.size(3), v.size(3)), dtype=accumulation_dtype(v.dtype))


@without_autocast
def span_state_grad(rule: LinearRule, inputs: Inputs, rows: Span, dout: Tensor, dstate: Tensor | None = None) -> Tensor:
    """The gradient [b, heads, K, V] of the state before a span; E if that of the state after it, ``dstate``, is 0."""
    dstate = empty_state(inputs) if dstate is None else dstate
    for part in reversed(segments(inputs, rows)):
        ready = prepared(rule, inputs, part)
        dstate = state_grads(ready, _blocks_of(dout, part, ready), dstate)[0]
    return dstate


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
        dblocks = _blocks_of(dout, part, ready)
        before, new, _ = states(ready, state)
        dstate, dafter = state_grads(ready, dblocks, dstate)
        dnew = ready.inside.mT @ dblocks + ready.writes @ dafter
        dkeep = (before * dafter).sum(-1, keepdim=True)
        dready = Prepared(
            erase=None if ready.erase is None else -dnew @ before.mT,
            own=dnew,
            writes=new @ dafter.mT,
            reads=dblocks @ before.mT,
            inside=dblocks @ new.mT,
            keep=dkeep if ready.keep.size(-2) > 1 else dkeep.sum(-2, keepdim=True),
        )
        pairs = [(x, dx) for x, dx in zip(graph, dready) if x is not None]
        results = torch.autograd.grad([x for x, _ in pairs], leaves, [dx for _, dx in pairs])
        for grad, result in zip(grads, results):
            grad[slice(*part)] = result
    return dstate


def _blocks_of(x: Tensor, rows: Span, ready: Prepared) -> Tensor:
    """Rows of [s, b, heads, V] in the blocks of ``ready``."""
    blocks, block = ready.own.shape[2:4]
    part = x[slice(*rows)].to(ready.own.dtype).permute(1, 2, 0, 3)
    return F.pad(part, (0, 0, 0, blocks * block - part.size(2))).unflatten(2, (blocks, block))
