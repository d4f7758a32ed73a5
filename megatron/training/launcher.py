# SPDX-License-Identifier: Apache-2.0
"""End a worker when its launcher is gone, together with all processes that the worker has started.

torchrun starts each worker in a new session. If torchrun were killed, the workers would wait for each other and keep
their GPU memory. Therefore a thread checks the launcher every second. Linux' parent-death signal is not used for this,
because it is also sent when the *thread* that started a process ends, and launchers use threads. It is used for forks
of a worker (the data loader's) that the main thread starts.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from megatron.system.processes import end_with_forking_thread

SECONDS = 1.0


def follow_launcher(launched: bool) -> None:
    """End this process and its descendants when its launcher has ended, and each fork when this process has ended.

    Args:
        launched: whether a launcher waits for this process. A process started by hand may outlive its shell.
    """
    if sys.platform == "linux":
        os.register_at_fork(before=_note_thread, after_in_child=_end_with_parent)
    if launched:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="launcher").start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(SECONDS)
    print("error: the launcher has ended, so this process ends as well", file=sys.stderr, flush=True)
    end_now()


def end_now() -> None:
    """End this process and its descendants immediately, without saving anything."""
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
        end_with_forking_thread()
