# SPDX-License-Identifier: Apache-2.0
"""Which process this is, and whether another one still runs.

A process number says little: numbers are used again, two hosts may have one name, and a container counts on its own.
A process is the same one if the boot of its machine, its PID namespace, its number and its start time are all equal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Process:
    """One process of one machine.

    Attributes:
        host: name of its machine, for messages only: two machines may have the same.
        boot: id of its machine's boot; empty where the system has none.
        namespace: the PID namespace that ``pid`` is counted in; empty where the system has none.
        pid: its number.
        started: when it began, in clock ticks since the boot.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """The calling process; a fork is another one."""
    return Process(socket.gethostname(), _boot(), _namespace(), os.getpid(), started(os.getpid()) or 0)


def is_alive(process: Process) -> bool | None:
    """Whether a process still runs; None where this cannot be seen from here (another machine or container,
    or a hidden process of another user).

    A process that has ended and was not waited for (a zombie) does not run.
    """
    if not process.boot or process.boot != _boot():
        return None
    if process.namespace != _namespace():
        return None
    begun = started(process.pid)
    if begun is None and _is_hidden(process.pid):
        return None
    return begun == process.started


def kill(process: Process) -> bool:
    """End a process by SIGKILL, where it surely is that one: same boot, PID namespace and start time.

    Returns whether it was sent a signal; nothing is sent where the system cannot hold on to a process (pidfd, Linux).
    """
    if not hasattr(os, "pidfd_open") or not is_alive(process):
        return False
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):  # the number may have gone to another process just before the handle was made
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; None of one that does not run."""
    try:
        # The name, in parentheses, may hold anything; fields 3 (state) and 22 (start time) follow it.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether a process of another user is there that /proc does not show (its mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


@cache
def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


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
