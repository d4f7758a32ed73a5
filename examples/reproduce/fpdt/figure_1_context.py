#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 1 of the FPDT paper: the longest context a GPU of each system, for 2.7B, 13B and 70B, simulated.

    python examples/reproduce/fpdt/figure_1_context.py [OUT_DIR]

Published are the last points of figure 11 over the number of GPUs; MFU is figure_1.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.capacity import tell  # noqa: E402
from examples.reproduce.fpdt.capacity import figure_11_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    rows = figure_11_rows(("gpt-2.7b", "gpt-13b", "llama3-70b"), per_gpu=True)
    write(out, "figure_1_context", "FPDT, figure 1: longest context a GPU", rows, log=True)
    tell(rows)
