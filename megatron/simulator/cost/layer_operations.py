# SPDX-License-Identifier: Apache-2.0
"""One transformer layer's forward and backward pass on one rank, written down as segments of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.decisions.chunks import goes_by_keys
from megatron.formulas.chunks import chunks_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.attention_operations import (
    Attended,
    attended,
    ring_backward,
    ring_forward,
    to_heads,
    to_sequence,
)
from megatron.simulator.cost.chunk_operations import (
    beside_ffn_backward,
    chunked_backward,
    chunked_forward,
    loaded_beside,
    stored_beside,
)
from megatron.simulator.cost.linear_operations import mlp, mlp_grad, output, output_grad, project, project_grad
from megatron.simulator.cost.operations import BF16
from megatron.simulator.cost.segment import Segment
from megatron.simulator.cost.trace import HostCopy


def layer(workload: Workload, strategy: Strategy) -> tuple[list[Segment], list[Segment]]:
    """(forward, backward with what it recomputes), of one layer and micro-batch.

    Raises:
        ValueError: Ulysses does not divide a TP rank's heads.
    """
    a, chunks = attended(workload, strategy), chunks_of(workload, strategy)
    work = _Layer(workload.shape, strategy, a, chunks.attention, chunks.ffn)
    forward = _forward(work, saving=strategy.recompute != "full" or strategy.stream_hidden)
    backward = _backward(work)
    if strategy.recompute == "full":
        backward = _again(work) + backward
    elif strategy.recompute == "selective":
        backward = _attention(work, saving=True) + backward
    if strategy.stream_hidden:
        forward, backward = streamed(workload, strategy, a, forward, backward)
    elif strategy.offload_checkpoints:
        inputs = BF16 * strategy.local_tokens(workload) * workload.shape.hidden
        forward = beside(forward, HostCopy("to_host", inputs))
        backward = beside(backward, HostCopy("to_device", inputs))
    return forward, backward


@dataclass(frozen=True)
class _Layer:
    """A layer, and the pieces that its tokens go through attention's ends and the FFN in.

    ``ffn_chunks``: 0: the FFN is whole.
    """

    shape: Shape
    strategy: Strategy
    attended: Attended
    chunks: int
    ffn_chunks: int

    @property
    def rows(self) -> float:
        """Tokens of a chunk, of a TP group."""
        return self.attended.rows / self.chunks

    def stored(self) -> tuple[HostCopy, ...]:
        """What leaves for host memory beside a forward pass."""
        return stored_beside(self.attended, self.strategy, self.chunks) if self.strategy.fpdt_chunk else ()

    def project(self) -> list[Segment]:
        return project(self.shape, self.strategy, self.rows, self.chunks)

    def output(self) -> list[Segment]:
        return output(self.shape, self.strategy, self.rows, self.chunks)

    def ffn(self, work: Callable[..., list[Segment]]) -> list[Segment]:
        runs = self.ffn_chunks or 1
        return work(self.shape, self.strategy, self.attended.rows / runs, runs)


def streamed(
    workload: Workload, strategy: Strategy, a: Attended, forward: list[Segment], backward: list[Segment]
) -> tuple[list[Segment], list[Segment]]:
    """With the hidden states that pass through the device chunk by chunk (docs/inside/host-copies.md): forward one
    in and one out; backward input and gradient in and a gradient out, by keys also input and gradient once more;
    recompute reads the input again."""
    state = BF16 * strategy.local_tokens(workload) * workload.shape.hidden
    by_keys = a.ring > 1 or goes_by_keys(a.heads, a.kv_heads, BF16)
    reads, writes = (4, 2) if by_keys else (2, 1)
    reads += strategy.recompute == "full"
    for direction, there, back in (("to_device", 1, reads), ("to_host", 1, writes)):
        forward = beside(forward, HostCopy(direction, there * state))
        backward = beside(backward, HostCopy(direction, back * state))
    return forward, backward


FLOPS_A_BYTE = 200.0  # of GPUs' data sheets: 156 (A100) to 295 (H100) FLOP/s in bf16 over memory's bytes a second


def beside(segments: list[Segment], *copies: HostCopy) -> list[Segment]:
    """The copies spread over all kernels, by their number: they have the time of all of them."""
    return _spread(segments, [1.0 if segment.kernels else 0.0 for segment in segments], copies)


def beside_work(segments: list[Segment], *copies: HostCopy) -> list[Segment]:
    """The same, of copies that wait for nothing, by the kernels' work."""
    work = [sum(kernel.flops + FLOPS_A_BYTE * kernel.bytes for kernel in segment.kernels) for segment in segments]
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


def _forward(work: _Layer, *, saving: bool) -> list[Segment]:
    segments = [*work.project(), *_attention(work, saving=saving), *work.output(), *work.ffn(mlp)]
    return beside_work(segments, *(work.stored() if saving else ()))


def _again(work: _Layer) -> list[Segment]:
    """What full recompute adds. A chunked layer alone stops at attention's output: the rest runs again anyway."""
    strategy, a = work.strategy, work.attended
    if not strategy.fpdt_chunk or strategy.recompute_layers > 1:
        return _forward(work, saving=True)
    segments = [
        *work.project(),
        *to_heads(a, strategy, work.rows, work.chunks),
        *chunked_forward(a, strategy, work.chunks, saving=True),
    ]
    return beside_work(segments, *work.stored())


def _attention(work: _Layer, *, saving: bool) -> list[Segment]:
    strategy, a, chunks = work.strategy, work.attended, work.chunks
    chunked = strategy.fpdt_chunk > 0
    tiles = chunked_forward(a, strategy, chunks, saving=saving) if chunked else ring_forward(a, strategy)
    return [*to_heads(a, strategy, work.rows, chunks), *tiles, *to_sequence(a, strategy, work.rows, chunks)]


def _backward(work: _Layer) -> list[Segment]:
    shape, strategy, a, rows, chunks = work.shape, work.strategy, work.attended, work.rows, work.chunks
    tiles = chunked_backward(a, strategy, chunks) if strategy.fpdt_chunk else ring_backward(a, strategy)
    segments = [
        *beside(work.ffn(mlp_grad), *beside_ffn_backward(a, strategy, chunks)),
        *output_grad(shape, strategy, rows, chunks),
        *to_sequence(a, strategy, rows, chunks, backward=True),
        *tiles,
        *to_heads(a, strategy, rows, chunks, backward=True),
        *project_grad(shape, strategy, rows, chunks),
    ]
    if not strategy.fpdt_chunk:  # runs of the FFN are computed again on their way back
        return [*work.ffn(mlp), *segments] if work.ffn_chunks else segments
    # Chunked layers keep nothing between a chunk's passes: projections and FFN run again before their gradients.
    segments = [
        *work.ffn(mlp),
        *work.output(),
        *to_sequence(a, strategy, rows, chunks),
        *work.project(),
        *segments,
    ]
    return beside_work(segments, *loaded_beside(a, strategy, chunks))
