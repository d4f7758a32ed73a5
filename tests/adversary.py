# SPDX-License-Identifier: Apache-2.0
"""A GPU's streams, simulated on a CPU: each copy happens at a random moment that the recorded events allow.

Compute runs eagerly. A copy happens when compute waits for it, or at any call before. Until then

- what is loaded is NaN, and what is stored may still change: a copy reads what its source holds when it happens;
- memory that is freed without a wait is lost: a store from it stores NaN, and a load into it is a fault;
- a host block that is reused becomes NaN once the copies of its last owner are done, and the next owner's copies may
  overtake unordered ones;
- compute may lag behind the host: a copy that does not wait for what was launched just before it may read its source
before that is written (NaN is stored), and the previous owner of its target may still write there (NaN is loaded).

``Mutant`` leaves one call out, to show that it is needed. See docs/inside/host-copies.md.
"""

from __future__ import annotations

import ast
import ctypes
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.fpdt.host_store import HostPool, Offload, is_host_buffer
from megatron.platform.streams import COMPUTE, LOADS, STORES, Streams

CPU = torch.device("cpu")
ORDERING = ("record", "wait", "synchronize")  # the calls that order copies


@dataclass
class Queue:
    """A stream: its queue of work that is not done yet.

    Attributes:
        given, done: how many items were queued, and how many of them have been done.
        after: every item that is queued from now on runs after this moment of compute.
    """

    todo: deque = field(default_factory=deque)
    given: int = 0
    done: int = 0
    after: int = 0


@dataclass(frozen=True)
class Event:
    """A stream has done ``number`` items, and compute has reached ``after``."""

    stream: str
    number: int
    after: int


@dataclass
class Memory:
    """Where a tensor's memory is. It does not keep the tensor alive."""

    storage: Callable[[], Any]
    layout: tuple
    block: int | None  # address of the host block

    @classmethod
    def of(cls, x: Tensor) -> Memory:
        layout, storage = (x.dtype, x.storage_offset(), x.shape, x.stride()), x.untyped_storage()
        if is_host_buffer(x):  # the pool keeps the memory, even for another owner
            address, size = storage.data_ptr(), storage.nbytes()
            raw = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8).untyped_storage()
            return cls(lambda: raw, layout, address)
        return cls(weakref.ref(storage), layout, None)

    def tensor(self) -> Tensor | None:
        """The tensor; None if its memory was freed."""
        storage, (dtype, *rest) = self.storage(), self.layout
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *rest)


@dataclass
class Copy:
    """A copy that has not happened. ``ordered``: compute's earlier work is done first. ``then``: called afterwards."""

    to: Memory
    source: Memory
    ordered: bool
    then: list[Callable[[], None]] = field(default_factory=list)

    def touches(self, block: int) -> bool:
        return block in (self.to.block, self.source.block)


class Adversary(Streams):
    """Streams whose copies happen by ``seed``: 0 as late as allowed, 1 as early as allowed, others at random.

    Attributes:
        faults: errors that no value would show.
        called: call sites that were reached.
    """

    asynchronous = True

    def __init__(self, seed: int) -> None:
        super().__init__(CPU)
        self.queues = {STORES: Queue(), LOADS: Queue()}
        self.now = 0  # the current moment of compute
        self.faults: list[str] = []
        self.called: set[str] = set()
        self.start_again(seed)

    def start_again(self, seed: int) -> None:
        """Use another schedule from now on."""
        self.draw = random.Random(seed)
        self.eager = {name: {0: 0.0, 1: 1.0}.get(seed, self.draw.choice([0.1, 0.5, 0.9])) for name in self.queues}

    def offload(self) -> Offload:
        """An offload that uses these streams."""
        return Offload(CPU, self, PoisoningPool(self))

    def finish(self) -> None:
        """End a run and check it.

        Raises:
            AssertionError: something went wrong.
        """
        self._force_all()
        assert not self.faults, self.faults

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return poison(super().empty(shape, dtype))

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        queue = self.queues[stream]
        ordered = queue.after >= self.now or self.draw.random() < 0.5
        self._give(stream, Copy(Memory.of(to), Memory.of(source), ordered))
        self.now += 1
        self._some()

    def record(self, stream: str) -> Event | None:
        if self._skips():
            return None
        if stream == COMPUTE:
            return Event(stream, 0, self.now)
        queue = self.queues[stream]
        return Event(stream, queue.given, queue.after)

    def wait(self, stream: str, event: Event | None) -> None:
        if self._skips() or event is None:
            return
        if stream == COMPUTE:
            self._force(event)
            self.now += 1
        else:
            self.queues[stream].after = max(self.queues[stream].after, event.after)
            self._give(stream, event)
        self._some()

    def synchronize(self) -> None:
        if not self._skips():
            self._force_all()

    def unpin(self, block: np.ndarray) -> None:
        for name, queue in self.queues.items():
            lost = [item for item in queue.todo if isinstance(item, Copy) and item.touches(block.ctypes.data)]
            if lost:
                self.faults.append(f"{name}: a host block was returned to the system before its copies")
                queue.todo.clear()
                queue.done = queue.given

    def lent(self, host: Tensor) -> None:
        """Note that a host block has a new owner: it becomes NaN when the copies of the previous owner are done."""
        block = host.untyped_storage().data_ptr()
        pending = [c for q in self.queues.values() for c in q.todo if isinstance(c, Copy) and c.touches(block)]
        memory, left = Memory.of(host), [len(pending)]

        def one_less() -> None:
            left[0] -= 1
            if left[0] <= 0:
                poison(memory.tensor())

        for copy in pending:
            copy.then.append(one_less)
        if not pending:
            one_less()

    def skips(self, site: str) -> bool:
        """Whether a call is left out."""
        return False

    def _skips(self) -> bool:
        frame = sys._getframe(1)
        method, caller = frame.f_code.co_name, frame.f_back
        site = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} {method}"
        self.called.add(site)
        return self.skips(site)

    def _give(self, stream: str, item: Copy | Event) -> None:
        self.queues[stream].todo.append(item)
        self.queues[stream].given += 1

    def _some(self) -> None:
        """Let some copies happen."""
        for name in self.draw.sample([STORES, LOADS], 2):
            while self.queues[name].todo and self.draw.random() < self.eager[name] and self._step(name):
                pass

    def _step(self, stream: str) -> bool:
        """Do the next item of a stream; False if it has to wait."""
        queue = self.queues[stream]
        item = queue.todo[0]
        if isinstance(item, Event):
            if not self._been(item):
                return False
        queue.todo.popleft()
        queue.done += 1
        if isinstance(item, Copy):
            self._happen(stream, item)
        return True

    def _happen(self, stream: str, copy: Copy) -> None:
        to, source = copy.to.tensor(), copy.source.tensor()
        if to is None:
            self.faults.append(f"{stream}: a copy into freed memory")
        elif source is None or not copy.ordered:
            poison(to)
        else:
            to.copy_(source)
        for function in copy.then:
            function()

    def _been(self, event: Event) -> bool:
        return event.stream == COMPUTE or self.queues[event.stream].done >= event.number

    def _force(self, event: Event) -> None:
        """Do everything that must have happened before an event."""
        while not self._been(event):
            if not self._step(event.stream):
                self._force(self.queues[event.stream].todo[0])

    def _force_all(self) -> None:
        for name, queue in self.queues.items():
            self._force(Event(name, queue.given, 0))


class Mutant(Adversary):
    """Leaves out the calls at one call site."""

    def __init__(self, seed: int, without: str) -> None:
        super().__init__(seed)
        self.without = without

    def skips(self, site: str) -> bool:
        return site == self.without


class PoisoningPool(HostPool):
    """Overwrite a buffer, so that no reader sees its earlier contents."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = super().empty(shape, dtype)
        self.streams.lent(buffer)
        return buffer


def poison(x: Tensor) -> Tensor:
    """Fill with NaN, or with 1 if the dtype has no NaN."""
    return x.fill_(torch.nan if x.is_floating_point() else 1)


def call_sites(folder: Path) -> list[str]:
    """All calls in ``folder`` that order streams."""
    result = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ORDERING:
                if ast.unparse(node.func.value).split(".")[-1] == "streams":
                    result.append(f"{path.name}:{node.lineno} {node.func.attr}")
    assert len(result) == len(set(result)), "two calls of one kind in one line cannot be distinguished"
    return sorted(result)
