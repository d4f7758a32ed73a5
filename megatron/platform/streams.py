# SPDX-License-Identifier: Apache-2.0
"""Streams, events and copies to and from the host, which overlap with compute.

There are three streams: compute is the current stream of the calling thread; one stream copies to the host, and one
from it. A stream does its work in order; only events order streams with each other. :class:`Streams` is for a CPU,
where each call is complete when it returns, and :class:`CudaStreams` for a GPU. The dry run has streams with simulated
time; the tests have streams that copy at the worst moment that events allow (docs/inside/host-copies.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; from host memory to a GPU through a pinned buffer, without waiting for the copy.

    PyTorch's pinned allocator reuses a buffer only after the copies from it are done. In contrast,
    ``torch.tensor(.., device=..)`` and a plain ``x.to(device)`` wait until the GPU has finished all earlier work.
    """
    if x.device == device:
        return x
    if x.device.type == "cpu" and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def runs_triton(x: Tensor) -> bool:
    """Whether our Triton kernels can compute with x: it is on a GPU and not fp64, and Triton is installed."""
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


COMPUTE, STORES, LOADS = "compute", "stores", "loads"

Event = Any
"""What :meth:`Streams.record` returns; None is an event that has already happened."""


class Streams:
    """For a CPU: a copy is done when the call returns, and there is nothing to wait for.

    Attributes:
        asynchronous: whether copies finish later, so that events are needed.
    """

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for the compute stream, where kernels that used this memory before may still be running."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        """Copy between the device and the host, on ``stream``."""
        to.copy_(source)

    def record(self, stream: str) -> Event:
        """An event that happens when ``stream`` has finished all its work so far."""
        return None

    def wait(self, stream: str, event: Event) -> None:
        """Let later work of ``stream`` start after ``event``. The host does not wait."""

    def synchronize(self) -> None:
        """The host waits until all streams have finished their work."""

    def pin(self, block: np.ndarray) -> None:
        """Pin host memory, for copies for which the host does not wait."""

    def unpin(self, block: np.ndarray) -> None:
        """Undo :meth:`pin`, before the memory is returned to the system."""


class CudaStreams(Streams):
    """For a GPU. Compute is the current stream of the calling thread."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copying: dict[str, torch.cuda.Stream] = {}

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(stream)):
            to.copy_(source, non_blocking=True)

    def record(self, stream: str) -> Event:
        return self._stream(stream).record_event()

    def wait(self, stream: str, event: Event) -> None:
        if event is not None:
            self._stream(stream).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pin(self, block: np.ndarray) -> None:
        # PyTorch's own pinned memory has sizes that are powers of two, up to twice the requested size.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, 0))

    def unpin(self, block: np.ndarray) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(block.ctypes.data))

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name == COMPUTE:
            return torch.cuda.current_stream(self.device)
        if name not in self._copying:
            self._copying[name] = torch.cuda.Stream(self.device)
        return self._copying[name]


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return (CudaStreams if device.type == "cuda" else Streams)(device)
