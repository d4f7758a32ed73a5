#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 6 of the USP paper: training throughput of TP x Ulysses x Ring, simulated or measured.

    python examples/reproduce/usp/table_6.py [OUT_DIR] [--measure]

Llama-3-8B on 16 A800-80G. TFLOPS count the full mask, as the paper's first version does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402
from examples.reproduce.usp.training import training_rows  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = training_rows(clock("usp-a800", args.measure), (6,))
    write(args.out_dir, "table_6", "USP, table 6", rows, panel="seq_length")
