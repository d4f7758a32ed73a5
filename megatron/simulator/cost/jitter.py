# SPDX-License-Identifier: Apache-2.0
"""What a step takes when ranks are not equally fast: at every collective that compute waits for, the slowest decides.

Between two such waits a rank computes for some seconds, each time a little more or less: its time is log-normal around
them with a coefficient of variation. A collective of n ranks begins when the last of them is there, after the largest
of n such times; over a step these add up. Groups that only meet at the end of the step, as data-parallel replicas do,
differ in their sums, of which again the largest counts.

Sums of many waits are taken as normal. Times are drawn from a generator with a seed: the same seed, the same times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log, sqrt
from random import Random
from statistics import NormalDist

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.layer_program import OURS, Program, as_run
from megatron.simulator.cost.operations import Segment
from megatron.simulator.cost.seconds import kernel_seconds
from megatron.simulator.machines.machine import Machine

QUANTILES = 4000  # points at which the largest of n is summed up
NORMAL = NormalDist()


@dataclass(frozen=True)
class Jitter:
    """Attributes:
    variation: standard deviation over mean of a rank's compute between two waits.
    seed: of the generator. steps: that are drawn.
    """

    variation: float
    seed: int = 1234
    steps: int = 1000


@dataclass
class Waits:
    """Compute between waits: for each size of group, how many waits, the sum of the seconds before them, and of the
    squares of these."""

    by_ranks: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, ranks: int, seconds: float, count: float = 1.0) -> None:
        """``count`` waits of a group of ``ranks``, each after ``seconds`` of compute."""
        if seconds > 0 and count > 0:
            waits, total, squares = self.by_ranks.get(ranks, (0.0, 0.0, 0.0))
            self.by_ranks[ranks] = waits + count, total + count * seconds, squares + count * seconds**2

    def grow(self, since: Waits, times: float) -> None:
        """What was added after ``since`` happens ``times`` times more."""
        for ranks, now in self.by_ranks.items():
            then = since.by_ranks.get(ranks, (0.0, 0.0, 0.0))
            self.by_ranks[ranks] = tuple(new + times * (new - old) for new, old in zip(now, then))

    def scaled(self, times: float) -> Waits:
        return Waits({ranks: (times * n, times * a, times * b) for ranks, (n, a, b) in self.by_ranks.items()})


@dataclass(frozen=True)
class Spread:
    """Seconds of a step: on average, and what one in twenty exceeds."""

    mean: float
    p95: float


def spread(seconds: float, waits: Waits, ranks: int, jitter: Jitter) -> Spread:
    """Of a step that takes ``seconds`` where all ``ranks`` are equally fast."""
    mean = variance = 0.0
    for group, (_, total, squares) in waits.by_ranks.items():
        largest, deviation = largest_of(group, jitter.variation)
        mean += total * (largest - 1)
        variance += squares * deviation**2
    groups = max(1, ranks // max(waits.by_ranks, default=1))
    random, deviation = Random(jitter.seed), sqrt(variance)
    drawn = sorted(
        seconds + mean + deviation * NORMAL.inv_cdf(min(random.random() ** (1 / groups), 1 - 1e-15) or 1e-300)
        for _ in range(jitter.steps)
    )
    return Spread(sum(drawn) / len(drawn), drawn[int(0.95 * (len(drawn) - 1))])


def told(found: Spread, jitter: Jitter) -> str:
    """A sentence."""
    return (
        f"with ranks whose compute varies by {100 * jitter.variation:g} % a step takes {found.mean:.4g} s on average, "
        f"and one in twenty more than {found.p95:.4g} s (seed {jitter.seed})"
    )


@lru_cache(maxsize=1024)
def largest_of(ranks: int, variation: float) -> tuple[float, float]:
    """(mean, standard deviation) of the largest of ``ranks`` log-normal numbers of mean 1."""
    if variation == 0:
        return 1.0, 0.0
    sigma = sqrt(log(1 + variation**2))
    found = []
    for index in range(QUANTILES):
        level = ((index + 0.5) / QUANTILES) ** (1 / ranks)
        found.append(exp(sigma * NORMAL.inv_cdf(level) - sigma**2 / 2))
    mean = sum(found) / QUANTILES
    return mean, sqrt(sum((value - mean) ** 2 for value in found) / QUANTILES)


# A step on ranks that are not equally fast, in closed form: where compute waits for others, and what that costs.
#
# A layer's compute is taken to lie evenly between the transfers that it waits for: those of TP, Ulysses and Ring, and
# under ZeRO 2 and 3 the weights and gradients. Without any of them ranks meet once, at the end of the step.


def step_spread(
    workload: Workload, strategy: Strategy, machine: Machine, jitter: Jitter, program: Program = OURS
) -> Spread:
    """Mean and 95th percentile of a step's seconds, which are :func:`~megatron.simulator.cost.estimate.estimate`'s
    where all ranks are equally fast."""
    seconds = estimate(workload, strategy, machine, program).seconds
    return spread(seconds, step_waits(workload, strategy, machine, program), strategy.ranks, jitter)


def step_waits(workload: Workload, strategy: Strategy, machine: Machine, program: Program = OURS) -> Waits:
    """Of a step: its layers' compute, cut at what they wait for; in a pipeline also of the bubble, which is others'."""
    found, compute = Waits(), 0.0
    shared = strategy.group("dp").size
    times = strategy.micro_batches(workload) + (strategy.pipeline - 1) / strategy.virtual
    for how, layers in strategy.layer_kinds(strategy.most_layers(workload.shape.layers)):
        for backward, plain in enumerate(layer(workload, how)):
            segments = as_run(plain, workload.shape, program)
            took = sum(part.count * kernel_seconds(one, machine) for part in segments for one in part.kernels)
            compute += times * layers * took
            met = meetings(segments)
            if strategy.zero >= 2 and shared > 1:
                met[shared] += 1 + (backward and strategy.zero == 3)
            waits = sum(met.values())
            for ranks, count in met.items():
                found.add(ranks, took / waits, times * layers * count)
    if not found.by_ranks:
        found.add(shared, compute)
    return found


def meetings(segments: list[Segment]) -> Counter[int]:
    """How often groups of each size wait for one another."""
    found: Counter[int] = Counter()
    for part in segments:
        for transfer in part.transfers:
            if transfer.axis != "pp" and transfer.group.size > 1:
                found[transfer.group.size] += part.count * transfer.count
    return found
