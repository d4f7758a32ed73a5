# SPDX-License-Identifier: Apache-2.0
"""Work of multi-latent attention: the projections to latents and from them; the rest is attention's."""

from __future__ import annotations

from megatron.formulas.strategy import Shape
from megatron.simulator.cost.kinds.attention_operations import mix, mix_grad, output, output_grad, rotary
from megatron.simulator.cost.operations import BF16, Segment, collective, gemm, memory
from megatron.simulator.cost.row_operations import Rows, all_gather_tokens
from megatron.simulator.cost.trace import Kernel

__all__ = ["mix", "mix_grad", "output", "output_grad", "project", "project_grad"]


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


def project(rows: Rows) -> list[Segment]:
    """Norm, the latents, their norms, queries, keys and values from them, rotary (core/latent_attention.py)."""
    strategy, tokens = rows.strategy, rows.tokens
    segments = [rows.run(rows.norm(rows.shape.hidden))]
    for name, into, out, width in _latents(rows.shape, strategy.tensor):
        norm = (rows.norm(out),) if name.endswith("_down") else ()
        sent = rows.send(*all_gather_tokens(strategy, into, tokens))
        segments += [*sent, rows.run(gemm(name, tokens, width, into), *norm)]
        if norm and strategy.tensor > 1:
            segments += rows.send(collective("all_gather", "tp", strategy.group("tp"), BF16 * tokens * out))
    return [*segments, rows.run(*_joined(rows), *rotary(rows))]


def project_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`project`."""
    shape, strategy, tokens = rows.shape, rows.strategy, rows.tokens
    segments = [rows.run(*rotary(rows, backward=True), *_joined(rows, backward=True))]
    for name, into, out, width in reversed(_latents(shape, strategy.tensor)):
        if name.endswith("_down"):
            rotated, sums = 0, ()
            if name == "kv_down" and strategy.tensor > 1:  # all heads share the rotated part
                rotated = shape.latent.rotated
                sums = (collective("all_reduce", "tp", strategy.group("tp"), BF16 * tokens * rotated),)
            sent = (*all_gather_tokens(strategy, out - rotated, tokens), *sums)
            segments.append(Segment((rows.norm(out, backward=True),), sent, count=rows.count))
        segments += rows.column_grad(name, width, into)
    return [*segments, rows.run(rows.norm(shape.hidden, backward=True))]


def _joined(rows: Rows, backward: bool = False) -> tuple[Kernel, ...]:
    """Copies that join the parts of queries and keys, and in the backward pass separate them again."""
    width = rows.shape.heads * rows.shape.head_dim / rows.strategy.tensor
    return (memory("join", 4 * BF16 * rows.tokens * width, backward=backward),)
