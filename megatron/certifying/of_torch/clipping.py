# SPDX-License-Identifier: Apache-2.0
"""Gradients before torch clips them, and the norm by which it does: clipping hides a common factor of all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

NAMES = ((clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_"))  # since torch 2.6


@dataclass
class Clipped:
    """What is known of the first clipping of each parameter.

    Attributes:
        gradients: by the parameter's id: before clipping; clipped, and how often that had been written.
        norms: by which they are clipped.
    """

    gradients: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)

    def unclipped(self, parameter: Tensor) -> Tensor | None:
        """The gradient before it was clipped; as it is if something else has changed it since, or nothing clips it."""
        gradient = parameter.grad
        if gradient is None:
            return None
        before, after, written = self.gradients.get(id(parameter), (None, None, 0))
        return before if gradient is after and gradient._version == written else gradient.detach().clone()


@contextmanager
def clipping() -> Iterator[Clipped]:
    """In this context, note what torch's functions clip by a norm."""
    seen, clip = Clipped(), clip_grad._clip_grads_with_norm_

    def noted(parameters: Any, max_norm: float, total_norm: Tensor, *options: Any, **more: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        fresh = [p for p in parameters if p.grad is not None and id(p) not in seen.gradients]
        before = [p.grad.detach().clone() for p in fresh]
        clip(parameters, max_norm, total_norm, *options, **more)
        for parameter, gradient in zip(fresh, before):
            seen.gradients[id(parameter)] = gradient, parameter.grad, parameter.grad._version
        if fresh and max_norm != float("inf"):  # with an infinite one, a program only reads the norm
            seen.norms.append(total_norm.detach())

    known = [(module, name, getattr(module, name)) for module, name in NAMES if hasattr(module, name)]
    for module, name, _ in known:
        setattr(module, name, noted)
    try:
        yield seen
    finally:
        for module, name, function in known:
            setattr(module, name, function)
