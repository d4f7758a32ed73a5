# SPDX-License-Identifier: Apache-2.0
"""A whole run of a plan: steps, days, GPU-hours and, with a file of prices, money; and which plan suits a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.simulator.planner.failures import Interrupted, Rates, interrupted
from megatron.simulator.planner.plans import Plan, Problem
from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal, short


@dataclass(frozen=True)
class Prices:
    """What a GPU costs an hour, by its name, in ``currency``."""

    gpu_hour: dict[str, float]
    currency: str

    def of(self, machine: str) -> float:
        """
        Raises:
            Refusal: the file does not say.
        """
        if machine not in self.gpu_hour:
            raise Refusal(f"--prices: no gpu_hour for {machine}; there is one for {', '.join(sorted(self.gpu_hour))}")
        return self.gpu_hour[machine]


@dataclass(frozen=True)
class Terms:
    """What a run is about.

    Attributes:
        tokens: to train on. deadline: seconds, 0: none. budget: money, or GPU-hours without prices; 0: none.
    """

    tokens: float
    prices: Prices | None = None
    rates: Rates | None = None
    deadline: float = 0.0
    budget: float = 0.0


@dataclass(frozen=True)
class Run:
    """A plan from its first step to its last.

    Attributes:
        seconds: of the whole run, failures and all.
        cost: money, or GPU-hours without prices.
    """

    plan: Plan
    problem: Problem
    steps: int
    seconds: float
    interrupted: Interrupted | None
    gpu_hours: float
    cost: float

    @property
    def save_interval(self) -> int:
        """Steps between two saves."""
        return max(1, round(self.interrupted.interval / self.plan.seconds)) if self.interrupted else 0


def run_of(plan: Plan, problem: Problem, terms: Terms) -> Run:
    """
    Raises:
        Refusal: no price for the GPU; or it fails too often.
    """
    workload, gpus = problem.workload, problem.gpus
    steps = math.ceil(terms.tokens / (workload.seq_length * workload.global_batch))
    seconds, broken = steps * plan.seconds, None
    if terms.rates:
        nodes = -(-gpus // problem.gpus_per_node)
        broken = interrupted(seconds, gpus, nodes, workload.shape, terms.rates)
        seconds = broken.seconds
    hours = gpus * seconds / 3600
    price = terms.prices.of(problem.machine.name) if terms.prices else 1.0
    return Run(plan, problem, steps, seconds, broken, hours, hours * price)


def chosen(runs: Sequence[Run], terms: Terms) -> Run:
    """The cheapest run under a deadline, the fastest within a budget, else the fastest.

    Raises:
        Refusal: none is soon, or cheap, enough.
    """
    soon = [run for run in runs if not terms.deadline or run.seconds <= terms.deadline]
    if not soon:
        best = min(runs, key=lambda run: run.seconds)
        raise Refusal(
            f"--deadline: the soonest, {best.problem.gpus} x {best.problem.machine.name}, takes {days(best.seconds)}: "
            "offer more --gpus, or fewer --train-tokens"
        )
    within = [run for run in soon if not terms.budget or run.cost <= terms.budget]
    if not within:
        best = min(soon, key=lambda run: run.cost)
        raise Refusal(
            f"--budget: the cheapest{' before the deadline' if terms.deadline else ''}, {best.problem.gpus} x "
            f"{best.problem.machine.name}, costs {money(best.cost, terms)}: offer other --gpus or --gpu, or fewer "
            "--train-tokens"
        )
    if terms.deadline and not terms.budget:
        return min(within, key=lambda run: run.cost)
    return min(within, key=lambda run: run.seconds)


def read_prices(path: Path) -> Prices:
    """From ``{"currency": "USD", "gpu_hour": {"H100-80G": 2.5}}``.

    Raises:
        Refusal: the file is not that.
    """
    raw = read_json(path, "--prices")
    hours = raw.get("gpu_hour") if isinstance(raw, dict) else None
    if not isinstance(hours, dict) or not hours:
        raise Refusal(f'--prices {path}: give {{"currency": "USD", "gpu_hour": {{"H100-80G": 2.5}}}}')
    for name, price in hours.items():
        if not isinstance(price, int | float) or isinstance(price, bool) or not 0 < price < math.inf:
            raise Refusal(f"--prices {path}: gpu_hour.{name}: must be a number above 0, not {short(price)}")
    currency = raw.get("currency", "USD")
    if not isinstance(currency, str) or len(currency) > 20 or not currency.isprintable() or set("[]") & set(currency):
        raise Refusal(f"--prices {path}: currency: must be a short name such as USD, not {short(currency)}")
    return Prices(hours, currency)


def days(seconds: float) -> str:
    """Days, or hours of less than three days, or minutes of less than three hours."""
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 3 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds / 60:,.1f} minutes"


def money(cost: float, terms: Terms) -> str:
    return f"{cost:,.0f} {terms.prices.currency if terms.prices else 'GPU-hours'}"
