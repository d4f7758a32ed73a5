# SPDX-License-Identifier: Apache-2.0
"""Small tensors made in host memory, and their way to a GPU, for which nobody waits."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; from host memory to a GPU through a pinned buffer, without waiting for the copy.

    PyTorch's pinned allocator hands a buffer out again only once the copies from it are done: block after block is made
    in host memory while the ones before travel. ``torch.tensor(.., device=..)`` and a plain ``x.to(device)`` wait until
    the GPU has done all that it was asked before.
    """
    if x.device == device:
        return x
    if x.device.type == "cpu" and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
