#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables and figures of GenSLM on DeepSpeed4Science's page: throughput, and longest sequences (capacity.py).

    python examples/reproduce/genslm/tables.py table_1 [OUT_DIR] [--measure]
    python examples/reproduce/genslm/tables.py figure_7 [OUT_DIR]

Throughput is that of 33B on 32 A100-40G with TP 32. The page gives TP 32 and no ZeRO, but neither the batch nor how
FLOPs are counted. We count like Megatron-DeepSpeed (full mask and recompute) and assume two sequences per step. With
one, the latency of rings over 32 ranks would cost a quarter of the published speed at 2K tokens; at 256K,
where two would not fit at once, it makes no difference. There are 64 heads, because 80 do not divide over 32 ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.capacity import context_table  # noqa: E402
from examples.reproduce.genslm.capacity import activation_rows, maxima_rows, scalability_rows  # noqa: E402
from examples.reproduce.report import FORMULAS, PaperTable, Row, published, run_tables  # noqa: E402
from examples.reproduce.simulate import Clock, clock, deepspeed_tflops, from_seconds, shape_of  # noqa: E402
from megatron.formulas.strategy import Strategy, Workload  # noqa: E402

GPUS, BATCH = 32, 2
# The old framework's share of the new one's rates, fitted to its two figures: eager kernels for softmax, norms and
# activation, unfused attention, a smaller batch. It predicts nothing.
OLD = 0.39


def throughput_rows(clock: Clock, frameworks: Sequence[str] = ("new", "old")) -> list[Row]:
    rows = []
    for line in published("genslm_throughput_33b_32xA100_40G_tp32"):
        for framework in frameworks:
            seq_length, theirs = line["seq_length"], line[f"{framework}_megatron_deepspeed_tflops"]
            label = {"framework": framework, "seq_length": seq_length}
            if theirs == "OOM" and clock.mark == "simulated":
                rows.append(Row(label, theirs, None, clock.mark, "TFLOPS/GPU", "only the speed is simulated here"))
                continue
            note = "published dip, not explained: attention's share grows" if seq_length == 262144 else ""
            tflops = from_seconds(throughput(clock, seq_length, framework), float, 1)
            rows.append(Row(label, theirs, tflops, clock.mark, "TFLOPS/GPU", note))
    return rows


def throughput(clock: Clock, seq_length: int, framework: str) -> float | str:
    """TFLOPS per GPU. The old framework has TP without sequence parallelism."""
    if framework == "old":
        clock = clock.slowed("the old framework", gemm=OLD, attention=OLD, memory=OLD, network=OLD)
    shape = shape_of("genslm-33b", num_attention_heads=64, max_position_embeddings=seq_length)
    workload = Workload(shape, seq_length, BATCH, causal=False)
    strategy = Strategy(tensor=GPUS, zero=0, recompute="full", sequence_parallel=framework == "new", micro_batch=BATCH)
    return from_seconds(clock.seconds("genslm-33b", workload, strategy), partial(deepspeed_tflops, workload, gpus=GPUS))


def maxima(figure: str, about: str, rows: Callable[[], list[Row]]) -> PaperTable:
    return context_table(f"DeepSpeed4Science, {figure}", about, rows, over="gpus", log=True)


TABLES = {
    "table_1": PaperTable(
        "GenSLM 33B, throughput",
        "throughput of GenSLM 33B on 32 A100-40G, TP 32",
        lambda measure: throughput_rows(clock("genslm-a100", measure)),
        {"over": "seq_length"},
    ),
    "figure_2": maxima(
        "figure 2: GenSLM 33B before",
        "longest sequences of 33B with the two older frameworks, under 60K tokens",
        lambda: maxima_rows("genslm-33b", ("old Megatron-DeepSpeed", "Megatron-LM")),
    ),
    "figure_7": maxima(
        "figure 7: GenSLM 33B",
        "longest sequences of 33B with three frameworks, A100-40G",
        lambda: maxima_rows("genslm-33b"),
    ),
    "figure_8": maxima(
        "figure 8: GenSLM 25B",
        "longest sequences of 25B with three frameworks, A100-40G",
        lambda: maxima_rows("genslm-25b"),
    ),
    "figure_9": maxima(
        "figure 9: scalability of GenSLM 33B",
        "longest sequences of 33B over GPUs, by memory saving. The published values are the text's limit while every "
        "rank holds the complete position embedding, about 50K tokens, and figure 7's maxima",
        lambda: scalability_rows("genslm-33b"),
    ),
    "figure_10": maxima(
        "figure 10: scalability of GenSLM 25B",
        "the same for 25B, with figure 8's maxima. figure_4.py counts the bytes of the mask, and figure_6.py those of "
        "the position embedding",
        lambda: scalability_rows("genslm-25b"),
    ),
    "section_scalability": PaperTable(
        "DeepSpeed4Science: activations of GenSLM 25B at 100K",
        "activations, from 480 GB to 12 GB per device. By Korthikanti et al., 34 bytes per layer, token and channel "
        "without recompute (equation 4), and 2 of layer inputs with full recompute",
        lambda _: activation_rows(),
        {"log": True},
        not_measured=FORMULAS,
    ),
}


if __name__ == "__main__":
    run_tables(__file__, __doc__, TABLES)
