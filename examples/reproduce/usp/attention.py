# SPDX-License-Identifier: Apache-2.0
"""USP's attention alone, forward (tables 3 and 4), by simulation.

The paper does not say how wide the attention is: taken as 32 heads of 128, one sequence, which the rates at 32K fit.
"""

from __future__ import annotations

import sys

from examples.reproduce.report import Row, published
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.attention_operations import attended, ring_forward, to_heads, to_sequence
from megatron.simulator.cost.operations import price
from megatron.simulator.machines.machine import Machine

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RINGS = {"basic": "contiguous", "balanced": "zigzag"}


def attention_rows(machine: Machine, table: str) -> list[Row]:
    """Iterations a second of ``usp_attention_TABLE``, Ulysses x Ring = 8; both readings of the A100 table's 128K."""
    rows = []
    for line in published(f"usp_attention_{table}"):
        written = line["seq_length"]
        doubled = table == "8xA100_nvlink" and written == 131072
        for seq_length in (written, 2 * written) if doubled else (written,):
            for ring, balance in RINGS.items():
                rate = 1 / attention_seconds(machine, seq_length, line["ulysses"], 8 // line["ulysses"], balance)
                label = {"seq_length": seq_length, "ulysses": line["ulysses"], "ring": ring}
                there: float | None = line[f"{ring}_ring_iters_per_s"]
                remark = ""
                if doubled and seq_length == written:
                    there, remark = (
                        None,
                        "printed as 128K, read as 256K: at 128K it would be a quarter of the 32K rate's FLOPS",
                    )
                elif doubled:
                    remark = "the rows printed as 128K"
                rows.append(Row(label, there, round(rate, 2), "simulated", "iterations/s", remark))
    return rows


def refuse_to_measure(table: int) -> int:
    """The exit code, and a line that says why."""
    print(
        f"error: --measure: USP's table {table} is attention alone, forward, and no program here runs that on "
        "Ulysses x Ring: leave --measure out, or see benchmarks/attention.py for attention with its backward pass",
        file=sys.stderr,
    )
    return 2


def attention_seconds(machine: Machine, seq_length: int, ulysses: int, ring: int, balance: str) -> float:
    """One forward pass of the attention of one layer."""
    shape = Shape(1, HEADS * HEAD_DIM, 1, HEADS, KV_HEADS, HEAD_DIM, 1)
    strategy = Strategy(ulysses=ulysses, ring=ring, balance=balance, fused=False)
    a = attended(Workload(shape, seq_length), strategy)
    work = [*to_heads(a, strategy, a.rows), *ring_forward(a, strategy), *to_sequence(a, strategy, a.rows)]
    return sum(price(work, machine).values())
