#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 3 of the FPDT paper, the column MFU: Llama-3-8B on 8 A100-80G by strategy, simulated or measured.

    python examples/reproduce/fpdt/table_3_mfu.py [OUT_DIR] [--measure]

Constants are those of figure 11; none is fitted here.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.fpdt.training import table_3_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    write(args.out_dir, "table_3_mfu", "FPDT, table 3: MFU", table_3_rows(clock("fpdt-a100", args.measure)))
