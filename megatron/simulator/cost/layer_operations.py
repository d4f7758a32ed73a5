# SPDX-License-Identifier: Apache-2.0
"""One transformer layer's forward and backward pass on one rank, written down as segments of work."""

from __future__ import annotations

from math import ceil

from megatron.formulas.strategy import Shape, Strategy
from megatron.simulator.cost.attention_operations import (
    Attended,
    attended,
    ring_backward,
    ring_forward,
    to_heads,
    to_sequence,
)
from megatron.simulator.cost.chunk_operations import chunked_backward, chunked_forward
from megatron.simulator.cost.linear_operations import mlp, mlp_grad, output, output_grad, project, project_grad
from megatron.simulator.cost.operations import BF16
from megatron.simulator.cost.segment import Segment
from megatron.simulator.cost.trace import HostCopy


def attention_chunks(strategy: Strategy, seq_length: int) -> int:
    """Chunks that FPDT cuts the sequence in; 1 without."""
    return max(1, ceil(seq_length / strategy.fpdt_chunk)) if strategy.fpdt_chunk else 1


def ffn_chunks(strategy: Strategy, seq_length: int) -> int:
    """FPDT takes twice its attention chunks (training/validate_chunks.py)."""
    return strategy.ffn_chunks or (2 * attention_chunks(strategy, seq_length) if strategy.fpdt_chunk else 1)


def layer(shape: Shape, strategy: Strategy, seq_length: int, causal: bool) -> tuple[list[Segment], list[Segment]]:
    """(forward, backward with what it recomputes), of one layer and micro-batch.

    Raises:
        ValueError: Ulysses does not divide a TP rank's heads.
    """
    a = attended(shape, strategy, seq_length, causal)
    forward = _forward(a, shape, strategy, seq_length, saving=strategy.recompute != "full")
    backward = _backward(a, shape, strategy, seq_length)
    if strategy.recompute == "full":
        backward = _again(a, shape, strategy, seq_length) + backward
    elif strategy.recompute == "selective":
        backward = _attention(a, strategy, 1, saving=True) + backward
    if strategy.offload_checkpoints:
        tokens = seq_length * strategy.micro_batch // strategy.context
        tokens = tokens // strategy.tensor if strategy.sequence_parallel else tokens
        forward = beside(forward, HostCopy("to_host", BF16 * tokens * shape.hidden))
        backward = beside(backward, HostCopy("to_device", BF16 * tokens * shape.hidden))
    return forward, backward


def beside(segments: list[Segment], copy: HostCopy) -> list[Segment]:
    """The copy spread over all kernels, by their number: it has the whole layer's time."""
    kernels = sum(segment.count for segment in segments if segment.kernels)
    share = HostCopy(copy.direction, copy.bytes / kernels)
    return [
        Segment(segment.kernels, segment.transfers, (*segment.copies, share), segment.count)
        if segment.kernels
        else segment
        for segment in segments
    ]


def _forward(a: Attended, shape: Shape, strategy: Strategy, seq_length: int, *, saving: bool) -> list[Segment]:
    chunks, pieces = attention_chunks(strategy, seq_length), ffn_chunks(strategy, seq_length)
    tokens = a.rows // chunks
    return [
        *project(shape, strategy, tokens, chunks),
        *_attention(a, strategy, chunks, saving=saving),
        *output(shape, strategy, tokens, chunks),
        *mlp(shape, strategy, a.rows // pieces, pieces),
    ]


def _again(a: Attended, shape: Shape, strategy: Strategy, seq_length: int) -> list[Segment]:
    """What full recompute adds. A chunked layer alone stops at attention's output: the rest runs again anyway."""
    if not strategy.fpdt_chunk or strategy.recompute_layers > 1:
        return _forward(a, shape, strategy, seq_length, saving=True)
    chunks = attention_chunks(strategy, seq_length)
    rows = a.rows // chunks
    return [
        *project(shape, strategy, rows, chunks),
        *to_heads(a, strategy, rows, chunks),
        *chunked_forward(a, strategy, chunks, saving=True),
    ]


def _attention(a: Attended, strategy: Strategy, chunks: int, *, saving: bool) -> list[Segment]:
    chunked = strategy.fpdt_chunk > 0
    tiles = chunked_forward(a, strategy, chunks, saving=saving) if chunked else ring_forward(a, strategy)
    rows = a.rows // chunks
    return [*to_heads(a, strategy, rows, chunks), *tiles, *to_sequence(a, strategy, rows, chunks)]


def _backward(a: Attended, shape: Shape, strategy: Strategy, seq_length: int) -> list[Segment]:
    chunks, pieces = attention_chunks(strategy, seq_length), ffn_chunks(strategy, seq_length)
    rows = a.rows // chunks
    tiles = chunked_backward(a, strategy, chunks) if strategy.fpdt_chunk else ring_backward(a, strategy)
    segments = [
        *mlp_grad(shape, strategy, a.rows // pieces, pieces),
        *output_grad(shape, strategy, rows, chunks),
        *to_sequence(a, strategy, rows, chunks, backward=True),
        *tiles,
        *to_heads(a, strategy, rows, chunks, backward=True),
        *project_grad(shape, strategy, rows, chunks),
    ]
    if not strategy.fpdt_chunk:
        return segments
    # Chunked layers keep nothing between a chunk's passes: projections and FFN run again before their gradients.
    return [
        *mlp(shape, strategy, a.rows // pieces, pieces),
        *output(shape, strategy, rows, chunks),
        *to_sequence(a, strategy, rows, chunks),
        *project(shape, strategy, rows, chunks),
        *segments,
    ]
