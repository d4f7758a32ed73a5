# SPDX-License-Identifier: Apache-2.0
"""GenSLM 33B's throughput on 32 A100-40G with TP 32 (DeepSpeed4Science's table), simulated, or measured on
the GPUs at hand.

The page gives TP 32 and no ZeRO; not the batch, nor how FLOPs are counted: taken as Megatron-DeepSpeed counts them,
full mask and recompute, and two sequences a step. With one, the latency of rings through 32 ranks would cost a quarter
of the speed at 2K tokens that was published; at 256K, where two would not fit at once, it is all the same. 64 heads,
for 80 do not divide over 32 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from examples.reproduce.report import Row, published
from examples.reproduce.simulate import Clock, deepspeed_tflops, shape_of, told
from megatron.formulas.strategy import Strategy, Workload

GPUS, BATCH = 32, 2
# The old framework's share of the new one's rates, fitted to its two figures: eager kernels for softmax, norms and
# activation, attention written out, a smaller batch. It predicts nothing.
OLD = 0.39


def throughput_rows(clock: Clock, frameworks: Sequence[str] = ("new", "old")) -> list[Row]:
    rows = []
    for line in published("genslm_throughput_33b_32xA100_40G_tp32"):
        for framework in frameworks:
            seq_length, there = line["seq_length"], line[f"{framework}_megatron_deepspeed_tflops"]
            label = {"framework": framework, "seq_length": seq_length}
            if there == "OOM" and clock.mark == "simulated":
                rows.append(Row(label, there, None, clock.mark, "TFLOPS/GPU", "speed alone is simulated here"))
                continue
            note = "published dip, not explained: attention's share grows" if seq_length == 262144 else ""
            tflops = told(throughput(clock, seq_length, framework), lambda value: round(value, 1))
            rows.append(Row(label, there, tflops, clock.mark, "TFLOPS/GPU", note))
    return rows


def throughput(clock: Clock, seq_length: int, framework: str) -> float | str:
    """TFLOPS per GPU. The old framework has no sequence parallelism beside TP."""
    if framework == "old":
        clock = clock.slowed("the old framework", gemm=OLD, attention=OLD, memory=OLD, network=OLD)
    shape = shape_of("genslm-33b", num_attention_heads=64, max_position_embeddings=seq_length)
    workload = Workload(shape, seq_length, BATCH, causal=False)
    strategy = Strategy(tensor=GPUS, zero=0, recompute="full", sequence_parallel=framework == "new", micro_batch=BATCH)
    return told(clock.seconds("genslm-33b", workload, strategy), partial(deepspeed_tflops, workload, gpus=GPUS))
