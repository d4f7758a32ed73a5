# SPDX-License-Identifier: Apache-2.0
"""The parameters of a pipeline stage, tensor by tensor, and the bytes of its model states."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, lcm

from megatron.formulas.kinds import attention_of, mixer_of
from megatron.formulas.sizes import Tensor, norm_of, padded_vocab
from megatron.formulas.strategy import Shape, Strategy

BUCKET = 40_000_000  # smallest bucket of core's DDP (--overlap-grad-reduce), or a million per rank

CONVOLVED = 8  # largest width of a convolution


@dataclass(frozen=True)
class StageParameters:
    """The parameters of one rank of a pipeline stage, in the order of the model."""

    embedding: tuple[Tensor, ...]
    layer: tuple[Tensor, ...]  # of each layer without experts
    layers: int
    final: tuple[Tensor, ...]  # norm, then the output layer
    routed: tuple[Tensor, ...] = ()  # of all layers with experts, without the experts; with states, of all layers
    experts: tuple[Tensor, ...] = ()  # of all experts on this rank
    with_experts: int = 0  # layers with experts
    mixed: int = 0  # all layers, if some have a state
    with_states: int = 0  # linear-attention and SSM layers
    pattern: str = ""  # of a hybrid's layers

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All but the experts."""
        return self.embedding + self.layer * self.layers + self.routed + self.final

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """What Muon updates: matrices of layers without experts. A convolution has few columns, but three dims."""
        inside = self.layer * self.layers + self.routed
        return tuple(tensor for tensor in inside if tensor[1] > CONVOLVED)

    @property
    def numel(self) -> int:
        layers = self.layers * self.layer_numel + numel(self.routed) + numel(self.experts)
        return numel(self.embedding) + layers + numel(self.final)

    @property
    def layer_numel(self) -> int:
        """Of each layer; with states, on average."""
        return numel(self.routed) // self.mixed if self.mixed else numel(self.layer)

    @property
    def count(self) -> int:
        """Number of all layers."""
        return self.mixed or self.layers + self.with_experts

    @property
    def with_keys(self) -> int:
        """Number of layers that attend to keys."""
        return self.pattern.count("*") if self.pattern else self.count - self.with_states


@dataclass(frozen=True)
class States:
    """Bytes of model states of a rank."""

    parameters: int
    gradients: int
    optimizer: int


@lru_cache(maxsize=4096)
def stage_parameters(
    shape: Shape,
    tensor: int,
    pipeline: int,
    stage: int,
    *,
    padded: bool = True,
    expert: int = 1,
    expert_tensor: int | None = None,
    span: tuple[int, int] | None = None,
) -> StageParameters:
    """Parameters of a rank in stage ``stage`` of ``pipeline`` stages, all its virtual stages together.

    TP does not split learned positions. With several stages, the first and the last each have a copy of tied weights.

    Args:
        padded: count the vocabulary as a run pads it; False: as the tokenizer has it.
        expert: ranks that share the experts.
        expert_tensor: ranks that split each expert; default ``tensor``.
        span: first layer of the stage, and number of its layers; default: an equal share.
    """
    h, norm = shape.hidden, norm_of(shape)
    rows = (padded_vocab(shape.vocab, tensor) if padded else shape.vocab) // tensor
    first, last = stage == 0, stage == pipeline - 1
    embedding: tuple[Tensor, ...] = ()
    if first:
        embedding = (
            (rows, h),
            *(((h, 1),) * (2 * shape.embed_norm)),
            *(((shape.positions, h),) * bool(shape.positions)),
        )
    final: tuple[Tensor, ...] = ()
    if last:
        final = (*norm, *(() if shape.tied and first else ((rows, h),)))
    begin, layers = span or (stage * (shape.layers // pipeline), shape.layers // pipeline)
    with_experts, experts = shape.with_experts(begin, layers), ()
    if shape.mixture is not None:
        experts = shape.mixture.tensors(shape, expert, expert_tensor or tensor) * with_experts
    if shape.mixed:
        own = range(begin, begin + layers)
        every = tuple(x for index in own for x in _layer(shape.kind(index), tensor))
        with_states = sum(shape.linear.layers[index] for index in own) if shape.linear else 0
        kinds = {"mixed": layers, "with_states": with_states, "pattern": shape.pattern[begin : begin + layers]}
        return StageParameters(embedding, (), 0, final, every, experts, with_experts, **kinds)
    routed = _layer(shape, tensor) * with_experts if with_experts else ()
    layer = _layer(shape.without_experts(), tensor)
    return StageParameters(embedding, layer, layers - with_experts, final, routed, experts, with_experts)


def _layer(shape: Shape, tensor: int) -> tuple[Tensor, ...]:
    """A layer of a model with one kind of layers, without its experts."""
    norm = norm_of(shape)
    mixer = mixer_of(shape).tensors(shape, tensor) if shape.mixes else ()
    return (*mixer, *norm * (2 * shape.sandwich_norm + 1), *_ffn(shape, tensor)) if shape.has_ffn else mixer


def _ffn(shape: Shape, tensor: int) -> tuple[Tensor, ...]:
    """The matrices of an MLP, or a router with the shared expert."""
    if shape.mixture is not None:
        return shape.mixture.router(shape, tensor)
    first, second = shape.ffn // tensor * (2 if shape.gated else 1), shape.ffn // tensor
    bias = (((first, 1),), ((shape.hidden, 1),)) if shape.bias else ((), ())
    return ((first, shape.hidden), *bias[0], (shape.hidden, second), *bias[1])


def rank_parameters(shape: Shape, strategy: Strategy, stage: int) -> StageParameters:
    """Parameters of a rank under a strategy."""
    span = strategy.stage_span(shape.layers, stage)
    sizes = {"expert": strategy.expert, "expert_tensor": strategy.expert_tensor} if shape.mixture else {}
    return stage_parameters(shape, strategy.tensor, strategy.pipeline, stage, span=span, **sizes)


def rank_states(held: StageParameters, strategy: Strategy, itemsize: int) -> States:
    """Bytes of model states of a rank under a strategy; ``held``: its parameters."""
    ranks, holders = strategy.group("dp").size, strategy.group("expert dp").size
    options = {"bucketed": strategy.overlap_grad_reduce, "muon": strategy.muon}
    return model_states(held, strategy.zero, ranks, itemsize, expert_ranks=holders, **options)


@lru_cache(maxsize=4096)
def model_states(
    parameters: StageParameters,
    zero: int,
    ranks: int,
    itemsize: int,
    *,
    bucketed: bool = True,
    expert_ranks: int = 1,
    muon: bool = False,
) -> States:
    """Bytes of a rank's parameters, gradients and Adam states (mixed precision: 2 + 4 + 12 each; fp32: 4 + 4 + 8).

    A matrix that Muon updates has one state instead of two, 4 bytes less.

    The step counter of PyTorch's Adam, 4 bytes per tensor, is not counted.

    Args:
        parameters: of the stage.
        zero: stage of ZeRO: 0 and 1 by core's DDP (fp32 gradients in buffers), 2 and 3 by FSDP (fp32 shards).
        ranks: number of ranks that ZeRO splits over, DP x CP.
        itemsize: bytes of a number in the compute dtype.
        bucketed: --overlap-grad-reduce: several buckets, each padded under ZeRO 1.
        expert_ranks: number of ranks that hold the same experts, over which ZeRO 1 splits their states.
        muon: --optimizer muon. Under ZeRO 1, the states are those of the rank that has the fewest matrices.
    """
    narrow, options = itemsize < 4, {"bucketed": bucketed, "muon": muon}
    if parameters.experts:
        of_experts = model_states(
            StageParameters((), parameters.experts, 1, ()), zero, expert_ranks, itemsize, **options
        )
        of_others = model_states(replace(parameters, experts=()), zero, ranks, itemsize, **options)
        return States(*(getattr(of_experts, f.name) + getattr(of_others, f.name) for f in fields(States)))
    if zero >= 2:
        shard = shard_numel(parameters.tensors, ranks)
        less = 4 * shard_numel(parameters.matrices, ranks) if muon else 0
        return States(4 * shard, 4 * shard, 8 * shard - less)
    if zero == 0:
        count, less = parameters.numel, 4 * numel(parameters.matrices) if muon else 0
        return States(itemsize * count, 4 * count, (12 if narrow else 8) * count - less)
    buckets = _buckets(parameters, ranks, max(BUCKET, 1_000_000 * ranks) if bucketed and ranks > 1 else None)
    buffer = buckets[-1][1]
    less = 4 * _fewest(ranks, buckets) if muon else 0
    return States(itemsize * buffer, 4 * buffer, (12 if narrow else 8) * (buffer // ranks) - less)


Buckets = list[tuple[int, int, list[tuple[int, int]]]]
"""Buckets of core's buffer: first element, end, and the first element and end of each matrix of a layer."""


def _buckets(parameters: StageParameters, ranks: int, bucket: int | None) -> Buckets:
    """core's buffer under ZeRO 1 (core/distributed/param_and_grad_buffer.py).

    Parameters start at multiples of 64, buckets end at multiples of the ranks and of 128.
    """
    step, end, start = lcm(ranks, 128), 0, 0
    done, matrices, every = [], [], parameters.tensors
    inside = range(len(parameters.embedding), len(every) - len(parameters.final))
    for index, (rows, columns) in reversed(list(enumerate(every))):
        begin = -(-end // 64) * 64
        end = begin + rows * columns
        if index in inside and columns > CONVOLVED:
            matrices.append((begin, end))
        if bucket is not None and end - start >= bucket:
            end = -(-end // step) * step
            done.append((start, end, matrices))
            start, matrices = end, []
    return [*done, (start, -(-end // step) * step, matrices)]


def _fewest(ranks: int, buckets: Buckets) -> int:
    """Elements of matrices on the rank that has fewest, if each bucket is split evenly."""
    counts = [0] * ranks
    for start, end, matrices in buckets:
        share = (end - start) // ranks
        for begin, stop in matrices:
            for rank in range((begin - start) // share, (stop - 1 - start) // share + 1):
                counts[rank] += min(stop, start + (rank + 1) * share) - max(begin, start + rank * share)
    return min(counts)


def numel(tensors: tuple[Tensor, ...]) -> int:
    """Number of elements of all ``tensors`` together."""
    return sum(rows * columns for rows, columns in tensors)


def shard_numel(tensors: tuple[Tensor, ...], ranks: int) -> int:
    """Elements of a rank's shard of tensors under FSDP, which splits and pads rows."""
    return sum(ceil(rows / ranks) * columns for rows, columns in tensors)


def whole_vectors(shape: Shape, held: StageParameters) -> int:
    """Elements of the vectors that TP does not split: norms, and biases after row-parallel matrices.

    Under TP-sp each TP rank applies them to different tokens, so their gradients are summed over TP.
    """
    norm, halves = 2 if shape.layer_norm else 1, 1 if shape.pattern else 2  # of a layer: a mixer, an FFN
    layer = halves * (norm + shape.bias) * shape.hidden
    heads = attention_of(shape).vectors(shape) * held.with_keys
    embedding = held.embedding if not shape.positions else ()  # with positions, words are not scattered before the norm
    router = (shape.mixture.experts + shape.bias) * shape.hidden if shape.mixture else 0
    layers = layer * held.count + heads + router * held.with_experts
    layers -= shape.bias * shape.hidden * held.with_states  # their projections have no bias
    return layers + numel(tuple(x for x in (*embedding, *held.final) if x[1] == 1))
