# SPDX-License-Identifier: Apache-2.0
"""Host memory of a simulated rank: buffers without memory, and a GPU's copy streams."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.context_parallel.fpdt.host_pool import HostPool
from megatron.context_parallel.fpdt.offload import IN_FLIGHT, Loading, Offload
from megatron.simulator.dry_run.recorder import Recorder


class SimulatedPool(HostPool):
    """Counts as a :class:`HostPool` does; its buffers are fake tensors."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = max(prod(shape) * dtype.itemsize, 1)
        buffer = torch.empty(size, dtype=torch.uint8)
        storage = buffer.untyped_storage()
        storage.is_host_buffer = True
        weakref.finalize(storage, self._return, size).atexit = False
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def _return(self, size: int) -> None:
        self.in_use -= size


@dataclass
class SimulatedLoading(Loading):
    """A device tensor that is being filled on a simulated stream."""

    recorder: Recorder | None = None
    ticket: int = 0

    def wait(self) -> Tensor:
        self.recorder.wait(self.ticket)
        return self.x


class SimulatedGpuOffload(Offload):
    """A GPU's: copies run on streams of their own, and what leaves stays on the device until its copy is done."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(torch.device("cpu"), SimulatedPool(pinned=False))
        self.recorder = recorder
        self._waiting: deque[tuple[Tensor, int]] = deque()

    def write(self, host: Tensor, x: Tensor) -> None:
        self.copies.to_host += x.numel() * x.element_size()
        x = x.contiguous()
        self._waiting.append((x, self._copy(host, x, "to_host")))
        if len(self._waiting) > IN_FLIGHT:
            self.recorder.wait(self._waiting.popleft()[1])

    def let_go(self) -> None:
        while self._waiting:
            self.recorder.wait(self._waiting.popleft()[1])

    def load(self, host: Tensor) -> Loading:
        self.copies.to_device += host.numel() * host.element_size()
        x = torch.empty(host.shape, dtype=host.dtype)
        return SimulatedLoading(x, None, self.recorder, self._copy(x, host, "to_device"))

    def _copy(self, to: Tensor, source: Tensor, direction: str) -> int:
        with self.recorder.hushed():
            to.copy_(source)
        return self.recorder.copy(direction, to.numel() * to.element_size())


def simulated_offload(recorder: Recorder, on_gpu: bool) -> Offload:
    """A simulated rank's offload; on a CPU its copies are compute, as they are there."""
    return SimulatedGpuOffload(recorder) if on_gpu else Offload(torch.device("cpu"), SimulatedPool(pinned=False))
