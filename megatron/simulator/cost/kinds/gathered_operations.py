# SPDX-License-Identifier: Apache-2.0
"""Attention on a ring that gathers all keys (context_parallel/attention/ring.py, GatherSource): nothing overlaps."""

from __future__ import annotations

from dataclasses import replace

from megatron.formulas.strategy import Strategy
from megatron.simulator.cost.kinds import ring_operations as passed_on
from megatron.simulator.cost.kinds.ring_operations import Attended
from megatron.simulator.cost.operations import BF16, FP32, Segment, collective
from megatron.simulator.cost.trace import Collective


def ring_forward(a: Attended, strategy: Strategy) -> list[Segment]:
    return [*_whole("all_gather", a, strategy, BF16), *_alone(passed_on.ring_forward(a, strategy))]


def ring_backward(a: Attended, strategy: Strategy) -> list[Segment]:
    tiles = _alone(passed_on.ring_backward(a, strategy))
    gradients = _whole("reduce_scatter", a, strategy, FP32)
    return [*_whole("all_gather", a, strategy, BF16), *tiles, *gradients]


def _alone(segments: list[Segment]) -> list[Segment]:
    """The same tiles without the hops that they overlap."""
    return [replace(segment, transfers=()) for segment in segments if segment.kernels]


def _whole(kind: Collective, a: Attended, strategy: Strategy, itemsize: int) -> list[Segment]:
    if a.ring == 1:
        return []
    size = itemsize * a.ring * a.queries * a.batch * a.kv_heads * a.pair_dim
    return [Segment((), (collective(kind, "ring", strategy.group("ring"), size),))]
