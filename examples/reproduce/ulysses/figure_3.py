#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 3 of the DeepSpeed-Ulysses paper: 1.2B, lengths to 1M tokens on 1 to 64 A100, simulated or measured.

    python examples/reproduce/ulysses/figure_3.py [OUT_DIR] [--measure]

What the figure shows is not in published/: ours stands alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402
from examples.reproduce.ulysses.training import figure_3_rows  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = figure_3_rows(clock("ulysses-a100", args.measure))
    write(args.out_dir, "figure_3", "DeepSpeed-Ulysses, figure 3", rows, over="gpus")
