# SPDX-License-Identifier: Apache-2.0
"""A plan's whole step in a few numbers, from which page.html draws every stage's passes to scale.

The estimate says how long a micro-batch takes on the last stage, and what comes once a step; the closed forms of a
layer and of the loss say how that is shared between the two directions and which of it other stages have too. When
each pass begins follows from the schedule, which the page works out as cost/pipeline.py does.
"""

from __future__ import annotations

from typing import Any

from megatron.formulas.chunks import chunks_of
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.loss_operations import embedding, embedding_grad, loss, loss_grad
from megatron.simulator.cost.seconds import transfer_seconds
from megatron.simulator.cost.segment import Segment, price
from megatron.simulator.cost.state_operations import states, sum_shared_gradients
from megatron.simulator.cost.step_operations import busiest_stage, layer
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.plans import Plan, Problem

Json = dict[str, Any]


def step_shape(plan: Plan, problem: Problem) -> Json:
    """Seconds of ``plan``'s passes on a rank: ``passes``: forward and backward of a stage, ``first``: of the first one,
    ``last``: of the last one, which has the loss, all whole, not of a virtual stage; ``message``; ``after``: what
    follows the last pass, by name."""
    s, workload, machine, parts = plan.strategy, problem.workload, problem.machine, plan.estimate.parts
    batches = s.micro_batches(workload)
    after = _once(workload, s, machine)
    if s.zero <= 1:
        after["dp"] = parts.get("dp", 0.0)
    message = max(0.0, parts.get("pp", 0.0) - after.get("pp", 0.0)) / (batches * (2 * s.virtual - 1))
    outside = ("bubble", "optimizer", "pp", *(["dp"] if s.zero <= 1 else []))
    busy = sum(seconds for name, seconds in parts.items() if name not in outside) - after.get("tp", 0.0)
    first, stage, last = passes(workload, s, machine)
    scale = busy / batches / max(sum(last), sum(stage) if s.uneven else 0.0)
    after["optimizer"] = parts.get("optimizer", 0.0)
    return {
        "stages": s.pipeline,
        "virtual": s.virtual,
        "batches": batches,
        "passes": [scale * seconds for seconds in stage],
        "first": [scale * seconds for seconds in first],
        "last": [scale * seconds for seconds in last],
        "message": message if s.pipeline > 1 else 0.0,
        "after": [[name, seconds] for name, seconds in after.items() if seconds > 0],
    }


def passes(workload: Workload, s: Strategy, machine: Machine) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a micro-batch, forward and backward, on the first stage, on one in the middle and on the last; as in
    the estimate, the embedding counts where one stage has it all."""
    chunks = chunks_of(workload, s)

    def of(layers: int) -> list[float]:
        found = [0.0, 0.0]
        for how, number in s.layer_kinds(layers):
            for at, segments in enumerate(layer(workload, how)):
                found[at] += number * _seconds(segments, machine)
        return found

    stage = of(s.most_layers(workload.shape.layers))
    first, last = (
        of(s.stage_layers(workload.shape.layers, at)) if s.uneven else list(stage) for at in (0, s.pipeline - 1)
    )
    tokens = workload.seq_length * s.micro_batch // s.context
    for at, segments in enumerate(
        (loss(workload.shape, s, tokens, chunks.loss), loss_grad(workload.shape, s, tokens, chunks.loss))
    ):
        last[at] += _seconds(segments, machine)
    if s.pipeline == 1:
        for at, make in enumerate((embedding, embedding_grad)):
            last[at] += _seconds(make(workload.shape, s, tokens), machine)
    return first, stage, last


def _seconds(segments: list[Segment], machine: Machine) -> float:
    return sum(price(segments, machine).values())


def _once(workload: Workload, s: Strategy, machine: Machine) -> dict[str, float]:
    """Sums of gradients that ranks share, by axis."""
    found: dict[str, float] = {}
    for transfer in sum_shared_gradients(workload.shape, s, states(workload.shape, s, busiest_stage(s))):
        found[transfer.axis] = found.get(transfer.axis, 0.0) + transfer_seconds(transfer, machine)
    return found
