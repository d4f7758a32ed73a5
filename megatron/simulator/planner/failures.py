# SPDX-License-Identifier: Apache-2.0
"""What failures and checkpoints cost a long run, and how often to save.

A run of thousands of GPUs is interrupted every few hours. Each time the work since the last checkpoint is lost, and a
restart takes its time; saving often costs as well. The best interval between is J. T. Daly's higher-order estimate (A
higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22, 2006,
eq. 37), which for short saves is J. W. Young's sqrt(2 d M) (A first order approximation to the optimum checkpoint
interval, CACM 17, 1974). The time of the whole run is Daly's eq. 20: failures come at random, also while the program
saves and restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.formulas.parameters import stage_parameters
from megatron.formulas.strategy import Shape
from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal, short

STATE_BYTES = 14  # of a parameter in a checkpoint: bf16 weight, fp32 main weight, Adam's two moments


@dataclass(frozen=True)
class Rates:
    """How often a cluster fails, as a JSON file says it.

    Attributes:
        gpu_hours_per_failure: GPU-hours between two failures that end a run, whatever their cause.
        restart_minutes: from a failure to the next step, loading included.
        save_gb_per_second: of one node, to the storage; 10^9 bytes.
        save_seconds: that a save keeps the program from training, in place of what follows from its size: a save
            that goes on beside training keeps it for seconds.
        source: where the figures are from.
    """

    gpu_hours_per_failure: float
    restart_minutes: float = 10.0
    save_gb_per_second: float = 2.0
    save_seconds: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Interrupted:
    """A run with failures.

    Attributes:
        seconds: of the whole run; failures: that it meets.
        between: seconds between two failures; interval: of training between two saves; save: of one.
        saving, lost: seconds of the run that went into saves, and into work done twice and restarts.
    """

    seconds: float
    failures: float
    between: float
    interval: float
    save: float
    saving: float
    lost: float


def read_rates(path: Path) -> Rates:
    """
    Raises:
        Refusal: the file cannot be read, or a field is unknown, missing or no such figure.
    """
    names = [field.name for field in fields(Rates)]
    raw = read_json(path, "--failures")
    if not isinstance(raw, dict) or "gpu_hours_per_failure" not in raw:
        raise Refusal(f"--failures {path}: give an object with gpu_hours_per_failure (docs/use/planner.md)")
    for name, value in raw.items():
        if name not in names:
            raise Refusal(f"--failures {path}: {name}: no such field; fields are {', '.join(names)}")
        if name == "source":
            if not isinstance(value, str):
                raise Refusal(f"--failures {path}: source: must be text, not {short(value)}")
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (number and (value > 0 or (value == 0 and name in names[1:4:2]))):
            raise Refusal(f"--failures {path}: {name}: must be a number above 0, not {short(value)}")
    return Rates(**raw)


def checkpoint_bytes(shape: Shape) -> int:
    """Of the model and its optimizer."""
    return STATE_BYTES * stage_parameters(shape, 1, 1, 0).numel


def best_interval(save: float, between: float) -> float:
    """Seconds of training between two saves of ``save`` seconds, where ``between`` pass from failure to failure."""
    if save >= 2 * between:
        return between
    ratio = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def interrupted(work: float, gpus: int, nodes: int, shape: Shape, rates: Rates) -> Interrupted:
    """A run of ``work`` seconds without failures.

    Raises:
        Refusal: it would fail before it has saved anything, again and again.
    """
    between = 3600 * rates.gpu_hours_per_failure / gpus
    save = rates.save_seconds or checkpoint_bytes(shape) / (1e9 * rates.save_gb_per_second * nodes)
    restart = 60 * rates.restart_minutes
    interval = min(best_interval(save, between), work)
    if max(restart, interval + save) > 20 * between:
        raise Refusal(
            f"--failures: {gpus} GPUs fail every {between:.0f} s, a save and a restart take {save + restart:.0f} s: "
            "such a run gets nowhere; use fewer --gpus, or faster saves and restarts"
        )
    seconds = between * math.exp(restart / between) * math.expm1((interval + save) / between) * work / interval
    saving = save * work / interval
    return Interrupted(seconds, seconds / between, between, interval, save, saving, seconds - work - saving)
