# SPDX-License-Identifier: Apache-2.0
"""Keys and values, or their gradients, as one tensor: what travels, waits in host memory and comes back together."""

from __future__ import annotations

import torch
from torch import Tensor


def packed(k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
    """[s, b, heads, key size + value size]: the heads may be of different sizes."""
    return torch.cat((k_SBHD, v_SBHD), dim=-1)


def unpacked(kv: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Views of the keys, whose heads have ``key_dim`` entries, and of the values in what :func:`packed` gave."""
    return kv[..., :key_dim], kv[..., key_dim:]
