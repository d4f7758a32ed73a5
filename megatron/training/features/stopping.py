# SPDX-License-Identifier: Apache-2.0
"""Stops a run early, when all ranks agree."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals after which a run saves and ends. Launchers and schedulers send SIGTERM; Slurm can send SIGUSR1 earlier."""


class Stopper:
    """Stops the run after a signal on any rank, or when its time is over.

    Before training begins there is nothing to save, and a signal ends the process by SystemExit. Later, a second signal
    of the same kind ends the process at once and saves nothing. If a scheduler and a launcher both send the signal, it
    comes twice within ``MOMENT`` and counts once.
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
        """Training begins: from now on a signal waits for the end of the step."""
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
        """Stop for a reason that all ranks have at the same step."""
        self.reason = self.reason or reason

    def agree(self, *values: int) -> list[int]:
        """Decide after a step whether to stop; returns the maximum over all ranks of each of ``values``.

        This is the only all-reduce that every step adds, so features send their numbers with it.
        """
        late = self.deadline is not None and time.monotonic() > self.deadline
        votes = torch.tensor([self._signal, late, *values], dtype=torch.int64, device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        number, late, *largest = votes.tolist()
        if number or late:
            self.stop(signal.Signals(number).name if number else "--exit-duration-in-mins is over")
        return largest
