# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest way to train a model on some GPUs, among all that fit.

Grids are tried in the order of the time that they take where nothing is saved and no gradient sent: none can be faster
than that. On each grid, ways to save memory are tried from the fastest on, until one fits. The search ends where the
next grid cannot be faster than what has been found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron.formulas.strategy import Strategy
from megatron.simulator.cost.estimate import estimate, step_parts
from megatron.simulator.cost.segment import Parts
from megatron.simulator.planner.plans import Grid, Plan, Problem, better, priced, too_much_model, weighed
from megatron.simulator.planner.search_space import grids, savings, within, zero_stages
from megatron.simulator.planner.ways import Orders, from_the_fastest

NEAR = 1.25  # plans up to so many times the winner's time are looked at, for the picture ...
MANY = 1500  # ... unless it has so many already


@dataclass
class Known:
    """What a search has worked out, for another one within narrower limits.

    Attributes:
        bases: (seconds at least, number, grid), the fastest first.
        orders: ways to save memory on a grid, the fastest first.
    """

    bases: list[tuple[float, int, Strategy]]
    orders: Orders = field(default_factory=dict)


@dataclass
class Found:
    """What a search has seen.

    Attributes:
        plans: of each grid the fastest that fits, fastest first.
        fitting, failing: everything that was priced, for pictures.
    """

    plans: list[Plan]
    known: Known
    fitting: list[Plan] = field(default_factory=list)
    failing: list[Plan] = field(default_factory=list)

    @property
    def tight(self) -> list[Plan]:
        """Of each grid the fastest that fits but leaves too little, where that is faster than its plan."""
        best: dict[Grid, Plan] = {}
        slower = {plan.grid: plan.seconds for plan in self.plans}
        for plan in self.failing:
            if plan.tight and plan.seconds < min(slower.get(plan.grid, float("inf")), _seconds(best.get(plan.grid))):
                best[plan.grid] = plan
        return sorted(best.values(), key=lambda plan: plan.seconds)


def search(problem: Problem, top: int = 10, known: Known | None = None, near: float = NEAR) -> Found:
    """The fastest plans: at least ``top`` grids, if so many fit, and all that come near the winner.

    Args:
        near: plans up to so many times the winner's time are looked at as well.
        known: of a search for the same within wider limits.
    """
    if known is None:
        known = Known(sorted((least, index, base) for index, (least, base) in enumerate(_bases(problem))))
    bases = [entry for entry in known.bases if within(entry[2], problem.limits)]
    best: dict[Grid, Plan] = {}
    found = Found([], known)
    cut = float("inf")
    for bound, _, base in bases:
        if bound > cut:
            break
        for zero in zero_stages(base, problem.limits):
            plan = _first_that_fits(problem, base.but(zero=zero), cut, found)
            if plan is None:
                continue
            found.fitting.append(plan)
            if plan.grid not in best or better(plan, best[plan.grid]):
                best[plan.grid] = plan
        if best:
            times = sorted(plan.seconds for plan in best.values())
            needed = times[top - 1] if len(times) >= top else float("inf")
            seen = len(found.fitting) + len(found.failing)
            cut = max(near * times[0], needed) if seen < MANY else needed
    found.plans = sorted(best.values(), key=lambda plan: plan.seconds)
    return found


def everything(problem: Problem) -> Iterator[Strategy]:
    """All strategies that the program accepts."""
    for base in _grids(problem):
        for zero in zero_stages(base, problem.limits):
            yield from savings(base.but(zero=zero), problem.workload, problem.limits)


def least_seconds(parts: Parts) -> float:
    """A step without gradients and weights on their way."""
    return sum(seconds for name, seconds in parts.items() if name not in ("dp", "optimizer"))


def _grids(problem: Problem) -> Iterable[Strategy]:
    return grids(problem.workload, problem.gpus, problem.limits)


def _bases(problem: Problem) -> Iterator[tuple[float, Strategy]]:
    """(seconds at least, grid), but for micro-batches that are no faster than smaller ones on the same grid: they take
    more memory. The seconds are those without recompute, chunks and copies."""
    workload, machine = problem.workload, problem.machine
    fastest_yet: dict[Strategy, float] = {}
    for base in sorted(_grids(problem), key=lambda base: base.micro_batch):
        worth, parts = False, {}
        for zero in zero_stages(base, problem.limits):
            parts[zero] = step_parts(workload, base.but(zero=zero), machine)
            alike, seconds = base.but(micro_batch=1, zero=zero), sum(parts[zero].values())
            if seconds < 0.999 * fastest_yet.get(alike, float("inf")):
                fastest_yet[alike], worth = seconds, True
        if worth:
            yield least_seconds(parts.get(base.zero) or step_parts(workload, base, machine)), base


def _first_that_fits(problem: Problem, base: Strategy, cut: float, found: Found) -> Plan | None:
    """The fastest way to make ``base`` fit, unless it takes longer than ``cut``; what does not fit is noted."""
    workload, machine = problem.workload, problem.machine
    for strategy in from_the_fastest(workload, base, machine, problem.limits, found.known.orders):
        time = estimate(workload, strategy, machine)
        if time.seconds > cut:
            return None
        fit = weighed(problem, strategy)
        plan = Plan(strategy, fit.memory, fit.room, fit.host_room, time, spare=fit.spare)
        if plan.fits:
            return fewest_recomputed(problem, plan)
        found.failing.append(plan)
        if too_much_model(plan):
            return None
    return None


def fewest_recomputed(problem: Problem, plan: Plan) -> Plan:
    """A plan that recomputes some layers of a stage, with as few of them as fit."""
    s = plan.strategy
    if s.recompute != "full" or s.recompute_method != "block":
        return plan
    low, high = 0, s.recompute_layers  # fits with ``high``, as far as is known not with ``low``
    while high - low > 1:
        middle = (low + high) // 2
        fewer = weighed(problem, s.but(recompute_layers=middle))
        low, high = (low, middle) if fewer.fits else (middle, high)
    return plan if high == s.recompute_layers else priced(problem, s.but(recompute_layers=high))


def _seconds(plan: Plan | None) -> float:
    return plan.seconds if plan else float("inf")
