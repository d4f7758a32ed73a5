#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed4Science's section on scalability says of activations, GenSLM 25B at 100K tokens; simulated.

    python examples/reproduce/genslm/section_scalability.py [OUT_DIR]

480 GB become 12 GB a device. By Korthikanti et al.: 34 bytes a layer, token and channel without recompute (equation 4),
2 of layer inputs with full recompute. The section's mask, 54 to 39 GB: figure_4.py; its position embedding:
figure_6.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.genslm.capacity import activation_rows  # noqa: E402
from examples.reproduce.report import command, write  # noqa: E402

if __name__ == "__main__":
    out = command(__file__, __doc__).parse_args().out_dir
    write(
        out, "section_scalability", "DeepSpeed4Science: activations of GenSLM 25B at 100K", activation_rows(), log=True
    )
