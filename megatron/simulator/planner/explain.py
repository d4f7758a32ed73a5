# SPDX-License-Identifier: Apache-2.0
"""Sentences about plans, from their times and bytes: what a plan is, why it wins, why others lose or do not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

from megatron.decisions.division import uneven_heads
from megatron.formulas.kinds.state_figures import states_of
from megatron.formulas.parameters import StageParameters, States, rank_parameters, rank_states
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost import layer_operations
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.operations import BF16
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner.plans import Fit, Plan, Problem
from megatron.simulator.planner.search import SearchCache, search
from megatron.simulator.planner.search_space import Limits, divisors

GIB = 2**30
PARTS = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory": "norms, activations and copies on the device",
    "optimizer": "the optimizer",
    "tp": "waiting for TP's gathers and scatters",
    "ulysses": "waiting for Ulysses' all-to-alls",
    "ring": "waiting for the ring",
    "cp": "waiting for states and rows of convolutions",
    "ep": "waiting for all-to-alls to the experts",
    "dp": "waiting for gradients and weights over DP x CP",
    "pp": "waiting for neighbours in the pipeline",
    "host": "waiting for copies to and from the host",
    "bubble": "the pipeline's bubble",
    "launching": "waiting for the host to launch kernels",
}
AXES = {"tensor": "TP", "ulysses": "Ulysses", "ring": "Ring", "data": "DP", "pipeline": "PP", "expert": "EP"}
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "temporary": "temporary tensors",
}
STATES = ("parameters", "gradients", "optimizer")
MOST_ALTERNATIVES = 6  # in a report


def grid_words(s: Strategy) -> str:
    """``TP 2 x Ulysses 4``."""
    used = [f"{name} {getattr(s, axis)}" for axis, name in AXES.items() if axis != "expert" and getattr(s, axis) > 1]
    return (" x ".join(used) or "one GPU") + (f" with EP {s.expert}" if s.expert > 1 else "")


def saving_words(s: Strategy) -> str:
    """Recompute, chunks and offloading; empty: none of these."""
    words = [f"{s.recompute} recompute"] if s.recompute != "none" else []
    if s.recompute == "full" and s.recompute_method == "block":
        words = [f"recompute of {s.recompute_layers} layer{'s' * (s.recompute_layers > 1)} per stage"]
    elif s.recompute == "full" and s.recompute_layers > 1:
        words = [f"full recompute in units of {s.recompute_layers} layers"]
    if s.keep_attention:
        words.append("attention kept")
    if s.fpdt_chunk:
        words.append(f"FPDT {count(s.fpdt_chunk)}" + ("" if s.fpdt_offload else " on the device"))
    if s.offload_checkpoints:
        words.append("layer inputs on the host")
    if s.stream_hidden:
        words.append("hidden states streamed")
    if s.ffn_chunks and not s.fpdt_chunk:
        words.append(f"FFN in {s.ffn_chunks} chunks")
    if s.loss_chunks:
        words.append(f"loss in {s.loss_chunks} chunks")
    return ", ".join(words)


def words(s: Strategy) -> str:
    """The complete strategy in words."""
    parts = [grid_words(s), f"ZeRO {s.zero}"]
    if s.micro_batch > 1:
        parts.append(f"micro-batch {s.micro_batch}")
    if s.virtual > 1:
        parts.append(f"{s.virtual} virtual stages")
    return ", ".join([*parts, *filter(None, [saving_words(s)])])


def count(number: int) -> str:
    """A number of tokens in K or M if that is exact."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"


def gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def a(name: str) -> str:
    """``name`` with its spoken article: an A100, an H100, a B200."""
    spelled = re.match(r"[AEFHILMNORSX]\d|[aeio]", name)
    return f"{'an' if spelled else 'a'} {name}"


def _for(name: str) -> str:
    return PARTS[name] if PARTS[name].startswith("waiting") else f"for {PARTS[name]}"


def winning(plan: Plan, problem: Problem) -> str:
    """Where the winner's time and memory go."""
    shares = {name: took / plan.seconds for name, took in plan.estimate.parts.items()}
    largest = sorted(shares, key=lambda name: -shares[name])[:4]
    shown = ", ".join(f"{PARTS[name]} {100 * shares[name]:.0f} %" for name in largest if shares[name] > 0.005)
    memory = plan.memory
    held = ", ".join(
        f"{gib(getattr(memory, kind))} {text}" for kind, text in KINDS.items() if getattr(memory, kind) > 0.05 * GIB
    )
    text = (
        f"{words(plan.strategy)}: {duration(plan.seconds)} per step. Most of it is {shown}. The rank that needs most "
        f"memory holds {gib(memory.total)} ({held}), {gib(plan.margin)} less than {a(problem.machine.name)} has for "
        "programs."
    )
    if memory.host:
        node = problem.gpus_per_node
        text += f" Offloading needs {gib(node * memory.host)} of a node's host memory."
    if problem.workload.shape.mixture:
        text += f" {_experts(plan, problem)}"
    if (linear := problem.workload.shape.linear) and linear.rule and plan.strategy.context > 1:
        text += f" {_states(plan, problem)}"
    if (busiest := plan.strategy.busiest(problem.workload)) > 1.005:
        text += f" With packed documents the ring's busiest rank has {busiest:.2f} times the attention of the mean."
    return text


def _experts(plan: Plan, problem: Problem) -> str:
    """The memory of a rank's experts, and the time of their tokens' messages."""
    workload, s, number = problem.workload, plan.strategy, problem.workload.shape.mixture.experts
    held = max(
        (rank_parameters(workload.shape, s, stage) for stage in {0, s.pipeline - 1}), key=lambda one: one.with_experts
    )
    alone = StageParameters((), (), 0, (), experts=held.experts)
    states = rank_states(alone, s, 2) if held.experts else States(0, 0, 0)
    took = plan.estimate.parts.get("ep", 0.0)
    return (
        f"Of {number} experts in a layer it holds {number // s.expert}, with {gib(sum(vars(states).values()))} of "
        f"parameters, gradients and optimizer states; their all-to-alls take {duration(took)}, if the busiest rank's "
        f"experts get {workload.imbalance:g} times the mean."
    )


def _states(plan: Plan, problem: Problem) -> str:
    """What a rank sends for a layer, of each kind, in the forward pass of a micro-batch."""
    workload, s, linear = problem.workload, plan.strategy, problem.workload.shape.linear
    states = states_of(workload, s, BF16)
    kinds = workload.shape.pattern or "".join("*M"[state] for state in linear.layers)
    places = {"a linear-attention or SSM": kinds.find("M"), "an attention": kinds.find("*")}
    sent = {name: _sent(workload, s, place) for name, place in places.items() if place >= 0}
    how = "go from rank to rank" if states.relay else "are gathered as maps of spans"
    how += " after an all-to-all over heads" * states.by_heads
    shown = " and ".join(f"{size / 2**20:,.1f} MiB for {name} layer" for name, size in sent.items())
    return f"Forward, a rank sends its context neighbours {shown}; states {how}."


def _sent(workload: Workload, s: Strategy, layer: int) -> float:
    """Bytes over Ulysses, Ring and CP of a layer's forward pass."""
    forward, _ = layer_operations.layer(replace(workload, shape=workload.shape.kind(layer)), s.but(recompute="none"))
    moved = ((one, part.count) for part in forward for one in part.transfers)
    return sum(one.bytes * one.count * times for one, times in moved if one.axis in ("ulysses", "ring", "cp"))


def losing(plan: Plan, winner: Plan) -> str:
    """How much slower a plan is than the winner, and by which parts of a step; or how much faster."""
    lost = plan.seconds - winner.seconds
    if lost < -1e-3 * winner.seconds:
        return f"{duration(-lost)} ({-100 * lost / winner.seconds:.1f} %) faster"
    if lost <= 1e-3 * winner.seconds:
        return f"as fast as the winner, with {gib(abs(plan.margin - winner.margin))} " + (
            "more to spare" if plan.margin > winner.margin else "less to spare"
        )
    best, parts = winner.estimate.parts, plan.estimate.parts
    changes = {name: parts.get(name, 0.0) - best.get(name, 0.0) for name in {*best, *parts}}
    rising = sorted((name for name in changes if changes[name] > 0), key=lambda name: -changes[name])
    main = [name for name in rising if changes[name] > 0.15 * changes[rising[0]]][:3]
    more = [f"{duration(changes[name])} more {_for(name)}" for name in main]
    falling = min(changes, key=lambda name: changes[name])
    if changes[falling] < -0.15 * changes[rising[0]]:
        more.append(f"{duration(-changes[falling])} less {_for(falling)}")
    return f"{duration(lost)} ({100 * lost / winner.seconds:.1f} %) slower: {', '.join(more)}"


def failing(plan: Fit, winner: Plan | None, problem: Problem) -> str:
    """The memory that is too small, and what needs more of it than the winner."""
    machine = problem.machine
    if plan.margin >= plan.spare:
        node, lack = problem.gpus_per_node, -plan.host_margin
        return f"needs {gib(node * plan.memory.host)} of host memory per node, {gib(node * lack)} more than it has"
    if plan.tight:
        left = f"leaves {gib(plan.margin)} of what {a(machine.name)} has for programs"
        return f"{left}, less than the --margin of {gib(plan.spare)}"
    text = f"needs {gib(plan.memory.total)}, {gib(-plan.margin)} more than {a(machine.name)} has for programs"
    extra = {kind: getattr(plan.memory, kind) - (getattr(winner.memory, kind) if winner else 0) for kind in KINDS}
    kinds = [kind for kind in sorted(extra, key=lambda kind: -extra[kind]) if extra[kind] > 0.1 * -plan.margin][:3]
    if not kinds:
        return text
    shown = ", ".join(f"{gib(extra[kind])} {'more ' if winner else ''}{KINDS[kind]}" for kind in kinds)
    states = kinds[0] in STATES
    return f"{text}: {shown}" + (f"; {holding(plan.strategy)}" if states and winner else "")


def holding(s: Strategy) -> str:
    """The part of the model that a rank holds."""
    share = s.tensor * s.pipeline
    part = "the whole model" if share == 1 else f"1/{share} of the model"
    if s.zero > 2:
        return f"every rank works with {part}, split over {s.group('dp').size} ranks"
    split = {1: "optimizer states", 2: "gradients and optimizer states"}
    over = s.group("dp").size
    return f"every rank holds {part}" + (f", with {split[s.zero]} split over {over} ranks" if s.zero else "")


def alternatives(winner: Plan, problem: Problem, known: SearchCache | None = None) -> list[str]:
    """Sentences about the best plans with one decision of the winner changed: their cost, or the memory they lack.

    ``known``: the cache of the search for the winner.
    """
    texts: dict[Strategy, tuple[float, str]] = {}
    for label, limits in _changes(winner.strategy, problem):
        changed = replace(problem, limits=limits)
        result = search(changed, 1, known, near=1.0)
        near = [plan for plan in result.failing if plan.seconds < winner.seconds]
        if near:
            plan = max(near, key=lambda plan: min(plan.margin, plan.host_margin))
            sooner = f"{label}: {words(plan.strategy)} would take {duration(winner.seconds - plan.seconds)} less"
            texts.setdefault(plan.strategy, (plan.lack, f"{sooner}, but {failing(plan, winner, problem)}."))
        if result.plans and result.plans[0].strategy != winner.strategy:
            plan = result.plans[0]
            text = f"{label}: {words(plan.strategy)} is {losing(plan, winner)}."
            texts.setdefault(plan.strategy, (plan.seconds / winner.seconds - 1, text))
    return [text for _, text in sorted(texts.values())[:MOST_ALTERNATIVES]]


def _changes(s: Strategy, problem: Problem) -> list[tuple[str, Limits]]:
    """(name of a changed decision, limits for the search with it)."""
    limits, changes = problem.limits, []
    sizes = tuple(divisors(problem.gpus))
    for axis, name in AXES.items():
        if axis == "expert" and not problem.workload.shape.mixture:
            continue
        used = getattr(s, axis) > 1
        choice = tuple(size for size in sizes if (size == 1) == used)
        given = getattr(limits, axis)
        if given is not None:
            choice = tuple(size for size in choice if size in given)
        if choice:
            changes.append((f"{'Without' if used else 'With'} {name}", replace(limits, **{axis: choice})))
    same = replace(limits, **{axis: (getattr(s, axis),) for axis in AXES}, micro_batch=(s.micro_batch,))
    if limits.zero is None:
        for zero in range(4):
            if zero != s.zero and (zero < 2 or s.pipeline == 1) and s.group("dp").size > 1:
                changes.append((f"With ZeRO {zero}", replace(same, zero=(zero,))))
    if s.recompute != "none" and limits.recompute is None:
        changes.append(("Without recompute", replace(same, recompute=("none",))))
    if s.fpdt_chunk and limits.fpdt_chunk is None:
        changes.append(("Without FPDT", replace(same, fpdt_chunk=(0,))))
    if limits.offload and (s.offload_checkpoints or (s.fpdt_chunk and s.fpdt_offload)):
        changes.append(("Without host memory", replace(same, offload=False)))
    return changes


MOST_PADDING = 0.05  # of a sequence's length
WORTH = 0.98  # padding is mentioned if it shortens the step to at most this share


def uncertain_words(plan: Plan, problem: Problem) -> str:
    """The range of the step's time over the machine's uncertain shares; empty if it is narrow."""
    machine = problem.machine
    ends = machine.slowest_and_fastest()
    slow, fast = (estimate(problem.workload, plan.strategy, end).seconds for end in ends)
    shares = ", ".join(
        f"{name} {low:.2f} to {high:.2f}"
        for name, (low, high) in machine.uncertain.items()
        if low < high and name != "fp8"  # the planner has no FP8
    )
    if not shares or slow - fast < 0.01 * plan.seconds:
        return ""
    return (
        f"Published runs on {machine.name} reach different shares of its benchmark rates ({shares}; "
        f"docs/inside/published-runs.md): with these a step takes {duration(fast)} to {duration(slow)}"
    )


def uneven_words(problem: Problem, plan: Plan) -> str:
    """A sentence if the winner has a ring because Ulysses does not divide the heads; else an empty text."""
    s = plan.strategy
    ranks, heads = s.ulysses * s.ring, problem.workload.shape.heads // s.tensor
    if s.ring == 1 or ranks > heads or heads % ranks == 0:
        return ""
    return (
        f"Ulysses {ranks} does not divide the {heads} heads of a TP rank: with unequal shares, one rank would have "
        f"{-(-heads // ranks)}, and attention would take {uneven_heads(heads, ranks):.0%} longer"
    )


def padded_length(problem: Problem) -> int:
    """The next length, at most 5 % longer, that more grids can split; the problem's length if there is none."""
    length, whole = problem.workload.seq_length, 2 * problem.gpus
    for unit in (unit for unit in range(whole, 1, -1) if whole % unit == 0):
        padded = ceil(length / unit) * unit
        if padded <= (1 + MOST_PADDING) * length:
            return padded
    return length


def padded_problem(problem: Problem) -> Problem:
    """The problem with sequences of :func:`padded_length`, and as many learned positions, if it has these.

    The same object if the sequences have this length already.
    """
    length, workload, shape = padded_length(problem), problem.workload, problem.workload.shape
    if length == workload.seq_length:
        return problem
    longer = replace(shape, positions=max(shape.positions, length) if shape.positions else 0)
    return replace(problem, workload=replace(workload, seq_length=length, shape=longer))


def padding_words(problem: Problem, plan: Plan) -> str:
    """A sentence about padded sequences if they take less time; otherwise empty."""
    longer = padded_problem(problem)
    length, padded = problem.workload.seq_length, longer.workload.seq_length
    if padded == length or problem.workload.keys:
        return ""
    plans = search(longer, 1, near=1.0).plans
    if not plans or plans[0].seconds > WORTH * plan.seconds:
        return ""
    best = plans[0]
    return (
        f"--seq-length {length} fits few grids: padded to --seq-length {padded}, {grid_words(best.strategy)} takes "
        f"{duration(best.seconds)} per step instead of {duration(plan.seconds)}"
    )
