# SPDX-License-Identifier: Apache-2.0
"""Time limits for a machine that others use too."""

from __future__ import annotations

import os

MOST = 8.0  # largest factor, because the limits themselves are generous


def patience(seconds: float) -> float:
    """A time limit for something that takes at most ``seconds`` on a quiet machine.

    If five processes compete for each core, everything takes five times as long.
    """
    return seconds * min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), MOST)
