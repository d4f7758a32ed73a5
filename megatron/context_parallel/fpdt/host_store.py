# SPDX-License-Identifier: Apache-2.0
"""Host memory behind the device (FPDT paper, section 4.2).

Three layers. :class:`HostPool` allocates host memory once and reuses it. :class:`Offload` copies between the device and
such buffers; the copies overlap with compute. On top, :class:`Shelf` keeps chunks by name, :class:`HiddenStates` keeps
one long tensor by rows, and :class:`SavedInHost` keeps layer inputs that autograd saves. Each brings back what is
needed one step before its use (the double buffer). They also work without host memory.

Two streams copy, one in each direction, ordered with compute by events (platform/streams.py); the host waits for
nothing. On a CPU the same calls copy from memory to memory. Every wait below is needed: the tests remove each in turn
and copy at random legal moments.
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
from megatron.decisions.division import IN_FLIGHT
from megatron.platform.streams import COMPUTE, LOADS, STORES, Event, Streams, streams_of

# Host memory that is allocated once and reused.
#
# A host buffer is an ordinary CPU tensor (pinned where there is a GPU), so it can be sliced, saved for backward and
# passed through autograd. When its last reference dies, its memory goes back to the pool it came from. Where all steps
# are alike, buffers are allocated in the first one and never again. Where lengths change, the pool holds at most twice
# what was ever in use at once.


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


# Copies between the device and host buffers (host_store.py) that overlap with compute (FPDT paper, section 4.2).
#
# Two streams copy, one each way, ordered with compute by events (platform/streams.py); nothing here waits on the
# host. On a CPU the same calls copy from memory to memory. Every wait below is needed: the tests take each away in
# turn, and copy at random legal moments.


@dataclass
class Copies:
    """Bytes that have moved, for tests and reports."""

    to_host: int = 0
    to_device: int = 0


class Offload:
    """Moves tensors between a device and host buffers.

    Args:
        device: where compute happens.
        streams: what copies; default the device's.
        pool: where host buffers come from; default a pool of its own.
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
        """A host buffer that gets the values of device tensor ``x``."""
        host = self.pool.empty(x.shape, x.dtype)
        self.write(host, x)
        return host

    def write(self, host: Tensor, x: Tensor) -> None:
        """Start copying device tensor ``x``, which must not change any more, into ``host`` (a buffer, or its rows)."""
        streams = self.streams
        self.copies.to_host += x.numel() * x.element_size()
        if not streams.asynchronous:
            streams.copy(STORES, host, x)
            return
        x, block = x.contiguous(), self.pool.block_of(host)
        streams.wait(STORES, streams.record(COMPUTE))
        # The block may be another's by now, and what was read from it before on its way still.
        streams.wait(STORES, self.pool.read.get(block))
        streams.copy(STORES, host, x)
        self.pool.written[block] = done = streams.record(STORES)
        self._leaving.append((x, done))
        self._let_go(IN_FLIGHT)

    def let_go(self) -> None:
        """Have compute wait for all copies to the host, so that it may reuse the memory of what has left."""
        self._let_go(0)

    def _let_go(self, count: int) -> None:
        """All but ``count``. Compute waits for a copy later than it could, when that costs nothing."""
        while len(self._leaving) > count:
            self.streams.wait(COMPUTE, self._leaving[0][1])
            self._leaving.popleft()

    def load(self, host: Tensor) -> Loading:
        """Start copying a host buffer (or rows of one) to the device; call it before the compute it may overlap."""
        streams = self.streams
        self.copies.to_device += host.numel() * host.element_size()
        x = streams.empty(host.shape, host.dtype)
        if not streams.asynchronous:
            streams.copy(LOADS, x, host)
            return Loading(x)
        block = self.pool.block_of(host)
        streams.wait(LOADS, streams.record(COMPUTE))  # x's memory may be in use by what was launched before
        streams.wait(LOADS, self.pool.written.get(block))
        streams.hold(x, LOADS)  # whoever drops a Loading before its wait must not free memory that is being written
        streams.copy(LOADS, x, host)
        self.pool.read[block] = done = streams.record(LOADS)
        return Loading(x, done, streams)


@dataclass
class Loading:
    """A device tensor that is being filled; without ``streams``, one that is there."""

    x: Tensor
    done: Event = None
    streams: Streams | None = None

    def wait(self) -> Tensor:
        """The tensor, for use by what the current stream does next."""
        if self.streams is not None:
            self.streams.wait(COMPUTE, self.done)
        return self.x


Item, Coming, There = TypeVar("Item"), TypeVar("Coming"), TypeVar("There")


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


class HiddenStates:
    """Hidden states, or their gradients, read and written span by span: on the device, or a host buffer."""

    def __init__(self, x: Tensor, offload: Offload | None) -> None:
        self.x, self.offload = x, offload if is_host_buffer(x) else None

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, offload: Offload | None
    ) -> HiddenStates:
        """On ``device``; with ``offload``, a host buffer."""
        x = torch.empty(shape, dtype=dtype, device=device) if offload is None else offload.empty(shape, dtype)
        return cls(x, offload)

    def walk(self, spans: Sequence[Span]) -> Iterator[Tensor]:
        """The rows of each span in turn, on the device; a host buffer's come one span ahead."""
        return _one_ahead(spans, self._load, Loading.wait)

    def read(self, span: Span) -> Tensor:
        return self._load(span).wait()

    def write(self, span: Span, rows: Tensor) -> None:
        if self.offload is None:
            self.x[slice(*span)] = rows
        else:
            self.offload.write(self.x[slice(*span)], rows)

    def _load(self, span: Span) -> Loading:
        rows = self.x[slice(*span)]
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
    used: bool = False

    def fetch(self) -> None:
        self.coming = self.coming or self.offload.load(self.host)

    def take(self) -> Tensor:
        self.offload.let_go()  # nothing may leave for the rest of the backward pass, and these copies are long done
        self.fetch()
        x, self.coming, self.used = self.coming.wait(), None, True
        if self.before is not None and not self.before.used:  # hooks may serve several passes
            self.before.fetch()
        self.before = None
        return x
