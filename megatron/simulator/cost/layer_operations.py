# SPDX-License-Identifier: Apache-2.0
"""Forward and backward pass of one transformer layer on one rank, as segments of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.decisions.division import goes_by_keys
from megatron.formulas.mixtures import Dispatched, dispatched
from megatron.formulas.sizes import chunks_of, heads_of
from megatron.formulas.strategy import Group, Shape, Strategy, Workload
from megatron.simulator.cost.attention_operations import (
    Attended,
    attended,
    chunked_backward,
    chunked_forward,
    copied_in_ffn_backward,
    loaded_in_backward,
    ring_backward,
    ring_forward,
    state_mixer,
    stored_in_forward,
    to_heads,
    to_sequence,
)
from megatron.simulator.cost.operations import BF16, FP32, Segment, collective, gemm, memory
from megatron.simulator.cost.trace import Collective, HostCopy, Kernel, Transfer

# Projections, norms, MLP, and their tensor parallelism.
#
# ``tokens``: number of tokens of a TP group. Between linear layers each rank has a share of them (sequence parallel) or
# all. The forward pass waits for TP's transfers. In the backward pass megatron-core overlaps a column-parallel layer's
# transfers with its two products (core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).

# Bytes per rotated number. One kernel (context_parallel/positions/rope_kernel.py) reads and writes it once. PyTorch's
# operations in fp32 (rope.py): cast up 6, times cosine 8, plus the other half times sine 12, cast down 6.
ROTARY_BYTES, UNFUSED_ROTARY_BYTES = 2 * BF16, 32


# Bytes per number of attention's output with a gate (core/transformer_layer.py, gated). Forward: cast the gate up 6,
# sigmoid 8, product 10, cast down 6. Backward: cast up 6, two products 18, of the sigmoid 12, casts down 12.
GATE_BYTES, GATE_GRAD_BYTES = 30, 48


def project(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """Norm, QKV and rotary."""
    if shape.latent:
        return _project_latents(shape, strategy, tokens, count)
    local, width = _local(strategy, tokens), _qkv(shape, strategy.tensor)
    return [
        Segment(kernels=(memory("norm", 2 * BF16 * local * shape.hidden),), count=count),
        *_enter(shape, strategy, tokens, count),
        Segment(kernels=(gemm("qkv", tokens, width, shape.hidden),), count=count),
        *_all_of_qkv("all_gather", shape, strategy, tokens, count),
        Segment(kernels=_rotary(shape, strategy, tokens), count=count),
    ]


def project_grad(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """The backward pass of :func:`project`."""
    if shape.latent:
        return _project_latents_grad(shape, strategy, tokens, count)
    local, width = _local(strategy, tokens), _qkv(shape, strategy.tensor)
    return [
        Segment(kernels=_rotary(shape, strategy, tokens, backward=True), count=count),
        *_all_of_qkv("reduce_scatter", shape, strategy, tokens, count),
        *_column_grad("qkv", shape, strategy, tokens, width, count),
        Segment(kernels=(memory("norm", 5 * BF16 * local * shape.hidden, backward=True),), count=count),
    ]


def output(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """Output projection and residual."""
    width = _mixed(shape, strategy.tensor)
    return [
        *_gate(shape, GATE_BYTES * tokens * width, count),
        Segment(kernels=(gemm("attention_out", tokens, shape.hidden, width),), count=count),
        *_leave(shape, strategy, tokens, count),
    ]


def output_grad(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """The backward pass of :func:`output`."""
    width = _mixed(shape, strategy.tensor)
    gate = _gate(shape, GATE_GRAD_BYTES * tokens * width, count, backward=True)
    return [*_row_grad("attention_out", shape, strategy, tokens, width, count), *gate]


def _gate(shape: Shape, moved: float, count: int, backward: bool = False) -> list[Segment]:
    """The gate on attention's output; that of a state is a part of its norm."""
    if not shape.output_gate or shape.linear:
        return []
    return [Segment((memory("gate", moved, backward=backward),), count=count)]


def mlp(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """Norm, MLP and residual."""
    local, inner = _local(strategy, tokens), shape.ffn // strategy.tensor
    up = inner * (2 if shape.gated else 1)
    activation = memory("activation", BF16 * tokens * (up + inner))
    return [
        Segment(kernels=(memory("norm", 2 * BF16 * local * shape.hidden),), count=count),
        *_enter(shape, strategy, tokens, count),
        Segment(
            kernels=(
                gemm("mlp_up", tokens, up, shape.hidden),
                activation,
                gemm("mlp_down", tokens, shape.hidden, inner),
            ),
            count=count,
        ),
        *_leave(shape, strategy, tokens, count),
    ]


def mlp_grad(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """The backward pass of :func:`mlp`."""
    local, inner = _local(strategy, tokens), shape.ffn // strategy.tensor
    up = inner * (2 if shape.gated else 1)
    activation = memory("activation", BF16 * tokens * (2 * up + inner), backward=True)
    return [
        *_row_grad("mlp_down", shape, strategy, tokens, inner, count),
        Segment(kernels=(activation,), count=count),
        *_column_grad("mlp_up", shape, strategy, tokens, up, count),
        Segment(kernels=(memory("norm", 5 * BF16 * local * shape.hidden, backward=True),), count=count),
    ]


def _latents(shape: Shape, tensor: int) -> list[tuple[str, int, int, int]]:
    """(name, width of the input, width of the result, width of TP's part of it) of the products that make q, k, v."""
    latent, heads = shape.latent, shape.heads
    down, up = latent.keys + latent.rotated, heads * (shape.head_dim - latent.rotated + latent.value)
    pairs = [("kv_down", shape.hidden, down), ("kv_up", latent.keys, up)]
    if latent.queries:
        pairs += [("q_down", shape.hidden, latent.queries), ("q_up", latent.queries, heads * shape.head_dim)]
    else:
        pairs.append(("q", shape.hidden, heads * shape.head_dim))
    return [(name, into, out, out // tensor) for name, into, out in pairs]


def _project_latents(shape: Shape, strategy: Strategy, tokens: float, count: int) -> list[Segment]:
    """Norm, the latents, their norms, queries, keys and values from them, rotary (core/latent_attention.py)."""
    local = _local(strategy, tokens)
    segments = [Segment((memory("norm", 2 * BF16 * local * shape.hidden),), count=count)]
    for name, into, out, width in _latents(shape, strategy.tensor):
        gathers = entering(strategy, into, tokens)
        segments += [Segment(transfers=gathers, count=count)] if gathers else []
        kernels = [gemm(name, tokens, width, into)]
        if name.endswith("_down"):
            kernels.append(memory("norm", 2 * BF16 * local * out))
        segments.append(Segment(tuple(kernels), count=count))
        if name.endswith("_down") and strategy.tensor > 1:
            whole = collective("all_gather", "tp", strategy.group("tp"), BF16 * tokens * out)
            segments.append(Segment(transfers=(whole,), count=count))
    return [*segments, Segment((*_joined(shape, strategy, tokens), *_rotary(shape, strategy, tokens)), count=count)]


def _project_latents_grad(shape: Shape, strategy: Strategy, tokens: float, count: int) -> list[Segment]:
    """The backward pass of :func:`_project_latents`."""
    local = _local(strategy, tokens)
    begin = (*_rotary(shape, strategy, tokens, backward=True), *_joined(shape, strategy, tokens, backward=True))
    segments = [Segment(begin, count=count)]
    for name, into, out, width in reversed(_latents(shape, strategy.tensor)):
        if name.endswith("_down"):
            norm, rotated = memory("norm", 5 * BF16 * local * out, backward=True), 0
            sums: tuple[Transfer, ...] = ()
            if name == "kv_down" and strategy.tensor > 1:  # all heads share the rotated part
                rotated = shape.latent.rotated
                sums = (collective("all_reduce", "tp", strategy.group("tp"), BF16 * tokens * rotated),)
            segments.append(Segment((norm,), (*entering(strategy, out - rotated, tokens), *sums), count=count))
        segments += _column_grad(name, shape, strategy, tokens, width, count, into)
    return [*segments, Segment((memory("norm", 5 * BF16 * local * shape.hidden, backward=True),), count=count)]


def _joined(shape: Shape, strategy: Strategy, tokens: float, backward: bool = False) -> tuple[Kernel, ...]:
    """Copies that join the parts of queries and keys, and in the backward pass separate them again."""
    return (memory("join", 4 * BF16 * tokens * shape.heads * shape.head_dim / strategy.tensor, backward=backward),)


# --- experts ---
#
# The all-to-all dispatcher (core/experts.py). Each expert's products run one after the other. The ranks wait for the
# rank whose experts get most tokens.


def experts(workload: Workload, strategy: Strategy) -> list[Segment]:
    """Norm, router, the tokens' way to their experts and back, experts, shared expert and residual."""
    shape, d = workload.shape, dispatched(workload, strategy)
    token, inner = BF16 * shape.hidden, d.width * (2 if shape.gated else 1)
    scores = memory("router", ROUTER_BYTES * d.tokens * shape.mixture.experts)
    up, down = gemm("expert_up", d.each, inner, shape.hidden), gemm("expert_down", d.each, shape.hidden, d.width)
    each = (up, memory("activation", BF16 * d.each * (inner + d.width)), down)
    sorts = memory("sort", 2 * token * d.received)
    return [
        Segment((memory("norm", 2 * token * d.tokens), gemm("router", d.tokens, shape.mixture.experts, shape.hidden))),
        *_shared_expert(shape, strategy, d),
        Segment((scores, memory("permute", 2 * token * d.sent)), _counts(shape, strategy)),
        *_there(strategy, d, token + BF16),  # with the token's weight
        Segment((sorts,)),
        Segment(each, count=d.held),
        Segment((sorts,)),
        *_back(strategy, d, token),
        Segment((memory("permute", 2 * token * d.sent), memory("residual", 3 * token * d.tokens))),
    ]


def experts_grad(workload: Workload, strategy: Strategy) -> list[Segment]:
    """The backward pass of :func:`experts`."""
    shape, d = workload.shape, dispatched(workload, strategy)
    token, inner = BF16 * shape.hidden, d.width * (2 if shape.gated else 1)
    number = shape.mixture.experts
    each = (
        gemm("expert_down_dgrad", d.each, d.width, shape.hidden, backward=True),
        *_weight_grad("expert_down", strategy, d.each, shape.hidden, d.width, 1),
        memory("activation", BF16 * d.each * (2 * inner + d.width), backward=True),
        gemm("expert_up_dgrad", d.each, shape.hidden, inner, backward=True),
        *_weight_grad("expert_up", strategy, d.each, inner, shape.hidden, 1),
    )
    router = (
        memory("router", ROUTER_BYTES * d.tokens * number, backward=True),
        gemm("router_dgrad", d.tokens, shape.hidden, number, backward=True),
        *_weight_grad("router", strategy, d.tokens, number, shape.hidden, 1),
    )
    sorts = memory("sort", 2 * token * d.received, backward=True)
    permute = memory("permute", 2 * token * d.sent, backward=True)
    return [
        Segment((permute,)),
        *_there(strategy, d, token),
        Segment((sorts,)),
        Segment(each, count=d.held),
        Segment((sorts,)),
        *_back(strategy, d, token + BF16),
        Segment((permute,)),
        *_shared_expert_grad(shape, strategy, d),
        Segment((*router, memory("norm", 5 * token * d.tokens, backward=True))),
    ]


# Bytes for each score of a token: casts, the sort by score with its indices, softmax, masks and their transposes.
ROUTER_BYTES = 60


def _there(strategy: Strategy, d: Dispatched, token: int) -> list[Segment]:
    """The all-to-all over EP of ``token`` bytes for each choice; then with expert TP a gather."""
    arrived = d.received // strategy.expert_tensor
    return [*_exchange(strategy, d.sent, arrived, token), *_within_expert(strategy, "all_gather", d.received * token)]


def _back(strategy: Strategy, d: Dispatched, token: int) -> list[Segment]:
    """The reverse of :func:`_there`."""
    arrived = d.received // strategy.expert_tensor
    sums = _within_expert(strategy, "reduce_scatter", d.received * token)
    return [*sums, *_exchange(strategy, arrived, d.sent, token)]


def _exchange(strategy: Strategy, sent: int, received: int, token: int) -> list[Segment]:
    """An all-to-all over EP; the rank whose experts get most tokens receives more than it sends, or sends more."""
    group = strategy.group("ep")
    if group.size == 1:
        return []
    own = min(sent, max(sent, received) // group.size)
    away, coming = (token * (choices - own) for choices in (sent, received))
    return [Segment((), (Transfer("all_to_all", "ep", group, away, excess=max(0, coming - away)),))]


def _within_expert(strategy: Strategy, kind: Collective, size: int) -> list[Segment]:
    group = Group(strategy.expert_tensor)
    return [Segment((), (collective(kind, "ep", group, size),))] if group.size > 1 else []


def _counts(shape: Shape, strategy: Strategy) -> tuple[Transfer, ...]:
    """The gather of how many tokens each rank has for each expert, in int64."""
    group = Group(strategy.expert * strategy.expert_tensor)
    return (collective("all_gather", "ep", group, 8 * shape.mixture.experts * group.size),) if group.size > 1 else ()


def _shared_expert(shape: Shape, strategy: Strategy, d: Dispatched) -> list[Segment]:
    if not d.shared:
        return []
    tokens, up = d.tokens * _split(strategy), d.shared * (2 if shape.gated else 1)
    products = (
        gemm("shared_up", tokens, up, shape.hidden),
        memory("activation", BF16 * tokens * (up + d.shared)),
        gemm("shared_down", tokens, shape.hidden, d.shared),
    )
    leave = leaving(strategy, shape.hidden, tokens)
    sides = *_enter(shape, strategy, tokens, 1), Segment(products), *([Segment((), leave)] if leave else [])
    return list(sides)


def _shared_expert_grad(shape: Shape, strategy: Strategy, d: Dispatched) -> list[Segment]:
    if not d.shared:
        return []
    tokens, up = d.tokens * _split(strategy), d.shared * (2 if shape.gated else 1)
    activation = memory("activation", BF16 * tokens * (2 * up + d.shared), backward=True)
    return [
        *_row_grad("shared_down", shape, strategy, tokens, d.shared, 1),
        Segment((activation,)),
        *_column_grad("shared_up", shape, strategy, tokens, up, 1),
    ]


def _split(strategy: Strategy) -> int:
    return strategy.tensor if strategy.sequence_parallel else 1


def entering(strategy: Strategy, width: int, tokens: float) -> tuple[Transfer, ...]:
    """The all-gather before a column-parallel layer or a row-parallel layer's gradient; ``width``: per token."""
    if strategy.tensor == 1 or not strategy.sequence_parallel:
        return ()
    return (collective("all_gather", "tp", strategy.group("tp"), BF16 * tokens * width),)


def leaving(strategy: Strategy, width: int, tokens: float) -> tuple[Transfer, ...]:
    """The reduction after a row-parallel layer, and after a column-parallel layer's gradient."""
    if strategy.tensor == 1:
        return ()
    kind = "reduce_scatter" if strategy.sequence_parallel else "all_reduce"
    return (collective(kind, "tp", strategy.group("tp"), BF16 * tokens * width),)


def _mixed(shape: Shape, tensor: int) -> int:
    """Columns on a TP rank of what enters the output projection."""
    linear = shape.linear
    return (linear.heads * linear.values if linear else shape.heads * shape.value_dim) // tensor


def _qkv(shape: Shape, tensor: int) -> int:
    """Columns of the first projection on a TP rank: an equal share, even if it is less than a key/value head."""
    if shape.linear:
        return shape.linear.projected // tensor
    return ((1 + shape.output_gate) * shape.heads + 2 * shape.kv_heads) * shape.head_dim // tensor


def _all_of_qkv(kind: Collective, shape: Shape, strategy: Strategy, tokens: float, count: int) -> list[Segment]:
    """With more TP ranks than key/value heads core gathers queries, keys and values of all TP ranks.

    Each rank then selects those of its heads (core/transformer/attention.py, get_query_key_value_tensors).
    """
    if shape.kv_heads >= strategy.tensor or shape.linear:
        return []
    whole, backward = BF16 * tokens * _qkv(shape, 1), kind == "reduce_scatter"
    # A copy joins the ranks' columns; in backward a gradient for all columns is first filled with zeros.
    copies = memory("join", (4 if backward else 2) * whole, backward=backward)
    return [
        Segment(transfers=(collective(kind, "tp", strategy.group("tp"), whole),), count=count),
        Segment(kernels=(copies,), count=count),
    ]


def _local(strategy: Strategy, tokens: float) -> float:
    return tokens / strategy.tensor if strategy.sequence_parallel else tokens


def _rotary(shape: Shape, strategy: Strategy, tokens: float, backward: bool = False) -> tuple[Kernel, ...]:
    if shape.positions or shape.linear:
        return ()
    held = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    each = ROTARY_BYTES if strategy.fused else UNFUSED_ROTARY_BYTES
    return (memory("rotary", each * tokens * (held.q + held.kv) * shape.head_dim, backward=backward),)


def _enter(shape: Shape, strategy: Strategy, tokens: float, count: int) -> list[Segment]:
    transfers = entering(strategy, shape.hidden, tokens)
    return [Segment(transfers=transfers, count=count)] if transfers else []


def _leave(shape: Shape, strategy: Strategy, tokens: float, count: int) -> list[Segment]:
    residual = memory("residual", 3 * BF16 * _local(strategy, tokens) * shape.hidden)
    transfers = leaving(strategy, shape.hidden, tokens)
    return [*([Segment(transfers=transfers, count=count)] if transfers else []), Segment((residual,), count=count)]


def _weight_grad(name: str, strategy: Strategy, tokens: float, n: int, k: int, count: int) -> tuple[Kernel, ...]:
    """The product, which adds to DDP's fp32 gradient itself, or a kernel does.

    FSDP reduces gradients once per micro-batch; only a layer that runs in ``count`` chunks has an fp32 sum: the first
    chunk is cast up, and the sum down.
    """
    product, each = gemm(name + "_wgrad", n, k, tokens, backward=True), BF16 + 2 * FP32
    if strategy.fused and strategy.zero < 2:
        return (replace(product, bytes=product.bytes + (2 * FP32 - BF16) * n * k),)
    if strategy.fused:
        if not (strategy.fpdt_chunk or (strategy.ffn_chunks and name.startswith("mlp"))):
            return (product,)
        each = (2 * (BF16 + FP32) + (count - 1) * each) / count
    return product, memory("main_grad", each * n * k, backward=True)


def _column_grad(
    name: str, shape: Shape, strategy: Strategy, tokens: float, width: int, count: int, into: int = 0
) -> list[Segment]:
    """``into``: the width of the layer's input, if it is not the hidden size."""
    into = into or shape.hidden
    dgrad = gemm(name + "_dgrad", tokens, into, width, backward=True)
    wgrad = _weight_grad(name, strategy, tokens, width, into, count)
    return [
        Segment((dgrad,), entering(strategy, into, tokens), count=count),
        Segment(wgrad, leaving(strategy, into, tokens), count=count),
    ]


def _row_grad(name: str, shape: Shape, strategy: Strategy, tokens: float, width: int, count: int) -> list[Segment]:
    dgrad = gemm(name + "_dgrad", tokens, width, shape.hidden, backward=True)
    wgrad = _weight_grad(name, strategy, tokens, shape.hidden, width, count)
    return [*_enter(shape, strategy, tokens, count), Segment((dgrad, *wgrad), count=count)]


def layer(workload: Workload, strategy: Strategy) -> tuple[list[Segment], list[Segment]]:
    """(forward, backward with recompute) of one layer and micro-batch.

    Raises:
        ValueError: Ulysses does not divide a TP rank's heads.
    """
    a, chunks = attended(workload, strategy), chunks_of(workload, strategy)
    work = _Layer(workload, strategy, a, chunks.attention, chunks.ffn)
    forward = _forward(work, saving=strategy.recompute != "full" or strategy.stream_hidden)
    backward = _backward(work)
    if strategy.recompute == "full":
        backward = _again(work) + backward
    elif strategy.recompute == "selective" and workload.shape.mixes:
        backward = _attention(work, saving=True) + backward
    if strategy.stream_hidden:
        forward, backward = streamed(workload, strategy, a, forward, backward)
    elif strategy.offload_checkpoints:
        inputs = BF16 * strategy.local_tokens(workload) * workload.shape.hidden
        forward = spread_evenly(forward, HostCopy("to_host", inputs))
        backward = spread_evenly(backward, HostCopy("to_device", inputs))
    return forward, backward


@dataclass(frozen=True)
class _Layer:
    """A layer and the numbers of its chunks."""

    workload: Workload
    strategy: Strategy
    attended: Attended
    chunks: int  # for projections and attention
    ffn_chunks: int  # 0: the FFN is not cut

    @property
    def shape(self) -> Shape:
        return self.workload.shape

    @property
    def rows(self) -> float:
        """Tokens of a chunk in a TP group."""
        return self.attended.rows / self.chunks

    def stored(self) -> tuple[HostCopy, ...]:
        """Copies to host memory that a forward pass overlaps."""
        return stored_in_forward(self.attended, self.strategy, self.chunks) if self.strategy.fpdt_chunk else ()

    def project(self) -> list[Segment]:
        return project(self.shape, self.strategy, self.rows, self.chunks)

    def output(self) -> list[Segment]:
        return output(self.shape, self.strategy, self.rows, self.chunks)

    def ffn(self, work: Callable[..., list[Segment]]) -> list[Segment]:
        """The pass of the MLP, or of the experts in its place, if any. ``work``: :func:`mlp` or :func:`mlp_grad`."""
        if not self.shape.has_ffn:
            return []
        if self.shape.mixture:
            return (experts if work is mlp else experts_grad)(self.workload, self.strategy)
        runs = self.ffn_chunks or 1
        return work(self.shape, self.strategy, self.attended.rows / runs, runs)


def streamed(
    workload: Workload, strategy: Strategy, a: Attended, forward: list[Segment], backward: list[Segment]
) -> tuple[list[Segment], list[Segment]]:
    """Both passes with the copies of streamed hidden states (docs/inside/host-copies.md, "What is copied").

    Forward loads one state and stores one. Backward loads input and gradient and stores a gradient; by keys it loads
    and stores all of these a second time. Recompute loads the input again.
    """
    state = BF16 * strategy.local_tokens(workload) * workload.shape.hidden
    by_keys = a.ring > 1 or goes_by_keys(a.heads, a.kv_heads, BF16)
    reads, writes = (4, 2) if by_keys else (2, 1)
    reads += strategy.recompute == "full"
    for direction, count in (("to_device", reads), ("to_host", writes)):
        forward = spread_evenly(forward, HostCopy(direction, state))
        backward = spread_evenly(backward, HostCopy(direction, count * state))
    return forward, backward


FLOPS_PER_BYTE = 200.0  # bf16 FLOP/s over memory bandwidth in data sheets: 156 (A100) to 295 (H100)


def spread_evenly(segments: list[Segment], *copies: HostCopy) -> list[Segment]:
    """The segments, with the copies divided in equal shares over the segments that have kernels."""
    return _spread(segments, [1.0 if segment.kernels else 0.0 for segment in segments], copies)


def spread_by_work(segments: list[Segment], *copies: HostCopy) -> list[Segment]:
    """The segments, with the copies divided in proportion to their kernels' work; the copies wait for no kernel."""
    work = [sum(kernel.flops + FLOPS_PER_BYTE * kernel.bytes for kernel in segment.kernels) for segment in segments]
    return _spread(segments, work, copies) if copies else segments


def _spread(segments: list[Segment], shares: list[float], copies: Sequence[HostCopy]) -> list[Segment]:
    whole = sum(share * segment.count for share, segment in zip(shares, segments))
    return [
        replace(
            segment,
            copies=(*segment.copies, *(HostCopy(copy.direction, copy.bytes * share / whole) for copy in copies)),
        )
        if share
        else segment
        for share, segment in zip(shares, segments)
    ]


def _forward(work: _Layer, *, saving: bool, again: bool = False) -> list[Segment]:
    segments = work.ffn(mlp)
    if work.shape.mixes:
        attention = _attention(work, saving=saving, kept=again and work.strategy.keep_attention)
        segments = [*work.project(), *attention, *work.output(), *segments]
    return spread_by_work(segments, *(work.stored() if saving else ()))


def _again(work: _Layer) -> list[Segment]:
    """Segments that full recompute adds. In a single chunked layer they end with attention: backward runs the rest."""
    strategy, a = work.strategy, work.attended
    if not strategy.fpdt_chunk or strategy.recompute_layers > 1:
        return _forward(work, saving=True, again=True)
    segments = [
        *work.project(),
        *to_heads(a, strategy, work.rows, work.chunks),
        *chunked_forward(a, strategy, work.chunks, saving=True),
    ]
    return spread_by_work(segments, *work.stored())


def _attention(work: _Layer, *, saving: bool, kept: bool = False) -> list[Segment]:
    """The forward pass; ``kept``: its result is known, so that no tile is computed."""
    strategy, a, chunks = work.strategy, work.attended, work.chunks
    if work.shape.linear:
        return state_mixer(work.workload, strategy)
    chunked = strategy.fpdt_chunk > 0
    tiles = chunked_forward(a, strategy, chunks, saving=saving) if chunked else ring_forward(a, strategy)
    tiles = [] if kept else tiles
    return [*to_heads(a, strategy, work.rows, chunks), *tiles, *to_sequence(a, strategy, work.rows, chunks)]


def _backward(work: _Layer) -> list[Segment]:
    shape, strategy, a, rows, chunks = work.shape, work.strategy, work.attended, work.rows, work.chunks
    tiles = chunked_backward(a, strategy, chunks) if strategy.fpdt_chunk else ring_backward(a, strategy)
    tiles = [
        *to_sequence(a, strategy, rows, chunks, backward=True),
        *tiles,
        *to_heads(a, strategy, rows, chunks, backward=True),
    ]
    if shape.linear:
        tiles = state_mixer(work.workload, strategy, backward=True)
    mixer = [
        *output_grad(shape, strategy, rows, chunks),
        *tiles,
        *project_grad(shape, strategy, rows, chunks),
    ]
    ffn = spread_evenly(work.ffn(mlp_grad), *copied_in_ffn_backward(a, strategy, chunks))
    segments = [*ffn, *(mixer if shape.mixes else ())]
    if not strategy.fpdt_chunk:  # a chunked FFN computes its forward pass again
        return [*work.ffn(mlp), *segments] if work.ffn_chunks and shape.has_ffn else segments
    # Chunked layers keep nothing between a chunk's passes: projections and FFN run again before their gradients.
    segments = [*work.ffn(mlp), *work.output(), *to_sequence(a, strategy, rows, chunks), *work.project(), *segments]
    return spread_by_work(segments, *loaded_in_backward(a, strategy, chunks))
