#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 1 of the FPDT paper: the longest context, by model and GPUs, simulated.

    python examples/reproduce/fpdt/table_1.py [OUT_DIR]

Notes say what stops a row, and mark with ASSUMED the two that could not have run with what the paper states.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.capacity import tell  # noqa: E402
from examples.reproduce.fpdt.capacity import table_1_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    rows = table_1_rows()
    write(out, "table_1", "FPDT, table 1: longest context", rows, log=True)
    tell(rows)
