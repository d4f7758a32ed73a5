# SPDX-License-Identifier: Apache-2.0
"""Device memory of the systems that GenSLM was trained with before: closed forms with stated assumptions.

Neither this project's program nor its formulas do what they did, so their memory is written down here:

- a dense attention mask, made on the device: ones in fp32 and their lower triangle, 4 bytes an entry each, at once
  (the page: over 10 GB at 50K tokens, and at least twice that while it is made); then booleans, 1 byte;
- a learned position embedding, whole on every rank, trained as any weight;
- full recompute: each layer keeps its input, and one layer at a time its activations, by equations 1, 2 and 4 of
  Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models".

Which parallel sizes a published row has is not said: TP over all GPUs is taken, as the page's throughput table (TP 32
on 32 GPUs) and the names in its figures 9 and 10 have it. Batch 1, 2 bytes a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.formulas.parameters import model_states, stage_parameters
from megatron.formulas.strategy import Shape

NARROW, WIDE = 2, 4  # bytes of a number in bf16 or fp16, and in fp32


@dataclass(frozen=True)
class System:
    """What of long-context training a system has.

    Attributes:
        sequence_parallel: Megatron's, beside TP; without it every TP rank holds all layers' whole inputs.
        flash: FlashAttention; without it scores and dropout masks are written out.
        adam_on_host: DeepSpeed's ZeRO-Offload: fp32 weights and Adam's states are in host memory, and gradients in 16
            bits on the device, 4 bytes a parameter in place of 18.
        why: said beside its rows.
    """

    sequence_parallel: bool
    flash: bool
    adam_on_host: bool
    why: str


OLD_MEGATRON_DEEPSPEED = System(
    sequence_parallel=False,
    flash=False,
    adam_on_host=True,
    why="ASSUMED: ZeRO-Offload, for model states and the published length's layer inputs are more than the GPU has",
)
MEGATRON_LM = System(
    sequence_parallel=True,
    flash=True,
    adam_on_host=False,
    why="ASSUMED: FlashAttention, for on 16 and 32 GPUs the published lengths' scores do not fit; a dense mask even so",
)
TENSOR_PARALLEL = System(sequence_parallel=False, flash=True, adam_on_host=False, why="")


@dataclass(frozen=True)
class OldMemory:
    """Bytes of a rank.

    Attributes:
        states: weights, gradients and what of the optimizer is on the device, position embedding left out.
        positions: the same of the position embedding.
        making_mask: before the first layer.
        mask: from then on.
        inputs: of all layers.
        layer: the layer that is recomputed and goes back.
    """

    states: int
    positions: int
    making_mask: int
    mask: int
    inputs: int
    layer: int

    @property
    def total(self) -> int:
        """At the fuller of two moments: while the mask is made, and while the first layer goes back."""
        return self.states + self.positions + max(self.making_mask, self.mask + self.inputs + self.layer)


def old_memory(shape: Shape, seq_length: int, tensor: int, system: System) -> OldMemory:
    """Of a rank of ``tensor``, for one sequence a step."""
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
    """Bytes that a layer keeps without recompute (equations 2 and 4), and while attention goes back.

    Equation 1 is that of one rank. FlashAttention leaves out its term in the square of the length.
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
