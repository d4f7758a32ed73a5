# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's ways to differentiate mean for operations with a backward pass of their own, and no second one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


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
