# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors on the compute device and in host memory.

On a GPU the caching allocator counts the peak. On a CPU nothing does, so :class:`TensorMeter` watches the outputs of
every operation and the ends of their storages. That costs time, so it is used only on the first two steps, and on the
step that --profile-memory records, also on a GPU.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.platform.hooks import patched

METERED_STEPS = 2

GONE = weakref.ref(type("Gone", (), {})())
"""A reference to a storage that has ended or never existed."""

Place = Literal["device", "host", "elsewhere"]  # elsewhere: ordinary CPU tensors of a run on a GPU


@dataclass(slots=True)
class Block:
    """One storage."""

    number: int
    size: int
    place: Place
    storage: weakref.ref


@dataclass(slots=True)
class Level:
    """Bytes now and at the peak. ``high`` is the maximum since the last :meth:`settle`."""

    now: int = 0
    high: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.high = max(self.high, self.now)

    def settle(self) -> None:
        self.peak, self.high = max(self.peak, self.high), self.now


@dataclass
class History:
    """What a meter has recorded: ``events`` are (time, block's number, change of its bytes)."""

    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[float, int, int]] = field(default_factory=list)


class TensorMeter(TorchDispatchMode):
    """Counts the bytes of live storages while it is active, including storages that existed before.

    A CPU storage whose Python object has ``is_host_buffer`` set holds offloaded data. It counts as host memory, even if
    the compute device is a CPU. PyTorch keeps that object as long as the storage lives.

    Args:
        device: type of the compute device.
        record: keep every change in ``history``.
        resized: also watch resizing, which is not an operation. FSDP frees and fills the storages of gathered weights
            by resizing them.
        before: only tensors of this class count if they existed before. In a simulation these are the fake ones; the
            other tensors of the process do not belong to the simulation.
    """

    def __init__(
        self,
        device: str = "cpu",
        record: bool = False,
        resized: bool = False,
        before: type[torch.Tensor] = torch.Tensor,
    ) -> None:
        super().__init__()
        self.device, self.resized, self.before = device, resized, before
        self.live: dict[int, Block] = {}
        self.history = History() if record else None
        self._levels: dict[Place, Level] = {"device": Level(), "host": Level(), "elsewhere": Level()}
        # New blocks that may still be marked as host buffers. The host level's bytes including the block are kept too,
        # because an older host buffer may end before the block is marked.
        self._new: list[tuple[Block, int]] = []
        self._count = 0

    @property
    def now(self) -> int:
        return self._settled("device").now

    @property
    def peak(self) -> int:
        return self._settled("device").peak

    @property
    def host_now(self) -> int:
        return self._settled("host").now

    @property
    def host_peak(self) -> int:
        return self._settled("host").peak

    def __enter__(self) -> TensorMeter:
        # isinstance would load lazy modules
        tensors = [item for item in gc.get_objects() if issubclass(type(item), self.before)]
        for tensor in sorted(tensors, key=_order):  # the collector's order differs between processes
            self.see(tensor)
        if self.resized:
            self._watch = patched(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
            self._watch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self.resized:
            self._watch.__exit__(*exception)

    def _resizing(self, resize: Callable) -> Callable:
        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            out = resize(storage, size)
            block = self.live.get(storage._cdata)
            if block is not None:
                self.settle()
                self._resize(block, storage.nbytes())
                self._settle_peaks()
            return out

        return resize_and_count

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.settle()
        out = func(*args, **(kwargs or {}))
        self.see_all(out)
        return out

    def see_all(self, out: Any) -> None:
        """Count the tensors that an operation returned."""
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)

    def see(self, tensor: torch.Tensor) -> Block | None:
        """Count a tensor's storage once; returns its block, or None if it has no memory on a watched device."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own storage is empty, its size is not
        kind = tensor.device.type
        if kind not in ("cpu", self.device) or tensor.layout != torch.strided or not torch._C._has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        block = self.live.get(key)
        if block is None:
            place: Place = "device" if kind == self.device else "elsewhere"
            block = self.live[key] = Block(self._count, 0, place, weakref.ref(storage, partial(self._gone, key)))
            self._count += 1
            if self.history is not None:
                self.history.blocks.append(block)
        if block.size != size:
            self._resize(block, size)
            self._new.append((block, self._levels["host"].now + size))
        elif block.place != "host":
            self._move_if_host_buffer(block)
        return block

    def count(
        self,
        changes: Sequence[tuple[int, int]],
        given: Sequence[Block | None],
        blocks: int,
        made: Mapping[int, torch.UntypedStorage],
        high: int,
    ) -> None:
        """Count the changes on the compute device of operations that are replayed instead of called.

        Args:
            changes: (number of a new block, or ``~index`` of one in ``given`` that ends; change of its bytes).
            given: blocks that the operations were called with.
            blocks: the number of new blocks.
            made: storages of the blocks that stay, by their number.
            high: the maximum of additional bytes during the operations.
        """
        self.settle()
        when, first = time.perf_counter(), self._count
        new = [Block(first + number, 0, "device", GONE) for number in range(blocks)]
        self._count += blocks
        ended = {place: given[~place] for place, _ in changes if place < 0}
        if self.history is not None:
            self.history.blocks += new
            self.history.events += [
                (when, (first + place if place >= 0 else ended[place].number), change) for place, change in changes
            ]
        for block in ended.values():
            del self.live[block.storage()._cdata]
            block.size = 0
        for number, storage in made.items():
            block, key = new[number], storage._cdata
            block.size, block.storage = storage.nbytes(), weakref.ref(storage, partial(self._gone, key))
            self.live[key] = block
        level = self._levels["device"]
        level.add(high)
        level.add(sum(change for _, change in changes) - high)
        self._settle_peaks()

    def _resize(self, block: Block, size: int) -> None:
        self._levels[block.place].add(size - block.size)
        if self.history is not None:
            self.history.events.append((time.perf_counter(), block.number, size - block.size))
        block.size = size

    def _move_if_host_buffer(self, block: Block, high: int = 0) -> None:
        """Move a block to the host level if it has been marked; ``high``: a peak of that level with this block."""
        if block.place != "host" and getattr(block.storage(), "is_host_buffer", False):
            level = self._levels[block.place]
            level.now, level.high = level.now - block.size, level.high - block.size
            block.place = "host"
            host = self._levels["host"]
            host.add(block.size)
            host.high = max(host.high, high)

    def settle(self) -> None:
        """Count new blocks in the peaks. It is called late, because host buffers are marked after their operation."""
        if self._new:
            for block, high in self._new:
                self._move_if_host_buffer(block, high)
            self._new.clear()
            self._settle_peaks()

    def _settle_peaks(self) -> None:
        for level in self._levels.values():
            level.settle()

    def _settled(self, place: Place) -> Level:
        self.settle()
        return self._levels[place]

    def _gone(self, key: int, _: weakref.ref) -> None:
        block = self.live.pop(key, None)
        if block is not None:
            for other, high in self._new:
                self._move_if_host_buffer(other, high)
            self._resize(block, 0)


def _order(tensor: torch.Tensor) -> tuple:
    """Sort key: the largest tensor first, then by dtype and shape."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    stored = tensor.layout == torch.strided and torch._C._has_storage(tensor)
    if not stored or is_lazy(tensor):
        return (0,)
    return -tensor.untyped_storage().nbytes(), str(tensor.dtype), tuple(tensor.shape)


class PeakBytes:
    """The peaks of each step: ``with peak.step(): train(); peak.bytes, peak.host_bytes``.

    Args:
        host_bytes: returns the peak bytes of the pool of host memory, with offload.
        resized: see :class:`TensorMeter`.
    """

    def __init__(
        self, device: torch.device, host_bytes: Callable[[], int] | None = None, resized: bool = False
    ) -> None:
        self.device, self.bytes, self.host_bytes, self.steps = device, 0, 0, 0
        self._host_peak, self.resized = host_bytes, resized

    @contextmanager
    def step(self, record: bool = False) -> Iterator[TensorMeter | None]:
        """Measure one step. With ``record`` it yields a meter with a history, on any step and device."""
        on_gpu = self.device.type == "cuda"
        metered = record or (not on_gpu and self.steps < METERED_STEPS)
        meter = TensorMeter(self.device.type, record, self.resized) if metered else None
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        with meter or nullcontext():
            yield meter
        self.steps += 1
        if on_gpu:
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        if meter is not None:
            self.bytes = self.bytes if on_gpu else max(self.bytes, meter.peak)
            self.host_bytes = max(self.host_bytes, meter.host_peak)
        if self._host_peak:
            self.host_bytes = max(self.host_bytes, self._host_peak())
