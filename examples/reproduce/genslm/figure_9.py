#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 9 of DeepSpeed4Science's page: longest sequences of GenSLM 33B over GPUs, by memory saving, simulated.

    python examples/reproduce/genslm/figure_9.py [OUT_DIR]

Published are the text's ceiling without sharing out the position embedding, about 50K tokens, and figure 7's maxima.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.capacity import tell  # noqa: E402
from examples.reproduce.genslm.capacity import scalability_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    rows = scalability_rows("genslm-33b")
    write(out, "figure_9", "DeepSpeed4Science, figure 9: scalability of GenSLM 33B", rows, over="gpus", log=True)
    tell(rows)
