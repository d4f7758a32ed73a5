#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 3 of the FPDT paper: memory strategies for Llama-3-8B on 8 A100-80G, simulated.

    python examples/reproduce/fpdt/table_3.py [OUT_DIR]

The longest sequence, device memory at the published length, and MFU there (for information). AC: activation
checkpoints; OC: in host memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.capacity import tell  # noqa: E402
from examples.reproduce.fpdt.capacity import table_3_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    rows = table_3_rows()
    write(out, "table_3", "FPDT, table 3: Llama-3-8B on 8 A100-80G", rows, log="tokens")
    tell(rows)
