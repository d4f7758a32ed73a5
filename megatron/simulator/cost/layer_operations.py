# SPDX-License-Identifier: Apache-2.0
"""Forward and backward pass of one transformer layer on one rank, as segments of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType

from megatron.decisions.division import goes_by_keys
from megatron.formulas.kinds import mixer_of
from megatron.formulas.sizes import chunks_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.kinds.attention_operations import LayerWork
from megatron.simulator.cost.kinds.chunk_operations import chunked_forward, copied_in_ffn_backward, loaded_in_backward
from megatron.simulator.cost.kinds.expert_operations import experts, experts_grad
from megatron.simulator.cost.kinds.ring_operations import Attended, attended, to_heads, to_sequence
from megatron.simulator.cost.operations import BF16, Segment
from megatron.simulator.cost.row_operations import Rows
from megatron.simulator.cost.trace import HostCopy


def mlp(rows: Rows) -> list[Segment]:
    """Norm, MLP and residual."""
    inner = rows.shape.ffn // rows.strategy.tensor
    return [rows.run(rows.norm(rows.shape.hidden)), *rows.mlp("mlp", inner), *rows.leave()]


def mlp_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`mlp`."""
    inner = rows.shape.ffn // rows.strategy.tensor
    return [*rows.mlp_grad("mlp", inner), rows.run(rows.norm(rows.shape.hidden, backward=True))]


# --- the layer ---


def layer(workload: Workload, strategy: Strategy) -> tuple[list[Segment], list[Segment]]:
    """(forward, backward with recompute) of one layer and micro-batch.

    Raises:
        ValueError: Ulysses does not divide a TP rank's heads.
    """
    a, chunks = attended(workload, strategy), chunks_of(workload, strategy)
    work = LayerWork(workload, strategy, a, chunks.attention)
    forward = _forward(work, saving=strategy.recompute != "full" or strategy.stream_hidden)
    backward = _backward(work)
    if strategy.recompute == "full":
        backward = _again(work) + backward
    elif strategy.recompute == "selective" and workload.shape.mixes:
        backward = _mixer(workload.shape).mix(work, saving=True) + backward
    if strategy.stream_hidden:
        forward, backward = streamed(workload, strategy, a, forward, backward)
    elif strategy.offload_checkpoints:
        inputs = BF16 * strategy.local_tokens(workload) * workload.shape.hidden
        forward = spread_evenly(forward, HostCopy("to_host", inputs))
        backward = spread_evenly(backward, HostCopy("to_device", inputs))
    return forward, backward


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


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"megatron.simulator.cost.kinds.{name}")


def _mixer(shape: Shape) -> ModuleType:
    """The work of what mixes tokens in a layer: a module of kinds/."""
    return _module(mixer_of(shape).operations)


def _ffn(work: LayerWork, *, backward: bool = False) -> list[Segment]:
    """A pass of the MLP, or of the experts in its place, if any."""
    workload, strategy, shape = work.workload, work.strategy, work.shape
    if not shape.has_ffn:
        return []
    if shape.mixture:
        return (experts_grad if backward else experts)(workload, strategy)
    runs = chunks_of(workload, strategy).ffn or 1
    return (mlp_grad if backward else mlp)(Rows(shape, strategy, work.attended.rows / runs, runs))


def _forward(work: LayerWork, *, saving: bool, again: bool = False) -> list[Segment]:
    segments, mixer = _ffn(work), _mixer(work.shape)
    if work.shape.mixes:
        mixed = mixer.mix(work, saving=saving, kept=again and work.strategy.keep_attention)
        segments = [*mixer.project(work.rows), *mixed, *mixer.output(work.rows), *segments]
    return spread_by_work(segments, *(work.stored() if saving else ()))


def _again(work: LayerWork) -> list[Segment]:
    """Segments that full recompute adds. In a single chunked layer they end with attention: backward runs the rest."""
    strategy, a = work.strategy, work.attended
    if not strategy.fpdt_chunk or strategy.recompute_layers > 1:
        return _forward(work, saving=True, again=True)
    segments = [
        *_mixer(work.shape).project(work.rows),
        *to_heads(a, strategy, work.rows.tokens, work.chunks),
        *chunked_forward(a, strategy, work.chunks, saving=True),
    ]
    return spread_by_work(segments, *work.stored())


def _backward(work: LayerWork) -> list[Segment]:
    strategy, a, chunks, mixer = work.strategy, work.attended, work.chunks, _mixer(work.shape)
    segments = spread_evenly(_ffn(work, backward=True), *copied_in_ffn_backward(a, strategy, chunks))
    if work.shape.mixes:
        segments += [*mixer.output_grad(work.rows), *mixer.mix_grad(work), *mixer.project_grad(work.rows)]
    if not strategy.fpdt_chunk:  # a chunked FFN computes its forward pass again
        cut = chunks_of(work.workload, strategy).ffn and work.shape.has_ffn
        return [*_ffn(work), *segments] if cut else segments
    # Chunked layers keep nothing between a chunk's passes: projections and FFN run again before their gradients.
    segments = [
        *_ffn(work),
        *mixer.output(work.rows),
        *to_sequence(a, strategy, work.rows.tokens, chunks),
        *mixer.project(work.rows),
        *segments,
    ]
    return spread_by_work(segments, *loaded_in_backward(a, strategy, chunks))
