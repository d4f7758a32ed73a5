# SPDX-License-Identifier: Apache-2.0
"""For a run that does not fit: the cheapest changes of its command line that fit, priced by the closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.explain import gib
from megatron.simulator.planner.limits import fewest_gpus
from megatron.simulator.planner.plan_report import training_flags
from megatron.simulator.planner.plans import Plan, Problem, memory_fit, priced
from megatron.simulator.planner.search import search
from megatron.simulator.planner.search_space import Limits, savings, zero_stages
from megatron.training.arguments.argv import options
from megatron.training.arguments.stages import strategy_of, workload_of
from megatron.training.pretrain import Possible
from megatron.training.refusal import Fix, Refusal
from megatron.training.settings.config import Config

SPARE = 0.02  # share of a device's memory that stays free, as in plans
MOST = 3  # changes to name
SAME_TIME = 1.005  # of two changes whose times differ by less, only the one of fewer flags is named
TRIED = 12  # candidates that the program may refuse before the search ends

# Flags of Megatron-LM and DeepSpeed that choose the same as ours; a flag of ours replaces all of its line.
SAME_CHOICE = (
    "--ulysses-parallel-size --ring-parallel-size --context-parallel-size --cp-comm-type --ds-sequence-parallel-size "
    "--hierarchical-context-parallel-sizes",
    "--zero-stage --use-distributed-optimizer",
    "--recompute-granularity --recompute-method --recompute-num-layers --recompute-activations --checkpoint-activations"
    " --keep-attention --deepspeed-activation-checkpointing --checkpoint-num-layers --recompute-modules",
    "--num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage",
)


def of_config(config: Config, world_size: int, machine: Machine, vocab_size: int) -> tuple[Problem, Plan] | None:
    """The planning problem of a completed run, and the run as a plan; None if closed forms do not know its model."""
    strategy = strategy_of(config)
    strategy = strategy.but(data=world_size // strategy.ranks, expert=config.parallel.expert_model_parallel_size or 1)
    try:
        workload = workload_of(config, vocab_size)
        limits = Limits().of_shape(workload.shape)
        problem = Problem(workload, world_size, machine, limits, SPARE * machine.memory)
        return problem, priced(problem, strategy)
    except (Refusal, ValueError):
        return None


def lines(
    config: Config, world_size: int, machine: Machine, vocab_size: int, possible: Possible | None, needed: float = 0.0
) -> list[str]:
    """At most five lines: what the closed forms say about the run's memory, and the cheapest changes that fit.

    Empty if they say that it fits, and ``needed`` is not given.

    Args:
        possible: asks the program; None: every change is possible.
        needed: device bytes that a dry run needs; the closed forms are then scaled to them.
    """
    if (known := of_config(config, world_size, machine, vocab_size)) is None:
        return []
    problem, now = known
    if now.margin >= 0 and now.host_margin >= 0 and not needed:
        return []
    if (share := needed / (now.memory.total + machine.reserved)) > 1:
        problem = replace(problem, machine=replace(machine, reserved=machine.memory - machine.usable_memory / share))
    says = f"the step needs {gib(now.memory.total)} of the {gib(machine.usable_memory)} that {machine.name} has"
    if now.margin >= 0:
        says = f"the step does not fit on {machine.name}"
    found = cheapest(problem, now, possible)
    if not found:
        fewest = fewest_gpus(problem)
        more = f"; --world-size {fewest} is the smallest number that suffices" if fewest else ""
        return [f"{says}, and on {world_size} nothing does{more}"]
    return [
        f"{says} (closed forms, {duration(now.seconds)} a step); changes that fit, the fastest first:",
        *(f"  {changed(fix)}: {price(plan, now)}" for fix, plan in found),
    ]


def price(plan: Plan, now: Plan) -> str:
    more = plan.seconds / now.seconds - 1
    than = "as long as now" if abs(more) < 0.005 else f"{abs(100 * more):.0f} % {'more' if more > 0 else 'less'}"
    host = f" and {gib(plan.memory.host)} of host memory" if plan.memory.host else ""
    return f"{duration(plan.seconds)} a step, {than}, {gib(plan.memory.total)}{host}"


def changed(fix: Fix) -> str:
    return ", without ".join(filter(None, [fix.use, fix.drop.replace(" ", ", ")])) or "without them"


def cheapest(problem: Problem, now: Plan, possible: Possible | None) -> list[tuple[Fix, Plan]]:
    """Changes after which the run fits, the fastest first; each next one changes fewer flags."""
    fitting = sorted(_fitting(problem, now.strategy), key=lambda plan: plan.seconds)
    found: list[tuple[Fix, Plan]] = []
    refused = 0
    for plan in fitting:
        fix = change(problem.workload, now.strategy, plan.strategy)
        if (found and _size(fix) >= _size(found[-1][0])) or refused > TRIED:
            continue
        if possible is not None and (fix := possible(fix)) is None:
            refused += 1
            continue
        if found and plan.seconds < SAME_TIME * found[-1][1].seconds:
            found.pop()
        found.append((fix, plan))
    return found if len(found) <= MOST else [*found[: MOST - 1], found[-1]]


def _fitting(problem: Problem, now: Strategy) -> Iterator[Plan]:
    """Plans that fit: all memory savings on the run's grid, and the best plan of all grids."""
    for zero in zero_stages(now, problem.limits):
        plain = {"recompute": "none", "recompute_layers": 1, "recompute_method": "uniform", "keep_attention": False}
        grid = now.but(**plain, zero=zero, offload_checkpoints=False, fpdt_chunk=0, stream_hidden=False)
        kept = [now.but(zero=zero, loss_chunks=strategy.loss_chunks, ffn_chunks=strategy.ffn_chunks)
                for strategy in savings(grid, problem.workload, problem.limits)
                if strategy.recompute == "none" and not strategy.fpdt_chunk]  # fmt: skip
        for strategy in dict.fromkeys([*kept, *savings(grid, problem.workload, problem.limits)]):
            if strategy != now and memory_fit(problem, strategy).fits:
                yield priced(problem, strategy)
    yield from search(problem, top=1, near=1.0).plans


def change(workload: Workload, now: Strategy, then: Strategy) -> Fix:
    """The flags that differ, as a change of the command line."""
    before, after = (options(training_flags(workload, strategy)) for strategy in (now, then))
    use = [option for option in after if option not in before]
    flags = {flag for flag, *_ in use}
    gone = {flag for flag, *_ in before} - {flag for flag, *_ in after} | replaced(flags) - flags
    return Fix(" ".join(word for option in use for word in option), " ".join(sorted(gone)))


def replaced(flags: set[str]) -> set[str]:
    """Other flags that choose the same as one of ``flags``."""
    return {flag for line in SAME_CHOICE if flags & {*line.split()} for flag in line.split()}


def _size(fix: Fix) -> int:
    return len(options(fix.use.split()))
