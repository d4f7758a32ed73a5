# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of tensors on the compute device.

On a GPU the caching allocator counts. On a CPU nobody does, so :class:`TensorMeter` watches every operation's outputs
and the ends of their storages' lives; that costs time, so it is used on the first two steps only.
"""

from __future__ import annotations

import gc
import weakref
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

METERED_STEPS = 2


class TensorMeter(TorchDispatchMode):
    """Counts the bytes of live CPU storages while it is active, those that were there before included.

    Args:
        resized: FSDP is at work. It frees and fills the storages of gathered weights by resizing them, which is no
            operation: they are looked at again when an operation uses them, and before a new peak is believed.
    """

    def __init__(self, resized: bool = False) -> None:
        super().__init__()
        self.resized = resized
        self.live: dict[int, int] = {}
        self.storages: dict[int, weakref.ref] = {}
        self.now = 0
        self.peak = 0

    def __enter__(self) -> TensorMeter:
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):  # isinstance would ask lazy modules for their class
                self._see(thing)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((out, args, kwargs) if self.resized else out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own storage is empty, its size is not
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known == size:
            return
        if known is None:
            weakref.finalize(storage, self._gone, key).atexit = False
            self.storages[key] = weakref.ref(storage)
        self.live[key] = size
        self.now += size - (known or 0)
        if self.resized and self.now > self.peak:
            self._look_again()
        self.peak = max(self.peak, self.now)

    def _look_again(self) -> None:
        for key, reference in self.storages.items():
            storage = reference()
            if storage is not None and storage.nbytes() != self.live[key]:
                self.now += storage.nbytes() - self.live[key]
                self.live[key] = storage.nbytes()

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)
        self.storages.pop(key, None)


class PeakBytes:
    """The device's peak, step by step: ``with peak: train(); peak.bytes``."""

    def __init__(self, device: torch.device, resized: bool = False) -> None:
        self.device, self.bytes, self.steps, self.resized = device, 0, 0, resized
        self._meter: TensorMeter | None = None

    def __enter__(self) -> PeakBytes:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.steps < METERED_STEPS:
            self._meter = TensorMeter(self.resized)
            self._meter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.steps += 1
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self._meter is not None:
            self._meter.__exit__(kind, error, trace)
            self.bytes = max(self.bytes, self._meter.peak)
            self._meter = None
