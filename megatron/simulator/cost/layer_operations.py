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

# Bytes per rotated number. One kernel (context_parallel/positions/rope_kernel.py) reads and writes it once. PyTorch's
# operations in fp32 (rope.py): cast up 6, times cosine 8, plus the other half times sine 12, cast down 6.
ROTARY_BYTES, UNFUSED_ROTARY_BYTES = 2 * BF16, 32


# Bytes per number of attention's output with a gate (core/transformer_layer.py, gated). Forward: cast the gate up 6,
# sigmoid 8, product 10, cast down 6. Backward: cast up 6, two products 18, of the sigmoid 12, casts down 12.
GATE_BYTES, GATE_GRAD_BYTES = 30, 48


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


@dataclass(frozen=True)
class Rows:
    """Tokens of a TP group in the linear layers of a layer, ``count`` times in a row.

    Between linear layers each rank has a share of them (sequence parallel) or all. The forward pass waits for TP's
    transfers. In the backward pass megatron-core overlaps a column-parallel layer's transfers with its two products
    (core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    """

    shape: Shape
    strategy: Strategy
    tokens: float
    count: int = 1

    def run(self, *kernels: Kernel) -> Segment:
        return Segment(kernels, count=self.count)

    def send(self, *transfers: Transfer) -> list[Segment]:
        """Transfers that nothing overlaps, if any."""
        return [Segment((), transfers, count=self.count)] if transfers else []

    def memory(self, name: str, width: float, *, backward: bool = False) -> Kernel:
        """A kernel that moves ``width`` bytes for each token that this rank has between linear layers."""
        split = self.strategy.tensor if self.strategy.sequence_parallel else 1
        return memory(name, width * self.tokens / split, backward=backward)

    def norm(self, width: int, *, backward: bool = False) -> Kernel:
        return self.memory("norm", (5 if backward else 2) * BF16 * width, backward=backward)

    def activation(self, inner: int, *, backward: bool = False) -> Kernel:
        """Of an MLP; ``inner``: its width on this rank."""
        up = inner * (2 if self.shape.gated else 1)
        size = BF16 * self.tokens * ((2 * up if backward else up) + inner)
        return memory("activation", size, backward=backward)

    def enter(self) -> list[Segment]:
        return self.send(*entering(self.strategy, self.shape.hidden, self.tokens))

    def leave(self) -> list[Segment]:
        transfers = leaving(self.strategy, self.shape.hidden, self.tokens)
        return [*self.send(*transfers), self.run(self.memory("residual", 3 * BF16 * self.shape.hidden))]

    def weight_grad(self, name: str, n: int, k: int) -> tuple[Kernel, ...]:
        """The product, which adds to DDP's fp32 gradient itself, or a kernel does.

        FSDP reduces gradients once per micro-batch; only a layer that runs in ``count`` chunks has an fp32 sum: the
        first chunk is cast up, and the sum down.
        """
        strategy = self.strategy
        product, each = gemm(name + "_wgrad", n, k, self.tokens, backward=True), BF16 + 2 * FP32
        if strategy.fused and strategy.zero < 2:
            return (replace(product, bytes=product.bytes + (2 * FP32 - BF16) * n * k),)
        if strategy.fused:
            if not (strategy.fpdt_chunk or (strategy.ffn_chunks and name.startswith("mlp"))):
                return (product,)
            each = (2 * (BF16 + FP32) + (self.count - 1) * each) / self.count
        return product, memory("main_grad", each * n * k, backward=True)

    def column_grad(self, name: str, width: int, into: int = 0) -> list[Segment]:
        """``into``: the width of the layer's input, if it is not the hidden size."""
        into, tokens, count = into or self.shape.hidden, self.tokens, self.count
        dgrad = gemm(name + "_dgrad", tokens, into, width, backward=True)
        return [
            Segment((dgrad,), entering(self.strategy, into, tokens), count=count),
            Segment(self.weight_grad(name, width, into), leaving(self.strategy, into, tokens), count=count),
        ]

    def row_grad(self, name: str, width: int) -> list[Segment]:
        dgrad = gemm(name + "_dgrad", self.tokens, width, self.shape.hidden, backward=True)
        return [*self.enter(), self.run(dgrad, *self.weight_grad(name, self.shape.hidden, width))]


# --- projections and MLP ---


def project(rows: Rows) -> list[Segment]:
    """Norm, QKV and rotary."""
    shape = rows.shape
    if shape.latent:
        return _project_latents(rows)
    return [
        rows.run(rows.norm(shape.hidden)),
        *rows.enter(),
        rows.run(gemm("qkv", rows.tokens, _qkv(shape, rows.strategy.tensor), shape.hidden)),
        *_all_of_qkv("all_gather", rows),
        rows.run(*_rotary(rows)),
    ]


def project_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`project`."""
    if rows.shape.latent:
        return _project_latents_grad(rows)
    return [
        rows.run(*_rotary(rows, backward=True)),
        *_all_of_qkv("reduce_scatter", rows),
        *rows.column_grad("qkv", _qkv(rows.shape, rows.strategy.tensor)),
        rows.run(rows.norm(rows.shape.hidden, backward=True)),
    ]


def output(rows: Rows) -> list[Segment]:
    """Output projection and residual."""
    width = _mixed(rows.shape, rows.strategy.tensor)
    product = gemm("attention_out", rows.tokens, rows.shape.hidden, width)
    return [*_gate(rows, GATE_BYTES * width), rows.run(product), *rows.leave()]


def output_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`output`."""
    width = _mixed(rows.shape, rows.strategy.tensor)
    return [*rows.row_grad("attention_out", width), *_gate(rows, GATE_GRAD_BYTES * width, backward=True)]


def _gate(rows: Rows, moved: float, backward: bool = False) -> list[Segment]:
    """The gate on attention's output; that of a state is a part of its norm."""
    if not rows.shape.output_gate or rows.shape.linear:
        return []
    return [rows.run(memory("gate", moved * rows.tokens, backward=backward))]


def mlp(rows: Rows) -> list[Segment]:
    """Norm, MLP and residual."""
    shape, inner = rows.shape, rows.shape.ffn // rows.strategy.tensor
    up = gemm("mlp_up", rows.tokens, inner * (2 if shape.gated else 1), shape.hidden)
    down = gemm("mlp_down", rows.tokens, shape.hidden, inner)
    run = rows.run(up, rows.activation(inner), down)
    return [rows.run(rows.norm(shape.hidden)), *rows.enter(), run, *rows.leave()]


def mlp_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`mlp`."""
    shape, inner = rows.shape, rows.shape.ffn // rows.strategy.tensor
    return [
        *rows.row_grad("mlp_down", inner),
        rows.run(rows.activation(inner, backward=True)),
        *rows.column_grad("mlp_up", inner * (2 if shape.gated else 1)),
        rows.run(rows.norm(shape.hidden, backward=True)),
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


def _project_latents(rows: Rows) -> list[Segment]:
    """Norm, the latents, their norms, queries, keys and values from them, rotary (core/latent_attention.py)."""
    strategy, tokens = rows.strategy, rows.tokens
    segments = [rows.run(rows.norm(rows.shape.hidden))]
    for name, into, out, width in _latents(rows.shape, strategy.tensor):
        norm = (rows.norm(out),) if name.endswith("_down") else ()
        segments += [*rows.send(*entering(strategy, into, tokens)), rows.run(gemm(name, tokens, width, into), *norm)]
        if norm and strategy.tensor > 1:
            segments += rows.send(collective("all_gather", "tp", strategy.group("tp"), BF16 * tokens * out))
    return [*segments, rows.run(*_joined(rows), *_rotary(rows))]


def _project_latents_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`_project_latents`."""
    shape, strategy, tokens = rows.shape, rows.strategy, rows.tokens
    segments = [rows.run(*_rotary(rows, backward=True), *_joined(rows, backward=True))]
    for name, into, out, width in reversed(_latents(shape, strategy.tensor)):
        if name.endswith("_down"):
            rotated, sums = 0, ()
            if name == "kv_down" and strategy.tensor > 1:  # all heads share the rotated part
                rotated = shape.latent.rotated
                sums = (collective("all_reduce", "tp", strategy.group("tp"), BF16 * tokens * rotated),)
            sent = (*entering(strategy, out - rotated, tokens), *sums)
            segments.append(Segment((rows.norm(out, backward=True),), sent, count=rows.count))
        segments += rows.column_grad(name, width, into)
    return [*segments, rows.run(rows.norm(shape.hidden, backward=True))]


def _joined(rows: Rows, backward: bool = False) -> tuple[Kernel, ...]:
    """Copies that join the parts of queries and keys, and in the backward pass separate them again."""
    width = rows.shape.heads * rows.shape.head_dim / rows.strategy.tensor
    return (memory("join", 4 * BF16 * rows.tokens * width, backward=backward),)


def _mixed(shape: Shape, tensor: int) -> int:
    """Columns on a TP rank of what enters the output projection."""
    linear = shape.linear
    return (linear.heads * linear.values if linear else shape.heads * shape.value_dim) // tensor


def _qkv(shape: Shape, tensor: int) -> int:
    """Columns of the first projection on a TP rank: an equal share, even if it is less than a key/value head."""
    if shape.linear:
        return shape.linear.projected // tensor
    return ((1 + shape.output_gate) * shape.heads + 2 * shape.kv_heads) * shape.head_dim // tensor


def _all_of_qkv(kind: Collective, rows: Rows) -> list[Segment]:
    """With more TP ranks than key/value heads core gathers queries, keys and values of all TP ranks.

    Each rank then selects those of its heads (core/transformer/attention.py, get_query_key_value_tensors).
    """
    shape, strategy = rows.shape, rows.strategy
    if shape.kv_heads >= strategy.tensor or shape.linear:
        return []
    whole, backward = BF16 * rows.tokens * _qkv(shape, 1), kind == "reduce_scatter"
    # A copy joins the ranks' columns; in backward a gradient for all columns is first filled with zeros.
    copies = memory("join", (4 if backward else 2) * whole, backward=backward)
    return [*rows.send(collective(kind, "tp", strategy.group("tp"), whole)), rows.run(copies)]


def _rotary(rows: Rows, backward: bool = False) -> tuple[Kernel, ...]:
    shape, strategy = rows.shape, rows.strategy
    if shape.positions or shape.linear:
        return ()
    held = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    each = ROTARY_BYTES if strategy.fused else UNFUSED_ROTARY_BYTES
    return (memory("rotary", each * rows.tokens * (held.q + held.kv) * shape.head_dim, backward=backward),)


# --- experts ---
#
# The all-to-all dispatcher (core/experts.py). Each expert's products run one after the other. The ranks wait for the
# rank whose experts get most tokens.

# Bytes for each score of a token: casts, the sort by score with its indices, softmax, masks and their transposes.
ROUTER_BYTES = 60


def experts(workload: Workload, strategy: Strategy) -> list[Segment]:
    """Norm, router, the tokens' way to their experts and back, experts, shared expert and residual."""
    shape, d = workload.shape, dispatched(workload, strategy)
    token, inner = BF16 * shape.hidden, d.width * (2 if shape.gated else 1)
    scores = memory("router", ROUTER_BYTES * d.tokens * shape.mixture.experts)
    up, down = gemm("expert_up", d.each, inner, shape.hidden), gemm("expert_down", d.each, shape.hidden, d.width)
    sorts = memory("sort", 2 * token * d.received)
    return [
        Segment((memory("norm", 2 * token * d.tokens), gemm("router", d.tokens, shape.mixture.experts, shape.hidden))),
        *_shared_expert(shape, strategy, d),
        Segment((scores, memory("permute", 2 * token * d.sent)), _counts(shape, strategy)),
        *_there(strategy, d, token + BF16),  # with the token's weight
        Segment((sorts,)),
        Segment((up, Rows(shape, strategy, d.each).activation(d.width), down), count=d.held),
        Segment((sorts,)),
        *_back(strategy, d, token),
        Segment((memory("permute", 2 * token * d.sent), memory("residual", 3 * token * d.tokens))),
    ]


def experts_grad(workload: Workload, strategy: Strategy) -> list[Segment]:
    """The backward pass of :func:`experts`."""
    shape, d = workload.shape, dispatched(workload, strategy)
    token, inner = BF16 * shape.hidden, d.width * (2 if shape.gated else 1)
    number, of_each, of_all = shape.mixture.experts, Rows(shape, strategy, d.each), Rows(shape, strategy, d.tokens)
    each = (
        gemm("expert_down_dgrad", d.each, d.width, shape.hidden, backward=True),
        *of_each.weight_grad("expert_down", shape.hidden, d.width),
        of_each.activation(d.width, backward=True),
        gemm("expert_up_dgrad", d.each, shape.hidden, inner, backward=True),
        *of_each.weight_grad("expert_up", inner, shape.hidden),
    )
    router = (
        memory("router", ROUTER_BYTES * d.tokens * number, backward=True),
        gemm("router_dgrad", d.tokens, shape.hidden, number, backward=True),
        *of_all.weight_grad("router", number, shape.hidden),
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


def _of_shared_expert(shape: Shape, strategy: Strategy, d: Dispatched) -> Rows:
    return Rows(shape, strategy, d.tokens * (strategy.tensor if strategy.sequence_parallel else 1))


def _shared_expert(shape: Shape, strategy: Strategy, d: Dispatched) -> list[Segment]:
    if not d.shared:
        return []
    rows = _of_shared_expert(shape, strategy, d)
    up = gemm("shared_up", rows.tokens, d.shared * (2 if shape.gated else 1), shape.hidden)
    down = gemm("shared_down", rows.tokens, shape.hidden, d.shared)
    leave = rows.send(*leaving(strategy, shape.hidden, rows.tokens))
    return [*rows.enter(), rows.run(up, rows.activation(d.shared), down), *leave]


def _shared_expert_grad(shape: Shape, strategy: Strategy, d: Dispatched) -> list[Segment]:
    if not d.shared:
        return []
    rows = _of_shared_expert(shape, strategy, d)
    return [
        *rows.row_grad("shared_down", d.shared),
        rows.run(rows.activation(d.shared, backward=True)),
        *rows.column_grad("shared_up", d.shared * (2 if shape.gated else 1)),
    ]


# --- the layer ---


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
    def rows(self) -> Rows:
        """The tokens of each chunk of projections and attention."""
        return Rows(self.shape, self.strategy, self.attended.rows / self.chunks, self.chunks)

    def stored(self) -> tuple[HostCopy, ...]:
        """Copies to host memory that a forward pass overlaps."""
        return stored_in_forward(self.attended, self.strategy, self.chunks) if self.strategy.fpdt_chunk else ()

    def ffn(self, work: Callable[..., list[Segment]]) -> list[Segment]:
        """The pass of the MLP, or of the experts in its place, if any. ``work``: :func:`mlp` or :func:`mlp_grad`."""
        if not self.shape.has_ffn:
            return []
        if self.shape.mixture:
            return (experts if work is mlp else experts_grad)(self.workload, self.strategy)
        runs = self.ffn_chunks or 1
        return work(Rows(self.shape, self.strategy, self.attended.rows / runs, runs))


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
        segments = [*project(work.rows), *attention, *output(work.rows), *segments]
    return spread_by_work(segments, *(work.stored() if saving else ()))


def _again(work: _Layer) -> list[Segment]:
    """Segments that full recompute adds. In a single chunked layer they end with attention: backward runs the rest."""
    strategy, a = work.strategy, work.attended
    if not strategy.fpdt_chunk or strategy.recompute_layers > 1:
        return _forward(work, saving=True, again=True)
    segments = [
        *project(work.rows),
        *to_heads(a, strategy, work.rows.tokens, work.chunks),
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
    return [
        *to_heads(a, strategy, work.rows.tokens, chunks),
        *tiles,
        *to_sequence(a, strategy, work.rows.tokens, chunks),
    ]


def _backward(work: _Layer) -> list[Segment]:
    shape, strategy, a, chunks = work.shape, work.strategy, work.attended, work.chunks
    rows = work.rows.tokens
    tiles = chunked_backward(a, strategy, chunks) if strategy.fpdt_chunk else ring_backward(a, strategy)
    tiles = [
        *to_sequence(a, strategy, rows, chunks, backward=True),
        *tiles,
        *to_heads(a, strategy, rows, chunks, backward=True),
    ]
    if shape.linear:
        tiles = state_mixer(work.workload, strategy, backward=True)
    mixer = [*output_grad(work.rows), *tiles, *project_grad(work.rows)]
    ffn = spread_evenly(work.ffn(mlp_grad), *copied_in_ffn_backward(a, strategy, chunks))
    segments = [*ffn, *(mixer if shape.mixes else ())]
    if not strategy.fpdt_chunk:  # a chunked FFN computes its forward pass again
        return [*work.ffn(mlp), *segments] if work.ffn_chunks and shape.has_ffn else segments
    # Chunked layers keep nothing between a chunk's passes: projections and FFN run again before their gradients.
    segments = [
        *work.ffn(mlp),
        *output(work.rows),
        *to_sequence(a, strategy, rows, chunks),
        *project(work.rows),
        *segments,
    ]
    return spread_by_work(segments, *loaded_in_backward(a, strategy, chunks))
