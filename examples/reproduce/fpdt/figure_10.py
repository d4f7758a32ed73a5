#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 10 of the FPDT paper: how long the parts of a layer take, over the length, on 4 A100; simulated.

    python examples/reproduce/fpdt/figure_10.py [OUT_DIR]

What the figure shows is not in published/, but for its text: attention overtakes fetching from the host between 32K and
64K tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.fpdt.latency import figure_10_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import cluster  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    rows = figure_10_rows(cluster("fpdt-a100"))
    write(out, "figure_10", "FPDT, figure 10", rows, over="seq_length", log=True)
