# SPDX-License-Identifier: Apache-2.0
"""Work of experts on the rank whose experts get most tokens, for which the others wait.

The all-to-all dispatcher (core/experts.py). Each expert's products run one after the other.
"""

from __future__ import annotations

from megatron.formulas.kinds.expert_figures import Dispatched, dispatched
from megatron.formulas.strategy import Group, Shape, Strategy, Workload
from megatron.simulator.cost.operations import BF16, Segment, collective, gemm, memory
from megatron.simulator.cost.row_operations import Rows, reduce_tokens
from megatron.simulator.cost.trace import Collective, Transfer

# Bytes for each score of a token: casts, the sort by score with its indices, softmax, masks and their transposes.
ROUTER_BYTES = 60


def experts(workload: Workload, strategy: Strategy) -> list[Segment]:
    """Norm, router, the tokens' way to their experts and back, experts, shared expert and residual."""
    shape, d = workload.shape, dispatched(workload, strategy)
    token, inner = BF16 * shape.hidden, d.width * (2 if shape.gated else 1)
    scores = memory("router", ROUTER_BYTES * d.tokens * shape.mixture.experts)
    up, down = gemm("expert_up", d.each, inner, shape.hidden), gemm("expert_down", d.each, shape.hidden, d.width)
    sorts = memory("sort", 2 * token * d.received)
    return [
        Segment((memory("norm", 2 * token * d.tokens), gemm("router", d.tokens, shape.mixture.experts, shape.hidden))),
        *_shared_expert(shape, strategy, d),
        Segment((scores, memory("permute", 2 * token * d.sent)), _counts(shape, strategy)),
        *_there(strategy, d, token + BF16),  # with the token's weight
        Segment((sorts,)),
        Segment((up, Rows(shape, strategy, d.each).activation(d.width), down), count=d.held),
        Segment((sorts,)),
        *_back(strategy, d, token),
        Segment((memory("permute", 2 * token * d.sent), memory("residual", 3 * token * d.tokens))),
    ]


def experts_grad(workload: Workload, strategy: Strategy) -> list[Segment]:
    """The backward pass of :func:`experts`."""
    shape, d = workload.shape, dispatched(workload, strategy)
    token, inner = BF16 * shape.hidden, d.width * (2 if shape.gated else 1)
    number, of_each, of_all = shape.mixture.experts, Rows(shape, strategy, d.each), Rows(shape, strategy, d.tokens)
    each = (
        gemm("expert_down_dgrad", d.each, d.width, shape.hidden, backward=True),
        *of_each.weight_grad("expert_down", shape.hidden, d.width),
        of_each.activation(d.width, backward=True),
        gemm("expert_up_dgrad", d.each, shape.hidden, inner, backward=True),
        *of_each.weight_grad("expert_up", inner, shape.hidden),
    )
    router = (
        memory("router", ROUTER_BYTES * d.tokens * number, backward=True),
        gemm("router_dgrad", d.tokens, shape.hidden, number, backward=True),
        *of_all.weight_grad("router", number, shape.hidden),
    )
    sorts = memory("sort", 2 * token * d.received, backward=True)
    permute = memory("permute", 2 * token * d.sent, backward=True)
    return [
        Segment((permute,)),
        *_there(strategy, d, token),
        Segment((sorts,)),
        Segment(each, count=d.held),
        Segment((sorts,)),
        *_back(strategy, d, token + BF16),
        Segment((permute,)),
        *_shared_expert_grad(shape, strategy, d),
        Segment((*router, memory("norm", 5 * token * d.tokens, backward=True))),
    ]


def _there(strategy: Strategy, d: Dispatched, token: int) -> list[Segment]:
    """The all-to-all over EP of ``token`` bytes for each choice; then with expert TP a gather."""
    arrived = d.received // strategy.expert_tensor
    return [*_exchange(strategy, d.sent, arrived, token), *_within_expert(strategy, "all_gather", d.received * token)]


def _back(strategy: Strategy, d: Dispatched, token: int) -> list[Segment]:
    """The reverse of :func:`_there`."""
    arrived = d.received // strategy.expert_tensor
    sums = _within_expert(strategy, "reduce_scatter", d.received * token)
    return [*sums, *_exchange(strategy, arrived, d.sent, token)]


def _exchange(strategy: Strategy, sent: int, received: int, token: int) -> list[Segment]:
    """An all-to-all over EP; the rank whose experts get most tokens receives more than it sends, or sends more."""
    group = strategy.group("ep")
    if group.size == 1:
        return []
    own = min(sent, max(sent, received) // group.size)
    away, coming = (token * (choices - own) for choices in (sent, received))
    return [Segment((), (Transfer("all_to_all", "ep", group, away, excess=max(0, coming - away)),))]


def _within_expert(strategy: Strategy, kind: Collective, size: int) -> list[Segment]:
    group = Group(strategy.expert_tensor)
    return [Segment((), (collective(kind, "ep", group, size),))] if group.size > 1 else []


def _counts(shape: Shape, strategy: Strategy) -> tuple[Transfer, ...]:
    """The gather of how many tokens each rank has for each expert, in int64."""
    group = Group(strategy.expert * strategy.expert_tensor)
    return (collective("all_gather", "ep", group, 8 * shape.mixture.experts * group.size),) if group.size > 1 else ()


def _of_shared_expert(shape: Shape, strategy: Strategy, d: Dispatched) -> Rows:
    return Rows(shape, strategy, d.tokens * (strategy.tensor if strategy.sequence_parallel else 1))


def _shared_expert(shape: Shape, strategy: Strategy, d: Dispatched) -> list[Segment]:
    if not d.shared:
        return []
    rows = _of_shared_expert(shape, strategy, d)
    return [*rows.mlp("shared", d.shared), *rows.send(*reduce_tokens(strategy, shape.hidden, rows.tokens))]


def _shared_expert_grad(shape: Shape, strategy: Strategy, d: Dispatched) -> list[Segment]:
    return _of_shared_expert(shape, strategy, d).mlp_grad("shared", d.shared) if d.shared else []
