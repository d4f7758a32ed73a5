# SPDX-License-Identifier: Apache-2.0
"""The share of the machine that other programs use during a measurement, and the environment of measured programs."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.03  # largest share of the machine that other programs may use in a measurement that counts


def busy_seconds() -> float:
    """CPU seconds of all programs of the machine, including time stolen by the hypervisor; 0: unknown."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def foreign_share(busy_before: float, own: float, wall: float) -> float:
    """Share of all cores that other programs used since the start of a measurement.

    Args:
        busy_before: :func:`busy_seconds` at the start.
        own: CPU seconds of the measured program since then.
        wall: seconds since then.
    """
    return max(0.0, busy_seconds() - busy_before - own) / (wall * (os.cpu_count() or 1))


def cpu_seconds_of(pid: int) -> float | None:
    """CPU seconds of a running process; None: unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def environment(threads: int = 1) -> dict[str, str]:
    """Environment variables for a program of this repository that runs in a separate process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
