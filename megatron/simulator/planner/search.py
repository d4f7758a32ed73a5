# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest way to train a model on some GPUs, among all that fit.

Grids are tried in the order of the time that they take where nothing is saved and no gradient sent: none can be faster
than that. On each grid, ways to save memory are tried from the fastest on, until one fits. The search ends where the
next grid cannot be faster than what has been found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heapreplace

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate, pass_seconds, step_parts
from megatron.simulator.cost.operations import Parts
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.plans import Grid, Plan, Problem, better, priced, too_much_model, weighed
from megatron.simulator.planner.search_space import (
    Limits,
    chunked_savings,
    grids,
    moved,
    plain_savings,
    savings,
    united_savings,
    whole_savings,
    within,
    zero_stages,
)
from megatron.training.arguments.config import Config

# Ways to save memory on a grid, from the fastest on, each priced as late as can be.
#
# Most ways on most grids are never looked at: a faster one fits, or the search ends. So a way waits at the price of a
# simpler one that it only adds to (recompute, copies to the host), and is priced itself when nothing faster is left.


NEVER_FASTER = 0.99  # of a step whose FFN runs again on its way back: FPDT, whose chunked loss may win a little
ROUNDING = 1 - 1e-9  # of a simpler way's price, so that sums in another order hide nothing

GROUPS = (plain_savings, whole_savings, chunked_savings, united_savings)

Entry = tuple[float, int, Strategy]
"""Seconds of a micro-batch, number of a way, the way."""


class Ranked:
    """Ways by their seconds; of those as fast, by their numbers.

    Args:
        ways: numbered.
        seconds: of a way.
    """

    def __init__(self, ways: Iterable[tuple[int, Strategy]], seconds: Callable[[Strategy], float]) -> None:
        self._seconds = seconds
        self._priced: dict[Strategy, float] = {}
        self._found: list[Entry] = []
        # (seconds, or at least; whether that is the way's own price; number; the way, simpler ones before it)
        self._waiting = [(0.0, False, number, simpler(way)) for number, way in ways]
        heapify(self._waiting)

    def at(self, place: int) -> Entry | None:
        """The way at this place; None: there are no more."""
        while len(self._found) <= place and self._waiting:
            least, own, number, steps = self._waiting[0]
            if own:
                heappop(self._waiting)
                self._found.append((least, number, steps[-1]))
                continue
            seconds = self._priced.get(steps[0])
            if seconds is None:
                seconds = self._priced[steps[0]] = self._seconds(steps[0])
            if len(steps) == 1:
                heapreplace(self._waiting, (seconds, True, number, steps))
            else:
                heapreplace(self._waiting, (max(least, ROUNDING * seconds), False, number, steps[1:]))
        return self._found[place] if place < len(self._found) else None


def simpler(way: Strategy) -> list[Strategy]:
    """Ways that take no longer than ``way``, each adding to the one before: it is the last of them.

    Without copies to the host a step's kernels and transfers are the same or fewer; without recompute fewer.
    """
    steps = [way]
    here = way.but(offload_checkpoints=False, stream_hidden=False, fpdt_offload=way.fpdt_offload and not way.fpdt_chunk)
    if here.recompute_method == "uniform" and here != way:
        steps.append(here)
    if here.recompute != "none":
        steps.append(here.but(recompute="none", recompute_method="uniform", recompute_layers=1))
    return steps[::-1]


Orders = dict[tuple, Ranked]
"""By what the order hangs on."""


def from_the_fastest(
    workload: Workload, base: Strategy, machine: Machine, limits: Limits, orders: Orders
) -> Iterator[Strategy]:
    """All savings on a grid. Their order does not hang on ZeRO and PP, nor on DP where all samples are alike: it is
    found once for many grids. Where they differ, DP waits for the most pairs (Strategy.slowest), and attention weighs
    more in what is computed again.

    Nothing is faster than a step in which nothing is computed twice, and FPDT, which computes projections and FFN again
    on their way back, not than one whose FFN is: groups of ways wait for that. Units of several layers wait until
    layer by layer is to be recomputed.
    """
    alike = base.but(data=base.data if workload.spread else 1, pipeline=1, virtual=1, zero=1, first_less=0, last_less=0)
    groups, places = [_ranked(workload, alike, machine, limits, plain_savings, orders)], [0]
    first = groups[0].at(0)
    least = first[0] if first else 0.0
    later = [(least, whole_savings)]
    if limits.fpdt_chunk != (0,):
        later.append((least, chunked_savings))
    united = False
    while True:
        heads = [(entry, index) for index, ways in enumerate(groups) if (entry := ways.at(places[index]))]
        if later and (not heads or min(heads)[0][0] > later[0][0]):
            _, ways = later.pop(0)
            groups.append(_ranked(workload, alike, machine, limits, ways, orders))
            places.append(0)
            if later:  # now that the FFN in runs is priced
                later = [(NEVER_FASTER * pass_seconds(workload, alike.but(ffn_chunks=1), machine), chunked_savings)]
            continue
        way = min(heads)[0][2] if heads else None
        if not united and (way is None or (way.recompute == "full" and way.recompute_method == "uniform")):
            united = True
            groups.append(_ranked(workload, alike, machine, limits, united_savings, orders))
            places.append(0)
            continue
        if not heads:
            return
        _, index = min(heads)
        places[index] += 1
        suited = moved(way, base, workload)
        if suited is not None:
            yield suited


def _ranked(
    workload: Workload, alike: Strategy, machine: Machine, limits: Limits, ways: Callable, orders: Orders
) -> Ranked:
    settled = limits.recompute, limits.fpdt_chunk, limits.offload, limits.loss_chunks, limits.ffn_chunks
    key = alike, ways.__name__, *settled
    if key not in orders:
        numbered = enumerate(ways(alike, workload, limits), 1000 * GROUPS.index(ways))
        orders[key] = Ranked(numbered, lambda way: pass_seconds(workload, way, machine))
    return orders[key]


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


# The grid of an elastic run: the fastest that fits, with the ways to save memory that its flags name.


def fastest(configs: list[Config], world_size: int) -> int | None:
    """The index of the configuration that takes the least time on so many of its ``--gpu``; None: none fits.

    Of those that take the same time to one part in a thousand, the one with the most memory to spare.

    Args:
        configs: of one run on different grids, completed.

    Raises:
        Refusal: the GPU is not known.
    """
    from megatron.simulator.dry_run.one_rank import vocabulary_of
    from megatron.simulator.machines.machine_file import load
    from megatron.simulator.planner.plans import Problem, better, priced
    from megatron.training.arguments.stages import strategy_of, workload_of

    machine, best = load(configs[0].simulation.gpu), None
    vocab_size, _ = vocabulary_of(configs[0])
    for index, config in enumerate(configs):
        strategy = strategy_of(config)
        strategy = replace(strategy, data=world_size // strategy.ranks)
        workload = workload_of(config, vocab_size)
        plan = priced(Problem(workload, world_size, machine), strategy)
        if plan.fits and (best is None or better(plan, best[1])):
            best = index, plan
    return None if best is None else best[0]
