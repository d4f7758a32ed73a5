# SPDX-License-Identifier: Apache-2.0
"""Device memory of a rank at the fullest moment of a step, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.decisions.division import PARTS, pieces_together
from megatron.formulas.host_bytes import host_memory
from megatron.formulas.layer_memory import chunked_layer, norm_kept, whole_layer
from megatron.formulas.parameters import StageParameters, model_states, numel, stage_parameters
from megatron.formulas.sizes import WIDE, chunks_of, sizes_of
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
    if strategy.uneven:
        held = replace(held, layers=strategy.stage_layers(shape.layers, stage))
    states = model_states(
        held,
        strategy.zero,
        strategy.group("dp").size,
        itemsize,
        bucketed=strategy.overlap_grad_reduce,
    )
    last = stage == strategy.pipeline - 1
    weights = _gathered(workload, strategy, held, itemsize, last)
    always = sizes.angles if not strategy.fpdt_chunk else 0
    if strategy.tensor > 1 and strategy.sequence_parallel:
        always += sizes.whole  # core's buffer for gathered inputs
    if 0 < stage and strategy.micro_batches(workload) > 1:
        always += sizes.hidden  # the gradient sent to the stage before, until the next one is there

    gradients, early = states.gradients, states.gradients
    if strategy.zero > 1 and strategy.micro_batches(workload) <= 1:
        early = 0  # FSDP makes them as layers go back
    tied = itemsize * numel(held.embedding[:1]) if shape.tied and held.embedding and last else 0
    kept, moments, below = 0, [], held.layers
    for how, count in reversed(strategy.layer_kinds(held.layers)):  # the last layers go back first
        below -= count
        there = _Layers(how, count, below, held.layers - below - count)
        kept_by_them, found = _going_back(workload, there, itemsize, fused, stage, weights, early < gradients)
        kept = kept or kept_by_them
        moments += [(kept_then, more + tied, gathered, early + made) for kept_then, more, gathered, made in found]
        if strategy.zero < 2:
            break  # the first to go back had the most beside it
    if weights.words_sent:  # ... or, chunk by chunk, the embedding
        shares = early + weights.output_share + held.layers * weights.layer_share
        moments.append((0, weights.words_sent, weights.root, shares if early < gradients else gradients))
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


Moment = tuple[int, int, int, int]
"""Bytes: kept by forward passes, coming and going, of weights that FSDP has gathered, of gradients that it has made."""


@dataclass(frozen=True)
class _Layers:
    """``count`` layers of a stage that are trained alike; ``above``, which go back before them, and ``below``."""

    how: Strategy
    count: int
    below: int
    above: int


def _going_back(
    workload: Workload, layers: _Layers, itemsize: int, fused: bool, stage: int, weights: _Sharded, one_by_one: bool
) -> tuple[int, list[Moment]]:
    """(kept by all layers before the first of these goes back, moments that may be a stage's fullest from then on).

    Args:
        one_by_one: FSDP makes the gradients of a layer as it goes back.
    """
    how, sizes = layers.how, sizes_of(workload, layers.how, itemsize)
    of = chunked_layer if how.fpdt_chunk else whole_layer
    layer, again = of(workload, how, itemsize, fused), how.recompute == "full"
    unit = min(how.recompute_layers, layers.count) if again else 1
    # What a layer keeps until it has gone back, once its unit has run again.
    whole = of(workload, how.but(recompute="none"), itemsize, fused).kept if unit > 1 else layer.kept
    state = 0 if how.stream_hidden else sizes.hidden
    kept, more = _kept(workload, layers, whole, state, stage)
    busy, left, made = more + layer.backward, layers.below + layers.count, weights.output_share
    moments = [(kept, layer.forward, weights.there(left, 1), 0)] if again else []
    if not layers.above:  # The last layer goes back ...
        moments.append((kept, busy + weights.output_sent, weights.there(left, unit), made))
    if how.zero < 2:
        return kept, moments
    sent, units = busy + weights.layer_sent, layers.count // unit
    made += layers.above * weights.layer_share
    if unit > 1:  # ... or the one before it in its unit, beside the unit's output and the gradient of its own ...
        moments.append((kept + state, sent - whole, weights.there(left - 1, unit - 1), made + weights.layer_share))
    # ... or, while FSDP sums the gradients of another, the last of a unit below: of the next, or of the first.
    places = {1, units - 2, units - 1} if one_by_one else {1}
    one = state if again else layer.kept
    for gone in range(0 if layers.above else 1, units):
        if gone and gone not in places:
            continue
        freed = gone * one
        if how.offload_checkpoints:  # inputs: the one in use and the one that comes, until none comes
            freed += ((gone == units - 1 and not layers.below) - gone) * state
        there = weights.there(left - gone * unit, unit)
        moments.append((kept - freed, sent, there, made + gone * unit * weights.layer_share))
    return kept, moments


def _kept(workload: Workload, layers: _Layers, layer: int, hidden: int, stage: int) -> tuple[int, int]:
    """(kept by the micro-batches in flight before the last of them goes back, what recompute adds).

    Without recompute the second is minus one layer: what goes back first is among what is kept. Layers below keep their
    inputs alone.
    """
    strategy, count = layers.how, layers.count
    one, again = hidden + count * layer, -layer
    inputs = count + layers.below  # of what keeps no more than that
    if strategy.recompute == "full":
        unit = min(strategy.recompute_layers, count)
        inputs = -(-count // unit) + layers.below
        one = (inputs + 1) * hidden
        # FPDT's layers compute attention again, but not their output.
        again = -hidden if strategy.fpdt_chunk and unit == 1 else (unit - 1) * layer
    else:
        one += layers.below * hidden
    if strategy.offload_checkpoints:
        one -= max(inputs - 2, 0) * hidden  # the one in use, and the one that comes, are here
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
    """Of FSDP: bytes of weights that it has gathered while the loss is computed, of its root, which stays while layers
    go back, and of a layer; of whole gradients that it is summing up, and of this rank's share of them. ``words_sent``
    are those of an embedding that goes back in chunks, with a layer's and what else waits."""

    stage: int = 0
    loss: int = 0
    root: int = 0
    layer: int = 0
    output_sent: int = 0
    output_share: int = 0
    layer_sent: int = 0
    layer_share: int = 0
    words_sent: int = 0

    def there(self, layers: int, unit: int) -> int:
        """Bytes of weights while the last of ``layers`` layers goes back, whose recomputed unit has so many: a unit is
        gathered when it runs again, and a layer's weights go when it has gone back."""
        if self.stage == 3:
            layers = min(max(unit, 2), layers)  # one in use, one that comes
        return self.root + layers * self.layer


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
        root += embedding
    return _Sharded(
        stage=strategy.zero,
        # What was gathered last is there twice until the forward pass is over: its buffer waits for the next one's.
        loss=itemsize * (root + output + layer * (held.layers if strategy.zero == 2 else 0) + (output or layer)),
        root=itemsize * root,
        layer=itemsize * layer,
        output_sent=waiting + WIDE * output,
        output_share=WIDE * output // ranks,
        layer_sent=waiting + WIDE * layer,
        layer_share=WIDE * layer // ranks,
        words_sent=waiting + (itemsize + WIDE) * words + WIDE * layer if words else 0,
    )
