# SPDX-License-Identifier: Apache-2.0
"""Ways to save memory on a grid, from the fastest on, each priced as late as can be.

Most ways on most grids are never looked at: a faster one fits, or the search ends. So a way waits at the price of a
simpler one that it only adds to (recompute, copies to the host), and is priced itself when nothing faster is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import pass_seconds
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.search_space import (
    Limits,
    chunked_savings,
    moved,
    plain_savings,
    united_savings,
    whole_savings,
)

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
    alike = base.but(
        data=base.data if workload.spread else 1, pipeline=1, virtual=1, zero=1, first_less=0, last_less=0
    )
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
