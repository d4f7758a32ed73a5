# SPDX-License-Identifier: Apache-2.0
"""What to know beside the best plan: how far its time is uncertain, and a length that divides better."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from megatron.formulas.strategy import Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner.plans import Plan, Problem
from megatron.simulator.planner.search import search
from megatron.simulator.planner.words import grid_words

MOST_PADDING = 0.05  # of a sequence's length
WORTH = 0.98  # of the step's time that a padded one may take to be told of


def uncertain_words(plan: Plan, problem: Problem) -> str:
    """How long the step takes where the machine's uncertain shares are lowest, and highest; empty: none is, or none
    matters."""
    machine = problem.machine
    ends = machine.at_the_ends()
    slow, fast = (estimate(problem.workload, plan.strategy, end).seconds for end in ends)
    told = ", ".join(
        f"{name} {low:.2f} to {high:.2f}"
        for name, (low, high) in machine.uncertain.items()
        if low < high and name != "fp8"  # the planner has no FP8
    )
    if not told or slow - fast < 0.01 * plan.seconds:
        return ""
    return (
        f"Published runs disagree on what {machine.name} keeps in training ({told} of its rates alone, "
        f"docs/inside/published-runs.md): by them a step takes {duration(fast)} to {duration(slow)}"
    )


def padded_length(problem: Problem) -> int:
    """The next length, at most a twentieth longer, that more grids can split; the problem's own if there is none."""
    length, whole = problem.workload.seq_length, 2 * problem.gpus
    for unit in (unit for unit in range(whole, 1, -1) if whole % unit == 0):
        padded = ceil(length / unit) * unit
        if padded <= (1 + MOST_PADDING) * length:
            return padded
    return length


def padded_problem(problem: Problem) -> Problem:
    """The same with sequences of :func:`padded_length`; itself where these are no longer."""
    length = padded_length(problem)
    same = length == problem.workload.seq_length
    return problem if same else replace(problem, workload=_longer(problem.workload, length))


def padding_words(problem: Problem, plan: Plan) -> str:
    """Whether sequences that are padded would take less time, and to which length; empty: they would not."""
    longer = padded_problem(problem)
    length, padded = problem.workload.seq_length, longer.workload.seq_length
    if padded == length or problem.workload.keys:
        return ""
    found = search(longer, 1, near=1.0).plans
    if not found or found[0].seconds > WORTH * plan.seconds:
        return ""
    best = found[0]
    return (
        f"--seq-length {length} divides badly: padded to --seq-length {padded}, {grid_words(best.strategy)} takes "
        f"{duration(best.seconds)} a step in place of {duration(plan.seconds)}"
    )


def _longer(workload: Workload, length: int) -> Workload:
    """The workload with longer sequences, and as many learned positions where it has some."""
    shape = workload.shape
    positions = max(shape.positions, length) if shape.positions else 0
    return replace(workload, seq_length=length, shape=replace(shape, positions=positions))
