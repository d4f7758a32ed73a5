# SPDX-License-Identifier: Apache-2.0
"""Spans: consecutive positions or rows, as (start, stop)."""

from __future__ import annotations

import torch
from torch import Tensor

Span = tuple[int, int]
"""Consecutive positions, or row numbers, ``start .. stop - 1``, ascending."""


def positions(spans: tuple[Span, ...], device: torch.device, flip: bool = False) -> Tensor:
    """Global positions of spans, int64 [s]; last first with ``flip``."""
    runs = [torch.arange(start, stop, device=device) for start, stop in spans]
    found = runs[0] if len(runs) == 1 else torch.cat(runs)
    return found.flip(0) if flip else found
