#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables and figures of the FPDT paper: speed (training.py) and the longest context (capacity.py).

    python examples/reproduce/fpdt/tables.py table_1 [OUT_DIR]
    python examples/reproduce/fpdt/tables.py figure_11 [OUT_DIR] [--measure]

The paper does not say how it counts FLOPs. Our figures 1, 11 and 12 count causal attention, and count recompute as
work; notes of figures 1 and 11 have the two other conventions. The machine's constants are fitted to figure 11 only.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.capacity import context_table  # noqa: E402
from examples.reproduce.fpdt import capacity, training  # noqa: E402
from examples.reproduce.report import PaperTable, run_tables  # noqa: E402
from examples.reproduce.simulate import clock, cluster  # noqa: E402

TABLES = {
    "table_1": context_table(
        "FPDT, table 1: longest context",
        "the longest context, by model and GPUs; ASSUMED marks two rows that need more than the paper states",
        capacity.table_1_rows,
        log=True,
    ),
    "table_3": context_table(
        "FPDT, table 3: Llama-3-8B on 8 A100-80G",
        "memory strategies: the longest sequence, and device memory and MFU at the published length. AC: activation "
        "checkpoints; OC: in host memory",
        capacity.table_3_rows,
        log="tokens",
    ),
    "table_3_mfu": PaperTable(
        "FPDT, table 3: MFU",
        "the column MFU: Llama-3-8B on 8 A100-80G by strategy; no constant is fitted to it",
        lambda measure: training.table_3_rows(clock("fpdt-a100", measure)),
    ),
    "figure_1": PaperTable(
        "FPDT, figure 1",
        "MFU of each system at its longest context; the points are those of figure 11",
        lambda measure: training.figure_1_rows(clock("fpdt-a100", measure)),
        {"panel": "model"},
    ),
    "figure_1_context": context_table(
        "FPDT, figure 1: longest context per GPU",
        "the longest context per GPU of each system, for 2.7B, 13B and 70B; the published values are the last points "
        "of figure 11 divided by the number of GPUs",
        lambda: capacity.figure_11_rows(("gpt-2.7b", "gpt-13b", "llama3-70b"), per_gpu=True),
        log=True,
    ),
    "figure_10": PaperTable(
        "FPDT, figure 10",
        "time of the parts of a layer on 4 A100; only the text has numbers: attention takes longer than fetching from "
        "the host from 32K to 64K tokens on",
        lambda _: training.figure_10_rows(cluster("fpdt-a100")),
        {"over": "seq_length", "log": True},
        not_measured="the parts of a layer are simulated, and no program here runs them separately",
    ),
    "figure_11": PaperTable(
        "FPDT, figure 11",
        "MFU over the length of FPDT, Ulysses and Megatron-SP, six models",
        lambda measure: training.figure_11_rows(clock("fpdt-a100", measure)),
        {"over": "seq_length", "panel": "model"},
    ),
    "figure_11_context": context_table(
        "FPDT, figure 11: longest context",
        "where these systems run out of memory. Published is the last length that the figure shows; the paper's prose "
        "has other lengths for 2.7B (256K for both other systems) and 6.7B (256K for Ulysses, 128K for Megatron-SP)",
        capacity.figure_11_rows,
        log=True,
    ),
    "figure_12": PaperTable(
        "FPDT, figure 12",
        "MFU over the size of a chunk at 256K tokens; the figure's values are not in published/. figure_12_measured.py "
        "measures chunks on a CPU",
        lambda measure: training.figure_12_rows(clock("fpdt-a100", measure)),
        {"over": "chunk"},
    ),
}


if __name__ == "__main__":
    run_tables(__file__, __doc__, TABLES)
