#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 5 of the USP paper: training throughput of TP x Ulysses x Ring, simulated.

    python examples/reproduce/usp/table_5.py [OUT_DIR]

Llama2-7B on 8 A800-80G. TFLOPS count the full mask, as the paper's first version does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import cluster  # noqa: E402
from examples.reproduce.usp.training import training_rows  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    write(out, "table_5", "USP, table 5", training_rows(cluster("usp-a800"), (5,)))
