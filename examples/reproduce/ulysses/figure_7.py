#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 7 of the DeepSpeed-Ulysses paper: throughput over the length, 30B, block-sparse attention, 64 A100; simulated.

    python examples/reproduce/ulysses/figure_7.py [OUT_DIR] [--measure]

What the figure shows is not in published/: ours stands alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402
from examples.reproduce.ulysses.training import figure_7_rows  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = figure_7_rows(clock("ulysses-a100", args.measure))
    write(args.out_dir, "figure_7", "DeepSpeed-Ulysses, figure 7", rows, over="seq_length")
