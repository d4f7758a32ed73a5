#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 4 of the USP paper: attention alone, forward, Ulysses x Ring = 8, on 8 A100 over NVLink, simulated.

    python examples/reproduce/usp/table_4.py [OUT_DIR]

The rows printed as 128K fit 256K: they are simulated at both.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import cluster  # noqa: E402
from examples.reproduce.usp.attention import attention_rows, refuse_to_measure  # noqa: E402

if __name__ == "__main__":
    args = command(__file__, __doc__, measure=True).parse_args()
    if args.measure:
        sys.exit(refuse_to_measure(4))
    rows = attention_rows(cluster("usp-a100"), "8xA100_nvlink")
    write(args.out_dir, "table_4", "USP, table 4", rows, panel="seq_length")
