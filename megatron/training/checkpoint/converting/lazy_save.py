# SPDX-License-Identifier: Apache-2.0
"""Save a checkpoint of tensors that are made one at a time, when their turn to be written comes.

megatron-core's own strategy wants every tensor at once; this one lets a laptop write a model larger than its memory.
The format is the same: PyTorch's distributed checkpoint, which core calls ``torch_dist``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron.training.checkpoint.hugging_face.llama_weights import Piece
from megatron.training.checkpoint.hugging_face.safetensors_folder import cause

Compute = Callable[[ShardedTensor], Tensor]


class LazySave(SaveShardedStrategy):
    """A strategy for ``dist_checkpointing.save`` on one process.

    Args:
        compute: makes the data of a ShardedTensor, whose own may be on the meta device; called in the state's order.
        done: called after each tensor.
    """

    can_handle_sharded_objects = True

    def __init__(self, compute: Compute, done: Callable[[], Any]) -> None:
        super().__init__("torch_dist", 1)
        self.compute, self.done = compute, done

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the tensors and objects. Raises OSError where it cannot be done."""
        planner = _LazyPlanner(list(nested_values(sharded_state_dict)), self.compute, self.done)
        # Without reading ahead, which GPUs would get a stream for; the whole folder is synced later, by new_folder.
        writer = torch_checkpoint.FileSystemWriter(
            str(checkpoint_dir), thread_count=1, per_thread_copy_ahead=0, sync_files=False
        )
        try:
            torch_checkpoint.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except torch_checkpoint.CheckpointException as error:  # a BaseException that wraps the reason
            reason = cause(error)
            raise OSError(getattr(reason, "strerror", None) or str(reason)) from error


class _LazyPlanner(SavePlanner):
    """What to write, from core's descriptions of tensors; the data only on request."""

    def __init__(self, parts: list[ShardedTensor | ShardedObject], compute: Compute, done: Callable[[], Any]) -> None:
        self.parts = {_index(part): part for part in parts}
        self.compute, self.done = compute, done

    def set_up_planner(self, state_dict: Any, *_: Any, **__: Any) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(index, part) for index, part in self.parts.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        part = self.parts[replace(write_item.index, index=None)]
        if isinstance(part, ShardedObject):
            packed = io.BytesIO()
            torch.save([part.data], packed)
            return packed
        data = self.compute(part).reshape(part.local_shape)
        if data.dtype != part.dtype:
            raise ValueError(f"{part.key} came as {data.dtype}, not as {part.dtype}")
        self.done()
        return data


def _index(part: ShardedTensor | ShardedObject) -> MetadataIndex:
    if isinstance(part, ShardedObject):
        return MetadataIndex(part.unique_key)
    return MetadataIndex(part.key, torch.Size(part.global_offset))


def _item(index: MetadataIndex, part: ShardedTensor | ShardedObject) -> WriteItem:
    if isinstance(part, ShardedObject):
        return WriteItem(index, WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(part.local_shape))
    tensor = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(part.global_shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=tensor)


def sharded(piece: Piece, layers: int, dtype: torch.dtype, device: str = "meta") -> ShardedTensor:
    """A piece as megatron-core describes a part of a tensor; with the default device it takes no memory."""
    stacked = int(piece.layer is not None)
    offsets = [(0, piece.layer, layers)] * stacked
    offsets += [(stacked, piece.part, piece.parts)] if piece.parts > 1 else []
    data = torch.empty((1,) * stacked + piece.shape, dtype=dtype, device=device)
    # The vocabulary is padded to a size that depends on TP: the checkpoint may have more rows or fewer.
    vocabulary = not stacked and data.dim() == 2
    return ShardedTensor.from_rank_offsets(piece.key, data, *offsets, allow_shape_mismatch=vocabulary)
