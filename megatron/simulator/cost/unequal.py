# SPDX-License-Identifier: Apache-2.0
"""A step on ranks that are not equally fast, in closed form: where compute waits for others, and what that costs.

A layer's compute is taken to lie evenly between the transfers that it waits for: those of TP, Ulysses and Ring, and
under ZeRO 2 and 3 the weights and gradients. Without any of them ranks meet once, at the end of the step.
"""

from __future__ import annotations

from collections import Counter

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.jitter import Jitter, Spread, Waits, spread
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.program import OURS, Program, as_run
from megatron.simulator.cost.seconds import kernel_seconds
from megatron.simulator.cost.segment import Segment
from megatron.simulator.machines.machine import Machine


def step_spread(
    workload: Workload, strategy: Strategy, machine: Machine, jitter: Jitter, program: Program = OURS
) -> Spread:
    """Mean and 95th percentile of a step's seconds, which are :func:`~megatron.simulator.cost.estimate.estimate`'s
    where all ranks are equally fast."""
    seconds = estimate(workload, strategy, machine, program).seconds
    return spread(seconds, step_waits(workload, strategy, machine, program), strategy.ranks, jitter)


def step_waits(workload: Workload, strategy: Strategy, machine: Machine, program: Program = OURS) -> Waits:
    """Of a step: its layers' compute, cut at what they wait for; in a pipeline also of the bubble, which is others'."""
    found, compute = Waits(), 0.0
    shared = strategy.group("dp").size
    times = strategy.micro_batches(workload) + (strategy.pipeline - 1) / strategy.virtual
    for how, layers in strategy.layer_kinds(strategy.most_layers(workload.shape.layers)):
        for backward, plain in enumerate(layer(workload, how)):
            segments = as_run(plain, workload.shape, program)
            took = sum(part.count * kernel_seconds(one, machine) for part in segments for one in part.kernels)
            compute += times * layers * took
            met = meetings(segments)
            if strategy.zero >= 2 and shared > 1:
                met[shared] += 1 + (backward and strategy.zero == 3)
            waits = sum(met.values())
            for ranks, count in met.items():
                found.add(ranks, took / waits, times * layers * count)
    if not found.by_ranks:
        found.add(shared, compute)
    return found


def meetings(segments: list[Segment]) -> Counter[int]:
    """How often groups of each size wait for one another."""
    found: Counter[int] = Counter()
    for part in segments:
        for transfer in part.transfers:
            if transfer.axis != "pp" and transfer.group.size > 1:
                found[transfer.group.size] += part.count * transfer.count
    return found
