# SPDX-License-Identifier: Apache-2.0
"""FPDT's MFU over the length, the models and the systems (figures 1, 11 and 12), by simulation.

Settings of the paper: batch 1, full recompute with layer inputs in host memory, ZeRO 3 over all ranks; Megatron-SP has
TP over all ranks. Chunks of 64K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.reproduce.report import Row, published
from examples.reproduce.simulate import shape_of
from megatron.simulator.cost import copy_seconds
from megatron.simulator.estimate import estimate, model_flops
from megatron.simulator.hardware import Machine
from megatron.simulator.operations import BF16
from megatron.simulator.strategy import Shape, Strategy, Workload
from megatron.simulator.trace import HostCopy

CHUNK = 65536
MODELS = ("gpt-2.7b", "gpt-6.7b", "llama3-8b", "gpt-13b", "gpt-30b", "llama3-70b")
CONVENTIONS = ("causal", "causal with recompute", "full mask with recompute")


def shape(model: str) -> Shape:
    """30B: OPT's width and depth with 64 heads of 112, for its 56 do not divide over 16 ranks."""
    return shape_of(model, **({"num_attention_heads": 64} if model == "gpt-30b" else {}))


def strategy(system: str, gpus: int, chunk: int = CHUNK) -> Strategy:
    """Without the layer inputs' copies, which :func:`seconds` adds."""
    if system == "megatron-sp":
        return Strategy(tensor=gpus, recompute="full")
    return Strategy(ulysses=gpus, zero=3, recompute="full", fpdt_chunk=chunk if system == "fpdt" else 0)


def seconds(workload: Workload, chosen: Strategy, machine: Machine) -> float:
    """Of a step. The paper's program copies layer inputs to the host and back while it computes nothing (ours
    overlaps them)."""
    copied = float(BF16 * chosen.local_tokens(workload) * workload.shape.hidden)
    waiting = sum(copy_seconds(HostCopy(way, copied), machine) for way in ("to_host", "to_device"))
    return estimate(workload, chosen, machine).seconds + workload.shape.layers * waiting


def mfu(workload: Workload, seconds: float, gpus: int, peak: float) -> dict[str, float]:
    """In percent, by each way of counting FLOPs; recompute is a second forward pass."""
    causal, full = (model_flops(w, recompute=False)[0] for w in (workload, Workload(workload.shape, workload.seq_length, workload.global_batch, False)))
    capacity = seconds * gpus * peak / 100
    return dict(zip(CONVENTIONS, (causal / capacity, causal * 4 / 3 / capacity, full * 4 / 3 / capacity)))


def figure_11_rows(
    machine: Machine, convention: str = CONVENTIONS[1], models: Sequence[str] = MODELS
) -> list[Row]:
    rows = []
    for line in published("fpdt_figure_11_mfu"):
        if line["model"] not in models:
            continue
        workload = Workload(shape(line["model"]), line["seq_length"])
        found = seconds(workload, strategy(line["system"], line["gpus"]), machine)
        counted = mfu(workload, found, line["gpus"], machine.peak["bf16"])
        label = {key: line[key] for key in ("model", "gpus", "system", "seq_length")}
        others = ", ".join(f"{counted[name]:.1f} {name}" for name in CONVENTIONS if name != convention)
        rows.append(Row(label, line["mfu_percent_read_off_chart"], round(counted[convention], 1), "simulated", "% MFU", others))
    return rows
