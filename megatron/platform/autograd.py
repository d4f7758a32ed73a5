# SPDX-License-Identifier: Apache-2.0
"""Autocast, torch.func, second derivatives and forks, for operations with a custom backward pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

# Autocast casts the inputs of our operations as for PyTorch's operators; inside an operation autocast is off. A user's
# function that an operation calls runs under the autocast state of the forward pass, also when the backward pass runs
# it again.


F = TypeVar("F", bound=Callable[..., Any])
DEVICES = ("cpu", "cuda")


def autocast_inputs(*tensors: Tensor, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """The tensors cast as autocast casts them for a matrix product, if it is on; float64 stays.

    Args:
        device: of the product; default: that of the first tensor.
    """
    kind = (device or tensors[0].device).type
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def forks_can_train() -> bool:
    """Whether a fork of this process could run a backward pass: not once PyTorch has threads here for its devices."""
    child = os.fork()
    if not child:
        try:
            torch.ones((), requires_grad=True).backward()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def without_autocast(function: F) -> F:
    """Decorator: autocast is off inside ``function``."""

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
    """The autocast state at its construction; calling it gives a context with that state.

    Autocast's cache of cast weights is off, because weights that were cast without gradients would have none in the
    backward pass.
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
    """Refuse to run under ``torch.func``, which wraps tensors: wrapped tensors cannot be sent to other ranks.

    Raises:
        ValueError: a transform of torch.func is active.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise ValueError(f"{who} over ranks or in chunks does not support torch.func: use torch.autograd.grad")


def once_differentiable(who: str) -> Callable[[F], F]:
    """Decorator for a backward pass that cannot be differentiated: a second derivative raises an error.

    PyTorch's decorator of this name looks only at the incoming gradients. If these are constant and the saved tensors
    are not, a second derivative would lack a term without an error.
    """

    def decorate(backward: F) -> F:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return results
            message = f"{who} has no second derivative: call backward or torch.autograd.grad without create_graph"
            refuse = torch._C._functions.DelayedError(message, len(results))
            guarded = refuse(*(None if x is None else x.detach().requires_grad_() for x in results))
            return tuple(x if x is None or y is None else y for x, y in zip(results, guarded))

        return once

    return decorate
