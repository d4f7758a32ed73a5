# SPDX-License-Identifier: Apache-2.0
"""GenSLM 33B's throughput on 32 A100-40G with TP 32 (DeepSpeed4Science's table), by simulation.

The page gives TP 32 and no ZeRO; not the batch, nor how FLOPs are counted: taken as Megatron-DeepSpeed counts them,
full mask and recompute, and one sequence a step. 64 heads, for 80 do not divide over 32 ranks.
"""

from __future__ import annotations

from examples.reproduce.report import Row, published
from examples.reproduce.simulate import deepspeed_tflops, shape_of
from megatron.simulator.estimate import estimate
from megatron.simulator.hardware import Machine
from megatron.simulator.strategy import Strategy, Workload

GPUS = 32


def throughput_rows(machine: Machine) -> list[Row]:
    rows = []
    for line in published("genslm_throughput_33b_32xA100_40G_tp32"):
        seq_length = line["seq_length"]
        shape = shape_of("genslm-33b", num_attention_heads=64, max_position_embeddings=seq_length)
        workload = Workload(shape, seq_length, causal=False)
        for system, sharded in (("new", True), ("old", False)):
            strategy = Strategy(tensor=GPUS, zero=0, recompute="full", sequence_parallel=sharded)
            seconds = estimate(workload, strategy, machine).seconds
            tflops = round(deepspeed_tflops(workload, seconds, GPUS), 1)
            there = line[f"{system}_megatron_deepspeed_tflops"]
            rows.append(Row({"framework": system, "seq_length": seq_length}, there, tflops, "simulated", "TFLOPS/GPU"))
    return rows
