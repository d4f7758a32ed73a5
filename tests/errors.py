# SPDX-License-Identifier: Apache-2.0
"""Errors of results."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan

import torch
from torch import Tensor


def worst(errors: float | Iterable) -> float:
    """The largest of some errors, nested or not. NaN counts as infinite: ``max`` would overlook it."""
    if isinstance(errors, Iterable):
        return max(map(worst, errors))
    return inf if isnan(errors) else float(errors)


def limit_of_rounding(usual: float, moved: float | Iterable, most: float) -> float:
    """A limit of errors: the usual one, or twice what the last bits of weights moved on one process.

    That is below ``most``, or it is not rounding alone.
    """
    assert worst(moved) < most, f"{worst(moved):.1e}"
    return max(usual, 2 * worst(moved))


def change_last_bits(weights: Iterable[Tensor]) -> None:
    """Change each weight by about its last bit. What this changes in results is rounding, not an error."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in weights:
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.mul_(1 + noise * torch.finfo(weight.dtype).eps)
