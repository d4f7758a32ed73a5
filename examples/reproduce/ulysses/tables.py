#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed-Ulysses' throughput (figures 3 to 7, tables 2 and 3), simulated, or measured on the GPUs at hand.

    python examples/reproduce/ulysses/tables.py table_2 [OUT_DIR] [--measure]

ZeRO 3 over all ranks and full recompute; TFLOPS count the full mask and recompute. The batch and the degree of sequence
parallelism are given only for tables 2 and 3 (a global batch of 8), where 8 parallel sequences have P / 8 ranks
each. The figures show the best of several unnamed settings; ours are in the notes.

Attention is assumed to use the full mask. The published times are twice those of causal FlashAttention-2, which
was released in the same summer; the paper does not say whether the mask was not used or the kernel was older.
Measured runs have no causal mask either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.report import PaperTable, Row, published, run_tables  # noqa: E402
from examples.reproduce.simulate import Clock, clock, deepspeed_tflops, from_seconds, shape_of  # noqa: E402
from megatron.formulas.strategy import Shape, Strategy, Workload  # noqa: E402

ULYSSES = Strategy(zero=3, recompute="full")
MEGATRON_SP = Strategy(zero=1, recompute="full")
MEGATRON_TP = {"gpt-7b": 8, "gpt-30b": 64}  # not given; chosen so that curves look like the published ones
TOKENS = 16384  # tokens per GPU that fit with full recompute
SPARSE = 0.45  # of the attention rate, in full-mask FLOPs: the paper's block-sparse kernel, fitted to figure 6
MODELS = {"gpt-7b": "gpt-6.7b", "gpt-30b": "gpt-30b"}


def shape(name: str) -> Shape:
    """7B is the shape whose FLOPs give tables 2 and 3. 30B is not given: we take OPT's width and depth with 64 heads of
    112, because OPT's 56 do not divide over 64 ranks."""
    return shape_of(MODELS[name], **({"num_attention_heads": 64} if name == "gpt-30b" else {}))


def scaling_rows(clock: Clock, tables: Iterable[int] = (2, 3)) -> list[Row]:
    """Seconds per step and TFLOPS per GPU of tables 2 and 3."""
    rows = []
    for line in published("ulysses_scaling"):
        if line["table"] not in tables:
            continue
        batch, gpus = line["global_batch"], line["gpus"]
        workload = Workload(shape(line["model"]), line["seq_length"], batch, causal=False)
        strategy = replace(ULYSSES, ulysses=gpus // batch, data=batch)
        seconds = clock.seconds(MODELS[line["model"]], workload, strategy)
        label = {"seq_length": line["seq_length"], "gpus": gpus, "ulysses": gpus // batch, "dp": batch}
        agrees = deepspeed_tflops(workload, line["step_ms"] / 1e3, gpus)
        note = f"the printed time is {agrees:.1f} TFLOPS by the formula"
        ours = from_seconds(seconds, float, 2)
        rows.append(Row(label, round(line["step_ms"] / 1e3, 2), ours, clock.mark, "s", note))
        ours = from_seconds(seconds, partial(deepspeed_tflops, workload, gpus=gpus), 1)
        rows.append(Row(label, round(line["tflops_per_gpu"], 1), ours, clock.mark, "TFLOPS/GPU"))
    return rows


def figure_rows(clock: Clock, figure: int) -> list[Row]:
    """TFLOPS per GPU over the length, of Ulysses and Megatron's sequence parallelism (figures 4 to 6)."""
    rows = []
    for line in published("ulysses_figures_4_5_6_throughput"):
        if line["figure"] == figure:
            label = {"system": line["system"], "seq_length": line["seq_length"]}
            case = {key: line[key] for key in ("model", "gpus", "seq_length", "system", "attention")}
            (ours, note), column = throughput(clock, **case), line["tflops_per_gpu_read_off_chart"]
            if column == "OOM" and clock.mark == "simulated":
                ours, note = None, "only the speed is simulated here"
            rows.append(Row(label, column, ours, clock.mark, "TFLOPS/GPU", note))
    return rows


def throughput(
    clock: Clock, model: str, gpus: int, seq_length: int, system: str, attention: str
) -> tuple[float | str, str]:
    """TFLOPS per GPU, and the assumed settings."""
    if attention == "block-sparse":
        clock = clock.slowed("the paper's block-sparse kernel", attention=SPARSE)
    degree = MEGATRON_TP[model]
    if system == "ulysses":
        degree = max(1, min(gpus, seq_length // TOKENS))
    data = gpus // degree
    micro_batch = max(1, TOKENS * degree // seq_length)
    strategy = replace(ULYSSES, ulysses=degree, data=data, micro_batch=micro_batch)
    if system != "ulysses":
        strategy = replace(MEGATRON_SP, tensor=degree, data=data, micro_batch=micro_batch)
    workload = Workload(shape(model), seq_length, data * micro_batch, causal=False)
    seconds = clock.seconds(MODELS[model], workload, strategy)
    kind = "Ulysses" if system == "ulysses" else "TP"
    note = f"{kind} {degree} x DP {data}, micro-batch {micro_batch}"
    return from_seconds(seconds, partial(deepspeed_tflops, workload, gpus=gpus), 1), note


def figure_7_rows(clock: Clock) -> list[Row]:
    rows = []
    for system in ("ulysses", "megatron-sp"):
        for seq_length in (8192 << n for n in range(6)):
            ours, note = throughput(clock, "gpt-30b", 64, seq_length, system, "block-sparse")
            label = {"system": system, "seq_length": seq_length}
            rows.append(Row(label, None, ours, clock.mark, "TFLOPS/GPU", note))
    return rows


def figure_3_rows(clock: Clock) -> list[Row]:
    """1.2B: 24 layers of 2048, 32 heads of 64 (assumed). Rows with 4K to 32K tokens per GPU; one sequence per group."""
    small = shape_of("gpt-2.7b", num_layers=24, hidden_size=2048, num_attention_heads=32)
    rows = []
    for seq_length in (8192 << n for n in range(8)):
        for gpus in (1, 2, 4, 8, 16, 32, 64):
            degree = min(gpus, small.heads)
            if not 4096 <= seq_length // degree <= 32768:
                continue
            workload = Workload(small, seq_length, gpus // degree, causal=False)
            chosen = replace(ULYSSES, ulysses=degree, data=gpus // degree)
            seconds = clock.seconds("gpt-2.7b", workload, chosen)
            ours = from_seconds(seconds, partial(deepspeed_tflops, workload, gpus=gpus), 1)
            label = {"seq_length": seq_length, "gpus": gpus}
            rows.append(Row(label, None, ours, clock.mark, "TFLOPS/GPU", f"Ulysses {degree} x DP {gpus // degree}"))
    return rows


def scaling_table(number: int, about: str) -> PaperTable:
    return PaperTable(
        f"DeepSpeed-Ulysses, table {number}",
        about,
        lambda measure: scaling_rows(clock("ulysses-a100", measure), (number,)),
    )


def length_figure(number: int, about: str) -> PaperTable:
    return PaperTable(
        f"DeepSpeed-Ulysses, figure {number}",
        f"throughput over the length, {about}",
        lambda measure: figure_rows(clock("ulysses-a100", measure), number),
        {"over": "seq_length"},
    )


TABLES = {
    "table_2": scaling_table(2, "7B, one length on 64 to 256 A100"),
    "table_3": scaling_table(3, "7B, length and GPUs growing together, 64 to 256 A100"),
    "figure_3": PaperTable(
        "DeepSpeed-Ulysses, figure 3",
        "1.2B, lengths to 1M tokens on 1 to 64 A100; the figure's values are not in published/",
        lambda measure: figure_3_rows(clock("ulysses-a100", measure)),
        {"over": "gpus"},
    ),
    "figure_4": length_figure(4, "7B, dense attention, 32 A100"),
    "figure_5": length_figure(5, "30B, dense attention, 64 A100"),
    "figure_6": length_figure(6, "7B, block-sparse attention, 32 A100"),
    "figure_7": PaperTable(
        "DeepSpeed-Ulysses, figure 7",
        "throughput over the length, 30B, block-sparse attention, 64 A100; the values are not in published/",
        lambda measure: figure_7_rows(clock("ulysses-a100", measure)),
        {"over": "seq_length"},
    ),
}


if __name__ == "__main__":
    run_tables(__file__, __doc__, TABLES)
