# SPDX-License-Identifier: Apache-2.0
"""Token-wise layers in spans of tokens, which limits the memory of their intermediate results (FPDT paper, 5.4).

The forward pass keeps only a layer's input. The backward pass computes each span again and sums its parameter
gradients, so that every parameter gets its gradient once, independent of the number of spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.fpdt.host_store import HiddenStates, Offload
from megatron.context_parallel.layout.spans import Span
from megatron.platform.autograd import SameAutocast, once_differentiable, refuse_transforms

Replay = Callable[[], Callable[[], AbstractContextManager]]
"""Saves the random state and returns a function that makes a context in which this state is restored."""


def apply_in_chunks(
    function: Callable[[Tensor | None, Span], Tensor],
    x: Tensor | None,
    parameters: Sequence[Tensor],
    spans: Sequence[Span],
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    offload: Offload | None = None,
    replay: Replay | None = None,
) -> Tensor:
    """``y[start:stop] = function(x[start:stop], (start, stop))`` for each span of rows.

    Args:
        function: token-wise; its spans must not depend on each other.
        x: [rows, ...], on the device or a host buffer; None if ``function`` has another input.
        parameters: the tensors that ``function`` uses and that need gradients.
        spans: the rows of each call; together they are all rows.
        shape, dtype, device: of the result; default: those of ``x``.
        offload: if given, the result and the gradient of ``x`` are host buffers.
        replay: needed if ``function`` draws random numbers.
    """
    refuse_transforms("apply_in_chunks")
    shape, dtype, device = shape or x.shape, dtype or x.dtype, device or x.device
    return _InChunks.apply(x, function, spans, (shape, dtype, device), offload, replay, *parameters)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        function: Callable[[Tensor | None, Span], Tensor],
        spans: Sequence[Span],
        result: tuple[Sequence[int], torch.dtype, torch.device],
        offload: Offload | None,
        replay: Replay | None,
        *parameters: Tensor,
    ) -> Tensor:
        y = HiddenStates.empty(*result, offload)
        states = []
        ctx.autocast = SameAutocast()
        with ctx.autocast():
            for span, part in zip(spans, _walk(x, spans, offload)):
                states.append(replay() if replay else nullcontext)
                y.write(span, function(part, span))
        ctx.save_for_backward(x)
        ctx.function, ctx.spans, ctx.offload, ctx.states, ctx.parameters = function, spans, offload, states, parameters
        return y.x

    @staticmethod
    @once_differentiable("a layer in chunks")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        spans, offload = ctx.spans, ctx.offload
        dx = None
        if ctx.needs_input_grad[0]:
            dx = HiddenStates.empty(x.shape, x.dtype, x.device, offload)
        sums = GradientSums(ctx.parameters)
        for span, state, part, dy_part in zip(spans, ctx.states, _walk(x, spans, offload), _walk(dy, spans, offload)):
            with torch.enable_grad(), ctx.autocast(), state():
                leaf = None if part is None else part.detach().requires_grad_(dx is not None)
                y_part = ctx.function(leaf, span)
            grads = sums.differentiate(y_part, [] if dx is None else [leaf], dy_part)
            if dx is not None:
                dx.write(span, grads[0])
        return None if dx is None else dx.x, None, None, None, None, None, *sums.take()


def _walk(x: Tensor | None, spans: Sequence[Span], offload: Offload | None) -> Any:
    return [None] * len(spans) if x is None else HiddenStates(x, offload).walk(spans)


class GradientSums:
    """Sums of the gradients of parameters over spans or chunks, in fp32 (fp64 for fp64 parameters).

    If megatron-core's DDP has a buffer of that dtype for a parameter (``main_grad``), gradients are added to it
    directly, and the attribute ``grad_added_to_main_grad`` tells DDP so (see core's tensor_parallel/layers.py).
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        # A parameter that occurs twice is summed once.
        self.wanted = [*{id(parameter): parameter for parameter in parameters if parameter.requires_grad}.values()]
        self._sums: list[Tensor | None] = [None] * len(self.wanted)
        self._own = [False] * len(self.wanted)  # whether a sum may be updated in place

    def differentiate(self, y: Any, inputs: Sequence[Tensor], dy: Any) -> list[Tensor]:
        """The gradients of ``inputs``, 0 if ``y`` does not depend on one. Adds those of parameters to the sums."""
        for parameter in self.wanted:
            if main_grad_of(parameter) is not None:
                parameter.grad_added_to_main_grad = False  # layers with fused accumulation set it below
        pairs = zip((y,), (dy,)) if isinstance(y, Tensor) else zip(y, dy)
        reached = [pair for pair in pairs if pair[0].requires_grad]
        grads: Sequence[Tensor | None] = [None] * (len(inputs) + len(self.wanted))
        if reached and grads:
            results, grads_of_results = zip(*reached)
            grads = torch.autograd.grad(results, [*inputs, *self.wanted], grads_of_results, allow_unused=True)
        for index, grad in enumerate(grads[len(inputs) :]):
            if grad is not None:
                self._add(index, grad)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads)]

    def _add(self, index: int, grad: Tensor) -> None:
        total, wide = self._sums[index], accumulation_dtype(grad.dtype)
        main = main_grad_of(self.wanted[index])
        if main is not None:
            self._sums[index] = main
            if not self.wanted[index].grad_added_to_main_grad:
                main.add_(grad)
        elif total is None:
            self._sums[index] = grad.to(wide)
            # Autograd may return one tensor as several gradients, or dy itself: such a tensor must not be changed.
            self._own[index] = grad.dtype != wide
        elif self._own[index]:
            total += grad
        else:
            self._sums[index], self._own[index] = total + grad, True

    def take(self) -> list[Tensor | None]:
        """One gradient for each of ``parameters``, in its dtype; None if there is none, or for a repeated parameter."""
        sums = {id(parameter): total for parameter, total in zip(self.wanted, self._sums)}
        self._sums = []
        totals = [(parameter, sums.pop(id(parameter), None)) for parameter in self.parameters]
        return [None if total is None else _taken(parameter, total) for parameter, total in totals]


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The buffer to which gradients of a parameter can be added directly; None if there is none."""
    main = getattr(parameter, "main_grad", None)
    if main is None or main.dtype != accumulation_dtype(parameter.dtype):
        return None
    # Core sets zero_out_wgrad for weights that are used twice; DDP must add their other gradient.
    return None if getattr(parameter, "zero_out_wgrad", False) else main


def in_main_grad(parameter: Tensor, memory: Tensor | None = None) -> Tensor:
    """A placeholder for a gradient that is already in ``main_grad``: ``memory`` or a new tensor. It is never read."""
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(parameter) if memory is None else memory


def _taken(parameter: Tensor, total: Tensor) -> Tensor:
    return in_main_grad(parameter) if total is main_grad_of(parameter) else total.to(parameter.dtype)


def even_spans(rows: int, count: int) -> list[Span]:
    """``rows`` in at most ``count`` spans of nearly equal length, none of them empty."""
    count = max(1, min(count, rows))
    bounds = [rows * index // count for index in range(count + 1)]
    return list(zip(bounds, bounds[1:]))


def keep(value: Any) -> Tensor:
    """A tensor without elements that keeps ``value`` for a backward pass, as long as autograd keeps the tensor.

    Hooks for saved tensors apply to it: a non-reentrant checkpoint, for example, drops it with the value.
    """
    holder = torch.empty(0)
    holder.untyped_storage().kept = [value]  # the storage is shared by every alias of the tensor
    return holder


def take_kept(holder: Tensor, whose: str) -> Any:
    """The value given to :func:`keep`, by :func:`take_once`; None if hooks have saved a copy of the tensor."""
    return take_once(getattr(holder.untyped_storage(), "kept", [None]), whose)


def take_once(kept: list, whose: str) -> Any:
    """The only element of ``kept``, for a single backward pass.

    Raises:
        RuntimeError: this is the second backward pass.
    """
    if not kept:
        raise RuntimeError(
            f"a second backward pass through {whose} is not supported, even with retain_graph=True, because the first "
            "one frees its data: run the forward pass again"
        )
    return kept.pop()
