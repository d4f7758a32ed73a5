# SPDX-License-Identifier: Apache-2.0
"""Recognizes a step whose loss or gradient norm is bad, before its update."""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch
import torch.distributed as dist

from megatron.training.settings.config import Config

NAMES = ("loss", "gradient norm")
WINDOW = 100  # recent good steps, whose median a spike is compared with
LEAST = 10  # good steps before anything can be a spike


class Watch:
    """Judges each step before its update.

    Attributes:
        skips: whether the run may leave batches out.
    """

    def __init__(self, config: Config) -> None:
        faults, optimizer = config.faults, config.optimizer
        self.skips = faults.skip_bad_batches > 0
        self.finite = optimizer.check_for_nan_in_loss_and_grad and not optimizer.fp16
        self.factor = faults.spike_factor
        self.spiky = (faults.check_for_spiky_loss, faults.check_for_large_grads)
        self.recent = [deque(maxlen=WINDOW) for _ in NAMES]
        self._spikes: list[str] = []

    def judge(self, loss: float, grad_norm: float, device: torch.device) -> str:
        """What is bad about a step; empty if nothing is.

        The answer is the same on every rank, except where the run ends because of it.
        """
        values = (loss, grad_norm)
        problems = [self._judge_one(*arguments) for arguments in zip(NAMES, values, self.spiky, self.recent)]
        spikes = [line for line, finite in zip(problems, map(math.isfinite, values)) if line and finite]
        bad = next(filter(None, problems), "")
        if not self.skips and bad in spikes:
            self._spikes += spikes
            bad = ""
        elif self.skips and dist.is_initialized():
            worst = torch.tensor(bool(bad), dtype=torch.int, device=device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # a rank that saw other numbers must not go on alone
            bad = bad or ("the loss or the gradient norm of another rank is bad" if worst else "")
        if not bad:
            for value, recent in zip(values, self.recent):
                recent.append(value)
        return bad

    def take_spikes(self) -> list[str]:
        """A line for each spike since the last call whose step still changed the weights."""
        lines, self._spikes = self._spikes, []
        return lines

    def _judge_one(self, name: str, value: float, spiky: bool, recent: deque[float]) -> str:
        if not math.isfinite(value):
            return f"the {name} is {value}" if self.finite else ""
        if not spiky or len(recent) < LEAST:
            return ""
        usual = statistics.median(recent)
        if not 0 < self.factor * usual < value:
            return ""
        return f"the {name} is {value:.6g}, {value / usual:.1f} times the {usual:.6g} of the {len(recent)} steps before"
