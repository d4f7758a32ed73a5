# SPDX-License-Identifier: Apache-2.0
"""FPDT's MFU over the length, the models and the systems (figures 1, 11 and 12), by simulation.

Settings of the paper: batch 1, full recompute with layer inputs in host memory, ZeRO 3 over all ranks; Megatron-SP has
TP over all ranks. Chunks of 64K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    causal, full = (model_flops(replace(workload, causal=way), recompute=False)[0] for way in (True, False))
    capacity = seconds * gpus * peak / 100
    return dict(zip(CONVENTIONS, (causal / capacity, causal * 4 / 3 / capacity, full * 4 / 3 / capacity)))


def figure_11_rows(machine: Machine, convention: str = CONVENTIONS[1], models: Sequence[str] = MODELS) -> list[Row]:
    rows = []
    for line in published("fpdt_figure_11_mfu"):
        if line["model"] not in models:
            continue
        workload = Workload(shape(line["model"]), line["seq_length"])
        found = seconds(workload, strategy(line["system"], line["gpus"]), machine)
        counted = mfu(workload, found, line["gpus"], machine.peak["bf16"])
        label = {key: line[key] for key in ("model", "gpus", "system", "seq_length")}
        others = "64 heads of 112 assumed; " if line["model"] == "gpt-30b" else ""
        others += ", ".join(f"{counted[name]:.1f} {name}" for name in CONVENTIONS if name != convention)
        rows.append(
            Row(label, line["mfu_percent_read_off_chart"], round(counted[convention], 1), "simulated", "% MFU", others)
        )
    return rows


def figure_1_rows(machine: Machine) -> list[Row]:
    """The longest context that figure 11 shows of each system."""
    longest: dict[tuple, Row] = {}
    for row in figure_11_rows(machine, models=("gpt-2.7b", "gpt-13b", "llama3-70b")):
        key = row.label["model"], row.label["system"]
        if key not in longest or row.label["seq_length"] > longest[key].label["seq_length"]:
            longest[key] = row
    return list(longest.values())


def figure_12_rows(machine: Machine, length: int = 262144) -> list[Row]:
    """MFU by chunk; one chunk of all tokens is Ulysses without FPDT. 30B on 8 GPUs, the others on 4."""
    rows = []
    for model in ("gpt-2.7b", "gpt-6.7b", "gpt-13b", "gpt-30b"):
        gpus = 8 if model == "gpt-30b" else 4
        for chunk in (8192 << n for n in range(6)):
            workload = Workload(shape(model), length)
            chosen = strategy("fpdt" if chunk < length else "ulysses", gpus, chunk)
            counted = mfu(workload, seconds(workload, chosen, machine), gpus, machine.peak["bf16"])
            ours = round(counted[CONVENTIONS[1]], 1)
            rows.append(Row({"model": model, "chunk": chunk}, None, ours, "simulated", "% MFU"))
    return rows
