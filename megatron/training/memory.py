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
    """Counts the bytes of live CPU storages while it is active, those that were there before included."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
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
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known == size:
            return
        if known is None:
            weakref.finalize(storage, self._gone, key).atexit = False
        self.live[key] = size
        self.now += size - (known or 0)
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


class PeakBytes:
    """The device's peak, step by step: ``with peak: train(); peak.bytes``."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self.steps = device, 0, 0
        self._meter: TensorMeter | None = None

    def __enter__(self) -> PeakBytes:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.steps < METERED_STEPS:
            self._meter = TensorMeter()
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
