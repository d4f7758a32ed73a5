# SPDX-License-Identifier: Apache-2.0
"""Device memory of a rank at the fullest moment of a step, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.simulator.formulas.chunked_layer import chunked_layer
from megatron.simulator.formulas.host import host_memory
from megatron.simulator.formulas.layer import Layer, norm_kept, whole_layer
from megatron.simulator.formulas.parameters import model_states, stage_parameters
from megatron.simulator.formulas.sizes import WIDE, chunks_of, sizes_of
from megatron.simulator.strategy import Strategy, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. Without ``host`` they add up to the device's peak.

    Attributes:
        parameters: weights, and those that FSDP has gathered.
        gradients: fp32 buffers.
        optimizer: Adam's states and fp32 main weights.
        activations: what forward passes have kept when the fullest moment comes.
        temporary: what comes and goes around it.
        host: host memory for what is offloaded.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    host: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@lru_cache(maxsize=65536)
def device_memory(
    workload: Workload, strategy: Strategy, *, itemsize: int = 2, stage: int = 0, fused: bool = True
) -> Memory:
    """Bytes of the fullest rank of pipeline stage ``stage``.

    Args:
        workload, strategy: what is trained, and how.
        itemsize: of the compute dtype: 2 for bf16 and fp16 (with fp32 gradients and main weights), 4 for fp32.
        stage: pipeline stage, from 0.
        fused: kernels of a GPU (norms, SwiGLU, Adam); False: PyTorch's single operations, as on a CPU.
    """
    shape, chunks = workload.shape, chunks_of(workload, strategy)
    sizes = sizes_of(workload, strategy, itemsize)
    held = stage_parameters(shape, strategy.tensor, strategy.pipeline, stage)
    ranks = strategy.group("dp").size
    bucketed = strategy.overlap_grad_reduce
    states = model_states(held, strategy.zero, ranks, itemsize, fused=fused, bucketed=bucketed)
    gathered, gradient = _sharded(workload, strategy, itemsize, stage)

    make = chunked_layer if strategy.fpdt_chunk else whole_layer
    layer: Layer = make(workload, strategy, itemsize, fused)
    micro_batches = max(strategy.micro_batches(workload), 1)
    flying = min(strategy.pipeline - stage, micro_batches)
    if strategy.virtual > 1:
        flying = min(strategy.pipeline - stage + (strategy.virtual - 1) * strategy.pipeline / strategy.virtual, 99)
    layers = held.layers
    one = layers * layer.kept + sizes.hidden
    recomputed = 0
    if strategy.recompute == "full":
        unit = min(strategy.recompute_layers, layers)
        inputs = -(-layers // unit) * sizes.hidden
        if strategy.offload_checkpoints:
            inputs = 2 * sizes.hidden  # the one in use, and the one that comes
        one = inputs + sizes.hidden
        if not (strategy.fpdt_chunk and unit == 1):
            recomputed = (unit - 1) * layer.kept
    elif strategy.offload_checkpoints:
        one = layers * (layer.kept - sizes.hidden) + 2 * sizes.hidden
    kept = int(one * flying) + sizes.angles
    last = stage == strategy.pipeline - 1

    if strategy.recompute == "full":
        moments = [recomputed + layer.backward, layer.forward]
    else:
        moments = [layer.backward - layer.kept]
    if last:
        moments.append(_loss(workload, strategy, itemsize, fused))
    if strategy.tensor > 1 and strategy.sequence_parallel:
        kept += sizes.whole  # core's buffer for gathered inputs
    temporary = max(moments) + gradient
    optimizer = 0 if fused else 2 * WIDE * max(rows * columns for rows, columns in held.tensors)
    if optimizer > kept + temporary:
        kept, temporary = 0, optimizer
    host = host_memory(workload, strategy, itemsize).total
    return Memory(states.parameters + gathered, states.gradients, states.optimizer, kept, temporary, host)


def _loss(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """The final norm, logits and their gradients, or a chunk of them."""
    sizes, shape, chunks = sizes_of(workload, strategy, itemsize), workload.shape, chunks_of(workload, strategy)
    rows = sizes.logits // (sizes.whole // shape.hidden)  # of the output layer, of this rank
    weight = rows * shape.hidden
    if not chunks.loss:
        logits = sizes.logits if itemsize == WIDE else sizes.logits * (itemsize + WIDE) // itemsize
        after = sizes.logits + sizes.whole + weight * itemsize
        if strategy.tensor > 1 and strategy.sequence_parallel:
            after += sizes.hidden
        return norm_kept(workload, strategy, itemsize, fused) + max(logits, after)
    share = chunks.loss_rows * strategy.micro_batch / (sizes.hidden / itemsize / shape.hidden)
    norm = sizes.hidden if strategy.fpdt_chunk else norm_kept(workload, strategy, itemsize, fused)
    logits = sizes.logits if itemsize == WIDE else sizes.logits * (itemsize + WIDE) // itemsize
    return norm + sizes.hidden + weight * WIDE + int(share * logits)


def _sharded(workload: Workload, strategy: Strategy, itemsize: int, stage: int) -> tuple[int, int]:
    """ZeRO 2 and 3: (weights that are gathered, gradients of a layer on their way)."""
    if strategy.zero < 2:
        return 0, 0
    held = stage_parameters(workload.shape, strategy.tensor, strategy.pipeline, stage)
    rest = held.numel - held.layers * held.layer_numel
    layers = held.layers if strategy.zero == 2 else min(3, held.layers)
    return itemsize * (rest + layers * held.layer_numel), (itemsize + WIDE) * held.layer_numel
