#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 1 of the FPDT paper: MFU of each system at the longest context it is shown with, simulated or measured.

    python examples/reproduce/fpdt/figure_1.py [OUT_DIR] [--measure]

The points are those of figure 11: 2.7B, 13B and 70B. How long each fits: figure_1_context.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.fpdt.training import figure_1_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    write(args.out_dir, "figure_1", "FPDT, figure 1", figure_1_rows(clock("fpdt-a100", args.measure)), panel="model")
