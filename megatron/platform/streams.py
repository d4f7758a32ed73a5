# SPDX-License-Identifier: Apache-2.0
"""Work beside compute: streams, events and copies to and from the host. All that the heart knows of them is here.

There are three streams. Compute is whatever the calling thread launches; what is stored to the host and what is loaded
from it are copied by one stream each. A stream does its work in order; streams are ordered with each other by events
alone. :class:`Streams` is a CPU's, which does everything at once; :class:`CudaStreams` a GPU's. The dry run has streams
that take simulated time, and the tests have streams that copy at the worst legal moment (docs/inside/host-copies.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Small tensors made in host memory, and their way to a GPU, for which nobody waits.


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; from host memory to a GPU through a pinned buffer, without waiting for the copy.

    PyTorch's pinned allocator hands a buffer out again only once the copies from it are done: block after block is made
    in host memory while the ones before travel. ``torch.tensor(.., device=..)`` and a plain ``x.to(device)`` wait until
    the GPU has done all that it was asked before.
    """
    if x.device == device:
        return x
    if x.device.type == "cpu" and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


COMPUTE, STORES, LOADS = "compute", "stores", "loads"

Event = Any
"""What :meth:`Streams.record` returns; None is an event that has been."""


class Streams:
    """A CPU's: a copy is done when the call returns, so that there is nothing to wait for.

    Attributes:
        asynchronous: whether copies are done later, and events say when.
    """

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory, for use on the compute stream from now on: what freed it may still be running there."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        """Have ``stream`` copy between the device and the host."""
        to.copy_(source)

    def record(self, stream: str) -> Event:
        """An event that has been once ``stream`` has done all that it was given so far."""
        return None

    def wait(self, stream: str, event: Event) -> None:
        """What ``stream`` is given from now on begins after ``event``. The host does not wait."""

    def hold(self, x: Tensor, stream: str) -> None:
        """When device tensor ``x`` is let go, its memory stays until ``stream`` has done what it was given by then."""

    def synchronize(self) -> None:
        """The host waits until all streams have done all that they were given."""

    def pin(self, block: np.ndarray) -> None:
        """Make host memory fit for copies that the host does not wait for."""

    def unpin(self, block: np.ndarray) -> None:
        """Undo :meth:`pin`, before the memory goes back to the system."""


class CudaStreams(Streams):
    """A GPU's. Compute is the stream that is current in the calling thread."""

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

    def hold(self, x: Tensor, stream: str) -> None:
        x.record_stream(self._stream(stream))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pin(self, block: np.ndarray) -> None:
        # PyTorch's own pinned memory comes in powers of two, up to twice what is asked for.
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
