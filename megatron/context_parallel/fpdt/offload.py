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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span

Item, Coming, There = TypeVar("Item"), TypeVar("Coming"), TypeVar("There")

IN_FLIGHT = 2  # device tensors on their way to the host that may wait for their copy: bounds the memory they hold


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
        block = np.empty(size, dtype=np.uint8)
        if self.pinned:  # PyTorch's own pinned memory comes in powers of two, up to twice what is asked for
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, size, 0))
        return block

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

    def let_go(self) -> None:
        """Have compute wait for all copies to the host, so that it may reuse the memory of what has left."""
        while self._leaving:
            torch.cuda.current_stream().wait_event(self._leaving.popleft()[1])

    def load(self, host: Tensor) -> Loading:
        """Start copying a host buffer (or rows of one) to the device; call it before the compute it may overlap."""
        self.copies.to_device += host.numel() * host.element_size()
        if not self.on_gpu:
            return Loading(host.clone(memory_format=torch.contiguous_format))
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
    done: torch.cuda.Event | None = None

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

    def load(self, names: Sequence[tuple], fresh: Mapping[tuple, Tensor] = {}) -> list[Loading]:
        """Start bringing tensors to the device; those that are in ``fresh`` are there already."""
        kept = self._kept
        if self.offload is None:
            return [Loading(fresh[name] if name in fresh else kept[name]) for name in names]
        return [Loading(fresh[name]) if name in fresh else self.offload.load(kept[name]) for name in names]

    def get(self, name: tuple) -> Tensor:
        return self.load([name])[0].wait()

    def pop(self, name: tuple) -> Tensor | None:
        """As :meth:`get`, for the last time; None where nothing is kept."""
        if name not in self._kept:
            return None
        x = self.get(name)
        del self._kept[name]
        return x

    def drop(self, *names: tuple) -> None:
        for name in names:
            self._kept.pop(name, None)

    def walk(
        self, items: Sequence[Sequence[tuple]], fresh: Mapping[tuple, Tensor] = {}
    ) -> Iterator[dict[tuple, Tensor]]:
        """The tensors of each item in turn, by name; the first item's loads start now.

        While the caller computes on one item, the next one is on its way. Names that are neither kept nor fresh when
        their turn comes are left out: sums that have not begun.
        """

        def start(item: Sequence[tuple]) -> dict[tuple, Loading]:
            there = [name for name in item if name in fresh or name in self._kept]
            return dict(zip(there, self.load(there, fresh)))

        def wait(there: dict[tuple, Loading]) -> dict[tuple, Tensor]:
            return {name: loading.wait() for name, loading in there.items()}

        return _one_ahead(items, start, wait)


def _one_ahead(
    items: Sequence[Item], start: Callable[[Item], Coming], wait: Callable[[Coming], There]
) -> Iterator[There]:
    """``wait(start(item))`` of each item; the first is started now, every other while the one before it is used."""

    def steps(coming: Coming | None) -> Iterator[There]:
        for index in range(len(items)):
            current, coming = coming, start(items[index + 1]) if index + 1 < len(items) else None
            yield wait(current)
            del current

    return steps(start(items[0]) if items else None)


class Rows:
    """A long tensor that is read and written in runs of rows: on the device, or a host buffer."""

    def __init__(self, x: Tensor, offload: Offload | None) -> None:
        self.x, self.offload = x, offload if is_host_buffer(x) else None

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, offload: Offload | None) -> Rows:
        """On ``device``; with ``offload``, a host buffer."""
        x = torch.empty(shape, dtype=dtype, device=device) if offload is None else offload.empty(shape, dtype)
        return cls(x, offload)

    def walk(self, runs: Sequence[Span]) -> Iterator[Tensor]:
        """The rows of each run in turn, on the device; a host buffer's come one run ahead."""
        return _one_ahead(runs, self._load, Loading.wait)

    def read(self, run: Span) -> Tensor:
        return self._load(run).wait()

    def write(self, run: Span, rows: Tensor) -> None:
        if self.offload is None:
            self.x[run[0] : run[1]] = rows
        else:
            self.offload.write(self.x[run[0] : run[1]], rows)

    def _load(self, run: Span) -> Loading:
        rows = self.x[run[0] : run[1]]
        return Loading(rows) if self.offload is None else self.offload.load(rows)


class SavedInHost:
    """Hooks for ``torch.autograd.graph.saved_tensors_hooks``: layer inputs saved for backward go to host memory.

    When one is asked for in the backward pass, the one that was saved before it starts to come as well.

    Args:
        offload: what moves them.
        shape: of a layer input; other saved tensors stay where they are.
    """

    def __init__(self, offload: Offload, shape: torch.Size) -> None:
        self.offload, self.shape = offload, shape
        self._last: _Saved | None = None

    def pack(self, x: Tensor) -> Tensor | _Saved:
        if x.shape != self.shape or not x.is_floating_point() or is_host_buffer(x):
            return x
        self._last = _Saved(self.offload, self.offload.to_host(x.detach()), self._last)
        return self._last

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.take()


@dataclass
class _Saved:
    offload: Offload
    host: Tensor
    before: _Saved | None
    coming: Loading | None = None

    def fetch(self) -> None:
        self.coming = self.coming or self.offload.load(self.host)

    def take(self) -> Tensor:
        self.offload.let_go()  # nothing may leave for the rest of the backward pass, and these copies are long done
        self.fetch()
        x, self.coming = self.coming.wait(), None
        if self.before is not None:
            self.before.fetch()
            self.before = None
        return x
