# SPDX-License-Identifier: Apache-2.0
"""Host memory behind the device: buffers that are reused, copies that overlap with compute (FPDT paper, section 4.2).

A host buffer is an ordinary CPU tensor (pinned where there is a GPU), so it can be sliced, saved for backward and
passed through autograd. When its last reference dies, its memory goes back to the pool it came from: buffers are
allocated in the first step and never again.

On a GPU two streams copy, one each way, ordered with the compute stream by events; nothing here waits on the host. On a
CPU the same calls copy from memory to memory, so that everything but the speed can be tested there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IN_FLIGHT = 4  # device tensors on their way to the host that may wait for their copy: bounds the memory they hold


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

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized host tensor whose memory returns to the pool when nobody refers to it any more."""
        size = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        free = self._free.get(size)
        block = free.pop() if free else self._allocate(size)
        lease = block.view(_Lease)
        weakref.finalize(lease, self._give_back, block).atexit = False
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        storage = torch.from_numpy(lease).untyped_storage()
        storage.is_host_buffer = True  # for whoever counts device bytes on a CPU
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))

    def _allocate(self, size: int) -> np.ndarray:
        self.allocated += size
        if self.pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return np.empty(size, dtype=np.uint8)

    def _give_back(self, block: np.ndarray) -> None:
        self.in_use -= block.nbytes
        self._free.setdefault(block.nbytes, []).append(block)


def is_host_buffer(x: Tensor) -> bool:
    """Whether ``x`` is (a view of) a buffer of a :class:`HostPool`."""
    return getattr(x.untyped_storage(), "is_host_buffer", False)


@dataclass
class Copies:
    """Bytes that have moved, for tests and reports."""

    to_host: int = 0
    to_device: int = 0


class Offload:
    """Moves tensors between a device and host buffers.

    Args:
        device: where compute happens.
        pool: where host buffers come from; default a pool of its own.
    """

    def __init__(self, device: torch.device, pool: HostPool | None = None) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.pool = pool or HostPool(pinned=self.on_gpu)
        self.copies = Copies()
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        # By address of a block: its last write, which loads wait for, and its last read, which writes wait for.
        self._written: dict[int, torch.cuda.Event] = {}
        self._read: dict[int, torch.cuda.Event] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host buffer."""
        return self.pool.empty(shape, dtype)

    def to_host(self, x: Tensor) -> Tensor:
        """A host buffer that gets the values of device tensor ``x``."""
        host = self.pool.empty(x.shape, x.dtype)
        self.write(host, x)
        return host

    def write(self, host: Tensor, x: Tensor) -> None:
        """Start copying device tensor ``x`` into ``host`` (a buffer, or rows of one)."""
        self.copies.to_host += x.numel() * x.element_size()
        if not self.on_gpu:
            host.copy_(x)
            return
        compute, (stores, _) = torch.cuda.current_stream(), self._copy_streams()
        x, block = x.contiguous(), host.untyped_storage().data_ptr()
        stores.wait_stream(compute)
        if block in self._read:
            stores.wait_event(self._read[block])
        with torch.cuda.stream(stores):
            host.copy_(x, non_blocking=True)
        self._written[block] = done = stores.record_event()
        # The compute stream reuses x's memory once it has waited for the copy: later, when that costs nothing.
        self._leaving.append((x, done))
        if len(self._leaving) > IN_FLIGHT:
            compute.wait_event(self._leaving.popleft()[1])

    def load(self, host: Tensor) -> Loading:
        """Start copying a host buffer (or rows of one) to the device; call it before the compute it may overlap."""
        self.copies.to_device += host.numel() * host.element_size()
        if not self.on_gpu:
            return Loading(host.clone(memory_format=torch.contiguous_format), None)
        compute, (_, loads) = torch.cuda.current_stream(), self._copy_streams()
        block = host.untyped_storage().data_ptr()
        x = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        loads.wait_stream(compute)  # x's memory may be in use by what was launched before
        if block in self._written:
            loads.wait_event(self._written[block])
        with torch.cuda.stream(loads):
            x.copy_(host, non_blocking=True)
        self._read[block] = done = loads.record_event()
        return Loading(x, done)

    def _copy_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams


@dataclass
class Loading:
    """A device tensor that is being filled."""

    x: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The tensor, for use by what the current stream does next."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        return self.x


class Shelf:
    """Tensors by name, kept in host memory or, without ``offload``, on the device."""

    def __init__(self, offload: Offload | None) -> None:
        self.offload = offload
        self._kept: dict[tuple, Tensor] = {}

    def __contains__(self, name: tuple) -> bool:
        return name in self._kept

    def put(self, name: tuple, x: Tensor) -> None:
        """Keep ``x``; one that is there already is overwritten in place."""
        if self.offload is None:
            self._kept[name] = x
        elif name in self._kept:
            self.offload.write(self._kept[name], x)
        else:
            self._kept[name] = self.offload.to_host(x)

    def load(self, names: Sequence[tuple]) -> list[Loading]:
        """Start bringing tensors to the device."""
        if self.offload is None:
            return [Loading(self._kept[name], None) for name in names]
        return [self.offload.load(self._kept[name]) for name in names]

    def get(self, name: tuple) -> Tensor:
        return self.load([name])[0].wait()

    def pop(self, name: tuple) -> Tensor:
        """As :meth:`get`, for the last time."""
        x = self.get(name)
        del self._kept[name]
        return x

    def drop(self, name: tuple) -> None:
        self._kept.pop(name, None)

    def walk(self, items: Sequence[Sequence[tuple]]) -> Iterator[list[Tensor]]:
        """The tensors of each item in turn. While the caller computes on one item, the next one is on its way."""
        coming = self.load(items[0]) if items else []
        for following in (*items[1:], None):
            current, coming = coming, self.load(following) if following is not None else []
            yield [loading.wait() for loading in current]
            del current


class Rows:
    """A long tensor that is read and written in runs of rows: on the device, or in host memory."""

    def __init__(self, x: Tensor, offload: Offload | None) -> None:
        self.x, self.offload = x, offload

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, offload: Offload | None) -> Rows:
        x = torch.empty(shape, dtype=dtype, device=device) if offload is None else offload.empty(shape, dtype)
        return cls(x, offload)

    def walk(self, runs: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The rows of each run in turn, on the device; from the host, one run ahead."""
        if self.offload is None:
            yield from (self.x[start:stop] for start, stop in runs)
            return
        coming = None
        for index, (start, stop) in enumerate(runs):
            current = coming or self.offload.load(self.x[start:stop])
            coming = self.offload.load(self.x[slice(*runs[index + 1])]) if index + 1 < len(runs) else None
            yield current.wait()

    def read(self, run: tuple[int, int]) -> Tensor:
        rows = self.x[run[0] : run[1]]
        return rows if self.offload is None else self.offload.load(rows).wait()

    def write(self, run: tuple[int, int], rows: Tensor) -> None:
        if self.offload is None:
            self.x[run[0] : run[1]] = rows
        else:
            self.offload.write(self.x[run[0] : run[1]], rows)
