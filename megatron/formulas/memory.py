# SPDX-License-Identifier: Apache-2.0
"""Device memory of a rank at the fullest moment of a step, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.decisions.chunks import PARTS, pieces_together
from megatron.formulas.chunked_layer import chunked_layer
from megatron.formulas.chunks import chunks_of
from megatron.formulas.host import host_memory
from megatron.formulas.layer import norm_kept, whole_layer
from megatron.formulas.parameters import StageParameters, model_states, numel, stage_parameters
from megatron.formulas.sizes import WIDE, sizes_of
from megatron.formulas.strategy import Strategy, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. All but ``host`` add up to the device's peak.

    Attributes:
        parameters: weights, and those that FSDP has gathered at that moment.
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
        """The device's peak."""
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
    shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
    held = stage_parameters(shape, strategy.tensor, strategy.pipeline, stage)
    states = model_states(
        held,
        strategy.zero,
        strategy.group("dp").size,
        itemsize,
        bucketed=strategy.overlap_grad_reduce,
    )
    kinds = strategy.layer_kinds(held.layers)
    last_kind, plain = kinds[-1]  # which goes back first: under ``block``, one that keeps all it made
    layer = (chunked_layer if strategy.fpdt_chunk else whole_layer)(workload, last_kind, itemsize, fused)
    last = stage == strategy.pipeline - 1
    state = 0 if strategy.stream_hidden else sizes.hidden
    kept, again = _kept(workload, last_kind, plain, layer.kept, state, stage, recomputed=held.layers - plain)
    always = sizes.angles if not strategy.fpdt_chunk else 0
    if strategy.tensor > 1 and strategy.sequence_parallel:
        always += sizes.whole  # core's buffer for gathered inputs
    if 0 < stage and strategy.micro_batches(workload) > 1:
        always += sizes.hidden  # the gradient sent to the stage before, until the next one is there

    weights = _gathered(workload, strategy, held, itemsize, last)
    gradients, early = states.gradients, states.gradients
    if strategy.zero > 1 and strategy.micro_batches(workload) <= 1:
        early = 0  # FSDP makes them as layers go back
    # Moments: (kept, comes and goes, gathered weights, gradients). The last layer goes back ...
    tied = itemsize * numel(held.embedding[:1]) if shape.tied and held.embedding and last else 0
    busy = again + layer.backward + tied
    moments = [(kept, busy + weights.output_sent, weights.layers, early + weights.output_share)]
    if strategy.zero > 1 and held.layers > 1:  # ... or, while FSDP sums the gradients of another, the one before it ...
        one = layer.kept if last_kind.recompute != "full" else state
        sent, share = busy + weights.layer_sent, weights.layer_share
        moments.append((kept - one, sent, weights.layers, early + weights.output_share + share))
        if early < gradients:  # ... or the second, or the first
            below = (held.layers - 2) * one if not strategy.offload_checkpoints else 0
            shares = early + weights.output_share + (held.layers - 2) * share
            moments.append((kept - below, sent, weights.layers, shares))
            below = (held.layers - 1) * one if not strategy.offload_checkpoints else 0
            moments.append((kept - below, sent, weights.first, gradients - share))
    if weights.words_sent:  # ... or, chunk by chunk, the embedding
        shares = early + weights.output_share + held.layers * weights.layer_share
        moments.append((0, weights.words_sent, weights.root, shares if early < gradients else gradients))
    if last_kind.recompute == "full":
        moments.append((kept, layer.forward, weights.layers, early))
    if last:
        moments.append((kept, _loss(workload, strategy, itemsize, fused), weights.loss, early))
    step = 0 if fused else 2 * WIDE * max(rows * columns for rows, columns in held.tensors)
    moments.append((0, step - always, 0, gradients))
    kept, temporary, gathered, gradients = max(moments, key=sum)
    return Memory(
        parameters=states.parameters + gathered,
        gradients=gradients,
        optimizer=states.optimizer,
        activations=kept + always,
        temporary=temporary,
        host=host_memory(
            workload,
            strategy,
            itemsize,
            streamed=strategy.stream_hidden,
            block=strategy.recompute == "full" and strategy.recompute_method == "block",
        ).total,
    )


def _kept(
    workload: Workload, strategy: Strategy, layers: int, layer: int, hidden: int, stage: int, recomputed: int = 0
) -> tuple[int, int]:
    """(kept by the micro-batches in flight before the last of them goes back, what recompute adds).

    Without recompute the second is minus one layer: what goes back first is among what is kept. ``recomputed`` layers
    besides keep their inputs alone.
    """
    one, again = hidden + layers * layer, -layer
    if strategy.recompute == "full":
        unit = min(strategy.recompute_layers, layers)
        inputs = -(-layers // unit)
        if strategy.offload_checkpoints:
            inputs = min(inputs, 2)  # the one in use, and the one that comes
        one, again = (inputs + 1) * hidden, 0
        # FPDT's layers compute attention again, but not their output.
        again = -hidden if strategy.fpdt_chunk and unit == 1 else (unit - 1) * layer
    elif strategy.offload_checkpoints:
        one -= max(layers - 2, 0) * hidden
    one += recomputed * hidden
    stages, micro_batches = strategy.pipeline, max(strategy.micro_batches(workload), 1)
    if strategy.virtual == 1:
        flying = float(min(stages - stage, micro_batches))
    else:  # in chunks of 1 / virtual of the stage's layers
        chunks = 2 * (stages - stage - 1) + (strategy.virtual - 1) * stages + 1
        flying = min(chunks, micro_batches * strategy.virtual) / strategy.virtual
    ends = hidden if stages > 1 else 0  # a stage's output is let go of once it is sent
    return int((one - ends) * flying) + ends, again


def _loss(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """The final norm, logits and their gradients, or a chunk of them."""
    sizes, shape, chunks = sizes_of(workload, strategy, itemsize), workload.shape, chunks_of(workload, strategy)
    weight = sizes.logits // (sizes.whole // shape.hidden) * shape.hidden
    narrow = itemsize < WIDE
    state = 0 if strategy.stream_hidden else sizes.hidden
    norm = state if strategy.fpdt_chunk else norm_kept(workload, strategy, itemsize, fused)
    if not chunks.loss:  # core makes fp32 logits beside bf16 ones, and their gradients in their place
        logits = sizes.logits * (itemsize + WIDE) // itemsize if narrow else sizes.logits
        after = sizes.logits + sizes.whole + weight * itemsize
        if strategy.tensor > 1 and strategy.sequence_parallel:
            after += sizes.hidden
        return norm + max(logits, after)
    piece, rows = (size * chunks.loss_rows // chunks.all_rows for size in (sizes.logits, sizes.whole))
    together = min(pieces_together(rows // shape.hidden // itemsize, shape.hidden, itemsize), chunks.loss)
    computing = piece * (3 if narrow else 1) + (piece * together if together > 1 else 0)
    adding = piece * together + (weight * itemsize // PARTS if narrow else 0)
    return norm + state + weight * WIDE + max(computing, adding)


@dataclass(frozen=True)
class _Sharded:
    """Of FSDP: weights it has gathered while the loss is computed, while layers go back, when the first does, and of
    its root alone; whole gradients that it is summing up, and this rank's share of them. ``words_sent`` are those of
    an embedding that goes back in chunks, with a layer's and what else waits."""

    loss: int = 0
    layers: int = 0
    first: int = 0
    output_sent: int = 0
    output_share: int = 0
    layer_sent: int = 0
    layer_share: int = 0
    root: int = 0
    words_sent: int = 0


@lru_cache(maxsize=4096)
def _gathered(workload: Workload, strategy: Strategy, held: StageParameters, itemsize: int, last: bool) -> _Sharded:
    """ZeRO 2 and 3. Units are layers, the embedding, the output layer, and the root with what is left."""
    if strategy.zero < 2:
        return _Sharded()
    chunks, ranks = chunks_of(workload, strategy), strategy.group("dp").size
    embedding, output = numel(held.embedding), numel(held.final[-1:]) if last else 0
    root = numel(held.final) - output
    waiting = words = 0
    if workload.shape.tied:
        root, embedding, output = root + embedding + output, 0, 0
    else:  # what is read without being called is part of the root, and its gradient waits with it
        if strategy.stream_hidden:
            root, words, embedding = root + embedding, embedding, 0
        if chunks.loss:
            root, output, waiting = root + output, 0, itemsize * output
    layer = held.layer_numel
    if strategy.zero == 2:
        loss = itemsize * (root + embedding + output + held.layers * layer)
        layers = itemsize * (root + embedding + held.layers * layer)
    else:
        loss = itemsize * (root + output + layer)
        layers = itemsize * (root + layer * min(2, held.layers))  # one in use, one that comes
    return _Sharded(
        loss=loss,
        layers=layers,
        first=itemsize * (root + layer + (embedding if strategy.zero == 2 else 0)),
        output_sent=waiting + WIDE * output,
        output_share=WIDE * output // ranks,
        layer_sent=waiting + WIDE * layer,
        layer_share=WIDE * layer // ranks,
        root=itemsize * root,
        words_sent=waiting + (itemsize + WIDE) * words + WIDE * layer if words else 0,
    )
