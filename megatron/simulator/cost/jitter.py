# SPDX-License-Identifier: Apache-2.0
"""Time of a step on ranks whose speed varies: a collective waits for the slowest rank of its group.

A rank's compute time between two waits is log-normal, with a coefficient of variation. A collective of n ranks begins
after the largest of n such times, and a step adds these up. Groups that wait for each other only at the end of the
step, such as data-parallel replicas, differ in their sums, and the largest sum counts.

Sums of many waits are assumed to be normally distributed. Times are drawn from a generator with a fixed seed.
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
from megatron.simulator.cost.operations import Segment
from megatron.simulator.cost.seconds import kernel_seconds
from megatron.simulator.machines.machine import Machine

QUANTILES = 4000  # points over which the distribution of the largest of n is averaged
NORMAL = NormalDist()


@dataclass(frozen=True)
class Jitter:
    """How much the ranks' speed varies."""

    variation: float  # standard deviation over mean of a rank's compute between two waits
    seed: int = 1234  # of the generator
    steps: int = 1000  # number of steps to draw


@dataclass
class Waits:
    """Compute between waits: by group size, (number of waits, sum of the seconds before them, sum of their squares)."""

    by_ranks: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, ranks: int, seconds: float, count: float = 1.0) -> None:
        """``count`` waits of a group of ``ranks``, each after ``seconds`` of compute."""
        if seconds > 0 and count > 0:
            waits, total, squares = self.by_ranks.get(ranks, (0.0, 0.0, 0.0))
            self.by_ranks[ranks] = waits + count, total + count * seconds, squares + count * seconds**2

    def grow(self, since: Waits, times: float) -> None:
        """Repeat everything that was added after ``since`` another ``times`` times."""
        for ranks, now in self.by_ranks.items():
            then = since.by_ranks.get(ranks, (0.0, 0.0, 0.0))
            self.by_ranks[ranks] = tuple(new + times * (new - old) for new, old in zip(now, then))

    def scaled(self, times: float) -> Waits:
        return Waits({ranks: (times * n, times * a, times * b) for ranks, (n, a, b) in self.by_ranks.items()})


@dataclass(frozen=True)
class Spread:
    """Seconds of a step: mean and 95th percentile."""

    mean: float
    p95: float


def spread(seconds: float, waits: Waits, ranks: int, jitter: Jitter) -> Spread:
    """Mean and 95th percentile of a step that takes ``seconds`` if all ``ranks`` are equally fast."""
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


def describe(result: Spread, jitter: Jitter) -> str:
    """A sentence about a spread, for reports."""
    return (
        f"with ranks whose compute varies by {100 * jitter.variation:g} % a step takes {result.mean:.4g} s on average, "
        f"and one in twenty more than {result.p95:.4g} s (seed {jitter.seed})"
    )


@lru_cache(maxsize=1024)
def largest_of(ranks: int, variation: float) -> tuple[float, float]:
    """(mean, standard deviation) of the largest of ``ranks`` log-normal numbers of mean 1."""
    if variation == 0:
        return 1.0, 0.0
    sigma = sqrt(log(1 + variation**2))
    values = []
    for index in range(QUANTILES):
        level = ((index + 0.5) / QUANTILES) ** (1 / ranks)
        values.append(exp(sigma * NORMAL.inv_cdf(level) - sigma**2 / 2))
    mean = sum(values) / QUANTILES
    return mean, sqrt(sum((value - mean) ** 2 for value in values) / QUANTILES)


# --- the closed form of a step ---
#
# A layer's compute is assumed to be spread evenly between the transfers that it waits for: over TP, Ulysses and Ring,
# and of weights and gradients under ZeRO 2 and 3. Without any such transfer, ranks wait once, at the end of the
# step.


def step_spread(workload: Workload, strategy: Strategy, machine: Machine, jitter: Jitter) -> Spread:
    """Mean and 95th percentile of a step's seconds; without jitter both are the seconds of ``estimate``."""
    seconds = estimate(workload, strategy, machine).seconds
    return spread(seconds, step_waits(workload, strategy, machine), strategy.ranks, jitter)


def step_waits(workload: Workload, strategy: Strategy, machine: Machine) -> Waits:
    """Waits of a step. In a pipeline they include the bubble, in which other stages compute."""
    result, compute = Waits(), 0.0
    shared = strategy.group("dp").size
    times = strategy.micro_batches(workload) + (strategy.pipeline - 1) / strategy.virtual
    for layer_strategy, layers in strategy.layer_kinds(strategy.most_layers(workload.shape.layers)):
        for work, share in workload.kinds():
            for backward, segments in enumerate(layer(work, layer_strategy)):
                took = sum(part.count * kernel_seconds(one, machine) for part in segments for one in part.kernels)
                compute += times * share * layers * took
                met = waits_by_group_size(segments)
                if strategy.zero >= 2 and shared > 1:
                    met[shared] += 1 + (backward and strategy.zero == 3)
                waits = sum(met.values())
                for ranks, count in met.items():
                    result.add(ranks, took / waits, times * share * layers * count)
    if not result.by_ranks:
        result.add(shared, compute)
    return result


def waits_by_group_size(segments: list[Segment]) -> Counter[int]:
    """Number of waits by group size."""
    waits: Counter[int] = Counter()
    for part in segments:
        for transfer in part.transfers:
            if transfer.axis != "pp" and transfer.group.size > 1:
                waits[transfer.group.size] += part.count * transfer.count
    return waits
