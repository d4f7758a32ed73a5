# SPDX-License-Identifier: Apache-2.0
"""Host memory that is allocated once and reused.

A host buffer is an ordinary CPU tensor (pinned where there is a GPU), so it can be sliced, saved for backward and
passed through autograd. When its last reference dies, its memory goes back to the pool it came from. Where all steps
are alike, buffers are allocated in the first one and never again. Where lengths change, the pool holds at most twice
what was ever in use at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.platform.streams import Event, Streams

MOST = 2
"""The pool holds at most so many times the bytes that were ever in use at once, and a block so many times its buffer.
Allocating and pinning anew for each length is slow, and a block for each length that has ever been needs no end."""


class _Lease(np.ndarray):
    """The memory of a buffer while it is out of the pool; a class of its own because plain arrays take no finalizer."""


class HostPool:
    """Host memory in blocks that are allocated once and reused.

    Args:
        streams: what copies to and from the blocks, for which they are pinned.

    Attributes:
        allocated: bytes of all blocks, in use or not: what the process holds.
        in_use, peak: bytes of the buffers that are out now, and at most since the start.
        written, read: by block, the last copy to it, which loads wait for, and the last from it, which writes wait for.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.allocated = self.in_use = self.peak = 0
        self.written: dict[int, Event] = {}
        self.read: dict[int, Event] = {}
        self._free: dict[int, list[np.ndarray]] = {}  # by size
        self._blocks: dict[int, np.ndarray] = {}  # by address
        weakref.finalize(self, _release, self._blocks, streams).atexit = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized host tensor whose memory returns to the pool when nobody refers to it any more."""
        size = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        block = self._block(size)
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        lease = block[:size].view(_Lease)
        weakref.finalize(lease, self._give_back, block, size).atexit = False  # keeps the pool alive, too
        storage = torch.from_numpy(lease).untyped_storage()
        storage.is_host_buffer = True  # for whoever counts device bytes on a CPU
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))

    def block_of(self, host: Tensor) -> int:
        """Tells the block of a buffer (or of rows of one) from the others, also after it was given back."""
        return host.untyped_storage().data_ptr()

    def _block(self, size: int) -> np.ndarray:
        """A block of this size. Where the pool may not grow by one: a larger block, or else all idle ones make room."""
        full = self.allocated + size > MOST * max(self.peak, self.in_use + size)
        if full and not self._free.get(size):
            larger = [other for other, free in self._free.items() if free and size < other <= MOST * size]
            size = min(larger, default=size)
            if not larger:
                self._release_idle()
        free = self._free.get(size)
        return free.pop() if free else self._allocate(size)

    def _allocate(self, size: int) -> np.ndarray:
        self.allocated += size
        block = np.empty(size, dtype=np.uint8)
        self.streams.pin(block)
        self._blocks[block.ctypes.data] = block
        return block

    def _release_idle(self) -> None:
        free, self._free = self._free, {}
        idle = {block.ctypes.data: block for blocks in free.values() for block in blocks}
        for address, block in idle.items():
            self.allocated -= block.nbytes
            for known in (self._blocks, self.written, self.read):
                known.pop(address, None)
        _release(idle, self.streams)

    def _give_back(self, block: np.ndarray, size: int) -> None:
        self.in_use -= size
        self._free.setdefault(block.nbytes, []).append(block)


def _release(blocks: dict[int, np.ndarray], streams: Streams) -> None:
    """Blocks that nobody has a buffer in go back to the system."""
    if blocks:
        streams.synchronize()  # copies may be under way still
    for block in blocks.values():
        streams.unpin(block)


def is_host_buffer(x: Tensor) -> bool:
    """Whether ``x`` is (a view of) a buffer of a :class:`HostPool`."""
    return getattr(x.untyped_storage(), "is_host_buffer", False)
