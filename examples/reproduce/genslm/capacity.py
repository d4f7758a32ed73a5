# SPDX-License-Identifier: Apache-2.0
"""Longest sequences of GenSLM 25B and 33B (DeepSpeed4Science's figures 2 and 7 to 10), by simulation.

New Megatron-DeepSpeed is this project's program with the same savings: TP over all GPUs with sequence parallelism,
FlashAttention, full recompute, a position embedding that is split over the ranks, and no complete mask; layer
inputs stay on the device. There are 64 heads, because 80 do not divide over 32 ranks.

Neither this project's program nor its formulas do what the older systems did, so their memory has closed forms here,
with stated assumptions:

- a dense attention mask, made on the device: ones in fp32 and their lower triangle at the same time, 4 bytes per entry
  each (the page: over 10 GB at 50K tokens, and at least twice that while it is made); then booleans, 1 byte;
- a learned position embedding, complete on every rank, trained like other weights;
- full recompute: each layer keeps its input, and one layer at a time has its activations, by equations 1, 2 and 4 of
  Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models".

The page does not give the parallel sizes of its rows. We use TP over all GPUs, like its throughput table (TP 32
on 32 GPUs) and its figures 9 and 10. Batch 1, 2 bytes per number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from examples.reproduce.capacity import longest_multiple
from examples.reproduce.report import Row, published
from examples.reproduce.simulate import shape_of as named_shape
from megatron.formulas.device_memory import Memory, device_memory
from megatron.formulas.parameters import model_states, stage_parameters
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.machines.machine_file import load

NARROW, WIDE = 2, 4  # bytes of a number in bf16 or fp16, and in fp32


@dataclass(frozen=True)
class System:
    """The long-context features of a system.

    Attributes:
        sequence_parallel: Megatron's; without it every TP rank holds the complete inputs of all layers.
        flash: FlashAttention; without it scores and dropout masks are stored.
        adam_on_host: DeepSpeed's ZeRO-Offload: fp32 weights and Adam's states are in host memory, and gradients in 16
            bits on the device, 4 bytes per parameter instead of 18.
        why: the note of its rows.
    """

    sequence_parallel: bool
    flash: bool
    adam_on_host: bool
    why: str


OLD_MEGATRON_DEEPSPEED = System(
    sequence_parallel=False,
    flash=False,
    adam_on_host=True,
    why="ASSUMED: ZeRO-Offload, because model states and layer inputs exceed the GPU's memory",
)
MEGATRON_LM = System(
    sequence_parallel=True,
    flash=True,
    adam_on_host=False,
    why="ASSUMED: FlashAttention, because the scores do not fit on 16 and 32 GPUs; but with a dense mask",
)
TENSOR_PARALLEL = System(sequence_parallel=False, flash=True, adam_on_host=False, why="")


@dataclass(frozen=True)
class OldMemory:
    """Bytes of a rank.

    Attributes:
        states: weights, gradients and the optimizer's part on the device, without the position embedding.
        positions: the same of the position embedding.
        making_mask: needed while the mask is made, before the first layer.
        mask: the mask after it is made.
        inputs: inputs of all layers.
        layer: activations of the layer that is recomputed, in its backward pass.
    """

    states: int
    positions: int
    making_mask: int
    mask: int
    inputs: int
    layer: int

    @property
    def total(self) -> int:
        """The larger of two moments: while the mask is made, and during the first layer's backward pass."""
        return self.states + self.positions + max(self.making_mask, self.mask + self.inputs + self.layer)


def old_memory(shape: Shape, seq_length: int, tensor: int, system: System) -> OldMemory:
    """Memory of a rank of ``tensor``, with one sequence per step."""
    s, split = seq_length, tensor if system.sequence_parallel else 1
    states, with_table = (_states(replace(shape, positions=n), tensor, system) for n in (0, s))
    return OldMemory(
        states=states,
        positions=with_table - states,
        making_mask=2 * WIDE * s * s,
        mask=s * s,
        inputs=shape.layers * s * shape.hidden * NARROW // split,
        layer=layer_activations(shape, s, tensor, system),
    )


def layer_activations(shape: Shape, seq_length: int, tensor: int, system: System) -> int:
    """Bytes that a layer keeps without recompute (equations 2 and 4), and during attention's backward pass.

    Equation 1 is for one rank. With FlashAttention its quadratic term is absent.
    """
    s, h, heads = seq_length, shape.hidden, shape.heads
    kept = 34 * s * h // tensor if system.sequence_parallel else s * (10 * h + 24 * h // tensor)
    if system.flash:
        return kept
    scores = heads * s * s // tensor
    return kept + 5 * scores + NARROW * scores  # softmax, dropout's mask and output; the gradient of scores


def _states(shape: Shape, tensor: int, system: System) -> int:
    parameters = stage_parameters(shape, tensor, 1, 0)
    if system.adam_on_host:
        return 2 * NARROW * parameters.numel
    held = model_states(parameters, 0, 1, NARROW)
    return held.parameters + held.gradients + held.optimizer


STEP = 1024  # published lengths are multiples of it
GPU = "A100-40G"
SYSTEMS: dict[str, tuple[str, System | None]] = {  # (column in published/, system); None: this project's program
    "old Megatron-DeepSpeed": ("old_megatron_deepspeed_tokens", OLD_MEGATRON_DEEPSPEED),
    "Megatron-LM": ("megatron_lm_tokens", MEGATRON_LM),
    "new Megatron-DeepSpeed": ("new_megatron_deepspeed_tokens", None),
}
GB = 1e9


def shape_of(model: str) -> Shape:
    """The shape without positions, whose number depends on the length."""
    return replace(named_shape(model, num_attention_heads=64), positions=0)


def new_memory(shape: Shape, seq_length: int, tensor: int, *, inputs_on_host: bool = False) -> Memory:
    """Memory of a rank of this project's program."""
    strategy = Strategy(tensor=tensor, zero=0, recompute="full", offload_checkpoints=inputs_on_host)
    return device_memory(Workload(replace(shape, positions=seq_length // tensor), seq_length), strategy)


def longest(shape: Shape, gpus: int, system: System | None, *, inputs_on_host: bool = False) -> int:
    """The longest length in tokens, a multiple of 1024."""
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
    """What limits the length."""
    held = old_memory(shape, length + STEP, gpus, system)
    if held.making_mask > held.mask + held.inputs + held.layer:
        return f"limited by making the mask, {held.making_mask / GB:.1f} GB"
    return f"limited by layer inputs, {held.inputs / GB:.1f} GB, and one layer, {held.layer / GB:.1f} GB"


def _with_host(shape: Shape, gpus: int) -> str:
    further = longest(shape, gpus, None, inputs_on_host=True)
    return f"with layer inputs in host memory: {further // STEP}K"


SAVINGS: dict[str, System | None] = {"TP": TENSOR_PARALLEL, "TP, SP": MEGATRON_LM, "TP, SP, table and mask": None}
CEILING = 51200  # the page: about 50K on any number of GPUs, unless the table is split
NOT_THE_TABLE = "the page blames the table, here {table:.1f} GB; making the dense mask takes {mask:.1f} GB"


def scalability_rows(model: str) -> list[Row]:
    """Figures 9 and 10: the effect of each saving. published/ has only the numbers of the text."""
    shape, rows = shape_of(model), []
    published_tokens = {line["gpus"]: line["new_megatron_deepspeed_tokens"] for line in published("genslm_max_context")
            if line["model"] == model}  # fmt: skip
    for name, system in SAVINGS.items():
        for gpus in published_tokens:
            ours, theirs, note = longest(shape, gpus, system), None, ""
            if system is None:
                theirs = published_tokens[gpus]
            elif system is MEGATRON_LM and gpus == max(published_tokens):
                held = old_memory(shape, ours, gpus, system)
                theirs, note = CEILING, NOT_THE_TABLE.format(table=held.positions / GB, mask=held.making_mask / GB)
            rows.append(Row({"savings": name, "gpus": gpus}, theirs, ours, "simulated", "tokens", note))
    return rows


def activation_rows(length: int = 102400) -> list[Row]:
    """The page's figures for 25B at 100K: 480 GB of activations, 12 GB if they are split."""
    shape = shape_of("genslm-25b")
    channels = shape.layers * length * shape.hidden
    note = "activations and ranks are not specified: 480 GB are 12.7 bytes per layer, token and channel"
    result = {
        "all activations, 1 rank": (480.0, 34 * channels),
        "all activations, 64 ranks": (12.0, 34 * channels // 64),
        "layer inputs alone, 1 rank": (None, 2 * channels),
        "layer inputs alone, 64 ranks": (None, 2 * channels // 64),
    }
    return [
        Row({"savings": name}, theirs, round(size / GB, 2), "simulated", "GB", note if theirs else "")
        for name, (theirs, size) in result.items()
    ]
