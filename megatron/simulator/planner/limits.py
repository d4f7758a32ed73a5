# SPDX-License-Identifier: Apache-2.0
"""How far GPUs go: the longest sequence that fits on them, and the fewest that do for a model that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.planner.plans import Fit, Problem, too_much_model, weighed
from megatron.simulator.planner.search_space import grids, savings, zero_stages

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
