#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 12 of the FPDT paper: MFU over the size of a chunk at 256K tokens, simulated or measured.

    python examples/reproduce/fpdt/figure_12.py [OUT_DIR] [--measure]

What the figure shows is not in published/: ours stands alone. Chunks measured on a CPU: figure_12_measured.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.fpdt.training import figure_12_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = figure_12_rows(clock("fpdt-a100", args.measure))
    write(args.out_dir, "figure_12", "FPDT, figure 12", rows, over="chunk")
