# SPDX-License-Identifier: Apache-2.0
"""Linear attention over the complete sequence, on every grid and layout.

Each rank computes its outputs for a state of 0 before its spans, and the spans' maps; one exchange gives it the states
before them, and what tokens read of these is added. The backward pass goes the other way with gradients of states. All
of it is one autograd function, so that every rank takes part in every exchange, whether it needs its result or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.attention.kernels.base import KernelUnavailable
from megatron.context_parallel.attention.rule import one_dtype
from megatron.context_parallel.attention.ulysses import (
    heads_to_sequence,
    heads_to_sequence_grad,
    summed_by_head,
    to_heads,
    to_sequence,
)
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans
from megatron.context_parallel.linear_attention import decay_spans, fla_kernels
from megatron.context_parallel.linear_attention.decay_spans import DecaySpans
from megatron.context_parallel.linear_attention.fla_kernels import FlaSpans
from megatron.context_parallel.linear_attention.rules import RULES, LinearRule
from megatron.context_parallel.linear_attention.span_exchange import (
    Ends,
    SpanOrder,
    checked_ends,
    cut_at_forks,
    document_starts,
    entry_states,
    exit_grads,
    rows_of,
    span_order,
    trees_differ,
)
from megatron.context_parallel.linear_attention.span_maps import (
    BlockSpans,
    Inputs,
    add_reads,
    apply_map,
    empty_state,
    identity,
    reads_grad,
)
from megatron.decisions.division import head_plan
from megatron.decisions.state_exchange import EXCHANGES, LINEAR_KERNELS, StateSizes, chosen_exchange
from megatron.platform.autograd import once_differentiable, refuse_transforms, without_autocast
from megatron.platform.hooks import replaceable
from megatron.platform.streams import to_device


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    skip: Tensor | None = None,
    *,
    rule: LinearRule | str,
    layout: SequenceLayout,
    documents: Sequence[Sequence[int]] = (),
    exchange: str = "auto",
    kernel: str = "auto",
) -> Tensor:
    """Exact linear attention over the complete sequence; each rank passes the tokens that it holds.

    Args:
        q, k: [s_local, b, key heads, K]; v: [s_local, b, heads, V]; key heads divides heads, and consecutive heads
            share one. Tokens are those of ``layout.positions``. Scale and normalize q and k before.
        g: the logarithm of the decay, at most 0, -inf allowed: [s_local, b, heads], or [s_local, b, heads, K] if the
            rule has one for each channel.
        beta: [s_local, b, heads]; None: 1.
        skip: [s_local, b, heads], what multiplies v in the output, in addition (Mamba2's D, expanded); None: nothing.
            Not with a delta rule.
        rule: how a token changes the state: a LinearRule, or the name of one: ``gated_delta``, ``kda``, ``mamba2``,
            ``decay``.
        layout: which rank holds which tokens.
        documents: for each sample, one past the last token of each of its documents, in the complete sequence; or one
            such list for all samples; () if each sample is one document. No state passes from a document to another.
            A ``cp.Tree`` in place of a list: its branches begin with the state after their parent.
        exchange: ``gather``, ``relay``, ``heads`` (decisions/state_exchange.py), or ``auto``: the one with the fewest
            bytes. ``heads`` needs a number of heads that the Ulysses degree divides.
        kernel: ``fla``, the kernels of fla-core for GPUs; ``triton``, this program's for rules without a delta, also
            for GPUs; ``blocks``, which runs anywhere; ``auto``: fla where it can run, else blocks.

    Returns:
        [s_local, b, heads, V], in the dtype of v. Under autocast q, k and v are cast first. States and
        sums are fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError: shapes do not fit, or the exchange or the kernel cannot run.
    """
    refuse_transforms("linear_attention")
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule {rule!r} is unknown: use one of {', '.join(RULES)}")
        rule = RULES[rule]
    if trees_differ(documents):
        how = {"rule": rule, "layout": layout, "exchange": exchange, "kernel": kernel}
        given = zip(*(len(documents) * [None] if x is None else x.split(1, dim=1) for x in (q, k, v, g, beta, skip)))
        each = zip(given, documents, strict=True)
        return torch.cat([linear_attention(*one, documents=[tree], **how) for one, tree in each], dim=1)
    q, k, v = one_dtype(q, k, v)
    beta = g.new_ones(()).expand(v.shape[:3]) if beta is None else beta
    gates = torch.promote_types(g.dtype, beta.dtype)
    inputs = q, k, v, *(x.to(gates) for x in (g, beta, skip) if x is not None)
    ends = _checked(inputs, rule, layout, documents)
    route, (*others, skip) = route_of(inputs, rule, layout, ends, exchange, kernel), (*inputs, None)[:6]
    if route.kernel == "fla" and route.alone:
        inputs = route.arrange(inputs, route.spans)
        out = route.local(rule, route.spans).differentiable(inputs, (0, len(v)), empty_state(inputs))
        if out.requires_grad:
            out.register_hook(_refuse_second_derivatives)
        return out
    return _LinearAttention.apply(*others, skip, rule, route)


def _refuse_second_derivatives(_: Tensor) -> None:
    """A hook: the library's backward pass cannot be differentiated, and does not say so."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear attention has no second derivative: call backward or torch.autograd.grad without create_graph"
        )


def _checked(inputs: Inputs, rule: LinearRule, layout: SequenceLayout, documents: Sequence[Sequence[int]]) -> Ends:
    q, k, v, g, *others = inputs
    s, b, heads, _ = v.shape
    if rule.delta and len(others) > 1:
        raise ValueError(f"skip is for rules without delta, not for {rule.name}: add skip * v to the result")
    if layout.chunks > 1:
        raise ValueError(f"the layout has {layout.chunks} chunks: make the layout with chunks=1")
    if s != layout.local_length:
        raise ValueError(f"v has {s} tokens, but the layout gives each rank {layout.local_length}")
    gates = (s, b, heads, q.size(3)) if rule.channels else (s, b, heads)
    given = ("q", q, (s, b, q.size(2), q.size(3))), ("k", k, q.shape), ("g", g, gates)
    for name, x, shape in (*given, *zip(("beta", "skip"), others, [(s, b, heads)] * 2)):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}, but {rule.name} needs {list(shape)} beside v")
    if heads % q.size(2):
        raise ValueError(f"{heads} heads are not a multiple of the {q.size(2)} key heads")
    return checked_ends(documents, b, layout)


@dataclass(frozen=True)
class StateRoute:
    """How states go: over which axis, by which exchange, and over which spans."""

    context: Axis
    axis: Axis
    order: SpanOrder
    spans: Spans
    ends: Ends
    relay: bool
    ulysses: Axis | None = None
    kernel: str = "blocks"

    @property
    def alone(self) -> bool:
        """Whether this rank has all tokens and heads, and no state forks."""
        return self.ulysses is None and len(self.order.places) == 1

    def local(self, rule: LinearRule, spans: Spans) -> FlaSpans | DecaySpans | BlockSpans:
        """Computes the rows at ``spans``, as :meth:`arrange` has them."""
        if self.kernel != "fla":
            return DecaySpans(rule) if self.kernel == "triton" else BlockSpans(rule)
        return FlaSpans(rule, document_starts(self.ends, spans) if self.ends else None)

    @property
    def rows(self) -> list[Span]:
        return rows_of(self.spans)

    @property
    def sends(self) -> bool:
        """Whether any span needs the state after another one."""
        return any(not place.fresh for place in self.order.places)

    def arrange(self, inputs: Inputs, spans: Spans) -> list[Tensor]:
        """The inputs of the rows at ``spans``, with a log-decay of -inf where a document begins (not for fla).

        They are this rank's rows or, after an all-to-all, those of its ring rank, with this rank's heads.
        """
        inputs = _exchanged(inputs, self.ulysses)
        if self.ends and self.kernel != "fla":
            inputs[3] = inputs[3].masked_fill(self._begins(inputs[3], spans), -torch.inf)
        return inputs

    def arrange_grad(self, grads: Inputs, heads: tuple[int, int], spans: Spans) -> list[Tensor]:
        """The backward pass of :meth:`arrange`, whose inputs had these numbers of heads and of key heads."""
        dq, dk, dv, dg, *others = grads
        if self.ends and self.kernel != "fla":
            dg = dg.masked_fill(self._begins(dg, spans), 0.0)
        return _exchanged_grads((dq, dk, dv, dg, *others), heads, self.ulysses)

    def _begins(self, g: Tensor, spans: Spans) -> Tensor:
        at = to_device(document_starts(self.ends, spans), g.device)
        return at[..., None, None] if g.dim() == 4 else at[..., None]


def route_of(
    inputs: Inputs, rule: LinearRule, layout: SequenceLayout, ends: Ends, exchange: str, kernel: str = "auto"
) -> StateRoute:
    """The route of the states of inputs with these shapes, the same on every rank.

    Raises:
        ValueError: there is no such exchange or kernel, Ulysses does not divide the heads, or the kernel cannot run.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange {exchange!r} is unknown: use one of {', '.join(EXCHANGES)}")
    grid, bare = layout.grid, layout.without_groups()
    order, on_ring = (span_order(bare, ends, by_heads) for by_heads in (False, True))
    sizes, v = state_sizes(rule, inputs), inputs[2]
    kernel = chosen_kernel(kernel, rule, device=v.device, dtype=v.dtype, keys=sizes.keys, values=sizes.values)
    by_heads, how = chosen_exchange(sizes, order.counts, on_ring.counts, grid.ulysses.size, exchange)
    if by_heads:
        spans = cut_at_forks(layout.ring_spans(grid.ring.rank), ends)
        return StateRoute(grid.context, grid.ring, on_ring, spans, ends, how == "relay", grid.ulysses, kernel)
    spans = cut_at_forks(layout.local_spans, ends)
    return StateRoute(grid.context, grid.context, order, spans, ends, how == "relay", None, kernel)


@replaceable
def chosen_kernel(
    name: str, rule: LinearRule, *, device: torch.device, dtype: torch.dtype, keys: int, values: int
) -> str:
    """``fla``, ``triton`` or ``blocks``.

    Raises:
        KernelUnavailable: a ValueError: there is no such kernel, or it cannot run.
    """
    if name not in LINEAR_KERNELS:
        raise KernelUnavailable(name, f"no such kernel of linear attention, only {', '.join(LINEAR_KERNELS)}")
    if name == "blocks":
        return name
    kernel = decay_spans if name == "triton" else fla_kernels
    reason = kernel.why_not(rule, device=device, dtype=dtype, keys=keys, values=values)
    if reason and name != "auto":
        raise KernelUnavailable(name, f"{reason}; the kernel blocks runs here")
    return "blocks" if reason else ("fla" if name == "auto" else name)


def state_sizes(rule: LinearRule, inputs: Inputs) -> StateSizes:
    """The sizes by which an exchange is chosen."""
    q, _, v, g, *others = inputs
    s, b, heads, values = v.shape
    keys = q.size(3)
    return StateSizes(
        batch=b, heads=heads, key_heads=q.size(2), keys=keys, values=values, map_columns=rule.map_columns(keys),
        gates=(keys if rule.channels else 1) + len(others), rows=s, itemsize=v.element_size(),
        gate_itemsize=g.element_size(),
    )  # fmt: skip


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        skip: Tensor | None,
        rule: LinearRule,
        route: StateRoute,
    ) -> Tensor:
        given = (q, k, v, g, beta) if skip is None else (q, k, v, g, beta, skip)
        inputs = route.arrange(given, route.spans)
        out = torch.empty_like(inputs[2])
        mine, empty, start = route.order.of(route.axis.rank), empty_state(inputs), identity(rule, inputs)
        columns = rule.map_columns(empty.size(-2))
        local, entries, maps, reads = route.local(rule, route.spans), {}, {}, {}
        for p in mine:
            rows = route.rows[p.index]
            if not p.fresh:
                reads[p.index] = out.new_empty((rows[1] - rows[0], *empty.shape[:-1]))
            first = empty if p.fresh else start
            entries[p.index], after = local.outputs(inputs, rows, first, out, reads.get(p.index))
            maps[p.index] = F.pad(after, (start.size(-1) - after.size(-1), 0))
        sent = {p.index: maps[p.index] for p in mine if p.hands_on}
        before = entry_states(rule, route.order, route.axis, sent, empty, route.relay)
        for p in mine:
            if not p.fresh:
                add_reads(out[slice(*route.rows[p.index])], reads[p.index], before[p.index])
                entries[p.index] = [apply_map(rule, packed, before[p.index]) for packed in entries[p.index]]
        ctx.rule, ctx.route, ctx.heads = rule, route, (v.size(2), q.size(2))
        kept = [state for p in mine for state in entries[p.index]]
        matrices = [maps[p.index][..., :columns].clone() for p in mine if p.hands_on and not p.fresh]
        ctx.counts, ctx.inputs = [len(entries[p.index]) for p in mine], len(inputs)
        ctx.save_for_backward(*inputs, *kept, *matrices, *reads.values())
        return out if route.ulysses is None else heads_to_sequence(out, route.ulysses)

    @staticmethod
    @once_differentiable("linear attention")
    @without_autocast
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rule, route = ctx.rule, ctx.route
        saved = ctx.saved_tensors  # read once: each reading unpacks them, which a non-reentrant checkpoint allows once
        inputs, kept = saved[: ctx.inputs], list(saved[ctx.inputs :])
        if route.ulysses is not None:
            dout = heads_to_sequence_grad(dout, route.ulysses)
        mine, empty = route.order.of(route.axis.rank), empty_state(inputs)
        states = {p.index: [kept.pop(0) for _ in range(n)] for p, n in zip(mine, ctx.counts)}
        matrices = {p.index: kept.pop(0) for p in mine if p.hands_on and not p.fresh}
        maps, nothing = {}, empty.new_zeros((*empty.shape[:-1], rule.map_columns(empty.size(-2))))
        for p in mine:
            if not p.fresh:
                E = reads_grad(dout[slice(*route.rows[p.index])], kept.pop(0), empty)
                maps[p.index] = torch.cat((matrices.get(p.index, nothing), E), dim=-1)
        after = exit_grads(rule, route.order, route.axis, maps, empty, route.relay)
        local, grads = route.local(rule, route.spans), [torch.zeros_like(x) for x in inputs]
        for p in mine:
            local.grads(inputs, route.rows[p.index], states[p.index], dout, after[p.index], grads)
        grads = route.arrange_grad(grads, ctx.heads, route.spans)
        grads = (*grads, None)[:6]
        return *(dx if needed else None for dx, needed in zip(grads, ctx.needs_input_grad)), None, None


def _exchanged(inputs: Inputs, axis: Axis | None) -> list[Tensor]:
    """All tokens of the ring rank, of this rank's heads."""
    if axis is None:
        return list(inputs)
    q, k, v, g, *others = inputs
    plan = head_plan(v.size(2), q.size(2), axis.size)
    q, k, v = to_heads((q, k, v), (plan.kv_spans, plan.kv_spans, plan.q_spans), axis)
    if plan.needs_expansion(axis.rank):
        q, k = (torch.stack([x[:, :, head] for head in plan.kv_index[axis.rank]], dim=2) for x in (q, k))
    gates = [_with_channels(x) for x in (g, *others)]
    gates = to_heads(gates, (plan.q_spans,) * len(gates), axis)
    return [q, k, v, *(gate.squeeze(3) if x.dim() == 3 else gate for gate, x in zip(gates, (g, *others)))]


def _with_channels(gate: Tensor) -> Tensor:
    """[s, b, heads] -> [s, b, heads, 1]; others as they are."""
    return gate if gate.dim() == 4 else gate.unsqueeze(3)


def _exchanged_grads(grads: Inputs, heads: tuple[int, int], axis: Axis | None) -> list[Tensor]:
    """The backward pass of :func:`_exchanged`."""
    if axis is None:
        return list(grads)
    dq, dk, dv, *dgates = grads
    plan = head_plan(*heads, axis.size)
    if plan.needs_expansion(axis.rank):
        dq, dk = (summed_by_head(x, plan.kv_index[axis.rank]) for x in (dq, dk))
    dq, dk, dv = to_sequence((dq, dk, dv), (plan.kv_spans, plan.kv_spans, plan.q_spans), axis)
    gates = to_sequence([_with_channels(x) for x in dgates], (plan.q_spans,) * len(dgates), axis)
    return [dq, dk, dv, *(gate.squeeze(3) if x.dim() == 3 else gate for gate, x in zip(gates, dgates))]
