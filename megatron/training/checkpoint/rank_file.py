# SPDX-License-Identifier: Apache-2.0
"""Write a rank's part of a checkpoint in megatron-core's ``torch_dist`` format: one file, without extra processes.

For each save, core's FileSystemWriterAsync forks two processes per rank and spawns a third that imports torch again.
That takes seconds even for small files, and the processes outlive a rank that is killed. With this module a rank writes
its file itself, in any thread; the slow parts (checksums, writing, syncing) release Python's lock. Names, contents and
metadata of the files are the same as core's.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron.context_parallel.fpdt.host_store import HostPool
from megatron.platform.streams import COMPUTE, STORES, Event, Streams
from megatron.training.checkpoint.megatron_lm.file_list import Sum

BUFFER = 1 << 20  # bytes


class _Summed(io.FileIO):
    """A file that computes the CRC-32 of what is written to it."""

    crc32 = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.crc32 = zlib.crc32(memoryview(data).cast("B")[:written], self.crc32)
        return written


@contextmanager
def new_file(path: Path, sums: dict[str, Sum]) -> Iterator[io.BufferedWriter]:
    """Open a new file for sequential writing; at the end it is synced to the disk and its sum is put into ``sums``."""
    raw = _Summed(path, "w")
    file = io.BufferedWriter(raw, BUFFER)
    try:
        yield file
        file.flush()
        os.fsync(raw.fileno())
        sums[path.name] = Sum(raw.tell(), raw.crc32)
    finally:
        raw.close()  # not file.close(), which would try to flush the buffer to a full disk again


def write_bytes(path: Path, data: bytes, sums: dict[str, Sum]) -> None:
    """Write a file and sync it to the disk. Raises OSError."""
    with new_file(path, sums) as file:
        file.write(data)


def packed(data: Any) -> bytes:
    """``data`` as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


class Writer(filesystem.FileSystemWriter):
    """Writes this rank's part of a plan."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.parts: list[tuple[WriteItem, Tensor | io.BytesIO]] = []  # tensors may be on a GPU

    def plan_together(self, state: dict[str, Any], planner: SavePlanner) -> Metadata | None:
        """Choose this rank's parts of ``state``; on rank 0, returns where all ranks' tensors belong. All ranks call it.

        core's planner needs no message for that; rank 0 gathers the plans for their description.
        """
        first, plans = dist.get_rank() == 0, [None] * dist.get_world_size()
        planner.set_up_planner(state, is_coordinator=first)
        own = planner.create_local_plan()
        dist.gather_object(own, plans if first else None)
        self.parts = [(item, planner.resolve_data(item)) for item in planner.finish_plan(own).items]
        return planner.create_global_plan(plans)[1] if first else None

    @property
    def bytes(self) -> int:
        """Size of this rank's tensors."""
        return sum(data.nbytes for _, data in self.parts if isinstance(data, Tensor))

    def write(self, sums: dict[str, Sum]) -> list[WriteResult]:
        """Write this rank's file, if it has any data; returns where each part lies in it. Raises OSError."""
        if not self.parts:
            return []
        name = f"__{dist.get_rank()}_0{filesystem.DEFAULT_SUFFIX}"
        with new_file(Path(self.path) / name, sums) as file, without_inner_sums():
            return [self._write_item(file, name, item, data) for item, data in self.parts]

    def _write_item(
        self, file: io.BufferedWriter, name: str, item: WriteItem, data: Tensor | io.BytesIO
    ) -> WriteResult:
        if isinstance(data, Tensor):
            data = data.detach().cpu()
            if data.untyped_storage().size() != data.nbytes:
                data = data.clone()  # torch.save writes complete storages
        try:
            return filesystem._write_item(
                self.transforms, file, data, item, name, filesystem.SerializationFormat.TORCH_SAVE
            )
        except RuntimeError as error:  # torch's zip writer fails again when it is closed; find the original OSError
            chain: BaseException | None = error
            while chain is not None and not isinstance(chain, OSError):
                chain = chain.__context__
            raise chain or error from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]], sums: dict[str, Sum]) -> None:
        """Write ``.metadata``: where each tensor of all ranks lies."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        # As text: Python before 3.13 cannot unpickle a Path of Python 3.13, so that core could not read the checkpoint.
        metadata.storage_meta = replace(self.storage_meta(), checkpoint_id=str(self.path))
        write_bytes(Path(self.path) / filesystem._metadata_fn, pickle.dumps(metadata), sums)


@contextmanager
def without_inner_sums() -> Iterator[None]:
    """Switch off torch.save's checksums of each tensor: nothing checks them, and they take longer than writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class HostCopies:
    """Copies of a rank's tensors in host memory, made while the GPU computes; the memory is reused by later saves."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.pool = HostPool(streams)

    def begin(self) -> Event:
        """Record that the tensors are computed; call it in the thread that computes. Pass the event to :meth:`take`."""
        return self.streams.record(COMPUTE)

    def take(self, writer: Writer, computed: Event) -> None:
        """Replace a writer's tensors by copies, which are complete on return. Any thread may call it."""
        device = self.streams.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # a new thread uses GPU 0
            self.streams.wait(STORES, computed)
            writer.parts = [(item, self._copy(data)) for item, data in writer.parts]
            done = self.streams.record(STORES)
            if done is not None:
                done.synchronize()

    def _copy(self, data: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
        if not isinstance(data, Tensor) or not data.numel():
            return data
        copy = self.pool.empty(data.shape, data.dtype)
        self.streams.copy(STORES, copy, data.detach())
        return copy
