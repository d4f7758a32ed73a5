# SPDX-License-Identifier: Apache-2.0
"""How far GPUs go: the longest sequence that fits on them, and the fewest that do for a model that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner.explain import gib, words
from megatron.simulator.planner.plans import Fit, Plan, Problem, too_much_model, weighed
from megatron.simulator.planner.run_cost import Run, Terms, chosen, days, money, run_of
from megatron.simulator.planner.search import Found, search
from megatron.simulator.planner.search_space import grids, savings, zero_stages
from megatron.training.refusal import Refusal

MOST_TOKENS = 2**30
MOST_GPUS = 2**17
FINE = 16  # steps between a power of two and the next


def fits(problem: Problem) -> bool:
    """Whether any strategy fits; the leanest are tried first."""
    return any(fit.fits for fit in _leanest_first(problem))


def nearest(problem: Problem) -> Fit | None:
    """What comes nearest to fitting, where nothing does; None: the program accepts no grid at all."""

    def lacking(fit: Fit) -> float:
        return max(-fit.margin / fit.room, -fit.host_margin / fit.host_room)

    return min(_leanest_first(problem), key=lacking, default=None)


def _leanest_first(problem: Problem) -> Iterator[Fit]:
    for grid in grids(problem.workload, problem.gpus, problem.limits):
        if grid.micro_batch != min(problem.limits.micro_batch or (1,)):
            continue
        for zero in reversed(zero_stages(grid, problem.limits)):
            ways = sorted(savings(replace(grid, zero=zero), problem.workload, problem.limits), key=_leanness)
            for way in ways:
                fit = weighed(problem, way)
                yield fit
                if too_much_model(fit):
                    break


def _leanness(way: Strategy) -> tuple[bool | int, ...]:
    """Offloaded and recomputed first, short chunks before long ones and none."""
    kept = (way.recompute != "full", not way.offload_checkpoints, not way.fpdt_offload)
    return (not way.fpdt_chunk, *kept, way.fpdt_chunk)


def longest(problem: Problem, workload: Callable[[int], Workload]) -> tuple[int, int]:
    """(longest power of two, longest of FINE steps from it to the next) of tokens that fit; 0: not even 1024.

    Args:
        problem: whose GPUs and limits count; its own length does not.
        workload: of a number of tokens.
    """

    def fit(length: int) -> bool:
        return fits(replace(problem, workload=workload(length)))

    power, length = 0, 1024
    while length <= MOST_TOKENS:  # short ones can be too short to be cut
        power = length if fit(length) else power
        if power and power < length:
            break
        length *= 2
    step, best, failed = max(power // FINE, 1), power, 0
    for length in range(power + step, 2 * power, step):
        best, failed = (length, 0) if fit(length) else (best, failed + 1)
        if failed == 2:  # one alone may be a length that cannot be cut
            break
    return power, best


def fewest_gpus(problem: Problem) -> int | None:
    """The smallest number of GPUs that would do where the problem's do not: of one node any number, then whole nodes;
    of more than 32 nodes, in steps of a sixteenth. None: no number would, since a sequence or a model can be split no
    further."""

    node = problem.node or problem.machine.gpus
    whole = replace(problem, machine=replace(problem.machine, gpus=node))

    def fit(gpus: int) -> bool:
        return fits(replace(whole, gpus=gpus))

    for gpus in range(problem.gpus + 1, node + 1):
        if fit(gpus):
            return gpus
    below = max(1, problem.gpus // node)
    while not fit(2 * below * node):
        below *= 2
        if below * node > MOST_GPUS:
            return None
    steps = range(below + max(1, below // 16), 2 * below, max(1, below // 16))
    return next((nodes * node for nodes in steps if fit(nodes * node)), 2 * below * node)


# Kinds and numbers of GPUs beside each other: the best plan of each, and what a whole run takes and costs on it.


@dataclass(frozen=True)
class Offer:
    """Some GPUs, and how to train on them.

    Attributes:
        plans: ranked; those that leave too little memory where no other fits.
        run: of the first; None: nothing is known of the run.
    """

    problem: Problem
    found: Found
    plans: list[Plan]
    run: Run | None

    @property
    def plan(self) -> Plan:
        return self.plans[0]


def offers(problems: Sequence[Problem], top: int, terms: Terms | None, near: float) -> list[Offer]:
    """Of every problem that has a plan.

    Raises:
        Refusal: see :func:`run_of`.
    """
    made = []
    for problem in problems:
        found = search(problem, top, near=near)
        plans = found.plans or found.tight
        if plans:
            made.append(Offer(problem, found, plans, run_of(plans[0], problem, terms) if terms else None))
    return made


def best_of(found: Sequence[Offer], terms: Terms | None) -> Offer:
    """The fastest step, or what the whole run is best on. One that leaves less than it should comes after all others.

    Raises:
        Refusal: none is soon, or cheap, enough.
    """
    roomy = [offer for offer in found if not offer.plan.tight]
    for offers in (roomy, found):
        if not offers:
            continue
        if terms is None:
            return min(offers, key=lambda offer: offer.plan.seconds)
        try:
            run = chosen([offer.run for offer in offers], terms)
        except Refusal:
            if len(offers) == len(found):
                raise
            continue
        return next(offer for offer in offers if offer.run is run)
    raise ValueError("no offers")


def offers_table(found: Sequence[Offer], best: Offer, terms: Terms | None) -> Table:
    table = Table("", "GPUs", "plan", "a step", title="GPUs to choose from", title_justify="left")
    for name in ("the run", "cost") if terms else ():
        table.add_column(name, justify="right", no_wrap=True)
    for offer in found:
        problem, plan = offer.problem, offer.plan
        short = f" (leaves {gib(plan.margin)}, less than the --margin of {gib(problem.spare)})" if plan.tight else ""
        row = [words(plan.strategy) + short, duration(plan.seconds)]
        if offer.run:
            late = bool(terms.deadline) and offer.run.seconds > terms.deadline
            dear = bool(terms.budget) and offer.run.cost > terms.budget
            row += [days(offer.run.seconds) + " (late)" * late, money(offer.run.cost, terms) + " (dear)" * dear]
        mark = ">" if offer is best else ""
        table.add_row(mark, f"{problem.gpus} x {problem.machine.name}", *row)
    return table


def run_words(run: Run, terms: Terms) -> str:
    """The run in words: its steps, its time, its cost; failures and saves, where rates are given."""
    tokens = run.problem.workload.seq_length * run.problem.workload.global_batch
    text = f"{run.steps:,} steps of {tokens:,} tokens take {days(run.seconds)} and {run.gpu_hours:,.0f} GPU-hours"
    if terms.prices:
        text += f", {money(run.cost, terms)}"
    broken = run.interrupted
    if broken is None:
        return text + ", if nothing fails."
    share, every = run.seconds / 100, f"{days(broken.interval)}: --save-interval {run.save_interval}"
    return (
        f"{text}. Something fails every {days(broken.between)}, {broken.failures:,.0f} times in all. A save takes "
        f"{duration(broken.save)} and is best made every {every}. Saves take {broken.saving / share:.1f} % of the run, "
        f"work done twice and restarts {broken.lost / share:.1f} %."
    )
