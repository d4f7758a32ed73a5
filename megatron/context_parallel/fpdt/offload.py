# SPDX-License-Identifier: Apache-2.0
"""Copies between the device and host buffers (host_pool.py) that overlap with compute (FPDT paper, section 4.2).

Two streams copy, one each way, ordered with compute by events (platform/streams.py); nothing here waits on the host. On
a CPU the same calls copy from memory to memory. Every wait below is needed: the tests take each away in turn, and copy
at random legal moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel.fpdt.host_pool import HostPool
from megatron.decisions.chunks import IN_FLIGHT
from megatron.platform.streams import COMPUTE, LOADS, STORES, Event, Streams, streams_of


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
