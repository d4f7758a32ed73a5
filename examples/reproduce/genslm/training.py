# SPDX-License-Identifier: Apache-2.0
"""GenSLM 33B's throughput on 32 A100-40G with TP 32 (DeepSpeed4Science's table), by simulation.

The page gives TP 32 and no ZeRO; not the batch, nor how FLOPs are counted: taken as Megatron-DeepSpeed counts them,
full mask and recompute, and one sequence a step. 64 heads, for 80 do not divide over 32 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from examples.reproduce.report import Row, published
from examples.reproduce.simulate import deepspeed_tflops, shape_of
from megatron.simulator.estimate import estimate
from megatron.simulator.hardware import Machine
from megatron.simulator.strategy import Strategy, Workload

GPUS = 32
# The old framework's share of the new one's rates, fitted to its two figures: eager kernels for softmax, norms and
# activation, attention written out, a smaller batch. It foretells nothing.
OLD = 0.4


def throughput_rows(machine: Machine, frameworks: Sequence[str] = ("new", "old")) -> list[Row]:
    rows = []
    for line in published("genslm_throughput_33b_32xA100_40G_tp32"):
        for framework in frameworks:
            seq_length, there = line["seq_length"], line[f"{framework}_megatron_deepspeed_tflops"]
            label = {"framework": framework, "seq_length": seq_length}
            if there == "OOM":
                rows.append(Row(label, there, None, "simulated", "TFLOPS/GPU", "speed alone is simulated here"))
                continue
            note = "published dip, not explained: attention's share grows" if seq_length == 262144 else ""
            tflops = round(throughput(machine, seq_length, framework), 1)
            rows.append(Row(label, there, tflops, "simulated", "TFLOPS/GPU", note))
    return rows


def throughput(machine: Machine, seq_length: int, framework: str) -> float:
    """TFLOPS per GPU. The old framework has no sequence parallelism beside TP."""
    if framework == "old":
        shares = asdict(machine.calibration)
        slower = {name: OLD * shares[name] for name in ("gemm", "attention", "memory", "network")}
        machine = replace(machine, calibration=replace(machine.calibration, **slower))
    shape = shape_of("genslm-33b", num_attention_heads=64, max_position_embeddings=seq_length)
    workload = Workload(shape, seq_length, causal=False)
    strategy = Strategy(tensor=GPUS, zero=0, recompute="full", sequence_parallel=framework == "new")
    return deepspeed_tflops(workload, estimate(workload, strategy, machine).seconds, GPUS)
