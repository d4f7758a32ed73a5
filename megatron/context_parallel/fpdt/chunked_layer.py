# SPDX-License-Identifier: Apache-2.0
"""FPDT: a transformer layer in pipelined chunks, offloaded to host memory (FPDT paper, sections 4.1 and 4.2).

The sequence goes through projection, all-to-all, attention, all-to-all back, output projection and FFN chunk by chunk.
Only the layer's input and output exist for the complete sequence. Keys and values of finished chunks are kept in host
memory and loaded through a double buffer; so are queries, outputs and lse for the backward pass. The tiles say which
chunks meet and how they are masked.

See by_queries.py and by_keys.py for the loops over chunks, chunk_work.py for the work on one chunk, and host_store.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.fpdt import by_keys, by_queries
from megatron.context_parallel.fpdt.chunk_pass import ChunkPass
from megatron.context_parallel.fpdt.chunk_work import LayerFunctions
from megatron.context_parallel.fpdt.chunked_ffn import keep, take_kept
from megatron.context_parallel.fpdt.host_store import HiddenStates
from megatron.decisions.division import goes_by_keys
from megatron.platform.autograd import once_differentiable, refuse_transforms


@dataclass(frozen=True)
class ChunkedLayer(LayerFunctions):
    """A layer as functions of one chunk, and where its chunks are kept.

    Attributes:
        project: (x of a chunk [c, b, h], chunk) -> q, k, v [c, b, heads, d] with positions applied (RoPE); the head
            size of v may differ.
        output: (attention output [c, b, heads, d of v], x of the chunk, chunk) -> [c, b, h], residual added.
        parameters: the tensors that ``project``, ``output`` and ``ffn`` use and that need gradients.
        layout: of the sequence, with its chunks.
        rule: mask, kernel, scale, ALiBi, dropout, soft-cap and sinks; sinks get a gradient if they require one.
        ffn: token-wise, on the result of ``output``: [n, b, h] -> [n, b, h]; None if the layer ends with ``output``.
        ffn_by_rows: ``ffn`` also gets the span of its rows among this rank's rows: (x, (first, end)).
        ffn_pieces: number of spans in which a chunk goes through ``ffn``.
        offload: host memory for finished chunks; None keeps them on the device.
        streamed: the result and the gradient of x are host buffers (and x may be one).
        recompute: keep only x for the backward pass, and compute attention again in that pass.
        replay: needed if ``output`` or ``ffn`` draws random numbers from a generator.
    """

    def __post_init__(self) -> None:
        if self.streamed and self.offload is None:
            raise ValueError("streamed=True keeps hidden states in host memory: give offload=")
        if self.rule.gather_keys and self.layout.grid.ring.size > 1:
            raise ValueError("gather_keys=True with a layer in chunks is not supported: leave it out")
        if self.rule.up is not None:
            raise ValueError("up= with a layer in chunks is not supported: make keys and values in project")
        if self.ffn is None and (self.ffn_by_rows or self.ffn_pieces != 1):
            raise ValueError("ffn_by_rows and ffn_pieces need an ffn: give ffn= or leave them out")

    def __call__(self, x: Tensor) -> Tensor:
        """[s_local, b, h] -> [s_local, b, h]."""
        refuse_transforms("ChunkedLayer")
        saving = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.learned))
        return _Chunked.apply(x, self, saving, *self.learned)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ChunkedLayer, training: bool, *parameters: Tensor) -> Tensor:
        run = ChunkPass(layer, x, saving=training and not layer.recompute)
        y = HiddenStates.empty(x.shape, x.dtype, x.device, layer.offload if layer.streamed else None)
        with run.work.autocast():
            _forward(run, y)
        if training:
            if layer.recompute:
                run.store = None
            run.x = None  # saved by save_for_backward, so that hooks see it
            ctx.layer, ctx.autocast, ctx.random = layer, run.work.autocast, run.work.random
            ctx.save_for_backward(x, keep(run))
        return y.x

    @staticmethod
    @once_differentiable("a chunked layer")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, holder = ctx.saved_tensors
        layer, run = ctx.layer, take_kept(holder, "a chunked layer")
        with ctx.autocast():
            if layer.recompute or run is None:
                run = ChunkPass(layer, x, saving=True)
                _forward(run, None)
                run.work.random = dict(ctx.random)
            run.x = HiddenStates(x, layer.offload)
            run.dx = HiddenStates.empty(x.shape, x.dtype, x.device, layer.offload if layer.streamed else None)
            _backward(run, HiddenStates(dy, layer.offload))
        return run.dx.x, None, None, *run.work.take_grads()


def _forward(run: ChunkPass, y: HiddenStates | None) -> None:
    """By keys on a ring without offload, so that keys go around once. Otherwise by queries; on a ring all ranks' keys
    then go around for each query chunk."""
    on_device = run.layer.layout.grid.ring.size > 1 and run.layer.offload is None
    (by_keys if on_device else by_queries).forward(run, y)


def _backward(run: ChunkPass, dy: HiddenStates) -> None:
    """By keys on a ring, or if that moves fewer bytes to and from the host; else by queries."""
    layer, work = run.layer, run.work
    fewer = layer.offload is not None and goes_by_keys(work.local_heads, work.local_kv_heads, run.x.x.element_size())
    (by_keys if layer.layout.grid.ring.size > 1 or fewer else by_queries).backward(run, dy)
