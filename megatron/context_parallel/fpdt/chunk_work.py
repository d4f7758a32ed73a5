# SPDX-License-Identifier: Apache-2.0
"""A layer as functions of one chunk: the work before and after attention or linear attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.context_parallel.attention.attend import sinks_grad
from megatron.context_parallel.attention.kernels.sums import packed, unpacked
from megatron.context_parallel.attention.ring_plan import AttentionPlan
from megatron.context_parallel.attention.rule import AttentionRule, TileKernel, one_dtype
from megatron.context_parallel.attention.ulysses import heads_to_sequence, sequence_to_heads, sequence_to_heads_grad
from megatron.context_parallel.fpdt.chunked_ffn import GradientSums, Replay, even_spans, keep, take_kept
from megatron.context_parallel.fpdt.host_store import HiddenStates, Offload
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span
from megatron.platform.autograd import SameAutocast, once_differentiable, refuse_transforms
from megatron.platform.hooks import replaceable


@dataclass(frozen=True)
class LayerFunctions:
    """The common fields of ``ChunkedLayer``, which describes them (chunked_layer.py), and ``ChunkedLinearLayer``."""

    project: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    output: Callable[[Tensor, Tensor, int], Tensor]
    parameters: Sequence[Tensor]
    layout: SequenceLayout
    rule: AttentionRule = AttentionRule()
    ffn: Callable[..., Tensor] | None = None
    ffn_by_rows: bool = False
    ffn_pieces: int = 1
    offload: Offload | None = None
    streamed: bool = False
    recompute: bool = False
    replay: Replay | None = None
    plan: AttentionPlan | None = None

    def __post_init__(self) -> None:
        if self.streamed and self.offload is None:
            raise ValueError("streamed=True keeps hidden states in host memory: give offload=")
        if self.ffn is None and (self.ffn_by_rows or self.ffn_pieces != 1):
            raise ValueError("ffn_by_rows and ffn_pieces need an ffn: give ffn= or leave them out")

    def __call__(self, x: Tensor) -> Tensor:
        """[s_local, b, h] -> [s_local, b, h]."""
        refuse_transforms(type(self).__name__)
        backward_follows = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.learned))
        return _Chunked.apply(x, self, backward_follows, *self.learned)

    def start(self, x: Tensor, *, saving: bool) -> Pass:
        """A pass over the chunks of x; ``saving``: its tensors are kept for a backward pass."""
        raise NotImplementedError

    def hidden_states(self, x: Tensor) -> HiddenStates:
        """Memory for a result of the layer, or for the gradient of its input, of the shape of x."""
        return HiddenStates.empty(x.shape, x.dtype, x.device, self.offload if self.streamed else None)

    @property
    def learned(self) -> list[Tensor]:
        """All tensors that may need gradients: the parameters, and the sinks of the attention."""
        sinks = self.rule.sinks
        known = sinks is None or any(parameter is sinks for parameter in self.parameters)
        return [*self.parameters] if known else [*self.parameters, sinks]


class Pass(Protocol):
    """One forward pass through a layer in chunks, and its backward pass.

    Attributes:
        work: the functions of one chunk.
        x, dx: the layer's input and its gradient.
    """

    work: ChunkWork
    x: HiddenStates | None
    dx: HiddenStates | None

    def forward(self, y: HiddenStates | None) -> None:
        """Write the result to ``y``. Without ``y``, compute only what the backward pass needs."""
        ...

    def backward(self, dy: HiddenStates) -> None:
        """Write the gradient of x to :attr:`dx`."""
        ...


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LayerFunctions, backward_follows: bool, *parameters: Tensor) -> Tensor:
        run, y = layer.start(x, saving=backward_follows and not layer.recompute), layer.hidden_states(x)
        with run.work.autocast():
            run.forward(y)
        if backward_follows:
            run.x = None  # saved by save_for_backward, so that hooks see it
            ctx.layer, ctx.autocast, ctx.random = layer, run.work.autocast, run.work.random
            ctx.save_for_backward(x, keep(None if layer.recompute else run))
        return y.x

    @staticmethod
    @once_differentiable("a layer in chunks")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, holder = ctx.saved_tensors
        layer, run = ctx.layer, take_kept(holder, "a layer in chunks")
        with ctx.autocast():
            if run is None:
                run = layer.start(x, saving=True)
                run.forward(None)
                run.work.random = dict(ctx.random)
            run.x, run.dx = HiddenStates(x, layer.offload), layer.hidden_states(x)
            run.backward(HiddenStates(dy, layer.offload))
        return run.dx.x, None, None, *run.work.take_grads()


class ChunkWork:
    """A layer's work on one chunk at a time.

    Attributes:
        autocast: the autocast state of the forward pass.
        parameter_grads: sums over the chunks.
        random: by chunk, a function that restores the random state of its output and FFN.
        kernel: of the attention. It is set by the first projection, as are ``heads, kv_heads`` (before the all-to-all),
            ``local_heads, local_kv_heads`` (after it), ``head_dim``, ``value_dim`` and ``sinks`` (of the local heads).
    """

    def __init__(self, layer: LayerFunctions) -> None:
        self.layer, self.ulysses = layer, layer.layout.grid.ulysses
        self.autocast = SameAutocast()
        self.parameter_grads = GradientSums(layer.learned)
        self.random: dict[int, Callable[[], AbstractContextManager]] = {}
        self.kernel: TileKernel | None = None
        self.sinks_sum: Tensor | None = None

    @replaceable
    def project(self, x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """q [c, b, heads, d] and packed kv [c, b, kv_heads, sizes] of this rank's heads, after the all-to-all."""
        q, k, v = self._project(x, chunk)
        first, heads = self.kernel is None, (q.size(2), k.size(2))
        q, k, v = sequence_to_heads(q, k, v, self.ulysses)
        if first:
            self.heads, self.kv_heads = heads
            self.local_heads, self.local_kv_heads = q.size(2), k.size(2)
            self.head_dim, self.value_dim, self.dtype = q.size(3), v.size(3), q.dtype
            rule, length = self.layer.rule, self.layer.layout.seq_length
            self.kernel = rule.tile_kernel(q, self.ulysses, length, self.value_dim)
            self.sinks = rule.local_sinks(q, self.ulysses)
        return q.contiguous(), packed(k, v)  # copies, because views would keep all of q, k and v

    def unpacked(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, or their gradients, as packed by :meth:`project`."""
        return unpacked(kv, self.head_dim)

    def add_sinks_grad(self, dout: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Add a query chunk's part of the gradient of the sinks, if there are any."""
        if self.sinks is None or not self.layer.rule.sinks.requires_grad:
            return
        if self.sinks_sum is None:
            self.sinks_sum = torch.zeros_like(self.layer.rule.sinks, dtype=lse.dtype)
        first = self.ulysses.rank * self.local_heads
        self.sinks_sum[first : first + self.local_heads] += sinks_grad(self.sinks, dout, out, lse)

    def take_grads(self) -> list[Tensor | None]:
        """One gradient for each tensor in the layer's ``learned``, in the tensor's dtype."""
        grads, sinks = self.parameter_grads.take(), self.layer.rule.sinks
        if self.sinks_sum is None:
            return grads
        sinks_grad = self.sinks_sum.to(sinks.dtype)
        return [sinks_grad if x is sinks else grad for x, grad in zip(self.layer.learned, grads)]

    def output(self, out: Tensor, x: Tensor, chunk: int, y: HiddenStates) -> None:
        """Compute the layer's output from a chunk's attention output, and write it to ``y``."""
        if self.layer.replay:
            self.random[chunk] = self.layer.replay()
        hidden, (first, _) = self.output_of(out, x, chunk), self.layer.layout.local_chunks[chunk]
        for start, stop in self._ffn_spans(hidden):
            done = self.ffn_of(hidden[start:stop], chunk, start) if self.layer.ffn else hidden
            y.write((first + start, first + stop), done)

    @replaceable
    def output_grad(self, out: Tensor, x: Tensor, dy: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """dout, and the gradient of x that does not go through attention."""
        out, x = out.detach().requires_grad_(), x.detach().requires_grad_()
        with self.random.pop(chunk, nullcontext)():
            with torch.enable_grad():
                hidden = self.output_of(out, x, chunk)
            if self.layer.ffn:
                dy = self.ffn_grad(hidden.detach(), dy, chunk)
        return self.parameter_grads.differentiate(hidden, [out, x], dy)

    def ffn_grad(self, hidden: Tensor, dy: Tensor, chunk: int) -> Tensor:
        """The gradient of the FFN's input."""
        dhidden = torch.empty_like(hidden)
        for start, stop in self._ffn_spans(hidden):
            x = hidden[start:stop].requires_grad_()
            with torch.enable_grad():
                y = self.ffn_of(x, chunk, start)
            (dhidden[start:stop],) = self.parameter_grads.differentiate(y, [x], dy[start:stop])
        return dhidden

    @replaceable
    def project_grad(self, x: Tensor, dq: Tensor | None, dkv: Tensor | None, chunk: int) -> Tensor:
        """The gradient of x through q, k and v. dq is None for queries without keys, dkv for keys without queries."""
        (start, stop), batch = self.layer.layout.chunk_rows[chunk], x.size(1)
        if dq is None:
            dq = x.new_zeros((stop - start, batch, self.local_heads, self.head_dim))
        if dkv is None:
            dkv = x.new_zeros((stop - start, batch, self.local_kv_heads, self.head_dim + self.value_dim))
        grads = (grad.to(self.dtype) for grad in (dq, *self.unpacked(dkv)))
        sent = sequence_to_heads_grad(*grads, self.ulysses, heads=self.heads, kv_heads=self.kv_heads)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            qkv = self._project(x, chunk)
        (dx,) = self.parameter_grads.differentiate(qkv, [x], sent)
        return dx

    def _project(self, x: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        return one_dtype(*self.layer.project(x, chunk))

    @replaceable
    def output_of(self, out: Tensor, x: Tensor, chunk: int) -> Tensor:
        return self.layer.output(heads_to_sequence(out, self.ulysses), x, chunk)

    @replaceable
    def ffn_of(self, hidden: Tensor, chunk: int, start: int) -> Tensor:
        """The FFN of the chunk's rows from ``start`` on."""
        if not self.layer.ffn_by_rows:
            return self.layer.ffn(hidden)
        first = self.layer.layout.local_chunks[chunk][0] + start
        return self.layer.ffn(hidden, (first, first + hidden.size(0)))

    def _ffn_spans(self, hidden: Tensor) -> list[Span]:
        return even_spans(hidden.size(0), self.layer.ffn_pieces if self.layer.ffn else 1)
