# SPDX-License-Identifier: Apache-2.0
"""Host memory that is allocated once and reused.

A host buffer is an ordinary CPU tensor (pinned where there is a GPU), so it can be sliced, saved for backward and
passed through autograd. When its last reference dies, its memory goes back to the pool it came from: buffers are
allocated in the first step and never again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class _Lease(np.ndarray):
    """The memory of a buffer while it is out of the pool; a class of its own because plain arrays take no finalizer."""


class HostPool:
    """Host memory in blocks that are allocated once and reused.

    Attributes:
        allocated: bytes of all blocks, in use or not: what the process holds.
        in_use, peak: bytes handed out now, and at most since the start.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.allocated = self.in_use = self.peak = 0
        self._free: dict[int, list[np.ndarray]] = {}
        self._registered: list[np.ndarray] = []
        weakref.finalize(self, _unregister, self._registered).atexit = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized host tensor whose memory returns to the pool when nobody refers to it any more."""
        size = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        free = self._free.get(size)
        block = free.pop() if free else self._allocate(size)
        lease = block.view(_Lease)
        weakref.finalize(lease, self._give_back, block).atexit = False  # keeps the pool alive, too
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        storage = torch.from_numpy(lease).untyped_storage()
        storage.is_host_buffer = True  # for whoever counts device bytes on a CPU
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))

    def _allocate(self, size: int) -> np.ndarray:
        self.allocated += size
        block = np.empty(size, dtype=np.uint8)
        if self.pinned:  # PyTorch's own pinned memory comes in powers of two, up to twice what is asked for
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, size, 0))
            self._registered.append(block)
        return block

    def _give_back(self, block: np.ndarray) -> None:
        self.in_use -= block.nbytes
        self._free.setdefault(block.nbytes, []).append(block)


def _unregister(blocks: list[np.ndarray]) -> None:
    """A pool is gone, and with it all its buffers: unpin their memory before the system gets it back."""
    if blocks:
        torch.cuda.synchronize()  # copies may be under way still
    for block in blocks:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(block.ctypes.data))


def is_host_buffer(x: Tensor) -> bool:
    """Whether ``x`` is (a view of) a buffer of a :class:`HostPool`."""
    return getattr(x.untyped_storage(), "is_host_buffer", False)
