# SPDX-License-Identifier: Apache-2.0
"""Errors of results."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan


def worst(errors: float | Iterable) -> float:
    """The largest of some errors, nested or not. NaN counts as infinite: ``max`` would overlook it."""
    if isinstance(errors, Iterable):
        return max(map(worst, errors))
    return inf if isnan(errors) else float(errors)
