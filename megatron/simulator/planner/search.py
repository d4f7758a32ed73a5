# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest strategy that fits on given GPUs.

Grids are tried in the order of a lower bound: their time without memory savings and without gradient transfers. On
each grid, memory savings are tried from the fastest on, until one fits. The search ends when the next grid's bound
exceeds the time of the known plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heapreplace
from itertools import count

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate, pass_seconds, step_parts
from megatron.simulator.cost.operations import Parts
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.plans import Grid, Plan, Problem, better, memory_fit, priced, states_exceed_device
from megatron.simulator.planner.search_space import Limits, grids, on_grid, savings, within, zero_stages
from megatron.training.arguments.stages import strategy_of, workload_of
from megatron.training.settings.config import Config

ROUNDING = 1 - 1e-9  # factor on a lower bound, against rounding errors of sums in another order

Entry = tuple[float, int, Strategy]
"""Seconds of a micro-batch, number of a strategy, the strategy."""


class Ranked:
    """Strategies in the order of their seconds, then of their numbers, priced as late as possible.

    Most strategies on most grids need no price, because a faster one fits or the search ends. Until a price is needed,
    the price of a simpler strategy, without recompute or host copies, serves as a lower bound.

    Args:
        seconds: a function that returns a strategy's seconds.
    """

    def __init__(self, strategies: Iterable[Strategy], seconds: Callable[[Strategy], float]) -> None:
        self._seconds = seconds
        self._priced: dict[Strategy, float] = {}
        self._ranked: list[Entry] = []
        # (seconds or a lower bound, whether it is the strategy's price, number, simpler strategies and the strategy)
        self._waiting = [(0.0, False, number, simpler(strategy)) for number, strategy in enumerate(strategies)]
        heapify(self._waiting)

    def at(self, place: int) -> Entry | None:
        """The entry at this place of the order; None if there are fewer entries."""
        while len(self._ranked) <= place and self._waiting:
            least, is_price, number, steps = self._waiting[0]
            if is_price:
                heappop(self._waiting)
                self._ranked.append((least, number, steps[-1]))
                continue
            seconds = self._priced.get(steps[0])
            if seconds is None:
                seconds = self._priced[steps[0]] = self._seconds(steps[0])
            if len(steps) == 1:
                heapreplace(self._waiting, (seconds, True, number, steps))
            else:
                heapreplace(self._waiting, (max(least, ROUNDING * seconds), False, number, steps[1:]))
        return self._ranked[place] if place < len(self._ranked) else None


def simpler(s: Strategy) -> list[Strategy]:
    """Strategies that take no longer than ``s``, each adding to the previous one; the last is ``s``.

    A step without host copies has at most as many kernels and transfers; without recompute it has fewer kernels.
    """
    steps = [s]
    no_copies = s.but(offload_checkpoints=False, stream_hidden=False, fpdt_offload=s.fpdt_offload and not s.fpdt_chunk)
    if no_copies.recompute_method == "uniform" and no_copies != s:
        steps.append(no_copies)
    if no_copies.recompute != "none":
        none = {"recompute": "none", "recompute_method": "uniform", "recompute_layers": 1, "keep_attention": False}
        steps.append(no_copies.but(**none))
    return steps[::-1]


Orders = dict[tuple, Ranked]
"""Ranked savings by everything that their order depends on."""


def fastest_savings(
    workload: Workload, base: Strategy, machine: Machine, limits: Limits, orders: Orders
) -> Iterator[Strategy]:
    """All savings on a grid, the fastest first.

    Their order does not depend on ZeRO and PP, so many grids share it. It depends on DP only if samples differ, because
    DP waits for the sample with most pairs (`Strategy.slowest`).
    """
    shared = base.but(
        data=base.data if workload.spread else 1, pipeline=1, virtual=1, zero=1, first_less=0, last_less=0
    )
    key = shared, limits.recompute, limits.fpdt_chunk, limits.offload, limits.loss_chunks, limits.ffn_chunks
    if key not in orders:
        orders[key] = Ranked(savings(shared, workload, limits), lambda s: pass_seconds(workload, s, machine))
    for place in count():
        if (entry := orders[key].at(place)) is None:
            return
        if (strategy := on_grid(entry[2], base, workload)) is not None:
            yield strategy


NEAR = 1.25  # for the picture, plans up to this multiple of the fastest plan's time are searched
MANY = 1500  # from this number of priced plans on, no further plans are searched for the picture


@dataclass
class SearchCache:
    """Intermediate results, which another search within narrower limits can use."""

    bases: list[tuple[float, int, Strategy]]  # (lower bound in seconds, number, grid), the fastest first
    orders: Orders = field(default_factory=dict)  # memory savings on a grid, the fastest first


@dataclass
class SearchResult:
    """The result of a search."""

    plans: list[Plan]  # the fastest plan of each grid that fits, fastest first
    known: SearchCache
    fitting: list[Plan] = field(default_factory=list)  # all priced plans that fit, for pictures
    failing: list[Plan] = field(default_factory=list)  # all priced plans that do not fit, for pictures

    @property
    def tight(self) -> list[Plan]:
        """For each grid the fastest plan that leaves too little memory, if it is faster than the grid's plan."""
        best: dict[Grid, Plan] = {}
        slower = {plan.grid: plan.seconds for plan in self.plans}
        for plan in self.failing:
            if plan.tight and plan.seconds < min(slower.get(plan.grid, float("inf")), _seconds(best.get(plan.grid))):
                best[plan.grid] = plan
        return sorted(best.values(), key=lambda plan: plan.seconds)


def search(problem: Problem, top: int = 10, known: SearchCache | None = None, near: float = NEAR) -> SearchResult:
    """The fastest plans, of at least ``top`` grids if as many fit.

    Args:
        near: plans up to this multiple of the winner's time are searched as well.
        known: the cache of a search for the same problem within wider limits.
    """
    if known is None:
        known = SearchCache(sorted((least, index, base) for index, (least, base) in enumerate(_bases(problem))))
    bases = [entry for entry in known.bases if within(entry[2], problem.limits)]
    best: dict[Grid, Plan] = {}
    result = SearchResult([], known)
    cut = float("inf")
    for bound, _, base in bases:
        if bound > cut:
            break
        for zero in zero_stages(base, problem.limits):
            plan = _first_that_fits(problem, base.but(zero=zero), cut, result)
            if plan is None:
                continue
            result.fitting.append(plan)
            if plan.grid not in best or better(plan, best[plan.grid]):
                best[plan.grid] = plan
        if best:
            times = sorted(plan.seconds for plan in best.values())
            needed = times[top - 1] if len(times) >= top else float("inf")
            seen = len(result.fitting) + len(result.failing)
            cut = max(near * times[0], needed) if seen < MANY else needed
    result.plans = sorted(best.values(), key=lambda plan: plan.seconds)
    return result


def all_strategies(problem: Problem) -> Iterator[Strategy]:
    """All strategies that the program accepts."""
    for base in _grids(problem):
        for zero in zero_stages(base, problem.limits):
            yield from savings(base.but(zero=zero), problem.workload, problem.limits)


def least_seconds(parts: Parts) -> float:
    """Seconds of a step without transfers of gradients and weights and without the optimizer."""
    return sum(seconds for name, seconds in parts.items() if name not in ("dp", "optimizer"))


def _grids(problem: Problem) -> Iterable[Strategy]:
    return grids(problem.workload, problem.gpus, problem.limits)


def _bases(problem: Problem) -> Iterator[tuple[float, Strategy]]:
    """(lower bound in seconds, grid). The bound is the time without recompute, chunks and copies.

    A micro-batch that is no faster than a smaller one on the same grid is left out, because it needs more memory.
    """
    workload, machine = problem.workload, problem.machine
    fastest_yet: dict[Strategy, float] = {}
    for base in sorted(_grids(problem), key=lambda base: base.micro_batch):
        worth, parts = False, {}
        for zero in zero_stages(base, problem.limits):
            parts[zero] = step_parts(workload, base.but(zero=zero), machine)
            same_grid, seconds = base.but(micro_batch=1, zero=zero), sum(parts[zero].values())
            if seconds < 0.999 * fastest_yet.get(same_grid, float("inf")):
                fastest_yet[same_grid], worth = seconds, True
        if worth:
            yield least_seconds(parts.get(base.zero) or step_parts(workload, base, machine)), base


def _first_that_fits(problem: Problem, base: Strategy, cut: float, result: SearchResult) -> Plan | None:
    """The fastest plan on ``base`` that fits, if it takes at most ``cut``; adds others to ``result.failing``."""
    workload, machine, best = problem.workload, problem.machine, None
    for strategy in fastest_savings(workload, base, machine, problem.limits, result.known.orders):
        time = estimate(workload, strategy, machine)
        if time.seconds > (NEAR * best.seconds if best else cut):
            return best
        fit = memory_fit(problem, strategy)
        plan = Plan(strategy, fit.memory, fit.room, fit.host_room, time, spare=fit.spare)
        if plan.fits:
            best = min(filter(None, (best, fewest_recomputed(problem, plan))), key=_seconds)
            continue
        result.failing.append(plan)
        if states_exceed_device(plan):
            return best
    return best


def fewest_recomputed(problem: Problem, plan: Plan) -> Plan:
    """With block recompute, the plan that recomputes as few layers as memory allows; other plans stay as they are."""
    s = plan.strategy
    if s.recompute != "full" or s.recompute_method != "block":
        return plan
    low, high = 0, s.recompute_layers  # fits with ``high``, probably not with ``low``
    while high - low > 1:
        middle = (low + high) // 2
        fewer = memory_fit(problem, s.but(recompute_layers=middle))
        low, high = (low, middle) if fewer.fits else (middle, high)
    return plan if high == s.recompute_layers else priced(problem, s.but(recompute_layers=high))


def _seconds(plan: Plan | None) -> float:
    return plan.seconds if plan else float("inf")


def fastest(configs: list[Config], world_size: int) -> int | None:
    """For an elastic run, the index of the fastest configuration on ``world_size`` GPUs (``--gpu``); None: none fits.

    If times differ by less than a thousandth, the configuration that needs less memory is chosen.

    Args:
        configs: completed configurations of one run, on different grids.

    Raises:
        Refusal: the GPU is not known.
    """
    from megatron.simulator.dry_run.one_rank import vocabulary_of

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
