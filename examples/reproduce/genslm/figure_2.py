#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 2 of DeepSpeed4Science's page: longest sequences of GenSLM 33B with the frameworks of before, simulated.

    python examples/reproduce/genslm/figure_2.py [OUT_DIR]

Under 60K tokens with both. What is assumed of them: old_systems.py; all three frameworks: figure_7.py.
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
    rows = maxima_rows("genslm-33b", ("old Megatron-DeepSpeed", "Megatron-LM"))
    write(out, "figure_2", "DeepSpeed4Science, figure 2: GenSLM 33B before", rows, over="gpus", log=True)
    tell(rows)
