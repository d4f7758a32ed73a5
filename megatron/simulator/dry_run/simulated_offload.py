# SPDX-License-Identifier: Apache-2.0
"""Host memory of a simulated rank: buffers without memory, and a GPU's copy streams."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from megatron.context_parallel.fpdt.host_pool import HostPool
from megatron.context_parallel.fpdt.offload import Offload
from megatron.platform.streams import COMPUTE, STORES, Streams
from megatron.simulator.dry_run.recorder import Recorder

CPU = torch.device("cpu")


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

    def block_of(self, host: Tensor) -> int:
        return host.untyped_storage()._cdata

    def _return(self, size: int) -> None:
        self.in_use -= size


class SimulatedStreams(Streams):
    """A GPU's: an event is the ticket of the copy before it. That copies wait for each other is not simulated."""

    asynchronous = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(CPU)
        self.recorder = recorder
        self._last: dict[str, int] = {}

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        if source.requires_grad and torch.is_grad_enabled():
            with self.recorder.hushed():
                to.copy_(source)
        else:
            self.recorder.written(to)
        direction = "to_host" if stream == STORES else "to_device"
        self._last[stream] = self.recorder.copy(direction, to.numel() * to.element_size())

    def record(self, stream: str) -> int | None:
        return self._last.get(stream)

    def wait(self, stream: str, event: int | None) -> None:
        if stream == COMPUTE and event is not None:
            self.recorder.wait(event)


def simulated_offload(recorder: Recorder, on_gpu: bool) -> Offload:
    """A simulated rank's offload; on a CPU its copies are compute, as they are there."""
    streams = SimulatedStreams(recorder) if on_gpu else Streams(CPU)
    return Offload(CPU, streams, SimulatedPool(streams))
