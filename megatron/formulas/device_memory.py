# SPDX-License-Identifier: Apache-2.0
"""Closed form of a rank's device memory at the moment of a step when most of it is in use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.decisions.division import PARTS, pieces_together
from megatron.formulas.host_bytes import host_memory
from megatron.formulas.layer_memory import attention_apart, choices_apart, chunked_layer, whole_layer
from megatron.formulas.parameters import StageParameters, numel, rank_parameters, rank_states, stage_parameters
from megatron.formulas.sizes import WIDE, chunks_of, norm_kept, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload, changed, refuse_unknown


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. All but ``host`` add up to the device's peak.

    Attributes:
        parameters: weights, a reference's too, including those that FSDP has gathered at the peak.
        gradients: fp32 buffers.
        optimizer: Adam's states and fp32 main weights.
        activations: what forward passes have kept for backward at the peak.
        temporary: buffers that are in use at the peak only.
        host: host memory for offloaded tensors.
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
    """Bytes of the rank that needs most in pipeline stage ``stage``.

    Args:
        workload, strategy: what is trained, and how.
        itemsize: bytes of a number in the compute dtype: 2 for bf16 and fp16 (with fp32 gradients and main weights), 4
            for fp32.
        stage: pipeline stage, from 0.
        fused: with fused GPU kernels (norms, SwiGLU, Adam); False: with PyTorch's separate operations, as on a CPU.
    """
    refuse_unknown(workload.shape, strategy)
    shape, sizes = workload.shape, sizes_of(workload, strategy, itemsize)
    held = rank_parameters(shape, strategy, stage)
    states = rank_states(held, strategy, itemsize)
    first, held_layers = strategy.stage_span(shape.layers, stage)
    with_experts = shape.with_experts(first, held_layers)
    last = stage == strategy.pipeline - 1
    weights = _gathered(workload, strategy, stage, held, itemsize)
    always = sizes.angles if not strategy.fpdt_chunk else 0
    if strategy.tensor > 1 and strategy.sequence_parallel:
        always += sizes.whole  # core's buffer for gathered inputs
    if 0 < stage and strategy.micro_batches(workload) > 1:
        always += sizes.hidden  # the gradient sent to the previous stage is kept until the next one exists

    gradients, early = states.gradients, states.gradients
    if strategy.zero > 1 and strategy.micro_batches(workload) <= 1:
        early = 0  # FSDP creates a layer's gradients when its backward pass runs
    tied = itemsize * numel(held.embedding[:1]) if shape.tied and held.embedding and last else 0
    kept, moments, below = 0, [], held_layers
    for layer_strategy, count in reversed(strategy.layer_kinds(held_layers)):  # backward order
        below -= count
        above, share = held_layers - below - count, with_experts / held_layers
        layers = _Layers(layer_strategy, count, below, above, share, _dense(shape, first, held_layers))
        if shape.mixed:
            kinds = tuple(shape.kind(first + layer) for layer in range(held_layers))
            kept_before, peaks = _mixed_peaks(workload, layers, kinds, itemsize, fused, stage, weights)
        else:
            kept_before, peaks = _backward_peaks(workload, layers, itemsize, fused, stage, weights, early < gradients)
        kept = kept or kept_before
        moments += [(at_peak, more + tied, gathered, early + made) for at_peak, more, gathered, made in peaks]
        if strategy.zero < 2:
            break  # most is kept when the first backward pass begins
    if weights.embedding_sent:  # the chunked backward pass of the embedding
        shares = early + weights.output_share + sum(weights.shares)
        moments.append((0, weights.embedding_sent, weights.root, shares if early < gradients else gradients))
    if last:
        moments.append((kept, _loss(workload, strategy, itemsize, fused), weights.loss, early))
    step = 0 if fused else 2 * WIDE * max(rows * columns for rows, columns in held.tensors + held.experts)
    if not fused and strategy.zero == 1 and strategy.group("dp").size > 1:
        step = max(step, states.gradients)  # gloo's reduce-scatter needs a copy
    moments.append((0, step - always, 0, gradients))
    kept, temporary, gathered, gradients = max(moments, key=sum)
    return Memory(
        parameters=(1 + workload.reference) * states.parameters + gathered,
        gradients=gradients,
        optimizer=states.optimizer,
        activations=kept + always,
        temporary=temporary,
        host=host_memory(workload, strategy, itemsize, fused).total,
    )


Moment = tuple[int, int, int, int]
"""Bytes: kept by forward passes, temporary, weights that FSDP has gathered, gradients that it has made."""


@dataclass(frozen=True)
class _Layers:
    """Consecutive layers of a stage with one strategy."""

    strategy: Strategy
    count: int
    below: int  # layers of the stage before them: their backward passes come later
    above: int  # layers of the stage after them: their backward passes come first
    with_experts: float = 0.0  # share of layers with experts; the stage's last layer is one of them if there are any
    dense: int = 0  # layers without experts at the beginning of the stage


def _backward_peaks(
    workload: Workload, layers: _Layers, itemsize: int, fused: bool, stage: int, weights: _Sharded, one_by_one: bool
) -> tuple[int, list[Moment]]:
    """(bytes kept by all layers when the backward pass of ``layers`` begins, moments that may be the stage's peak).

    Args:
        one_by_one: FSDP creates a layer's gradients when its backward pass runs.
    """
    strategy, sizes = layers.strategy, sizes_of(workload, layers.strategy, itemsize)
    plain = workload
    if workload.shape.mixture:
        plain = replace(workload, shape=workload.shape.without_experts())
        workload = workload if layers.with_experts else plain
    layer_of = chunked_layer if strategy.fpdt_chunk else whole_layer
    layer, again = layer_of(workload, strategy, itemsize, fused), strategy.recompute == "full"
    unit = min(strategy.recompute_layers, layers.count) if again else 1
    # What a layer keeps until its backward pass, after its unit has been recomputed.
    whole = layer_of(workload, strategy.but(recompute="none"), itemsize, fused).kept if unit > 1 else layer.kept
    state = 0 if strategy.stream_hidden else sizes.hidden
    share, mean = layers.with_experts, whole
    if 0 < share < 1:
        mean = int(share * whole + (1 - share) * layer_of(plain, strategy, itemsize, fused).kept)
    apart = attention_apart(workload, strategy, itemsize, fused) + int(share * choices_apart(workload, strategy))
    kept, recomputed = _kept(workload, layers, mean, whole, state, stage, apart * (layers.count * again + layers.below))
    recomputed -= apart * again  # the layer that runs has its attention's result in what it needs
    temporary, unfinished = recomputed + layer.backward, layers.below + layers.count
    made = weights.output_share
    moments = [(kept, layer.forward - apart, weights.gathered(unfinished, 1), 0)] if again else []
    if not layers.above:  # backward of the last layer
        moments.append((kept, temporary + weights.output_sent, weights.gathered(unfinished, unit), made))
    if strategy.zero < 2:
        return kept, moments
    units = layers.count // unit
    if unit > 1:  # backward of the unit's last layer but one: the unit's output and its gradient are kept
        before = unfinished - 1
        sending = temporary + weights.sent(before) - whole
        moments.append((kept + state, sending, weights.gathered(before, unit - 1), made + weights.made(before)))
    # Backward of a unit's last layer, while FSDP sums another layer's gradients: in the next unit or in the first.
    first = layers.dense // unit  # layers without experts at the beginning of the stage need less
    places = {1, units - first - 2, units - first - 1} if one_by_one else {1}
    unit_kept = state + apart if again else layer.kept
    for finished in range(0 if layers.above else 1, units):
        if finished and finished not in places:
            continue
        freed = finished * (unit_kept if again else mean)
        if strategy.offload_checkpoints:  # the device holds two inputs, in use and prefetched; at the end one
            freed += ((finished == units - 1 and not layers.below) - finished) * state
        before = unfinished - finished * unit
        sending = temporary + weights.sent(before)
        moments.append((kept - freed, sending, weights.gathered(before, unit), made + weights.made(before)))
    return kept, moments


def _dense(shape: Shape, first: int, count: int) -> int:
    """How many layers without experts the layers from ``first`` on begin with; 0 if none of them has experts."""
    routes = shape.mixture.layers[first : first + count] if shape.mixture else ()
    return routes.index(1) if 1 in routes else 0


def _mixed_peaks(
    workload: Workload,
    layers: _Layers,
    kinds: tuple[Shape, ...],
    itemsize: int,
    fused: bool,
    stage: int,
    weights: _Sharded,
) -> tuple[int, list[Moment]]:
    """:func:`_backward_peaks` of layers of several kinds: the backward pass of each kind's last layer, or of all.

    Args:
        kinds: of each layer of the stage, the shape of a model with only such layers.
    """
    strategy, recomputes = layers.strategy, layers.strategy.recompute == "full"
    each = [whole_layer(changed(workload, {"shape": kind}), strategy, itemsize, fused) for kind in kinds]
    state = sizes_of(workload, strategy, itemsize).hidden
    own = [changed(workload, {"shape": kind}) for kind in kinds]
    aparts = [attention_apart(one, strategy, itemsize, fused) + choices_apart(one, strategy) for one in own]
    mean, top = sum(layer.kept for layer in each) // len(each), len(kinds) - 1
    kept, _ = _kept(workload, layers, mean, 0, state, stage, sum(aparts))
    moments: list[Moment] = []
    freed, seen = 0, set()
    for index in range(top, -1, -1):
        layer, kind = each[index], kinds[index]
        if kind not in seen or strategy.zero > 1:
            seen.add(kind)
            gathered = weights.gathered(index + 1, 1)
            made = weights.output_share + weights.made(index + 1)
            sent = weights.output_sent if index == top else weights.sent(index + 1)
            own = aparts[index] if recomputes else layer.kept
            moments.append((kept - freed, layer.backward - own + sent, gathered, made))
            if recomputes:
                moments.append((kept - freed, layer.forward - own, gathered, made))
        freed += layer.kept if not recomputes else aparts[index] + (0 if strategy.offload_checkpoints else state)
    return kept, moments


def _kept(
    workload: Workload, layers: _Layers, mean: int, layer: int, hidden: int, stage: int, apart: int
) -> tuple[int, int]:
    """(bytes kept by the micro-batches in flight before the backward pass of the last, bytes that recompute adds).

    Without recompute the second number is minus one layer, because the layer that runs backward is among those kept.
    Layers below keep their inputs only, and recomputed layers ``apart`` beside them. ``mean``, ``layer``: what a layer
    keeps, on average and the last of them.
    """
    strategy, count = layers.strategy, layers.count
    per_batch, again = hidden + count * mean, -layer  # bytes of a micro-batch
    inputs = count + layers.below  # layer inputs that are kept
    if strategy.recompute == "full":
        unit = min(strategy.recompute_layers, count)
        inputs = -(-count // unit) + layers.below
        per_batch = (inputs + 1) * hidden
        # Recompute of an FPDT layer runs attention again, but not the layer's output.
        again = -hidden if strategy.fpdt_chunk and unit == 1 else (unit - 1) * layer
    else:
        per_batch += layers.below * hidden
    per_batch += apart
    if strategy.offload_checkpoints:
        per_batch -= max(inputs - 2, 0) * hidden  # the device holds two: the one in use and the prefetched one
    stages, micro_batches = strategy.pipeline, max(strategy.micro_batches(workload), 1)
    if strategy.virtual == 1:
        in_flight = float(min(stages - stage, micro_batches))
    else:  # in chunks of 1 / virtual of the stage's layers
        chunks = 2 * (stages - stage - 1) + (strategy.virtual - 1) * stages + 1
        in_flight = min(chunks, micro_batches * strategy.virtual) / strategy.virtual
    ends = hidden if stages > 1 else 0  # a stage's output is freed after it is sent
    return int((per_batch - ends) * in_flight) + ends, again


def _loss(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """Bytes of the final norm, and of logits and their gradients, complete or for one chunk."""
    sizes, shape, chunks = sizes_of(workload, strategy, itemsize), workload.shape, chunks_of(workload, strategy)
    weight = sizes.logits // (sizes.whole // shape.hidden) * shape.hidden
    narrow = itemsize < WIDE
    state = 0 if strategy.stream_hidden else sizes.hidden
    norm = state if strategy.fpdt_chunk else norm_kept(workload, strategy, itemsize, fused)
    if not chunks.loss:  # core keeps bf16 and fp32 logits, and writes gradients in place
        logits = sizes.logits * (itemsize + WIDE) // itemsize if narrow else sizes.logits
        after = sizes.logits + sizes.whole + weight * itemsize
        if strategy.tensor > 1 and strategy.sequence_parallel:
            after += sizes.hidden
        return norm + max(logits, after)
    piece, rows = (size * chunks.loss_rows // chunks.all_rows for size in (sizes.logits, sizes.whole))
    together = min(pieces_together(rows // shape.hidden // itemsize, shape.hidden, itemsize), chunks.loss)
    computing = piece * (3 if narrow and not fused else 1) + (piece * together if together > 1 else 0)
    adding = piece * together + (weight * itemsize // PARTS if narrow else 0)
    return norm + state + weight * WIDE + max(computing, adding)


@dataclass(frozen=True)
class _Sharded:
    """Bytes of weights and gradients under FSDP.

    Attributes:
        stage: of ZeRO: 2 or 3.
        loss: weights that are gathered while the loss is computed.
        root: gathered weights of the root, which stay through the backward pass.
        layers: gathered weights of each layer.
        output_sent: unsharded gradients of the output layer while they are reduced.
        output_share, shares: this rank's shards of the gradients of the output layer and of each layer.
        waiting: gradients of an output layer in the root, which are reduced last.
        wide: bytes of a gradient that is reduced, over those of a gathered weight.
        embedding_sent: unsharded gradients, including a layer's, while those of a chunked embedding are reduced.
    """

    stage: int = 0
    loss: int = 0
    root: int = 0
    layers: tuple[int, ...] = ()
    output_sent: int = 0
    output_share: int = 0
    shares: tuple[int, ...] = ()
    waiting: int = 0
    wide: int = 1
    embedding_sent: int = 0

    def gathered(self, layers: int, unit: int) -> int:
        """Bytes of gathered weights when the last of ``layers`` layers runs backward; its unit has ``unit`` layers.

        A unit is gathered when it is recomputed; a layer's weights are freed after its backward pass.
        """
        first = max(layers - max(unit, 2), 0) if self.stage == 3 else 0  # one in use, one prefetched
        return self.root + sum(self.layers[first:layers])

    def sent(self, layer: int) -> int:
        """Bytes of unsharded gradients while those of layer number ``layer`` are reduced."""
        return self.waiting + (self.wide * self.layers[layer] if self.layers else 0)

    def made(self, layers: int) -> int:
        """Bytes of this rank's shards of the gradients of all but the first ``layers`` layers."""
        return sum(self.shares[layers:])


@lru_cache(maxsize=4096)
def _gathered(workload: Workload, strategy: Strategy, stage: int, held: StageParameters, itemsize: int) -> _Sharded:
    """Weights and gradients under FSDP; all 0 below ZeRO 2.

    FSDP's units are the layers, the embedding, the output layer, and the root with all other parameters.
    """
    if strategy.zero < 2:
        return _Sharded()
    chunks, ranks = chunks_of(workload, strategy), strategy.group("dp").size
    last = stage == strategy.pipeline - 1
    embedding, output = numel(held.embedding), numel(held.final[-1:]) if last else 0
    root = numel(held.final) - output
    waiting = chunked_embedding = 0
    if workload.shape.tied:
        root, embedding, output = root + embedding + output, 0, 0
    else:  # a module whose weights are read without calling it is part of the root, and so is its gradient
        if strategy.stream_hidden:
            root, chunked_embedding, embedding = root + embedding, embedding, 0
        if chunks.loss:
            root, output, waiting = root + output, 0, itemsize * output
    layers, shares = _layer_sizes(workload.shape, strategy, stage, held)
    last_layer = layers[-1]
    if strategy.zero == 2:
        root += embedding
    return _Sharded(
        stage=strategy.zero,
        # The last unit is in memory twice until forward ends: FSDP frees its gather buffer at the next gather only.
        loss=itemsize * (root + output + (sum(layers) if strategy.zero == 2 else 0) + (output or last_layer)),
        root=itemsize * root,
        layers=tuple(itemsize * layer for layer in layers),
        output_sent=waiting + WIDE * output,
        output_share=WIDE * output // ranks,
        shares=shares,
        waiting=waiting,
        wide=WIDE // itemsize,
        embedding_sent=(waiting + (itemsize + WIDE) * chunked_embedding + WIDE * layers[0] if chunked_embedding else 0),
    )


def _layer_sizes(
    shape: Shape, strategy: Strategy, stage: int, held: StageParameters
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(parameters of each layer, bytes of this rank's shard of their fp32 gradients)."""
    ranks, holders = strategy.group("dp").size, strategy.group("expert dp").size
    first, count = strategy.stage_span(shape.layers, stage)
    if not shape.mixed and not shape.mixture:
        return (held.layer_numel,) * count, (WIDE * held.layer_numel // ranks,) * count
    split = {"expert": strategy.expert, "expert_tensor": strategy.expert_tensor} if shape.mixture else {}
    every = [stage_parameters(shape, strategy.tensor, 1, 0, span=(first + layer, 1), **split) for layer in range(count)]
    numbers = [(numel(one.layer * one.layers + one.routed), numel(one.experts)) for one in every]
    layers, shares = zip(*((a + b, WIDE * a // ranks + WIDE * b // holders) for a, b in numbers))
    return layers, shares
