#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 11 of the FPDT paper: MFU over the length of FPDT, Ulysses and Megatron-SP, six models, simulated or measured.

    python examples/reproduce/fpdt/figure_11.py [OUT_DIR] [--measure]

The paper does not say how it counts FLOPs. The table counts causal attention, and recompute as work; the notes have two
other ways.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.fpdt.training import figure_11_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = figure_11_rows(clock("fpdt-a100", args.measure))
    write(args.out_dir, "figure_11", "FPDT, figure 11", rows, over="seq_length", panel="model")
