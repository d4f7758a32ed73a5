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

from megatron.platform.streams import Streams


class _Lease(np.ndarray):
    """The memory of a buffer while it is out of the pool; a class of its own because plain arrays take no finalizer."""


class HostPool:
    """Host memory in blocks that are allocated once and reused.

    Args:
        streams: what copies to and from the blocks, for which they are pinned.

    Attributes:
        allocated: bytes of all blocks, in use or not: what the process holds.
        in_use, peak: bytes handed out now, and at most since the start.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.allocated = self.in_use = self.peak = 0
        self._free: dict[int, list[np.ndarray]] = {}
        self._blocks: list[np.ndarray] = []
        weakref.finalize(self, _close, self._blocks, streams).atexit = False

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

    def block_of(self, host: Tensor) -> int:
        """Tells the block of a buffer (or of rows of one) from the others, also after it was given back."""
        return host.untyped_storage().data_ptr()

    def _allocate(self, size: int) -> np.ndarray:
        self.allocated += size
        block = np.empty(size, dtype=np.uint8)
        self.streams.pin(block)
        self._blocks.append(block)
        return block

    def _give_back(self, block: np.ndarray) -> None:
        self.in_use -= block.nbytes
        self._free.setdefault(block.nbytes, []).append(block)


def _close(blocks: list[np.ndarray], streams: Streams) -> None:
    """A pool is gone, and with it all its buffers: their memory goes back to the system."""
    if blocks:
        streams.synchronize()  # copies may be under way still
    for block in blocks:
        streams.unpin(block)


def is_host_buffer(x: Tensor) -> bool:
    """Whether ``x`` is (a view of) a buffer of a :class:`HostPool`."""
    return getattr(x.untyped_storage(), "is_host_buffer", False)
