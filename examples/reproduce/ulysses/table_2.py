#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 2 of the DeepSpeed-Ulysses paper: 7B, one length on 64 to 256 A100, simulated or measured.

    python examples/reproduce/ulysses/table_2.py [OUT_DIR] [--measure]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402
from examples.reproduce.ulysses.training import scaling_rows  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = scaling_rows(clock("ulysses-a100", args.measure), (2,))
    write(args.out_dir, "table_2", "DeepSpeed-Ulysses, table 2", rows)
