# SPDX-License-Identifier: Apache-2.0
"""Linear-attention and SSM layers (Gated DeltaNet, Mamba2): their memory, and how their states go from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import ClassVar

from megatron.decisions.division import head_plan
from megatron.decisions.state_exchange import (
    BLOCK,
    KERNEL_BLOCK,
    SEGMENT,
    SpanCounts,
    StateSizes,
    chosen_exchange,
    gather_bytes,
    heads_bytes,
    relay_bytes,
)
from megatron.formulas.kinds.attention_figures import Attention
from megatron.formulas.sizes import WIDE, Tensor, norm_of, sizes_of
from megatron.formulas.strategy import Shape, Strategy, Workload


@dataclass(frozen=True)
class LinearAttention(Attention):
    """Linear-attention and SSM layers in place of keys and values (Gated DeltaNet, Mamba2).

    Attributes:
        layers: 1 for each layer that has a state, 0 for the others.
        key_heads, heads: numbers of query and key heads, and of value heads.
        keys, values: sizes of a key head and of a value head.
        width: tokens that the short convolution sees.
        rule: how a token changes the state; Mamba2's query and key heads are its groups of B and C.
        delta: whether it is a delta rule.
    """

    layers: tuple[int, ...]
    key_heads: int
    heads: int
    keys: int
    values: int
    width: int
    rule: str = "gated_delta"
    delta: bool = True
    operations: ClassVar[str] = "state_operations"

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.keys + self.heads * self.values

    @property
    def map_columns(self) -> int:
        """Columns of the matrix of a span's map."""
        return self.keys if self.delta else 1

    @property
    def gates(self) -> int:
        """Inputs of the rule that are one number for each token and head: decay and factor, Mamba2 also the skip."""
        return 2 if self.delta else 3

    @property
    def projected(self) -> int:
        """Rows of the first projection."""
        return self.convolved + self.heads * (self.values + (2 if self.delta else 1))

    def tensors(self, shape: Shape, tensor: int) -> tuple[Tensor, ...]:
        """TP splits heads, and the norm of Mamba2's outputs with them, but not Gated DeltaNet's norm of a head."""
        h, heads, channels = shape.hidden, self.heads // tensor, self.convolved // tensor
        first, width, out = (self.projected // tensor, h), (channels, self.width), (h, heads * self.values)
        if self.delta:
            return (*norm_of(shape), *((heads, 1),) * 2, first, width, (self.values, 1), out)
        return (*norm_of(shape), *((heads, 1),) * 3, first, width, (channels, 1), out, (out[1], 1))

    def cut(self) -> list[int]:
        """Groups of heads."""
        return [self.key_heads]

    def products(self, shape: Shape) -> int:
        """Those of the projection, the convolution and the recurrence, which changes and reads the state.

        Gated DeltaNet also reads it before.
        """
        recurrence = (2 + self.delta) * self.heads * self.keys * self.values
        return shape.hidden * self.projected + self.convolved * self.width + recurrence

    def out_width(self, shape: Shape) -> int:
        """Numbers of a token that enter the output projection."""
        return self.heads * self.values

    def pairs(self, shape: Shape, seq_length: int) -> int:
        """None."""
        return 0

    def kept(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes kept for backward between the norm and the second projection, whose input is included."""
        parts = _parts(workload, strategy, itemsize)
        if strategy.recompute == "selective":
            return parts.every + parts.values
        return parts.every + sum(_inside(workload, strategy, itemsize, fused))

    def working(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes of the mixer's backward pass, in addition to what the layer keeps for it.

        The largest of: the gated norm; a segment of the rule, when what the norm kept is free again; the convolution,
        when what the rule kept is free as well.
        """
        parts, wide = _parts(workload, strategy, itemsize), WIDE // itemsize
        inside, norm = _inside(workload, strategy, itemsize, fused)
        # With selective recompute, all that is kept is computed again; the gradient of the outputs waits.
        again = inside + norm + parts.values if strategy.recompute == "selective" else 0
        gradients = 2 * parts.read + parts.values + parts.gates
        rule = again - norm + 2 * parts.values + gradients + _segment(workload, strategy, itemsize, fused)
        # Gradients of inputs in fp32; of a span: its input, its sums, two products, and the gradients of both.
        sums = parts.convolved * wide + (1 + 5 * wide) * parts.span
        convolution = again - norm - inside + parts.values + parts.convolved + sums
        normed = again - parts.values + 3 * parts.wide
        return max(rule, convolution, normed)

    def forward(self, workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
        """Bytes of the mixer's forward pass at its peak, without the norm before it."""
        parts = _parts(workload, strategy, itemsize)
        states = states_of(workload, strategy, itemsize)
        heads = states.exchanged.heads * strategy.micro_batch
        segment, block = states.segment, KERNEL_BLOCK if fused else BLOCK
        rule = WIDE * heads * segment * (6 * self.keys + 6 * self.values + 2 * block)
        inside, norm = _inside(workload, strategy, itemsize, fused)
        return parts.every + inside + max(rule, norm)


@lru_cache(maxsize=1024)
def spans_by_rank(ulysses: int, ring: int, balance: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The spans that each context rank holds, Ulysses innermost; a sequence has 2 x Ring x Ulysses units."""
    held = []
    for r in range(ring):
        blocks = (2 * r, 2 * r + 1) if balance == "contiguous" else (r, 2 * ring - 1 - r)
        units = [block * ulysses + unit for block in blocks for unit in range(ulysses)]
        for u in range(ulysses):
            first, second = units[2 * u : 2 * u + 2]
            held.append(((first, first + 2),) if second == first + 1 else ((first, first + 1), (second, second + 1)))
    return tuple(_joined(spans) for spans in held)


def _joined(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return ((spans[0][0], spans[1][1]),) if len(spans) == 2 and spans[0][1] == spans[1][0] else spans


@lru_cache(maxsize=1024)
def span_counts(ulysses: int, ring: int, balance: str) -> SpanCounts:
    """How the spans of one document hang together, over Ulysses x Ring ranks; the program counts the same."""
    held = spans_by_rank(ulysses, ring, balance)
    order = sorted((span, rank) for rank, spans in enumerate(held) for span in spans)
    links = [a for (_, a), (_, b) in zip(order, order[1:]) if a != b]
    slots = [len(spans) - (order[-1][1] == rank) for rank, spans in enumerate(held)]
    return SpanCounts(len(held), max(slots), len(links), max(map(links.count, range(len(held)))))


@dataclass(frozen=True)
class States:
    """The states of a layer on a rank.

    Attributes:
        sizes: before an all-to-all over heads.
        by_heads: whether that all-to-all is made; then a rank has all tokens of its ring rank and some heads.
        relay: whether a state goes from span to span; otherwise all ranks gather all maps.
        counts: of the ranks that exchange states.
        spans: the most spans of a rank.
        longest: tokens of the longest span.
        segment: tokens of it that are prepared together.
        segments: the most segments of a rank.
        exchanged: sizes of what is exchanged.
    """

    sizes: StateSizes
    by_heads: bool
    relay: bool
    counts: SpanCounts
    spans: int
    longest: int
    segment: int
    segments: int
    exchanged: StateSizes


@lru_cache(maxsize=8192)
def states_of(workload: Workload, strategy: Strategy, itemsize: int) -> States:
    """The states of a layer, and the exchange that the program chooses for them."""
    linear, tensor, ulysses = workload.shape.linear, strategy.tensor, strategy.ulysses
    sizes = StateSizes(
        batch=strategy.micro_batch,
        heads=linear.heads // tensor,
        key_heads=linear.key_heads // tensor,
        keys=linear.keys,
        values=linear.values,
        map_columns=linear.map_columns,
        gates=linear.gates,
        rows=workload.seq_length // strategy.context,
        itemsize=itemsize,
    )
    everyone, on_ring = (span_counts(u, strategy.ring, strategy.balance) for u in (ulysses, 1))
    by_heads, how = chosen_exchange(sizes, everyone, on_ring, ulysses)
    held = spans_by_rank(1 if by_heads else ulysses, strategy.ring, strategy.balance)
    unit = workload.seq_length // (2 * strategy.ring * (1 if by_heads else ulysses))
    longest = max(stop - start for spans in held for start, stop in spans) * unit
    exchanged = replace(sizes, heads=sizes.heads // ulysses) if by_heads else sizes
    counts, spans = on_ring if by_heads else everyone, max(map(len, held))
    most = SEGMENT // (exchanged.heads * exchanged.batch * (2 * linear.keys + linear.values)) // BLOCK * BLOCK
    segment = min(longest, max(most, BLOCK))
    segments = max(sum(ceil((stop - start) * unit / segment) for start, stop in one) for one in held)
    return States(sizes, by_heads, how == "relay", counts, spans, longest, segment, segments, exchanged)


# --- bytes that a rank sends for a layer, in a forward and in a backward pass ---


def halo_bytes(workload: Workload, strategy: Strategy, itemsize: int) -> tuple[int, int]:
    """The rows before its spans, which the convolution needs, and their gradients in fp32: of the busiest rank."""
    linear, counts = workload.shape.linear, span_counts(strategy.ulysses, strategy.ring, strategy.balance)
    rows = counts.sent * (linear.width - 1) * strategy.micro_batch * (linear.convolved // strategy.tensor)
    return rows * itemsize, rows * WIDE


def exchange_bytes(states: States) -> int:
    """Maps, or states, that the busiest rank sends; the same in both passes."""
    return (relay_bytes if states.relay else gather_bytes)(states.exchanged, states.counts)


def by_heads_bytes(states: States, ulysses: int) -> tuple[int, int]:
    """The all-to-alls over heads. Gradients are sent for each head that has a copy of a key head."""
    if not states.by_heads:
        return 0, 0
    plan = head_plan(states.sizes.heads, states.sizes.key_heads, ulysses)
    both = heads_bytes(states.sizes, ulysses, sum(map(len, plan.kv_heads)))
    return both, both


@dataclass(frozen=True)
class _Parts:
    """Bytes of a rank's tensors inside a linear-attention or SSM layer."""

    every: int  # what the first projection returns
    convolved: int
    span: int  # of it, the longest span
    keys: int  # queries, or keys
    read: int  # queries, or keys, after an all-to-all over heads, with copies of heads that are shared
    values: int
    gate: int  # one fp32 number for each token and head
    gates: int  # all such inputs of the rule
    norms: int  # one fp32 number for each query and key
    states: int  # that are kept, with the matrices of maps and what tokens read of the state before a span
    wide: int  # values in fp32


@lru_cache(maxsize=8192)
def _parts(workload: Workload, strategy: Strategy, itemsize: int) -> _Parts:
    linear, tensor = workload.shape.linear, strategy.tensor
    states = states_of(workload, strategy, itemsize)
    tokens = sizes_of(workload, strategy, itemsize).whole // (workload.shape.hidden * itemsize)
    heads, key_heads = linear.heads // tensor, linear.key_heads // tensor
    of_rank = states.exchanged.heads * strategy.micro_batch
    columns = linear.values * states.segments + linear.map_columns * states.spans * (states.counts.hops > 0)
    held = spans_by_rank(strategy.ulysses, strategy.ring, strategy.balance)
    halves = max(stop - start for spans in held for start, stop in spans)  # of a rank's tokens, in the longest span
    convolved, keys = (tokens * n // tensor * itemsize for n in (linear.convolved, linear.key_heads * linear.keys))
    reads = tokens * heads * linear.keys * itemsize if states.counts.hops else 0
    copies = 1.0
    if states.by_heads:
        plan = head_plan(heads, key_heads, strategy.ulysses)
        copies = max(map(len, plan.kv_index)) * strategy.ulysses / key_heads
    return _Parts(
        every=tokens * (linear.projected // tensor) * itemsize,
        convolved=convolved,
        span=convolved * halves // 2,
        keys=keys,
        read=int(keys * copies),
        values=tokens * heads * linear.values * itemsize,
        gate=tokens * heads * WIDE,
        gates=tokens * heads * WIDE * linear.gates,
        norms=2 * tokens * key_heads * WIDE,
        states=of_rank * linear.keys * columns * WIDE + reads,
        wide=tokens * heads * linear.values * WIDE,
    )


def _inside(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> tuple[int, int]:
    """Bytes kept between the projections: (until the rule's backward pass, until the norm's)."""
    parts, by_heads = _parts(workload, strategy, itemsize), states_of(workload, strategy, itemsize).by_heads
    if workload.shape.linear.delta:
        return _of_delta_rule(parts, by_heads, itemsize), _gated_norm(parts, itemsize, fused)
    return _of_mamba(parts, by_heads), _norm_of_gated(parts, itemsize)


def _of_delta_rule(parts: _Parts, by_heads: bool, itemsize: int) -> int:
    """Bytes of the convolution's output, queries and keys of length 1, gates and states.

    In fp32 norms keep the convolution's output itself; in bf16 they keep queries and keys in fp32. After an all-to-all
    over heads, a rank has other copies of all inputs.
    """
    narrow = itemsize < WIDE
    kept = parts.norms + parts.gates + parts.states + narrow * 2 * parts.keys // itemsize * WIDE
    inputs = 2 * parts.read + parts.gates
    if by_heads:
        return kept + inputs + parts.gate + parts.values + (0 if narrow else parts.convolved)
    return kept + inputs + parts.convolved


def _of_mamba(parts: _Parts, by_heads: bool) -> int:
    """Bytes of the convolution's output, of which queries, keys and values are parts, of gates and states.

    The time step is kept before and after softplus and after the limit. After an all-to-all over heads, a rank has
    copies of all inputs, and nothing keeps the convolution's output.
    """
    inputs = 2 * parts.read + parts.values + parts.gates if by_heads else parts.convolved + parts.gate
    return 3 * parts.gate + inputs + parts.states


def _gated_norm(parts: _Parts, itemsize: int, fused: bool) -> int:
    """Bytes that the norm of the outputs, the gate and the second projection keep.

    In fp32: the norm's input and output, the gate's SiLU, and the second projection's input; unfused also the input
    that is scaled; in bf16 also the gate.
    """
    return (3 + (not fused) + (itemsize < WIDE)) * parts.wide + parts.gate + parts.values


def _norm_of_gated(parts: _Parts, itemsize: int) -> int:
    """The same with the gate before the norm: in fp32 outputs, SiLU, the norm's input and output; in bf16 the gate."""
    return (4 + (itemsize < WIDE)) * parts.wide + parts.values


def _segment(workload: Workload, strategy: Strategy, itemsize: int, fused: bool) -> int:
    """Bytes of the backward pass of a segment at its peak, with maps of spans and states of blocks."""
    linear, states = workload.shape.linear, states_of(workload, strategy, itemsize)
    segment, state = states.segment, linear.keys * linear.values
    block = KERNEL_BLOCK if fused else min(BLOCK, 1 << (segment - 1).bit_length())
    blocks = ceil(segment / block)
    # Numbers for each token, head and number of a key or value, and for each pair of tokens of a block: the inputs in
    # order, what their preparation keeps, and its gradients. Heads that share a key also share what is made of keys.
    shared = linear.keys * states.sizes.key_heads / states.sizes.heads
    if linear.delta:
        first, second = 4 * shared + 6 * linear.values, 6 * shared + 3 * linear.values + 4 * block
        numbers = 5 * linear.keys + 6.36 * block + max(first, second)
    else:  # with the gradients of the segment before
        before = min(1.0, states.longest / segment - 1)
        numbers = (4 + 4 * before) * shared + (8 + 5 * before) * linear.values + (4.9 + 2 * before) * block
    of_head = int(blocks * block * numbers) + (2 * blocks + 3) * state
    if states.counts.hops:  # maps of this rank's spans, and gradients of the states after them
        of_head += states.spans * (linear.keys * linear.map_columns + 2 * state)
    return WIDE * states.exchanged.heads * strategy.micro_batch * of_head
