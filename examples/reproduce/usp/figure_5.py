#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 5 of the USP paper: data parallelism against sequence parallelism, Llama2-7B on 8 A800, simulated or measured.

python examples/reproduce/usp/figure_5.py [OUT_DIR] [--measure]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, mean_error, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402
from examples.reproduce.usp.training import figure_5_rows  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = figure_5_rows(clock("usp-a800", args.measure))
    write(args.out_dir, "figure_5", "USP, figure 5", rows, over="seq_length")
    if not args.measure:
        alone = mean_error(figure_5_rows(clock("usp-a800", False), overlap=False))
        print(f"with gradients and weights alone, as in tables 5 to 7: {alone:.1f} %")
