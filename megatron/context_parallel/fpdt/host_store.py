# SPDX-License-Identifier: Apache-2.0
"""Offloading to host memory (FPDT paper, section 4.2).

:class:`HostPool` allocates host memory once and reuses it. :class:`Offload` copies between the device and such buffers;
the copies overlap with compute. On top of these, :class:`ChunkStore` keeps chunks by name, :class:`HiddenStates` keeps
one long tensor by rows, and :class:`SavedInHost` keeps layer inputs that autograd saves. Each loads data one step
before its use (the double buffer). ChunkStore and HiddenStates also work without host memory.

Two streams copy, one in each direction, ordered with compute by events (platform/streams.py). The host never waits. On
a CPU the same calls copy from memory to memory. Every wait below is needed: tests remove each in turn, let the copies
happen at random moments that the other waits allow, and then see wrong results.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span
from megatron.decisions.division import IN_FLIGHT
from megatron.platform.streams import COMPUTE, LOADS, STORES, Event, Streams, streams_of

MOST = 2
"""Limit of the pool's size, relative to the largest number of bytes in use at once, and of a block's size, relative to
its buffer. Allocating and pinning for each new length would be slow; keeping a block for each length would need ever
more memory."""


class _Lease(np.ndarray):
    """The memory of a buffer while it is out of the pool; a subclass because plain arrays accept no finalizer."""


class HostPool:
    """Host memory in blocks that are allocated once and reused.

    A host buffer is an ordinary CPU tensor (pinned if there is a GPU): it can be sliced, saved for backward and passed
    through autograd. Its memory goes back to the pool when its last reference dies. If all steps are the same, buffers
    are allocated only in the first one. If lengths vary, the pool's size is limited by :data:`MOST`.

    Args:
        streams: the streams that copy to and from the blocks, which are pinned for them.

    Attributes:
        allocated: bytes of all blocks, in use or not.
        in_use, peak: bytes of the buffers in use, now and at most since the start.
        written, read: by block, the last copy to it, for which loads wait, and the last copy from it, for which writes
            wait.
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
        """An uninitialized host tensor whose memory goes back to the pool when its last reference dies."""
        size = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        block = self._block(size)
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        lease = block[:size].view(_Lease)
        weakref.finalize(lease, self._give_back, block, size).atexit = False  # also keeps the pool alive
        storage = torch.from_numpy(lease).untyped_storage()
        storage.is_host_buffer = True  # on a CPU this distinguishes it from device memory
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))

    def block_of(self, host: Tensor) -> int:
        """A number that identifies the block of a buffer (or of its rows), also after the buffer was given back."""
        return host.untyped_storage().data_ptr()

    def _block(self, size: int) -> np.ndarray:
        """A block of this size. If the pool is full, a larger idle block; without one, idle blocks are freed first."""
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
        # The block has its own pages: memory is pinned by pages, and a page cannot be pinned twice.
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = np.frombuffer(pages, dtype=np.uint8)
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
    """Return unused blocks to the system."""
    if blocks:
        streams.synchronize()  # copies may still be running
    for block in blocks.values():
        streams.unpin(block)


def is_host_buffer(x: Tensor) -> bool:
    """Whether ``x`` is (a view of) a buffer of a :class:`HostPool`."""
    return getattr(x.untyped_storage(), "is_host_buffer", False)


@dataclass
class Copies:
    """Bytes that were copied, for tests and reports."""

    to_host: int = 0
    to_device: int = 0


class Offload:
    """Copies tensors between a device and host buffers.

    Args:
        device: the compute device.
        streams: streams for the copies; default: those of the device.
        pool: allocates the host buffers; default: a new pool.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None, pool: HostPool | None = None) -> None:
        self.streams = streams or streams_of(device)
        self.pool = pool or HostPool(self.streams)
        self.copies = Copies()
        self._leaving: deque[tuple[Tensor, Event]] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host buffer."""
        return self.pool.empty(shape, dtype)

    def to_host(self, x: Tensor) -> Tensor:
        """A new host buffer with the values of device tensor ``x``."""
        host = self.pool.empty(x.shape, x.dtype)
        self.write(host, x)
        return host

    def write(self, host: Tensor, x: Tensor) -> None:
        """Start to copy device tensor ``x``, which must not change any more, to ``host`` (a buffer or rows of one)."""
        streams = self.streams
        self.copies.to_host += x.numel() * x.element_size()
        if not streams.asynchronous:
            streams.copy(STORES, host, x)
            return
        x, block = x.contiguous(), self.pool.block_of(host)
        streams.wait(STORES, streams.record(COMPUTE))
        # The block may have had another buffer before, and a copy from that one may still be running.
        streams.wait(STORES, self.pool.read.get(block))
        streams.copy(STORES, host, x)
        self.pool.written[block] = done = streams.record(STORES)
        self._leaving.append((x, done))
        self._let_go(IN_FLIGHT)

    def let_go(self) -> None:
        """Let compute wait for all copies to the host, so that their device memory can be reused."""
        self._let_go(0)

    def _let_go(self, count: int) -> None:
        """Let compute wait for all but the last ``count`` copies to the host."""
        while len(self._leaving) > count:
            self.streams.wait(COMPUTE, self._leaving[0][1])
            self._leaving.popleft()

    def load(self, host: Tensor) -> Loading:
        """Start to copy a host buffer (or rows of one) to the device; call it before the compute it overlaps with."""
        streams = self.streams
        self.copies.to_device += host.numel() * host.element_size()
        x = streams.empty(host.shape, host.dtype)
        if not streams.asynchronous:
            streams.copy(LOADS, x, host)
            return Loading(x)
        block = self.pool.block_of(host)
        streams.wait(LOADS, streams.record(COMPUTE))  # earlier kernels may still use the memory of x
        streams.wait(LOADS, self.pool.written.get(block))
        streams.copy(LOADS, x, host)
        self.pool.read[block] = done = streams.record(LOADS)
        return Loading(x, done, streams)


@dataclass
class Loading:
    """A device tensor that is being loaded; without ``streams`` it is complete.

    It keeps the tensor until compute waits for the copy. When the tensor dies after that, compute can reuse its memory
    at once. ``Tensor.record_stream`` would free the memory later, when the host notices that the copy has ended.
    """

    x: Tensor
    done: Event = None
    streams: Streams | None = None

    def wait(self) -> Tensor:
        """The tensor, for use in the current stream."""
        streams, self.streams = self.streams, None
        if streams is not None:
            streams.wait(COMPUTE, self.done)
        return self.x

    def __del__(self) -> None:
        self.wait()  # the copy of a load that nobody used may still be writing to its memory


Item, Coming, Loaded = TypeVar("Item"), TypeVar("Coming"), TypeVar("Loaded")


class ChunkStore:
    """Tensors by name, kept in host memory or, without ``offload``, on the device."""

    def __init__(self, offload: Offload | None) -> None:
        self.offload = offload
        self._kept: dict[tuple, Tensor] = {}

    def __contains__(self, name: tuple) -> bool:
        return name in self._kept

    def put(self, name: tuple, x: Tensor) -> None:
        """Keep ``x``; an earlier tensor of this name is overwritten in place."""
        if self.offload is None:
            self._kept[name] = x
        elif name in self._kept:
            self.offload.write(self._kept[name], x)
        else:
            self._kept[name] = self.offload.to_host(x)

    def load(self, names: Sequence[tuple], fresh: Mapping[tuple, Tensor] = {}) -> list[Loading]:
        """Start to load tensors to the device; those in ``fresh`` are already on it."""
        kept = self._kept
        if self.offload is None:
            return [Loading(fresh[name] if name in fresh else kept[name]) for name in names]
        return [Loading(fresh[name]) if name in fresh else self.offload.load(kept[name]) for name in names]

    def pop(self, name: tuple) -> Tensor | None:
        """The tensor, which is dropped from the store; None if there is none of this name."""
        if name not in self._kept:
            return None
        x = self.load([name])[0].wait()
        del self._kept[name]
        return x

    def drop(self, *names: tuple) -> None:
        for name in names:
            self._kept.pop(name, None)

    def walk(
        self, items: Sequence[Sequence[tuple]], fresh: Mapping[tuple, Tensor] = {}
    ) -> Iterator[dict[tuple, Tensor]]:
        """The tensors of each item in turn, by name; the first item's loads start now.

        While the caller computes on one item, the next one is loaded. Names that are neither kept nor fresh at that
        time are left out, for example sums that have not begun.
        """

        def start(item: Sequence[tuple]) -> dict[tuple, Loading]:
            names = [name for name in item if name in fresh or name in self._kept]
            return dict(zip(names, self.load(names, fresh)))

        def wait(started: dict[tuple, Loading]) -> dict[tuple, Tensor]:
            return {name: loading.wait() for name, loading in started.items()}

        return _one_ahead(items, start, wait)


def _one_ahead(
    items: Sequence[Item], start: Callable[[Item], Coming], wait: Callable[[Coming], Loaded]
) -> Iterator[Loaded]:
    """``wait(start(item))`` of each item. The first is started now, each later one while the previous is used."""

    def steps(coming: Coming | None) -> Iterator[Loaded]:
        for index in range(len(items)):
            current, coming = coming, start(items[index + 1]) if index + 1 < len(items) else None
            yield wait(current)
            del current

    return steps(start(items[0]) if items else None)


class HiddenStates:
    """Hidden states, or their gradients, read and written span by span: on the device, or a host buffer."""

    def __init__(self, x: Tensor, offload: Offload | None) -> None:
        self.x, self.offload = x, offload if is_host_buffer(x) else None

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, offload: Offload | None
    ) -> HiddenStates:
        """An uninitialized tensor on ``device`` or, with ``offload``, a host buffer."""
        x = torch.empty(shape, dtype=dtype, device=device) if offload is None else offload.empty(shape, dtype)
        return cls(x, offload)

    def walk(self, spans: Sequence[Span]) -> Iterator[Tensor]:
        """The rows of each span in turn, on the device; those of a host buffer are loaded one span ahead."""
        return _one_ahead(spans, self._load, Loading.wait)

    def read(self, span: Span) -> Tensor:
        return self._load(span).wait()

    def write(self, span: Span, rows: Tensor) -> None:
        if self.offload is None:
            self.x[slice(*span)] = rows
        else:
            self.offload.write(self.x[slice(*span)], rows)

    def write_sum(self, span: Span, rows: Tensor, more: Tensor) -> None:
        """Write ``rows + more``."""
        if self.offload is None:
            torch.add(rows, more, out=self.x[slice(*span)])
        else:
            self.write(span, rows + more)

    def _load(self, span: Span) -> Loading:
        rows = self.x[slice(*span)]
        return Loading(rows) if self.offload is None else self.offload.load(rows)


class SavedInHost:
    """Hooks for ``torch.autograd.graph.saved_tensors_hooks``: layer inputs saved for backward go to host memory.

    When the backward pass needs an input, it also starts to load the input that was saved before that one.

    Args:
        offload: copies the inputs.
        shape: of a layer input; saved tensors of other shapes stay on the device.
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
    used: bool = False

    def fetch(self) -> None:
        self.coming = self.coming or self.offload.load(self.host)

    def take(self) -> Tensor:
        # Frees the device memory of stored inputs. Later copies to the host would free it too, but there may be none.
        self.offload.let_go()
        self.fetch()
        x, self.coming, self.used = self.coming.wait(), None, True
        if self.before is not None and not self.before.used:  # hooks may serve several passes
            self.before.fetch()
        self.before = None
        return x
