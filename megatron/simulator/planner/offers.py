# SPDX-License-Identifier: Apache-2.0
"""Kinds and numbers of GPUs beside each other: the best plan of each, and what a whole run takes and costs on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner.plans import Plan, Problem
from megatron.simulator.planner.run import Run, Terms, chosen, days, money, run_of
from megatron.simulator.planner.search import Found, search
from megatron.simulator.planner.words import gib, words
from megatron.training.refusal import Refusal


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
