# SPDX-License-Identifier: Apache-2.0
"""A layer's attention on the busiest rank: projections, rotary, gate, and what is between them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from megatron.decisions.key_exchange import KEY_EXCHANGES
from megatron.formulas.kinds import mixer_of
from megatron.formulas.sizes import heads_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.kinds.chunk_operations import chunked_backward, chunked_forward, stored_in_forward
from megatron.simulator.cost.kinds.ring_operations import Attended, to_heads, to_sequence
from megatron.simulator.cost.operations import BF16, Segment, collective, gemm, memory
from megatron.simulator.cost.row_operations import Rows
from megatron.simulator.cost.trace import Collective, HostCopy, Kernel

# Bytes per rotated number. One kernel (context_parallel/positions/rope_kernel.py) reads and writes it once. PyTorch's
# operations in fp32 (rope.py): cast up 6, times cosine 8, plus the other half times sine 12, cast down 6.
ROTARY_BYTES, UNFUSED_ROTARY_BYTES = 2 * BF16, 32

# Bytes per number of attention's output with a gate (core/transformer_layer.py, gated). Forward: cast the gate up 6,
# sigmoid 8, product 10, cast down 6. Backward: cast up 6, two products 18, of the sigmoid 12, casts down 12.
GATE_BYTES, GATE_GRAD_BYTES = 30, 48


@dataclass(frozen=True)
class LayerWork:
    """A layer and the numbers of its chunks."""

    workload: Workload
    strategy: Strategy
    attended: Attended
    chunks: int  # for projections and attention

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


def project(rows: Rows) -> list[Segment]:
    """Norm, QKV and rotary."""
    shape = rows.shape
    return [
        rows.run(rows.norm(shape.hidden)),
        *rows.enter(),
        rows.run(gemm("qkv", rows.tokens, _qkv(shape, rows.strategy.tensor), shape.hidden)),
        *_all_of_qkv("all_gather", rows),
        rows.run(*rotary(rows)),
    ]


def project_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`project`."""
    return [
        rows.run(*rotary(rows, backward=True)),
        *_all_of_qkv("reduce_scatter", rows),
        *rows.column_grad("qkv", _qkv(rows.shape, rows.strategy.tensor)),
        rows.run(rows.norm(rows.shape.hidden, backward=True)),
    ]


def output(rows: Rows) -> list[Segment]:
    """Output projection and residual."""
    width = mixer_of(rows.shape).out_width(rows.shape)
    return [*_gate(rows, GATE_BYTES * width), *rows.out(width)]


def output_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`output`."""
    width = mixer_of(rows.shape).out_width(rows.shape)
    grads = rows.row_grad("attention_out", width // rows.strategy.tensor)
    return [*grads, *_gate(rows, GATE_GRAD_BYTES * width, backward=True)]


def _gate(rows: Rows, moved: float, backward: bool = False) -> list[Segment]:
    """The gate on attention's output; that of a linear-attention layer is a part of its norm."""
    size, gated = moved * rows.tokens / rows.strategy.tensor, rows.shape.output_gate and not rows.shape.linear
    return [rows.run(memory("gate", size, backward=backward))] if gated else []


def _qkv(shape: Shape, tensor: int) -> int:
    """Columns of the first projection on a TP rank: an equal share, even if it is less than a key/value head."""
    return ((1 + shape.output_gate) * shape.heads + 2 * shape.kv_heads) * shape.head_dim // tensor


def _all_of_qkv(kind: Collective, rows: Rows) -> list[Segment]:
    """With more TP ranks than key/value heads core gathers queries, keys and values of all TP ranks.

    Each rank then selects those of its heads (core/transformer/attention.py, get_query_key_value_tensors).
    """
    shape, strategy = rows.shape, rows.strategy
    if shape.kv_heads >= strategy.tensor:
        return []
    whole, backward = BF16 * rows.tokens * _qkv(shape, 1), kind == "reduce_scatter"
    # A copy joins the ranks' columns; in backward a gradient for all columns is first filled with zeros.
    copies = memory("join", (4 if backward else 2) * whole, backward=backward)
    return [*rows.send(collective(kind, "tp", strategy.group("tp"), whole)), rows.run(copies)]


def rotary(rows: Rows, backward: bool = False) -> tuple[Kernel, ...]:
    """The kernel that rotates queries and keys."""
    shape, strategy = rows.shape, rows.strategy
    if shape.positions:
        return ()
    held = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    each = ROTARY_BYTES if strategy.fused else UNFUSED_ROTARY_BYTES
    return (memory("rotary", each * rows.tokens * (held.q + held.kv) * shape.head_dim, backward=backward),)


def mix(work: LayerWork, *, saving: bool, kept: bool = False) -> list[Segment]:
    """The forward pass between the projections; ``kept``: its result is known, so that no tile is computed."""
    strategy, a, chunks, tokens = work.strategy, work.attended, work.chunks, work.rows.tokens
    chunked = strategy.fpdt_chunk > 0
    tiles = (
        chunked_forward(a, strategy, chunks, saving=saving)
        if chunked
        else ring_work(strategy).ring_forward(a, strategy)
    )
    return [*to_heads(a, strategy, tokens, chunks), *([] if kept else tiles), *to_sequence(a, strategy, tokens, chunks)]


def mix_grad(work: LayerWork) -> list[Segment]:
    """The backward pass of :func:`mix`."""
    strategy, a, chunks, tokens = work.strategy, work.attended, work.chunks, work.rows.tokens
    tiles = (
        chunked_backward(a, strategy, chunks) if strategy.fpdt_chunk else ring_work(strategy).ring_backward(a, strategy)
    )
    back = to_sequence(a, strategy, tokens, chunks, backward=True)
    return [*back, *tiles, *to_heads(a, strategy, tokens, chunks, backward=True)]


def ring_work(strategy: Strategy) -> ModuleType:
    """The module with the work of the strategy's exchange of keys."""
    return import_module(f"megatron.simulator.cost.kinds.{KEY_EXCHANGES[strategy.key_exchange].work}")
