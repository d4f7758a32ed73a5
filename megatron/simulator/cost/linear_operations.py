# SPDX-License-Identifier: Apache-2.0
"""What a layer does to each token by itself: projections, norms, MLP, and their tensor parallelism.

``tokens`` is what a TP group holds together; between linear layers each of its ranks has a share of them (sequence
parallel) or all. The forward pass waits for TP's transfers; in the backward pass megatron-core overlaps those of a
column-parallel layer with its two matrix products (core/tensor_parallel/layers.py,
LinearWithGradAccumulationAndAsyncCommunication).
"""

from __future__ import annotations

from megatron.formulas.sizes import heads_of
from megatron.formulas.strategy import Shape, Strategy
from megatron.simulator.cost.operations import BF16, FP32, collective, gemm, memory
from megatron.simulator.cost.segment import Segment
from megatron.simulator.cost.trace import Collective, Kernel, Transfer

# Bytes of a number that is rotated. By one kernel (context_parallel/positions/rope_kernel.py): read and written once.
# By PyTorch's operations in fp32 (rope.py): widen 6, times cosine 8, plus the other one times sine 12, narrow 6.
ROTARY_BYTES, UNFUSED_ROTARY_BYTES = 2 * BF16, 32


def project(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """Norm, QKV and rotary."""
    local, width = _local(strategy, tokens), _qkv(shape, strategy.tensor)
    return [
        Segment(kernels=(memory("norm", 2 * BF16 * local * shape.hidden),), count=count),
        *_enter(shape, strategy, tokens, count),
        Segment(kernels=(gemm("qkv", tokens, width, shape.hidden),), count=count),
        *_all_of_qkv("all_gather", shape, strategy, tokens, count),
        Segment(kernels=_rotary(shape, strategy, tokens), count=count),
    ]


def project_grad(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    local, width = _local(strategy, tokens), _qkv(shape, strategy.tensor)
    return [
        Segment(kernels=_rotary(shape, strategy, tokens, backward=True), count=count),
        *_all_of_qkv("reduce_scatter", shape, strategy, tokens, count),
        *_column_grad("qkv", shape, strategy, tokens, width, count),
        Segment(kernels=(memory("norm", 5 * BF16 * local * shape.hidden, backward=True),), count=count),
    ]


def output(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    """Output projection and residual."""
    width = shape.heads * shape.head_dim // strategy.tensor
    return [
        Segment(kernels=(gemm("attention_out", tokens, shape.hidden, width),), count=count),
        *_leave(shape, strategy, tokens, count),
    ]


def output_grad(shape: Shape, strategy: Strategy, tokens: float, count: int = 1) -> list[Segment]:
    width = shape.heads * shape.head_dim // strategy.tensor
    return _row_grad("attention_out", shape, strategy, tokens, width, count)


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
    local, inner = _local(strategy, tokens), shape.ffn // strategy.tensor
    up = inner * (2 if shape.gated else 1)
    activation = memory("activation", BF16 * tokens * (2 * up + inner), backward=True)
    return [
        *_row_grad("mlp_down", shape, strategy, tokens, inner, count),
        Segment(kernels=(activation,), count=count),
        *_column_grad("mlp_up", shape, strategy, tokens, up, count),
        Segment(kernels=(memory("norm", 5 * BF16 * local * shape.hidden, backward=True),), count=count),
    ]


def entering(strategy: Strategy, width: int, tokens: float) -> tuple[Transfer, ...]:
    """What a column-parallel layer on ``width`` wide tokens waits for in the forward pass, a row-parallel one's
    gradient in the backward pass."""
    if strategy.tensor == 1 or not strategy.sequence_parallel:
        return ()
    return (collective("all_gather", "tp", strategy.group("tp"), BF16 * tokens * width),)


def leaving(strategy: Strategy, width: int, tokens: float) -> tuple[Transfer, ...]:
    if strategy.tensor == 1:
        return ()
    kind = "reduce_scatter" if strategy.sequence_parallel else "all_reduce"
    return (collective(kind, "tp", strategy.group("tp"), BF16 * tokens * width),)


def _qkv(shape: Shape, tensor: int) -> int:
    """Columns of the QKV projection on a TP rank: an even share, also where that is less than a key/value head."""
    return (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tensor


def _all_of_qkv(kind: Collective, shape: Shape, strategy: Strategy, tokens: float, count: int) -> list[Segment]:
    """With more TP ranks than key/value heads core gathers queries, keys and values of all ranks, and each takes what
    its heads need (core/transformer/attention.py, get_query_key_value_tensors)."""
    if shape.kv_heads >= strategy.tensor:
        return []
    whole, backward = BF16 * tokens * _qkv(shape, 1), kind == "reduce_scatter"
    # Ranks' columns are joined by a copy; their gradient is first made as wide as all of them, of zeros.
    copies = memory("join", (4 if backward else 2) * whole, backward=backward)
    return [
        Segment(transfers=(collective(kind, "tp", strategy.group("tp"), whole),), count=count),
        Segment(kernels=(copies,), count=count),
    ]


def _local(strategy: Strategy, tokens: float) -> float:
    return tokens / strategy.tensor if strategy.sequence_parallel else tokens


def _rotary(shape: Shape, strategy: Strategy, tokens: float, backward: bool = False) -> tuple[Kernel, ...]:
    if shape.positions:
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
    """The product, and what adds it up in fp32: DDP's main gradients; those of FSDP (which sums once a micro-batch,
    when gradients travel) where a layer goes through in ``count`` pieces. Of these the first is made wide, and their
    sum narrow."""
    product, each = gemm(name + "_wgrad", n, k, tokens, backward=True), BF16 + 2 * FP32
    if strategy.zero > 1 and strategy.fused:
        if not (strategy.fpdt_chunk or (strategy.ffn_chunks and name.startswith("mlp"))):
            return (product,)
        each = (2 * (BF16 + FP32) + (count - 1) * each) / count
    return product, memory("main_grad", each * n * k, backward=True)


def _column_grad(name: str, shape: Shape, strategy: Strategy, tokens: float, width: int, count: int) -> list[Segment]:
    dgrad = gemm(name + "_dgrad", tokens, shape.hidden, width, backward=True)
    wgrad = _weight_grad(name, strategy, tokens, width, shape.hidden, count)
    return [
        Segment((dgrad,), entering(strategy, shape.hidden, tokens), count=count),
        Segment(wgrad, leaving(strategy, shape.hidden, tokens), count=count),
    ]


def _row_grad(name: str, shape: Shape, strategy: Strategy, tokens: float, width: int, count: int) -> list[Segment]:
    dgrad = gemm(name + "_dgrad", tokens, width, shape.hidden, backward=True)
    wgrad = _weight_grad(name, strategy, tokens, shape.hidden, width, count)
    return [
        *_enter(shape, strategy, tokens, count),
        Segment((dgrad, *wgrad), count=count),
    ]
