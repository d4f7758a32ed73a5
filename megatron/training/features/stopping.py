# SPDX-License-Identifier: Apache-2.0
"""When to stop before the end, agreed upon by all ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What ends a run in good order: launchers and schedulers send the first, Slurm the second as its warning, if asked."""


class Stopper:
    """Whether to stop early: a signal on any rank, or the time is up. Asked together, so that all ranks agree.

    Before training begins there is nothing to save, and a signal ends the process by SystemExit. After that the same
    signal again ends the process at once, and nothing is saved; what a scheduler and a launcher both send comes twice
    within a moment, and counts once.
    """

    MOMENT = 5.0  # seconds

    def __init__(self, device: torch.device, minutes: int | None) -> None:
        self.device = device
        self.deadline = time.monotonic() + 60 * minutes if minutes else None
        self.reason = ""
        self._signal, self._since, self._training = 0, 0.0, False
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    @property
    def stopped(self) -> bool:
        return bool(self.reason)

    def begin(self) -> None:
        """Training begins: from now on a signal is kept until the step is over."""
        self._training = True

    def _on_signal(self, number: int, _: Any) -> None:
        if not self._training:
            if os.environ.get("RANK", "0") == "0":
                os.write(2, f"error: {signal.Signals(number).name} before the first step: nothing to save\n".encode())
            raise SystemExit(128 + number)
        if number == self._signal and time.monotonic() - self._since > self.MOMENT:
            os.write(2, f"a second {signal.Signals(number).name}: ended at once, nothing saved\n".encode())
            os._exit(128 + number)
        if not self._signal:
            self._signal, self._since = number, time.monotonic()

    def restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def stop(self, reason: str) -> None:
        """Stop for a reason that every rank knows of."""
        self.reason = self.reason or reason

    def agree(self, *peaks: int) -> list[int]:
        """Take part in the decision after a step; returns the largest of all ranks of each of ``peaks``."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        votes = torch.tensor([self._signal, late, *peaks], dtype=torch.int64, device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        number, late, *largest = votes.tolist()
        if number or late:
            self.stop(signal.Signals(number).name if number else "--exit-duration-in-mins is over")
        return largest
