# SPDX-License-Identifier: Apache-2.0
"""All plans on one page for a browser: a sortable table, a picture of time against memory, timelines of a step.

The page (page.html) contains its data as JSON and loads nothing from a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from megatron.formulas.sizes import chunks_of
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import layer_works
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.operations import Segment, price
from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.step_operations import (
    embedding,
    embedding_grad,
    ends,
    loss,
    loss_grad,
    states,
    sum_shared_gradients,
)
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.confirm import Confirmation
from megatron.simulator.planner.explain import (
    GIB,
    KINDS,
    PARTS,
    count,
    failing,
    gib,
    grid_words,
    saving_words,
    winning,
    words,
)
from megatron.simulator.planner.plan_report import Report
from megatron.simulator.planner.plans import Plan, Problem
from megatron.simulator.planner.search import SearchResult

Json = dict[str, Any]


def step_shape(plan: Plan, problem: Problem) -> Json:
    """The numbers from which page.html draws the passes of all stages.

    The estimate gives the time of a micro-batch on the last stage, and work once per step. Closed forms of layer and
    loss divide it between forward and backward. The page computes the schedule as dry_run/whole_step.py does.

    Returns:
        Numbers of stages, virtual stages and micro-batches; seconds of ``passes``: (forward, backward) of a stage with
        all its virtual stages; ``first``, ``last``: the same for the first and the last stage; ``message``: between two
        stages; ``after``: work after the last pass, by name.
    """
    s, workload, machine, parts = plan.strategy, problem.workload, problem.machine, plan.estimate.parts
    batches = s.micro_batches(workload)
    after = _once(workload, s, machine)
    if s.zero <= 1:
        after["dp"] = parts.get("dp", 0.0)
    message = max(0.0, parts.get("pp", 0.0) - after.get("pp", 0.0)) / (batches * (2 * s.virtual - 1))
    outside = ("bubble", "optimizer", "pp", *(["dp"] if s.zero <= 1 else []))
    busy = sum(seconds for name, seconds in parts.items() if name not in outside) - after.get("tp", 0.0)
    first, stage, last = passes(workload, s, machine)
    slowest = (first, stage, last) if workload.shape.mixed else (stage, last) if s.uneven else (last,)
    scale = busy / batches / max(map(sum, slowest))
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
    """Seconds (forward, backward) of a micro-batch on the first stage, on one in the middle and on the last.

    As in the estimate, the embedding counts only without a pipeline.
    """
    chunks = chunks_of(workload, s)

    def of(stage: int) -> list[float]:
        both = [0.0, 0.0]
        for layer_strategy, number in s.layer_kinds(s.stage_layers(workload.shape.layers, stage)):
            for work, share in _kinds(workload, s, stage):
                for at, segments in enumerate(layer(work, layer_strategy)):
                    both[at] += share * number * _seconds(segments, machine)
        return both

    first, stage, last = (of(at) for at in (0, min(1, s.pipeline - 1), s.pipeline - 1))
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
    """Seconds of the reductions of shared gradients, by axis."""
    result: dict[str, float] = {}
    for transfer in sum_shared_gradients(workload.shape, s, states(workload.shape, s, s.pipeline - 1)):
        result[transfer.axis] = result.get(transfer.axis, 0.0) + transfer_seconds(transfer, machine)
    return result


TEMPLATE = Path(__file__).with_suffix(".html")
MOST = 2000  # plans on a page
TIMELINES = 25  # plans whose layer is drawn
DIGITS = 5


def page(
    report: Report, result: SearchResult, others: list[str], run: str = "", dry: Confirmation | None = None
) -> str:
    """The HTML page.

    Args:
        report: the ranked plans.
        result: all plans that were priced.
        others: sentences about why other plans lose.
        run: a sentence about the complete run: days, GPU-hours, cost.
        dry: the dry run of a plan.
    """
    problem, winner = report.problem, report.plans[0]
    known: dict[Strategy, Plan] = {}
    for plan in (*report.plans, *sorted((*result.fitting, *result.failing), key=lambda plan: plan.seconds)):
        known.setdefault(plan.strategy, plan)
    plans = list(known.values())[:MOST]
    length, batch = problem.workload.seq_length, problem.workload.global_batch
    where = f"on {problem.gpus} x {problem.machine.name}"
    data = {
        "title": f"{report.name()}, {count(length)} tokens, global batch {batch}, {where}",
        "room": problem.machine.usable_memory / GIB,
        "spare": problem.spare / GIB,
        "why": winning(winner, problem),
        "others": others,
        "run": run,
        "dry": dry_words(dry) if dry else "",
        "parts": PARTS,
        "kinds": KINDS,
        "plans": [row(plan, problem) for plan in plans],
        "commands": {at: report.command(plan.strategy) for at, plan in enumerate(plans) if at < TIMELINES or plan.fits},
        "steps": [rounded(step_shape(plan, problem)) for plan in plans],
        "layers": {at: layers(plan, problem) for at, plan in enumerate(plans[:TIMELINES])},
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no name is read as HTML
    return _sealed(TEMPLATE.read_text(encoding="utf-8")).replace("{{DATA}}", text)


def dry_words(done: Confirmation) -> str:
    """A sentence about a plan's dry run."""
    left = "" if done.left is None else f", {gib(done.left)} left" if done.left >= 0 else f", {gib(-done.left)} missing"
    return (
        f"A dry run of {words(done.plan.strategy)}, a simulated step of the real program, took "
        f"{duration(done.seconds)} and {gib(done.device)}{left}; the whole run counts with this time."
    )


def _sealed(template: str) -> str:
    """The page with the hashes of its style and script: browsers then run no other script and load nothing."""
    for name in ("style", "script"):
        content = template.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        template = template.replace(f"{{{{{name.upper()}}}}}", f"sha256-{digest}")
    return template


def row(plan: Plan, problem: Problem) -> Json:
    """A plan's row of the page's table; memory in GiB."""
    s, memory = plan.strategy, plan.memory
    fits = "yes" if plan.fits else "near" if plan.tight else "no"
    return {
        "name": words(s),
        "grid": grid_words(s),
        "saves": saving_words(s),
        "tensor": s.tensor, "ulysses": s.ulysses, "ring": s.ring, "data": s.data, "pipeline": s.pipeline,
        "expert": s.expert,
        "virtual": s.virtual, "micro_batch": s.micro_batch, "zero": s.zero,
        "seconds": plan.seconds,
        "mfu": digits(100 * plan.estimate.mfu),
        "memory": digits(memory.total / GIB),
        "margin": digits(plan.margin / GIB),
        "host": digits(memory.host / GIB),
        "fits": fits,
        "why": "" if fits == "yes" else failing(plan, None, problem),
        "parts": {name: digits(seconds) for name, seconds in plan.estimate.parts.items() if seconds > 0},
        "kinds": {name: digits(getattr(memory, name) / GIB) for name in KINDS},
    }  # fmt: skip


def _kinds(workload: Workload, s: Strategy, stage: int) -> list[tuple[Workload, float]]:
    """(workload of a model whose layers are all of one kind, share of layers of this kind) of a stage."""
    first, count = s.stage_span(workload.shape.layers, stage)
    return layer_works(workload, workload.shape.with_experts(first, count) / count, (first, count))


def _name(work: Workload, workload: Workload) -> str:
    """What distinguishes layers of this kind from the others."""
    shape, names = work.shape, []
    if workload.shape.mixed:
        names += ["of linear attention" if shape.linear else "of attention"] if shape.mixes else ["with an FFN alone"]
    if workload.shape.mixture and shape.has_ffn:
        names.append("with experts" if shape.mixture else "without experts")
    if workload.whole:
        names.append("without the window" if work.keys == workload.whole_keys else "with the window")
    return "".join(f" {name}" for name in names)


def layers(plan: Plan, problem: Problem) -> list[Json]:
    """The work of each stream over time, in seconds, for the passes of a layer, the embedding and the loss."""
    s, workload = plan.strategy, problem.workload
    drawn = []
    for layer_strategy, number in s.layer_kinds(s.most_layers(workload.shape.layers)):
        again = " recomputed" if layer_strategy.recompute == "full" and s.recompute_method == "block" else ""
        for work, share in _kinds(workload, s, s.pipeline - 1):
            kind = "" if share == 1 else _name(work, workload)
            for name, segments in zip(("forward", "backward"), layer(work, layer_strategy)):
                drawn.append(
                    {
                        "name": f"{name} pass of a{again} layer{kind}",
                        "times": round(share * number, 2),
                        **lanes(segments, problem.machine),
                    }
                )
    for name, segments in zip(("embedding, both passes", "loss, both passes"), ends(workload, s)):
        drawn.append({"name": name, "times": 1, **lanes(segments, problem.machine)})
    return drawn


def lanes(segments: list[Segment], machine: Machine) -> Json:
    """Blocks (lane, kind, begin, end, text) of consecutive segments; a block lasts as long as its lane works."""
    blocks, now = [], 0.0
    for segment in segments:
        took = sum(price([Segment(segment.kernels, segment.transfers, segment.copies)], machine).values())
        times = f" x {segment.count:,.4g}" if segment.count != 1 else ""
        begin = now
        for kernel in segment.kernels:
            end = begin + kernel_seconds(kernel, machine) * segment.count
            blocks.append(["compute", kernel.kind, digits(begin), digits(end), kernel.name + times])
            begin = end
        moved: dict[str, float] = {}
        for axis, seconds, what in (
            *((x.axis, transfer_seconds(x, machine), x.kind) for x in segment.transfers),
            *(("host", copy_seconds(x, machine), x.direction.replace("_", " ")) for x in segment.copies),
        ):
            start = moved.get(axis, now)
            moved[axis] = start + seconds * segment.count
            if seconds:
                blocks.append([axis, axis, digits(start), digits(moved[axis]), what.replace("_", "-") + times])
        now += took * segment.count
    return {"seconds": digits(now), "blocks": blocks}


def rounded(thing: Any) -> Any:
    """``thing`` with all its floats rounded by :func:`digits`."""
    if isinstance(thing, dict):
        return {name: rounded(value) for name, value in thing.items()}
    if isinstance(thing, list):
        return [rounded(value) for value in thing]
    return digits(thing) if isinstance(thing, float) else thing


def digits(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
