# SPDX-License-Identifier: Apache-2.0
"""How much of the machine other programs take while we measure."""

from __future__ import annotations

import os

QUIET = 0.03  # the share of the machine that others may take in a measurement that counts


def busy_seconds() -> float:
    """CPU seconds that the whole machine has spent, for others under a hypervisor included; 0 where nobody counts."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def foreign_share(busy_before: float, own: float, wall: float) -> float:
    """Share of all cores that other programs took.

    Args:
        busy_before: :func:`busy_seconds` at the start.
        own: CPU seconds that we took since.
        wall: seconds since.
    """
    return max(0.0, busy_seconds() - busy_before - own) / (wall * (os.cpu_count() or 1))


def cpu_seconds_of(pid: int) -> float | None:
    """CPU seconds that a running process has taken; None where that is not told."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
