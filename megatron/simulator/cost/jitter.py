# SPDX-License-Identifier: Apache-2.0
"""What a step takes when ranks are not equally fast: at every collective that compute waits for, the slowest decides.

Between two such waits a rank computes for some seconds, each time a little more or less: its time is log-normal around
them with a coefficient of variation. A collective of n ranks begins when the last of them is there, after the largest
of n such times; over a step these add up. Groups that only meet at the end of the step, as data-parallel replicas do,
differ in their sums, of which again the largest counts.

Sums of many waits are taken as normal. Times are drawn from a generator with a seed: the same seed, the same times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log, sqrt
from random import Random
from statistics import NormalDist

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
