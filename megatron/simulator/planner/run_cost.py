# SPDX-License-Identifier: Apache-2.0
"""The complete run of a plan: steps, days, GPU-hours and, with a file of prices, money; the best run within limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.formulas.parameters import stage_parameters
from megatron.formulas.strategy import Shape
from megatron.simulator.machines.machine_file import number, refuse_unknown, text
from megatron.simulator.planner.plans import Plan, Problem
from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal, short

# --- failures and checkpoints of a long run ---
#
# A run of thousands of GPUs fails every few hours, which costs the work since the last checkpoint and a restart;
# frequent saves cost time, too. The best interval is J. T. Daly's higher-order estimate (A higher order estimate of the
# optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22, 2006, eq. 37), which for short
# saves is J. W. Young's sqrt(2 d M) (A first order approximation to the optimum checkpoint interval, CACM 17, 1974).
# The time of the run is Daly's eq. 20: failures come at random, also during saves and restarts.

STATE_BYTES = 14  # per parameter in a checkpoint: bf16 weight, fp32 main weight, Adam's two moments


@dataclass(frozen=True)
class Rates:
    """Failure rates of a cluster, from a JSON file."""

    gpu_hours_per_failure: float  # GPU-hours between two failures that end a run, for any reason
    restart_minutes: float = 10.0  # from a failure to the next step, with loading
    save_gb_per_second: float = 2.0  # from one node to the storage; 10^9 bytes
    # seconds for which a save interrupts training; 0: computed from the checkpoint's size. An asynchronous save
    # interrupts training for a few seconds only.
    save_seconds: float = 0.0
    source: str = ""  # where the figures come from


@dataclass(frozen=True)
class Interrupted:
    """A run with failures."""

    seconds: float  # of the complete run
    failures: float  # their number
    between: float  # seconds between two failures
    interval: float  # seconds of training between two saves
    save: float  # seconds of a save
    # saving, lost: seconds of the run for saves, and for repeated steps and restarts
    saving: float
    lost: float


def read_rates(path: Path) -> Rates:
    """The rates of a JSON file. Raises Refusal if the file cannot be read, or a field is unknown, missing or wrong."""
    where, raw = f"--failures {path}", read_json(path, "--failures")
    if not isinstance(raw, dict) or "gpu_hours_per_failure" not in raw:
        raise Refusal(f"{where}: give an object with gpu_hours_per_failure (docs/use/planner.md)")
    refuse_unknown(where, "", raw, [field.name for field in fields(Rates)])
    for name, value in raw.items():
        if name == "source":
            text(where, name, value)
        else:
            number(where, name, value, above=name not in ("restart_minutes", "save_seconds"))
    return Rates(**raw)


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes of a checkpoint with model and optimizer."""
    return STATE_BYTES * stage_parameters(shape, 1, 1, 0).numel


def best_interval(save: float, between: float) -> float:
    """Best seconds of training between saves of ``save`` seconds, with ``between`` seconds from failure to failure."""
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def interrupted(work: float, gpus: int, nodes: int, shape: Shape, rates: Rates) -> Interrupted:
    """A run that takes ``work`` seconds without failures.

    Raises:
        Refusal: failures are so frequent that the run makes no progress.
    """
    between = 3600 * rates.gpu_hours_per_failure / gpus
    save = rates.save_seconds or checkpoint_bytes(shape) / (1e9 * rates.save_gb_per_second * nodes)
    restart = 60 * rates.restart_minutes
    interval = min(best_interval(save, between), work)
    if max(restart, interval + save) > 20 * between:
        raise Refusal(
            f"--failures: {gpus} GPUs fail every {between:.0f} s, a save and a restart take {save + restart:.0f} s: "
            "such a run makes no progress; use fewer --gpus, or faster saves and restarts"
        )
    seconds = between * math.exp(restart / between) * math.expm1((interval + save) / between) * work / interval
    saving = save * work / interval
    return Interrupted(seconds, seconds / between, between, interval, save, saving, seconds - work - saving)


@dataclass(frozen=True)
class Prices:
    """Prices of a GPU-hour by the GPU's name, in ``currency``."""

    gpu_hour: dict[str, float]
    currency: str
    source: str = ""  # where they come from

    def of(self, machine: str) -> float:
        """The price for a machine. Raises Refusal if there is none."""
        if machine not in self.gpu_hour:
            known = ", ".join(sorted(self.gpu_hour))
            raise Refusal(f"--prices: no gpu_hour for {machine}; add it to the file, which has {known}")
        return self.gpu_hour[machine]


@dataclass(frozen=True)
class Terms:
    """Size and limits of a run."""

    tokens: float  # to train on
    prices: Prices | None = None
    rates: Rates | None = None
    deadline: float = 0.0  # seconds; 0: none
    budget: float = 0.0  # money, or GPU-hours without prices; 0: none


@dataclass(frozen=True)
class Run:
    """The complete run of a plan."""

    plan: Plan
    problem: Problem
    step: float  # seconds
    steps: int
    seconds: float  # of the complete run, including failures
    interrupted: Interrupted | None
    gpu_hours: float
    cost: float  # money, or GPU-hours without prices

    @property
    def save_interval(self) -> int:
        """Steps between two saves; 0 without failure rates."""
        return max(1, round(self.interrupted.interval / self.step)) if self.interrupted else 0


def run_of(plan: Plan, problem: Problem, terms: Terms, step: float = 0.0) -> Run:
    """The complete run of a plan, by default with its time of a step.

    Raises:
        Refusal: there is no price for the GPU, or the run fails too often.
    """
    step = step or plan.seconds
    workload, gpus = problem.workload, problem.gpus
    steps = math.ceil(terms.tokens / (workload.seq_length * workload.global_batch))
    seconds, failures = steps * step, None
    if terms.rates:
        nodes = -(-gpus // problem.gpus_per_node)
        failures = interrupted(seconds, gpus, nodes, workload.shape, terms.rates)
        seconds = failures.seconds
    hours = gpus * seconds / 3600
    price = terms.prices.of(problem.machine.name) if terms.prices else 1.0
    return Run(plan, problem, step, steps, seconds, failures, hours, hours * price)


def chosen(runs: Sequence[Run], terms: Terms) -> Run:
    """With a deadline only, the cheapest run before it; otherwise the fastest run within the limits.

    Raises:
        Refusal: no run ends before the deadline, or none is within the budget.
    """
    soon = [run for run in runs if not terms.deadline or run.seconds <= terms.deadline]
    if not soon:
        best = min(runs, key=lambda run: run.seconds)
        raise Refusal(
            f"--deadline: the fastest run, {best.problem.gpus} x {best.problem.machine.name}, takes "
            f"{days(best.seconds)}: offer more --gpus, or fewer --train-tokens"
        )
    within = [run for run in soon if not terms.budget or run.cost <= terms.budget]
    if not within:
        best = min(soon, key=lambda run: run.cost)
        raise Refusal(
            f"--budget: the cheapest run{' before the deadline' if terms.deadline else ''}, {best.problem.gpus} x "
            f"{best.problem.machine.name}, costs {money(best.cost, terms)}: offer other --gpus or --gpu, or fewer "
            "--train-tokens"
        )
    if terms.deadline and not terms.budget:
        return min(within, key=lambda run: run.cost)
    return min(within, key=lambda run: run.seconds)


def read_prices(path: Path) -> Prices:
    """Prices from a file such as ``{"currency": "USD", "gpu_hour": {"H100-80G": 2.5}}``.

    Raises:
        Refusal: the file has another form.
    """
    where, raw = f"--prices {path}", read_json(path, "--prices")
    hours = raw.get("gpu_hour") if isinstance(raw, dict) else None
    if not isinstance(hours, dict) or not hours:
        raise Refusal(f'{where}: give {{"currency": "USD", "gpu_hour": {{"H100-80G": 2.5}}}}')
    for name, price in hours.items():
        number(where, f"gpu_hour.{name}", price)
    currency = raw.get("currency", "USD")
    if not isinstance(currency, str) or len(currency) > 20 or not currency.isprintable() or set("[]") & set(currency):
        raise Refusal(f"{where}: currency: must be a short name such as USD, not {short(currency)}")
    source = raw.get("source", "")
    if not isinstance(source, str) or len(source) > 200 or not source.isprintable():
        raise Refusal(f"{where}: source: must be a short text, not {short(source)}")
    return Prices(hours, currency, source)


def days(seconds: float) -> str:
    """A time in days; below three days in hours, below three hours in minutes."""
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 3 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds / 60:,.1f} minutes"


def money(cost: float, terms: Terms) -> str:
    return f"{cost:,.0f} {terms.prices.currency if terms.prices else 'GPU-hours'}"
