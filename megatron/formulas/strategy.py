# SPDX-License-Identifier: Apache-2.0
"""Model, batch and parallel strategy: the input of formulas, estimates and the planner."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypeVar

from megatron.decisions.key_exchange import PASSED_ON
from megatron.decisions.state_exchange import LARGEST_KEYS

T = TypeVar("T")


def hashed_once(kind: type[T]) -> type[T]:
    """Lets a frozen dataclass compute its hash once per object, because the planner looks it up in caches very often.

    Pickles leave the hash out, because hashes of strings differ between processes.
    """
    compute = kind.__hash__

    def __hash__(self: Any) -> int:
        try:
            return self._hash
        except AttributeError:
            value = compute(self)
            object.__setattr__(self, "_hash", value)
            return value

    def __getstate__(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    kind.__hash__, kind.__getstate__ = __hash__, __getstate__
    return kind


def changed(original: T, changes: dict[str, Any]) -> T:
    """Like ``dataclasses.replace``, ten times as fast, for a frozen dataclass without ``__post_init__``.

    Raises:
        TypeError: no such field.
    """
    new = object.__new__(type(original))
    values = new.__dict__
    values.update(original.__dict__)
    fields = len(values)
    values.update(changes)
    if len(values) > fields:
        raise TypeError(f"{type(original).__name__} has no {', '.join(changes.keys() - original.__dict__.keys())}")
    values.pop("_hash", None)
    return new


Axis = Literal["tp", "ulysses", "ring", "ep", "dp", "pp", "expert dp"]


@hashed_once
@dataclass(frozen=True)
class Shape:
    """A transformer's sizes; hashable, unlike the settings that it is made from."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True  # SwiGLU: three matrices in the MLP
    bias: bool = False
    layer_norm: bool = False  # LayerNorm with weight and bias; False: RMSNorm
    tied: bool = False  # output layer and embedding share their weights
    positions: int = 0  # rows of a learned position embedding
    qkv_bias: bool = False  # of the QKV projection, also without ``bias``
    qk_norm: bool = False  # norms of queries and keys, over a head
    wide_qk_norm: bool = False  # norms of queries and keys, over all heads together
    sinks: bool = False  # a learned score per head in the softmax
    embed_norm: bool = False  # LayerNorm after the word embedding
    mixture: Any = None  # layers with experts
    sandwich_norm: bool = False  # norms after attention and after the MLP too
    output_gate: bool = False  # a gate for each number of attention's output, projected with the queries
    latent: Any = None  # attention with latents; ``head_dim`` is the size of a query or key head
    linear: Any = None  # in some layers, in place of attention over keys
    pattern: str = ""  # hybrid: each layer is M (Mamba2), * (attention), - (MLP) or E (experts) alone

    @property
    def mixed(self) -> bool:
        """Whether layers differ in more than their experts."""
        return self.linear is not None or bool(self.pattern) or bool(self.latent and self.latent.differs)

    @property
    def mixes(self) -> bool:
        """Whether the layers of a shape with one kind of layers mix tokens."""
        return self.pattern in ("", "M", "*")

    @property
    def has_ffn(self) -> bool:
        """Whether the layers of a shape with one kind of layers have an FFN, which may be one of experts."""
        return self.pattern in ("", "-", "E")

    def layers_with(self, kinds: str) -> int:
        """The number of a hybrid's layers of these kinds."""
        return sum(map(self.pattern.count, kinds))

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.latent.value if self.latent else self.head_dim

    def with_experts(self, first: int, count: int) -> int:
        """How many of ``count`` layers from layer ``first`` on have experts."""
        return sum(self.mixture.layers[first : first + count]) if self.mixture else 0

    def kind(self, layer: int) -> Shape:
        """The shape of a model whose layers are all like this one's ``layer``."""
        mixture, linear = self.mixture, self.linear
        if mixture and not mixture.layers[layer]:
            mixture = None
        linear = linear if linear and linear.layers[layer] else None
        latent = self.latent and self.latent.of_layer(layer)
        own = {"mixture": mixture, "linear": linear, "latent": latent, "pattern": self.pattern[layer : layer + 1]}
        return changed(self, own)

    def without_experts(self) -> Shape:
        """The shape of a model whose layers are all like those of this model that have no experts."""
        return changed(self, {"mixture": None})


@hashed_once
@dataclass(frozen=True)
class Workload:
    """What is trained: a model on ``global_batch`` sequences of ``seq_length`` tokens per step.

    Attributes:
        keys: average number of keys that a query sees, under a window or in packed documents; 0: given by ``causal``.
        spread: standard deviation divided by mean, over samples, of the (query, key) pairs that attention computes.
        whole: share of layers without the window, which see ``whole_keys`` keys instead of ``keys`` (0: by ``causal``).
        imbalance: tokens that the busiest rank's experts get, over the mean of all experts.
        uneven: pairs of a ring's busiest rank over the mean in a micro-batch of packed documents: rows for rings of 2,
            4, 8, ..., columns for micro-batches of 1, 2, 4, ...; empty: the same on all ranks.
        reference: a frozen copy of the model computes each sample first, as with --dpo.
    """

    shape: Shape
    seq_length: int
    global_batch: int = 1
    causal: bool = True
    keys: float = 0.0
    spread: float = 0.0
    uneven: tuple[tuple[float, ...], ...] = ()
    whole: float = 0.0
    whole_keys: float = 0.0
    imbalance: float = 1.0
    reference: bool = False

    @property
    def attended(self) -> float:
        """Share of all pairs of tokens that the mask allows, on average over the layers."""
        if self.whole:
            return sum(share * kind.attended for kind, share in self.kinds())
        if self.keys:
            return self.keys / self.seq_length
        return 0.5 if self.causal else 1.0

    def kinds(self) -> list[tuple[Workload, float]]:
        """(workload of a model whose layers are all of one kind, share of layers of this kind), for each kind."""
        if not self.whole:
            return [(self, 1.0)]
        return [
            (changed(self, {"whole": 0.0, "whole_keys": 0.0}), 1 - self.whole),
            (changed(self, {"whole": 0.0, "whole_keys": 0.0, "keys": self.whole_keys}), self.whole),
        ]


class Group(NamedTuple):
    """The ranks of a collective: ``size`` ranks, ``stride`` apart."""

    size: int
    stride: int = 1


@hashed_once
@dataclass(frozen=True)
class Strategy:
    """How a model is trained: the grid (ranks in the order TP, Ulysses, Ring, DP, PP) and all that saves memory.

    Attributes:
        micro_batch: sequences in a forward pass.
        zero: stage of ZeRO, over DP x CP.
        recompute: ``none``, ``selective`` (attention only) or ``full``.
        recompute_method: of full recompute: ``uniform``, or ``block``, which recomputes the first layers of a stage.
        recompute_layers: layers in a recomputed unit; with ``block``, recomputed layers of a stage.
        keep_attention: with ``full``, attention's output and lse are kept, and only the rest is recomputed.
        offload_checkpoints: layer inputs are kept in host memory.
        fpdt_chunk: FPDT's chunk in global tokens; 0: no FPDT.
        fpdt_offload: FPDT's chunks are kept in host memory.
        stream_hidden: hidden states are in host memory too, and pass through the device chunk by chunk.
        ffn_chunks, loss_chunks: chunks of FFN and loss; 0: derived by the program with FPDT, else one.
        virtual: virtual pipeline stages of a rank.
        first_less, last_less: layers that the first and the last pipeline stage have less than the others.
        sequence_parallel: activations are split over TP between the linear layers.
        expert, expert_tensor: ranks that share the experts, and ranks that split each expert (EP, expert TP).
        fused: a single kernel rotates queries and keys, and one matrix product adds several chunks of the loss to its
            weight's gradient. False: several operations for each chunk, as in the papers' programs, whose FPDT also
            loads the next key chunk's queries during the last tile.
        muon: matrices are updated by Muon, which keeps one state instead of Adam's two.
        key_exchange: how keys travel on the ring (decisions/key_exchange.py).
    """

    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    data: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    zero: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int = 1
    keep_attention: bool = False
    offload_checkpoints: bool = False
    fpdt_chunk: int = 0
    fpdt_offload: bool = True
    ffn_chunks: int = 0
    loss_chunks: int = 0
    balance: Literal["zigzag", "contiguous"] = "zigzag"
    virtual: int = 1
    sequence_parallel: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    fused: bool = True
    recompute_method: Literal["uniform", "block"] = "uniform"
    stream_hidden: bool = False
    first_less: int = 0
    last_less: int = 0
    expert: int = 1
    expert_tensor: int = 1
    muon: bool = False
    key_exchange: str = PASSED_ON

    def but(self, **changes: Any) -> Strategy:
        """This strategy with other values of some fields."""
        return changed(self, changes)

    @property
    def context(self) -> int:
        return self.ulysses * self.ring

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    def group(self, axis: Axis) -> Group:
        """The ranks of an axis; ``dp`` is DP x CP, over which gradients are summed and ZeRO splits.

        ``expert dp`` are the ranks that hold the same experts, for which these are ``dp``.
        """
        tensor, ulysses = self.tensor, self.ulysses
        if axis == "tp":
            return Group(tensor, 1)
        if axis == "ulysses":
            return Group(ulysses, tensor)
        if axis == "ring":
            return Group(self.ring, tensor * ulysses)
        if axis == "ep":
            return Group(self.expert, self.expert_tensor)
        if axis == "dp":
            return Group(self.context * self.data, tensor)
        if axis == "expert dp":
            together = self.expert * self.expert_tensor
            return Group(self.ranks // self.pipeline // together, together)
        return Group(self.pipeline, tensor * self.context * self.data)

    def slowest(self, workload: Workload) -> float:
        """(Query, key) pairs of the busiest rank over the mean, on a ring under a window or among data-parallel ranks.

        Under a window of w keys only the ring rank with the sequence's beginning has queries that see fewer keys: of S
        tokens, w S - w^2 / 2 pairs in all. With packed documents data-parallel ranks have different work: the sums over
        micro-batches are close to normal, and the expected largest of ``data`` sums is near Blom's quantile
        (Statistical Estimates and Transformed Beta-Variables, 1958).
        """
        if self.ring > 1 and workload.keys and not workload.spread:
            keys, length = workload.keys, workload.seq_length
            return (length - sqrt(max(length * (length - 2 * keys), 0.0))) / keys
        if not workload.spread or self.data == 1:
            return 1.0
        above = NormalDist().inv_cdf((self.data - 0.375) / (self.data + 0.25))
        samples = max(workload.global_batch // self.data, 1)
        return 1 + workload.spread * above / sqrt(samples)

    def busiest(self, workload: Workload) -> float:
        """Pairs of a ring's busiest rank over the mean; sizes between two entries of ``uneven`` use the larger."""
        if not workload.uneven or self.ring == 1:
            return 1.0
        row = workload.uneven[min((self.ring - 1).bit_length(), len(workload.uneven)) - 1]
        return row[min((self.micro_batch - 1).bit_length(), len(row) - 1)]

    @property
    def uneven(self) -> bool:
        """Whether pipeline stages hold different numbers of layers."""
        return self.first_less + self.last_less > 0

    def stage_layers(self, layers: int, stage: int) -> int:
        """Number of a model's ``layers`` in a pipeline stage."""
        return self.most_layers(layers) - self.first_less * (stage == 0) - self.last_less * (stage == self.pipeline - 1)

    def stage_span(self, layers: int, stage: int) -> tuple[int, int]:
        """(first layer of a pipeline stage, number of its layers); virtual stages count as one after the other."""
        before = stage * self.most_layers(layers) - self.first_less * (stage > 0)
        return before, self.stage_layers(layers, stage)

    def most_layers(self, layers: int) -> int:
        """Number of a model's ``layers`` in the longest stage."""
        return (layers + self.first_less + self.last_less) // self.pipeline

    def layer_kinds(self, layers: int) -> list[tuple[Strategy, int]]:
        """(strategy, count) of a stage's ``layers``: with ``block``, some are recomputed and the others are not."""
        if self.recompute != "full" or self.recompute_method == "uniform":
            return [(self, layers)]
        again = min(self.recompute_layers, layers)
        plain = self.but(recompute_method="uniform", recompute_layers=1)
        kinds = [(plain, again), (plain.but(recompute="none"), layers - again)]
        return [(strategy, count) for strategy, count in kinds if count]

    def micro_batches(self, workload: Workload) -> int:
        """Forward passes of a rank in a step."""
        return workload.global_batch // (self.data * self.micro_batch)

    def local_tokens(self, workload: Workload) -> int:
        """Tokens of a micro-batch on a rank between attention layers: split over CP, with TP-sp also over TP."""
        tokens = workload.seq_length * self.micro_batch // self.context
        return tokens // self.tensor if self.sequence_parallel else tokens


def refuse_unknown(shape: Shape, strategy: Strategy) -> None:
    """Raises ValueError for combinations whose memory and time no formula knows yet."""
    if shape.mixed and (strategy.fpdt_chunk or strategy.recompute_layers > 1 or strategy.recompute_method == "block"):
        what = "hybrid models have" if shape.pattern else "linear attention has"
        raise ValueError(f"{what} no formula with FPDT, units of layers and block recompute: leave it out")
    if shape.pattern and strategy.virtual > 1:
        raise ValueError("hybrid models have no formula with virtual pipeline stages: leave them out")
    if shape.linear and shape.linear.rule and shape.linear.keys > LARGEST_KEYS:
        raise ValueError(f"states with more than {LARGEST_KEYS} keys a head have no formula: run a dry run")
    if shape.mixture and (strategy.fpdt_chunk or strategy.ffn_chunks):
        raise ValueError("experts have no formula with FPDT and a chunked FFN: leave one out")
    if shape.output_gate and strategy.fpdt_chunk:
        raise ValueError("gates on attention's output have no formula with FPDT: leave one out")
