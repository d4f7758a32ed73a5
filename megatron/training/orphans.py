# SPDX-License-Identifier: Apache-2.0
"""No process stays behind: workers go when their launcher is gone, and what a worker started goes with the worker.

torchrun starts each worker in a session of its own, so that a killed torchrun leaves them waiting for each other, with
the memory of their GPUs. The launcher is watched from a thread, every second: Linux' parent-death signal would also
come when the *thread* that started a process ends, as launchers have threads of their own. Forks of a worker (data
loader) get that signal, where the main thread forks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

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
