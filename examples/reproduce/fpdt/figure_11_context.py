#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 11 of the FPDT paper: where FPDT, Ulysses and Megatron-SP run out of memory, six models, simulated.

    python examples/reproduce/fpdt/figure_11_context.py [OUT_DIR]

Published is the last length that the figure shows of a system; its speed is figure_11.py. The paper's prose has other
lengths for 2.7B and 6.7B (256K and 256K for 2.7B, 256K for Ulysses and 128K for Megatron-SP with 6.7B).
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
    rows = figure_11_rows()
    write(out, "figure_11_context", "FPDT, figure 11: longest context", rows, log=True)
    tell(rows)
