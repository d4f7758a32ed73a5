# SPDX-License-Identifier: Apache-2.0
"""ALiBi: a bias of the scores in place of a position embedding (arXiv 2108.12409; DeepSpeed4Science)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> Tensor:
    """The slope of each head, fp32 [heads].

    If the number n of heads is a power of two, they are ``2^(-8/n), 2^(-16/n), ...``. Otherwise they are the slopes for
    the next smaller power of two, and every second slope for the next larger power.
    """
    nearest = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / nearest) for head in range(nearest)]
    slopes += [2 ** (-4 * (2 * head + 1) / nearest) for head in range(heads - nearest)]
    return torch.tensor(slopes, dtype=torch.float32)
