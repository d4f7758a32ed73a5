#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 8 of DeepSpeed4Science's page: longest sequences of GenSLM 25B, three frameworks, A100-40G, simulated.

    python examples/reproduce/genslm/figure_8.py [OUT_DIR]

What is assumed of the old frameworks: old_systems.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.capacity import tell  # noqa: E402
from examples.reproduce.genslm.capacity import maxima_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    rows = maxima_rows("genslm-25b")
    write(out, "figure_8", "DeepSpeed4Science, figure 8: GenSLM 25B", rows, over="gpus", log=True)
    tell(rows)
