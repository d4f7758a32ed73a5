#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 3 of the DeepSpeed-Ulysses paper: 1.2B, lengths to 1M tokens on 1 to 64 A100, simulated.

    python examples/reproduce/ulysses/figure_3.py [OUT_DIR]

What the figure shows is not in published/: ours stands alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import cluster  # noqa: E402
from examples.reproduce.ulysses.training import figure_3_rows  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    rows = figure_3_rows(cluster("ulysses-a100"))
    write(out, "figure_3", "DeepSpeed-Ulysses, figure 3", rows, over="gpus")
