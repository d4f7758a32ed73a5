# SPDX-License-Identifier: Apache-2.0
"""Longest sequences of GenSLM 25B and 33B (DeepSpeed4Science's figures 2 and 7 to 10), by simulation.

New Megatron-DeepSpeed is this project's program with the same savings: TP over all GPUs with sequence parallelism,
FlashAttention, full recompute, a position embedding shared out over the ranks, and no mask that is ever whole; layer
inputs stay on the device. The old systems: old_systems.py. 64 heads, for 80 do not divide over 32 ranks.
"""

from __future__ import annotations

from dataclasses import replace

from examples.reproduce.capacity import longest_multiple
from examples.reproduce.genslm.old_systems import (
    MEGATRON_LM,
    OLD_MEGATRON_DEEPSPEED,
    TENSOR_PARALLEL,
    System,
    old_memory,
)
from examples.reproduce.report import Row, published
from examples.reproduce.simulate import shape_of as named_shape
from megatron.formulas.device_memory import Memory, device_memory
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.machines.machine_file import load

STEP = 1024  # published lengths are multiples of it
GPU = "A100-40G"
SYSTEMS: dict[str, tuple[str, System | None]] = {  # names here and in published/; None: this project's program
    "old Megatron-DeepSpeed": ("old_megatron_deepspeed_tokens", OLD_MEGATRON_DEEPSPEED),
    "Megatron-LM": ("megatron_lm_tokens", MEGATRON_LM),
    "new Megatron-DeepSpeed": ("new_megatron_deepspeed_tokens", None),
}
GB = 1e9


def shape_of(model: str) -> Shape:
    """Without positions, which depend on the length."""
    return replace(named_shape(model, num_attention_heads=64), positions=0)


def new_memory(shape: Shape, seq_length: int, tensor: int, *, inputs_on_host: bool = False) -> Memory:
    """Of a rank of this project's program."""
    strategy = Strategy(tensor=tensor, zero=0, recompute="full", offload_checkpoints=inputs_on_host)
    return device_memory(Workload(replace(shape, positions=seq_length // tensor), seq_length), strategy)


def longest(shape: Shape, gpus: int, system: System | None, *, inputs_on_host: bool = False) -> int:
    """In tokens, a multiple of 1024."""
    limit = load(GPU).usable_memory

    def fits(length: int) -> bool:
        if system:
            return old_memory(shape, length, gpus, system).total <= limit
        return new_memory(shape, length, gpus, inputs_on_host=inputs_on_host).total <= limit

    return longest_multiple(fits, STEP)


def maxima_rows(model: str, systems: tuple[str, ...] = tuple(SYSTEMS)) -> list[Row]:
    """Figures 2, 7 and 8: each system on 16, 32 and 64 GPUs."""
    rows, shape = [], shape_of(model)
    for line in published("genslm_max_context"):
        if line["model"] != model:
            continue
        for name in systems:
            column, system = SYSTEMS[name]
            ours, gpus = longest(shape, line["gpus"], system), line["gpus"]
            note = f"{system.why}; {_fullest(shape, ours, gpus, system)}" if system else _with_host(shape, gpus)
            rows.append(Row({"gpus": gpus, "system": name}, line[column], ours, "simulated", "tokens", note))
    return rows


def _fullest(shape: Shape, length: int, gpus: int, system: System) -> str:
    """What a longer sequence has no room for."""
    held = old_memory(shape, length + STEP, gpus, system)
    if held.making_mask > held.mask + held.inputs + held.layer:
        return f"stopped by making the mask, {held.making_mask / GB:.1f} GB"
    return f"stopped by layer inputs, {held.inputs / GB:.1f} GB, and one layer, {held.layer / GB:.1f} GB"


def _with_host(shape: Shape, gpus: int) -> str:
    further = longest(shape, gpus, None, inputs_on_host=True)
    return f"with layer inputs in host memory: {further // STEP}K"


SAVINGS: dict[str, System | None] = {
    "TP": TENSOR_PARALLEL,
    "TP, SP": MEGATRON_LM,
    "TP, SP, table and mask": None,
}
CEILING = 51200  # the page: about 50K without sharing out the table, however many GPUs
NOT_THE_TABLE = "the page blames the table, here {table:.1f} GB; making the dense mask takes {mask:.1f} GB"


def scalability_rows(model: str) -> list[Row]:
    """Figures 9 and 10: what each saving is worth. Their numbers are not in published/ but for the text's."""
    shape, rows = shape_of(model), []
    told = {line["gpus"]: line["new_megatron_deepspeed_tokens"] for line in published("genslm_max_context")
            if line["model"] == model}  # fmt: skip
    for name, system in SAVINGS.items():
        for gpus in told:
            ours, there, note = longest(shape, gpus, system), None, ""
            if system is None:
                there = told[gpus]
            elif system is MEGATRON_LM and gpus == max(told):
                held = old_memory(shape, ours, gpus, system)
                there, note = CEILING, NOT_THE_TABLE.format(table=held.positions / GB, mask=held.making_mask / GB)
            rows.append(Row({"savings": name, "gpus": gpus}, there, ours, "simulated", "tokens", note))
    return rows


def activation_rows(length: int = 102400) -> list[Row]:
    """What the page says of 25B at 100K: 480 GB of activations, 12 GB where they are shared out."""
    shape = shape_of("genslm-25b")
    channels = shape.layers * length * shape.hidden
    note = "which activations, and over how many ranks, is not said: 480 GB are 12.7 bytes a layer, token and channel"
    found = {
        "all activations, 1 rank": (480.0, 34 * channels),
        "all activations, 64 ranks": (12.0, 34 * channels // 64),
        "layer inputs alone, 1 rank": (None, 2 * channels),
        "layer inputs alone, 64 ranks": (None, 2 * channels // 64),
    }
    return [
        Row({"savings": name}, there, round(size / GB, 2), "simulated", "GB", note if there else "")
        for name, (there, size) in found.items()
    ]
