# SPDX-License-Identifier: Apache-2.0
"""Identify processes, check whether they still run, and end them.

A PID does not identify a process: PIDs are used again, two hosts may have the same name, and each container has its own
PIDs. Two processes are the same if the boot id of the machine, the PID namespace, the PID and the start time are equal.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import threading
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # found here, because forked processes should load no libraries
PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Process:
    """A process on a machine.

    Attributes:
        host: name of its machine, only for messages.
        boot: boot id of its machine; empty if the system has none.
        namespace: its PID namespace; empty if the system has none.
        pid: its PID in this namespace.
        started: its start time, in clock ticks since the boot.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """The calling process."""
    return Process(socket.gethostname(), _boot(), _namespace(), os.getpid(), started(os.getpid()) or 0)


def is_alive(process: Process) -> bool | None:
    """Whether a process still runs; None if this process cannot see it (another machine or container, or a hidden
    process of another user). A zombie does not run.
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
    """Send SIGKILL to a process, if boot id, PID namespace and start time are those of ``process``.

    Returns whether the signal was sent. It is never sent on systems without pidfd (other than Linux).
    """
    if not hasattr(os, "pidfd_open") or not is_alive(process):
        return False
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):  # another process may have got the PID just before the handle was made
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def end_with_parent() -> None:
    """End this process, which multiprocessing has started, as soon as its parent has ended, by whatever signal.

    The parent's end closes a pipe. A thread waits for that, because a worker's own thread may wait for work forever.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def end_with_forking_thread() -> None:
    """Let Linux end this forked process when the thread that forked it ends."""
    if PRCTL is not None:
        PRCTL(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def cores() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started(pid: int) -> int | None:
    """The start time of a process, in clock ticks since the boot; None if it does not run."""
    try:
        # The name, in parentheses, may contain any characters; fields 3 (state) and 22 (start time) follow it.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether there is a process of another user that /proc hides (mount option hidepid)."""
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
