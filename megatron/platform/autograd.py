# SPDX-License-Identifier: Apache-2.0
"""How operations with a backward pass of their own behave under PyTorch's autocast and its ways to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

# What PyTorch's autocast means for operations that compute by themselves.
#
# Inside an operation of ours autocast is off: it computes in the dtypes that it is given. On its way in, tensors are
# cast as PyTorch's operator of the same name would cast them. A user's function that is called within an operation
# runs under the autocast of the forward pass, and again under the same one where the backward pass repeats it.


F = TypeVar("F", bound=Callable[..., Any])
DEVICES = ("cpu", "cuda")


def autocast_inputs(*tensors: Tensor, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """The tensors as autocast hands them to a matrix product: in its dtype where it is on; float64 stays.

    Args:
        device: where the product is computed; default: where the first tensor is.
    """
    kind = (device or tensors[0].device).type
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(function: F) -> F:
    """Autocast does not reach into ``function``."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        enabled = [kind for kind in DEVICES if torch.is_autocast_enabled(kind)]
        if not enabled:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for kind in enabled:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return wrapped


class SameAutocast:
    """The autocast state of where it is made; calling it gives a context with that state.

    Weights that autocast has cast are not kept: those that a forward pass without gradients casts would have none in
    the backward pass.
    """

    def __init__(self) -> None:
        self._dtypes = {kind: torch.get_autocast_dtype(kind) for kind in DEVICES if torch.is_autocast_enabled(kind)}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind in DEVICES:
                dtype = self._dtypes.get(kind)
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
                elif torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield


def refuse_transforms(who: str) -> None:
    """Refuse to run under ``torch.func``: tensors are wrapped there, and wrapped ones cannot be sent to other ranks.

    Raises:
        ValueError: a transform of torch.func is active.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise ValueError(f"{who} over ranks or in chunks takes no transforms of torch.func: use torch.autograd.grad")


def once_differentiable(who: str) -> Callable[[F], F]:
    """For a backward pass that has none itself: what goes back through its gradients raises an error.

    PyTorch's decorator of this name looks at the gradients that come in alone. Where those are constant, and the saved
    tensors are not, a second derivative would lack a term.
    """

    def decorate(backward: F) -> F:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return found
            message = f"{who} has no second derivative: call backward or torch.autograd.grad without create_graph"
            refuse = torch._C._functions.DelayedError(message, len(found))
            return tuple(
                x if x is None or made is None else made
                for x, made in zip(found, refuse(*(None if x is None else x.detach().requires_grad_() for x in found)))
            )

        return once

    return decorate
