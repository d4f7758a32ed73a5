#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 1 of the DeepSpeed4Science page: throughput of GenSLM 33B on 32 A100-40G, TP 32, simulated or measured.

    python examples/reproduce/genslm/table_1.py [OUT_DIR] [--measure]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.genslm.training import throughput_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import clock  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    rows = throughput_rows(clock("genslm-a100", args.measure))
    write(args.out_dir, "table_1", "GenSLM 33B, throughput", rows, over="seq_length")
