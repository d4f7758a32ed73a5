# SPDX-License-Identifier: Apache-2.0
"""When to stop before the end, agreed upon by all ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
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


# No process stays behind: workers go when their launcher is gone, and what a worker started goes with the worker.
#
# torchrun starts each worker in a session of its own, so that a killed torchrun leaves them waiting for each other,
# with the memory of their GPUs. The launcher is watched from a thread, every second: Linux' parent-death signal
# would also come when the *thread* that started a process ends, as launchers have threads of their own. Forks of a
# worker (data loader) get that signal, where the main thread forks.


PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
SECONDS = 1.0


def follow_launcher(launched: bool, parent: Callable[[], int] = os.getppid) -> None:
    """End this process and all that it started when its launcher is gone; its forks end with it.

    Args:
        launched: whether a launcher waits for this process; one started by hand may outlive its shell.
        parent: whose number tells.
    """
    if sys.platform == "linux":
        os.register_at_fork(before=_note_thread, after_in_child=_end_with_parent)
    if launched:
        threading.Thread(target=_watch, args=(parent, parent()), daemon=True, name="launcher").start()


def _watch(parent: Callable[[], int], first: int) -> None:
    while parent() == first:
        time.sleep(SECONDS)
    print("error: the launcher is gone, so this process ends as well", file=sys.stderr, flush=True)
    end_now()


def end_now() -> None:
    """End this process and its descendants at once, nothing saved."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    os._exit(1)


_forking = threading.local()


def _note_thread() -> None:
    _forking.by_main = threading.current_thread() is threading.main_thread()


def _end_with_parent() -> None:
    if getattr(_forking, "by_main", False):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
