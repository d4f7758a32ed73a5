# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest way to train a model on some GPUs, among all that fit.

Grids are tried in the order of the time that they take where nothing is saved and no gradient sent: none can be faster
than that. On each grid, ways to save memory are tried from the fastest on, until one fits. The search ends where the
next grid cannot be faster than what has been found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import merge

from megatron.formulas.memory import Memory, device_memory
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import Estimate, estimate, pass_seconds
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.search_space import (
    Limits,
    chunked_savings,
    grids,
    moved,
    plain_savings,
    savings,
    whole_savings,
    within,
    zero_stages,
)

HOST_SHARE = 0.9  # of a node's memory that offloading may fill; the rest is for the processes themselves
NEAR = 1.25  # plans up to so many times the winner's time are looked at, for the picture ...
NEVER_FASTER = 0.99  # of a step whose FFN runs again on its way back: FPDT, whose chunked loss may win a little
MANY = 1500  # ... unless it has so many already

GROUPS = (plain_savings, whole_savings, chunked_savings)

Grid = tuple[int, int, int, int, int]
"""TP, Ulysses, Ring, DP, PP."""


@dataclass(frozen=True)
class Problem:
    """What is planned: a workload on ``gpus`` of a machine's GPUs, within what the user has settled.

    Attributes:
        spare: bytes of a device that a plan must leave.
    """

    workload: Workload
    gpus: int
    machine: Machine
    limits: Limits = Limits()
    spare: float = 0.0

    @property
    def gpus_per_node(self) -> int:
        return min(self.gpus, self.machine.gpus)

    @property
    def host_room(self) -> float:
        """Bytes of host memory for one GPU."""
        return HOST_SHARE * self.machine.host_memory / self.gpus_per_node


@dataclass(frozen=True)
class Fit:
    """A strategy, and whether it fits.

    Attributes:
        memory: of the fullest pipeline stage.
        room: bytes that a device has for it; host_room: that its host has, a GPU; spare: of the device's, to be left.
    """

    strategy: Strategy
    memory: Memory
    room: float
    host_room: float
    spare: float = field(default=0.0, kw_only=True)

    @property
    def margin(self) -> float:
        """Bytes to OOM on the device; negative: that it lacks."""
        return self.room - self.memory.total

    @property
    def host_margin(self) -> float:
        """The same of the host."""
        return self.host_room - self.memory.host

    @property
    def fits(self) -> bool:
        return self.margin >= self.spare and self.host_margin >= 0

    @property
    def tight(self) -> bool:
        """Whether it fits, but for what should be left."""
        return 0 <= self.margin < self.spare and self.host_margin >= 0

    @property
    def grid(self) -> Grid:
        s = self.strategy
        return s.tensor, s.ulysses, s.ring, s.data, s.pipeline


@dataclass(frozen=True)
class Plan(Fit):
    """A strategy, with memory and time."""

    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


@dataclass
class Known:
    """What a search has worked out, for another one within narrower limits.

    Attributes:
        bases: (seconds at least, number, grid), the fastest first.
        orders: ways to save memory on a grid, the fastest first.
    """

    bases: list[tuple[float, int, Strategy]]
    orders: dict[tuple, list[tuple[float, int, Strategy]]] = field(default_factory=dict)


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
        known = Known(sorted((least_seconds(problem, base), index, base) for index, base in enumerate(_bases(problem))))
    bases = [entry for entry in known.bases if within(entry[2], problem.limits)]
    best: dict[Grid, Plan] = {}
    found = Found([], known)
    cut = float("inf")
    for bound, _, base in bases:
        if bound > cut:
            break
        for zero in zero_stages(base, problem.limits):
            plan = _first_that_fits(problem, replace(base, zero=zero), cut, found)
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
            yield from savings(replace(base, zero=zero), problem.workload, problem.limits)


def weighed(problem: Problem, strategy: Strategy) -> Fit:
    """Memory of one strategy."""
    room = problem.machine.usable_memory
    return Fit(strategy, fullest(problem.workload, strategy), room, problem.host_room, spare=problem.spare)


def priced(problem: Problem, strategy: Strategy) -> Plan:
    """Memory and time of one strategy."""
    fit, time = weighed(problem, strategy), estimate(problem.workload, strategy, problem.machine)
    return Plan(strategy, fit.memory, fit.room, fit.host_room, time, spare=fit.spare)


def fullest(workload: Workload, strategy: Strategy) -> Memory:
    """Of the first pipeline stage, which holds the most micro-batches, the second, which also waits to send gradients,
    or the last, which has the loss."""
    stages = {0, min(1, strategy.pipeline - 1), strategy.pipeline - 1}
    return max((device_memory(workload, strategy, stage=stage) for stage in stages), key=lambda memory: memory.total)


def too_much_model(fit: Fit) -> bool:
    """Whether model states alone are too much for a device, whatever is saved of the rest."""
    return fit.memory.total - fit.memory.activations - fit.memory.temporary > fit.room


def least_seconds(problem: Problem, base: Strategy) -> float:
    """A step on this grid without recompute, chunks and copies, and without gradients and weights on their way."""
    parts = estimate(problem.workload, base, problem.machine).parts
    return sum(seconds for name, seconds in parts.items() if name not in ("dp", "optimizer"))


def _grids(problem: Problem) -> Iterable[Strategy]:
    return grids(problem.workload, problem.gpus, problem.limits)


def _bases(problem: Problem) -> list[Strategy]:
    """The grids, but for micro-batches that are no faster than smaller ones on the same grid: they take more memory."""
    kept: list[Strategy] = []
    fastest_yet: dict[Strategy, float] = {}
    for base in sorted(_grids(problem), key=lambda base: base.micro_batch):
        worth = False
        for zero in zero_stages(base, problem.limits):
            alike = replace(base, micro_batch=1, zero=zero)
            seconds = estimate(problem.workload, replace(base, zero=zero), problem.machine).seconds
            if seconds < 0.999 * fastest_yet.get(alike, float("inf")):
                fastest_yet[alike], worth = seconds, True
        if worth:
            kept.append(base)
    return kept


def _first_that_fits(problem: Problem, base: Strategy, cut: float, found: Found) -> Plan | None:
    """The fastest way to make ``base`` fit, unless it takes longer than ``cut``; what does not fit is noted."""
    for strategy in _from_the_fastest(problem, base, found.known.orders):
        time = estimate(problem.workload, strategy, problem.machine)
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


def _from_the_fastest(
    problem: Problem, base: Strategy, orders: dict[tuple, list[tuple[float, int, Strategy]]]
) -> Iterator[Strategy]:
    """All savings on a grid. Their order does not hang on ZeRO, DP, PP: it is found once for many grids.

    They are priced as late as can be: nothing is faster than a step in which nothing is computed twice, and FPDT, which
    computes projections and FFN again on their way back, not than one whose FFN is.
    """
    alike = replace(base, data=1, pipeline=1, virtual=1, zero=1)
    waiting = _ordered(problem, alike, plain_savings, orders)
    later = [(waiting[0][0] if waiting else 0.0, whole_savings)]
    if problem.limits.fpdt_chunk != (0,):
        later.append((waiting[0][0] if waiting else 0.0, chunked_savings))
    while waiting or later:
        if later and (not waiting or waiting[0][0] > later[0][0]):
            _, ways = later.pop(0)
            waiting = list(merge(waiting, _ordered(problem, alike, ways, orders)))
            if later:  # now that the FFN in runs is priced
                least = pass_seconds(problem.workload, replace(alike, ffn_chunks=1), problem.machine)
                later = [(NEVER_FASTER * least, chunked_savings)]
            continue
        suited = moved(waiting[0][2], base, problem.workload)
        waiting = waiting[1:]
        if suited is not None:
            yield suited


def _ordered(
    problem: Problem, alike: Strategy, ways: Callable, orders: dict[tuple, list[tuple[float, int, Strategy]]]
) -> list[tuple[float, int, Strategy]]:
    """(seconds of a micro-batch, number, way), fastest first."""
    limits = problem.limits
    settled = limits.recompute, limits.fpdt_chunk, limits.offload, limits.loss_chunks, limits.ffn_chunks
    key = alike, ways.__name__, *settled
    if key not in orders:
        found = enumerate(ways(alike, problem.workload, limits), 1000 * GROUPS.index(ways))
        orders[key] = sorted(
            (pass_seconds(problem.workload, way, problem.machine), number, way) for number, way in found
        )
    return orders[key]


def fewest_recomputed(problem: Problem, plan: Plan) -> Plan:
    """A plan that recomputes some layers of a stage, with as few of them as fit."""
    s = plan.strategy
    if s.recompute != "full" or s.recompute_method != "block":
        return plan
    low, high = 0, s.recompute_layers  # fits with ``high``, as far as is known not with ``low``
    while high - low > 1:
        middle = (low + high) // 2
        fewer = weighed(problem, replace(s, recompute_layers=middle))
        low, high = (low, middle) if fewer.fits else (middle, high)
    return plan if high == s.recompute_layers else priced(problem, replace(s, recompute_layers=high))


def _seconds(plan: Plan | None) -> float:
    return plan.seconds if plan else float("inf")


def better(plan: Plan, other: Plan) -> bool:
    """Faster; or as fast to one part in a thousand, with less memory."""
    if abs(plan.seconds - other.seconds) > 1e-3 * other.seconds:
        return plan.seconds < other.seconds
    return plan.memory.total < other.memory.total
