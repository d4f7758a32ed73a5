# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint's tensors in megatron-core's torch_dist format, starting no process unless there is much to write.

core's FileSystemWriterAsync forks two processes a rank for each save, and to bring home their results it spawns a
third that imports torch anew (``_get_write_results_queue``): seconds, whatever there is to write, and a process that
outlives a rank killed meanwhile. Nothing is brought home from another process here: who gathers results is this one,
so a plain queue does. Below :data:`MUCH` bytes a rank writes its file itself, by the method of PyTorch's writer that
core's is derived from. Names, contents and metadata of the files are the same.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, _item_size
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

MUCH = 1 << 30  # bytes of tensors on a rank


class SaveStrategy(TorchDistSaveShardedStrategy):
    """core's strategy, with the writer below; it names its own in ``async_save``, which this follows line by line."""

    def __init__(self, much: int = MUCH):
        super().__init__("torch_dist", 1)
        self.much = much

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write the sharded part of a state; all ranks call it.

        Raises:
            CheckpointException: a rank could not write; raised on every rank.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = Writer(checkpoint_dir, thread_count=self.thread_count, much=self.much)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key), writer, planner=planner)
        self._get_save_and_finalize_callbacks(writer, planned).execute_sync()


class Writer(FileSystemWriterAsync):
    """One rank's files: written in this process below ``much`` bytes, by core's processes above."""

    def __init__(self, path: str | Path, *, thread_count: int, much: int):
        super().__init__(path, thread_count=thread_count)
        self.much = much
        self.written: list[WriteResult] | WRAPPED_EXCEPTION | None = None  # None: core's processes write

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Write now what is small. An error is kept for ``retrieve_write_results``, where all ranks learn of it."""
        if sum(_item_size(item) for item in plan.items if item.tensor_data is not None) >= self.much:
            filesystem_async._results_queue = queue.Queue()  # core's is kept by its module, and made if there is none
            super().prepare_write_data(plan, planner)
            return
        self.thread_count = 1  # with more, PyTorch starts threads and loses their errors
        try:
            self.written = FileSystemWriter.write_data(self, plan, planner).value() if plan.items else []
        except Exception as error:
            self.written = _wrap_exception(error)

    def get_save_function_and_args(self) -> tuple[Any, Any, list]:
        """What is left to do: nothing, or core's processes."""
        return super().get_save_function_and_args() if self.written is None else (None, None, [])

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Where each tensor lies in which file, or why it could not be written."""
        return super().retrieve_write_results() if self.written is None else self.written
