# SPDX-License-Identifier: Apache-2.0
"""Save a checkpoint whose tensors are computed one at a time, each just before it is written.

megatron-core's own strategy needs all tensors at once; with this one, a model larger than memory can be written. The
format is the same: PyTorch's distributed checkpoint, which core calls ``torch_dist``.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron.training.checkpoint.sharded_state import METADATA
from megatron.training.families.llama.llama_weights import Piece
from megatron.training.refusal import reason

Compute = Callable[[ShardedTensor], Tensor]


def save_lazily(state: dict[str, Any], folder: Path, compute: Compute, done: Callable[[], Any]) -> None:
    """Write a complete folder, as ``dist_checkpointing.save`` does, on one process.

    Args:
        compute: returns the data of a ShardedTensor, which may be on the meta device; called in order.
        done: called after each tensor.

    Raises:
        OSError: it cannot be written.
    """
    sharded, common = save_preprocess({"content_metadata": dict(METADATA), **state})
    torch.save(common, folder / "common.pt")
    planner = _LazyPlanner(list(nested_values(sharded)), compute, done)
    # No read-ahead, because it would create a GPU stream; new_folder syncs the complete folder later.
    writer = torch_checkpoint.FileSystemWriter(str(folder), thread_count=1, per_thread_copy_ahead=0, sync_files=False)
    try:
        torch_checkpoint.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except torch_checkpoint.CheckpointException as error:
        raise OSError(reason(cause(error))) from error
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def cause(error: torch_checkpoint.CheckpointException) -> BaseException:
    """The error inside torch's exception, a BaseException; an interruption (KeyboardInterrupt) is raised again.

    Closing an incomplete file, after a full disk or an interruption, raises another error that hides the first one.
    """
    chain = [next(iter(error.failures.values()))[0]]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    first = [link for link in chain if isinstance(link, (OSError, KeyboardInterrupt, SystemExit))]
    if first and not isinstance(first[-1], OSError):
        raise first[-1]
    return first[-1] if first else chain[0]


class _LazyPlanner(SavePlanner):
    """Plans the save from core's descriptions of tensors; the data are computed on request."""

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
            raise ValueError(f"{part.key} was computed in {data.dtype}, not in {part.dtype}")
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
    """A piece as core's ShardedTensor; on the meta device it takes no memory."""
    places = [(piece.layer, layers)] if piece.layer is not None and piece.stacked else []
    places += [(piece.expert, piece.experts)] if piece.expert is not None else []
    offsets, stacked = [(dim, *place) for dim, place in enumerate(places)], len(places)
    offsets += [(stacked, piece.part, piece.parts)] if piece.parts > 1 else []
    data = torch.empty((1,) * stacked + piece.shape, dtype=torch.float32 if piece.wide else dtype, device=device)
    # The vocabulary is padded to a size that depends on TP: the checkpoint may have more rows or fewer.
    vocabulary = not stacked and data.dim() == 2
    return ShardedTensor.from_rank_offsets(piece.key, data, *offsets, allow_shape_mismatch=vocabulary)


def empty_extra_states(parts: Iterable[ShardedTensor]) -> list[ShardedObject]:
    """The extra states that core's linear layers look for in a checkpoint; without FP8 they are empty."""
    states = {}
    for part in parts:
        module, _, kind = re.sub(r"\.weight\.\w+$", ".weight", part.key).rpartition(".")
        name = module.rpartition(".")[2]
        if kind == "weight" and (name.startswith("linear_") or name in ("in_proj", "out_proj", "eh_proj")):
            # A weight has two dims of its own; those before them are its layer and its expert.
            shape, first = part.global_shape[:-2] or (1,), part.global_offset[:-2] or (0,)
            for step in itertools.product(*(range(size) for size in part.local_shape[:-2])):  # all experts in one part
                at = tuple(map(sum, zip(first, step))) if step else first
                states[module, at] = ShardedObject(f"{module}._extra_state", None, shape, at)
    return list(states.values())
