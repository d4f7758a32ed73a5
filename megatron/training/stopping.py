# SPDX-License-Identifier: Apache-2.0
"""When to stop before the end, agreed upon by all ranks."""

from __future__ import annotations

import signal
import time
from typing import Any

import torch
import torch.distributed as dist


class Stopper:
    """Whether to stop early: a SIGTERM on any rank, or the time is up. Asked together, so that all ranks agree."""

    def __init__(self, device: torch.device, minutes: int | None) -> None:
        self.device = device
        self.deadline = time.monotonic() + 60 * minutes if minutes else None
        self.reason = ""
        self._signalled = False
        self._before = signal.signal(signal.SIGTERM, self._on_signal)

    @property
    def stopped(self) -> bool:
        return bool(self.reason)

    def _on_signal(self, *_: Any) -> None:
        self._signalled = True

    def restore(self) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def stop(self, reason: str) -> None:
        """Stop for a reason that every rank knows of."""
        self.reason = self.reason or reason

    def agree(self, *peaks: int) -> list[int]:
        """Take part in the decision after a step; returns the largest of all ranks of each of ``peaks``."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        votes = torch.tensor([self._signalled, late, *peaks], dtype=torch.int64, device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        signalled, late, *largest = votes.tolist()
        if signalled or late:
            self.stop("SIGTERM" if signalled else "--exit-duration-in-mins is over")
        return largest
