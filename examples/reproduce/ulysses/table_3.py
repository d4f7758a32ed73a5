#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 3 of the DeepSpeed-Ulysses paper: 7B, length and GPUs growing together, 64 to 256 A100, simulated.

    python examples/reproduce/ulysses/table_3.py [OUT_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import command, write  # noqa: E402
from examples.reproduce.simulate import cluster  # noqa: E402
from examples.reproduce.ulysses.training import scaling_rows  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    write(out, "table_3", "DeepSpeed-Ulysses, table 3", scaling_rows(cluster("ulysses-a100"), (3,)))
