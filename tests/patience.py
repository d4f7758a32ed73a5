# SPDX-License-Identifier: Apache-2.0
"""How long to wait on a machine that others use too."""

from __future__ import annotations

import os

MOST = 8.0  # limits are generous already


def patience(seconds: float) -> float:
    """Seconds to wait for what takes at most ``seconds`` on a quiet machine.

    Where five processes want each core, everything takes five times as long.
    """
    return seconds * min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), MOST)
