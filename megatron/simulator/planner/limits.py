# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that fits on given GPUs, the fewest GPUs that suffice, and a choice between offers of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner.explain import gib, words
from megatron.simulator.planner.plans import Fit, Plan, Problem, memory_fit, states_exceed_device
from megatron.simulator.planner.run_cost import Run, Terms, chosen, days, money, run_of
from megatron.simulator.planner.search import SearchResult, search
from megatron.simulator.planner.search_space import grids, savings, zero_stages
from megatron.training.refusal import Refusal

MOST_TOKENS = 2**30
MOST_GPUS = 2**17
FINE = 16  # lengths tried between a power of two and the next


def fits(problem: Problem) -> bool:
    """Whether any strategy fits; those that need least memory are tried first."""
    return any(fit.fits for fit in _least_memory_first(problem))


def nearest(problem: Problem) -> Fit | None:
    """If no strategy fits, the one that lacks the smallest share of memory; None: the program accepts no grid."""
    return min(_least_memory_first(problem), key=lambda fit: fit.lack, default=None)


def _least_memory_first(problem: Problem) -> Iterator[Fit]:
    for grid in grids(problem.workload, problem.gpus, problem.limits):
        if grid.micro_batch != min(problem.limits.micro_batch or (1,)):
            continue
        for zero in reversed(zero_stages(grid, problem.limits)):
            for strategy in sorted(
                savings(replace(grid, zero=zero), problem.workload, problem.limits), key=_memory_rank
            ):
                fit = memory_fit(problem, strategy)
                yield fit
                if states_exceed_device(fit):
                    break


def _memory_rank(s: Strategy) -> tuple[bool | int, ...]:
    """A sort key: FPDT, recompute and offloading first, short chunks before long ones."""
    return (not s.fpdt_chunk, s.recompute != "full", not s.offload_checkpoints, not s.fpdt_offload, s.fpdt_chunk)


def longest(problem: Problem, workload: Callable[[int], Workload]) -> tuple[int, int]:
    """(longest power of two, longest of ``FINE`` steps from it to the next) of tokens that fit; 0: not even 1024.

    Args:
        problem: its GPUs and limits; its sequence length is ignored.
        workload: makes the workload for a number of tokens.
    """

    def fit(length: int) -> bool:
        return fits(replace(problem, workload=workload(length)))

    power, length = 0, 1024
    while length <= MOST_TOKENS:  # the shortest may be too short for the grids
        power = length if fit(length) else power
        if power and power < length:
            break
        length *= 2
    step, best, failed = max(power // FINE, 1), power, 0
    for length in range(power + step, 2 * power, step):
        best, failed = (length, 0) if fit(length) else (best, failed + 1)
        if failed == 2:  # a single failure may be a length that no grid divides
            break
    return power, best


def fewest_gpus(problem: Problem) -> int | None:
    """The smallest number of GPUs on which some strategy fits, if none fits on the problem's GPUs.

    Any number within one node is tried, then numbers of nodes; beyond 32 nodes in steps of a sixteenth. None: no number
    suffices, because the sequence or the model cannot be split further.
    """

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


@dataclass(frozen=True)
class Offer:
    """A kind and number of GPUs to choose from, with its plans."""

    problem: Problem
    results: SearchResult
    plans: list[Plan]  # fastest first; if none leaves enough memory, those that leave less
    run: Run | None  # time and cost of the complete run with the first plan; None: unknown

    @property
    def plan(self) -> Plan:
        return self.plans[0]


def offers(problems: Sequence[Problem], top: int, terms: Terms | None, near: float) -> list[Offer]:
    """An offer for each problem that has a plan.

    Raises:
        Refusal: see :func:`run_of`.
    """
    result = []
    for problem in problems:
        outcome = search(problem, top, near=near)
        plans = outcome.plans or outcome.tight
        if plans:
            result.append(Offer(problem, outcome, plans, run_of(plans[0], problem, terms) if terms else None))
    return result


def best_of(all_offers: Sequence[Offer], terms: Terms | None) -> Offer:
    """The offer with the fastest step or, with ``terms``, the best run.

    Offers that leave too little memory are considered only if no other suits.

    Raises:
        Refusal: no run ends before the deadline, or none is within the budget.
    """
    roomy = [offer for offer in all_offers if not offer.plan.tight]
    for offers in (roomy, all_offers):
        if not offers:
            continue
        if terms is None:
            return min(offers, key=lambda offer: offer.plan.seconds)
        try:
            run = chosen([offer.run for offer in offers], terms)
        except Refusal:
            if len(offers) == len(all_offers):
                raise
            continue
        return next(offer for offer in offers if offer.run is run)
    raise ValueError("no offers")


def offers_table(all_offers: Sequence[Offer], best: Offer, terms: Terms | None) -> Table:
    """The first plan of each offer; with ``terms`` also time and cost of the run. ``best`` is marked."""
    table = Table("", "GPUs", "plan", "step", title="GPUs to choose from", title_justify="left")
    for name in ("the run", "cost") if terms else ():
        table.add_column(name, justify="right", no_wrap=True)
    for offer in all_offers:
        problem, plan = offer.problem, offer.plan
        short = f" (leaves {gib(plan.margin)}, less than the --margin of {gib(problem.spare)})" if plan.tight else ""
        row = [words(plan.strategy) + short, duration(plan.seconds)]
        if offer.run:
            late = bool(terms.deadline) and offer.run.seconds > terms.deadline
            expensive = bool(terms.budget) and offer.run.cost > terms.budget
            cost = money(offer.run.cost, terms) + " (over budget)" * expensive
            row += [days(offer.run.seconds) + " (late)" * late, cost]
        mark = ">" if offer is best else ""
        table.add_row(mark, f"{problem.gpus} x {problem.machine.name}", *row)
    return table


def run_words(run: Run, terms: Terms) -> str:
    """Sentences about the run: steps, time and cost, and if failure rates are given, failures and saves."""
    tokens = run.problem.workload.seq_length * run.problem.workload.global_batch
    text = f"{run.steps:,} steps of {tokens:,} tokens take {days(run.seconds)} and {run.gpu_hours:,.0f} GPU-hours"
    if terms.prices:
        source = f" (prices: {terms.prices.source})" if terms.prices.source else ""
        text += f", {money(run.cost, terms)}{source}"
    failures = run.interrupted
    if failures is None:
        return text + ", if nothing fails."
    share, every = run.seconds / 100, f"{days(failures.interval)}: --save-interval {run.save_interval}"
    return (
        f"{text}. The run fails every {days(failures.between)}, {failures.failures:,.0f} times in all. A save takes "
        f"{duration(failures.save)}; the best interval is {every}. Saves take {failures.saving / share:.1f} % of the "
        f"run, repeated steps and restarts {failures.lost / share:.1f} %."
    )
