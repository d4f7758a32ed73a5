# SPDX-License-Identifier: Apache-2.0
"""Copies between the device and host buffers (host_pool.py) that overlap with compute (FPDT paper, section 4.2).

On a GPU two streams copy, one each way, ordered with the compute stream by events; nothing here waits on the host. On a
CPU the same calls copy from memory to memory, so that everything but the speed can be tested there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel.fpdt.host_pool import HostPool

IN_FLIGHT = 2  # device tensors on their way to the host that may wait for their copy: bounds the memory they hold


@dataclass
class Copies:
    """Bytes that have moved, for tests and reports."""

    to_host: int = 0
    to_device: int = 0


class Offload:
    """Moves tensors between a device and host buffers.

    Args:
        device: where compute happens.
        pool: where host buffers come from; default a pool of its own.
    """

    def __init__(self, device: torch.device, pool: HostPool | None = None) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.pool = pool or HostPool(pinned=self.on_gpu)
        self.copies = Copies()
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        # By address of a block: its last write, which loads wait for, and its last read, which writes wait for.
        self._written: dict[int, torch.cuda.Event] = {}
        self._read: dict[int, torch.cuda.Event] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A host buffer."""
        return self.pool.empty(shape, dtype)

    def to_host(self, x: Tensor) -> Tensor:
        """A host buffer that gets the values of device tensor ``x``."""
        host = self.pool.empty(x.shape, x.dtype)
        self.write(host, x)
        return host

    def write(self, host: Tensor, x: Tensor) -> None:
        """Start copying device tensor ``x`` into ``host`` (a buffer, or rows of one)."""
        self.copies.to_host += x.numel() * x.element_size()
        if not self.on_gpu:
            host.copy_(x)
            return
        compute, (stores, _) = torch.cuda.current_stream(), self._copy_streams()
        x, block = x.contiguous(), host.untyped_storage().data_ptr()
        stores.wait_stream(compute)
        if block in self._read:
            stores.wait_event(self._read[block])
        with torch.cuda.stream(stores):
            host.copy_(x, non_blocking=True)
        self._written[block] = done = stores.record_event()
        # The compute stream reuses x's memory once it has waited for the copy: later, when that costs nothing.
        self._leaving.append((x, done))
        if len(self._leaving) > IN_FLIGHT:
            compute.wait_event(self._leaving.popleft()[1])

    def let_go(self) -> None:
        """Have compute wait for all copies to the host, so that it may reuse the memory of what has left."""
        while self._leaving:
            torch.cuda.current_stream().wait_event(self._leaving.popleft()[1])

    def load(self, host: Tensor) -> Loading:
        """Start copying a host buffer (or rows of one) to the device; call it before the compute it may overlap."""
        self.copies.to_device += host.numel() * host.element_size()
        if not self.on_gpu:
            return Loading(host.clone(memory_format=torch.contiguous_format))
        compute, (_, loads) = torch.cuda.current_stream(), self._copy_streams()
        block = host.untyped_storage().data_ptr()
        x = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        loads.wait_stream(compute)  # x's memory may be in use by what was launched before
        if block in self._written:
            loads.wait_event(self._written[block])
        x.record_stream(loads)  # whoever drops a Loading before its wait must not free memory that is being written
        with torch.cuda.stream(loads):
            x.copy_(host, non_blocking=True)
        self._read[block] = done = loads.record_event()
        return Loading(x, done)

    def _copy_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams


@dataclass
class Loading:
    """A device tensor that is being filled."""

    x: Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The tensor, for use by what the current stream does next."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        return self.x
