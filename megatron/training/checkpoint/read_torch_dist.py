# SPDX-License-Identifier: Apache-2.0
"""Read a folder in core's format ``torch_dist`` without running code that the files contain.

core reads ``.metadata``, and every object among the tensors, with the plain unpickler. This module reads both with
:mod:`unpickle`, and also ``common.pt`` and the tensors. Transformer Engine unpickles the states of its FP8 layers
itself, so those are checked first.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.futures import Future

from megatron.training.checkpoint.hugging_face.safetensors_folder import readable
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.refusal import Refusal, refuse_together

EXTRA_STATE = "_extra_state"


def load_state(state: dict[str, Any], path: Checked, *, whole_tensors_once: bool = True) -> dict[str, Any]:
    """Load a sharded state as core's ``dist_checkpointing.load`` does. All ranks call it.

    Args:
        whole_tensors_once: whether to check that the parts requested by all ranks cover each tensor exactly once.

    Raises:
        Refusal: on every rank; a tensor is damaged or missing, has another shape, or could run code.
    """
    with _refusals(path), readable(path.path):
        loaded = _load(state, path, whole_tensors_once)
    check_engine_states(loaded, path)
    return loaded


def _load(state: dict[str, Any], path: Checked, whole_tensors_once: bool) -> dict[str, Any]:
    """The steps of core's ``dist_checkpointing.load``, which from 0.17 on reads ``common.pt`` itself."""
    force_all_tensors_to_non_fp8(state)
    state, not_stored, factories = load_preprocess(state)
    loaded = path.common()
    merge(loaded, not_stored)
    state, _ = extract_sharded_base(state)
    local, all_ranks = determine_global_metadata(state) if whole_tensors_once else (None, None)
    state, _, _ = validate_integrity_and_strict_load(
        state, parse_strict_flag("assume_ok_unexpected"), whole_tensors_once, local, all_ranks, None
    )
    merge(loaded, _LoadTensors(path).load(state, path.path))
    return apply_factory_merges(loaded, factories)


def tensors_in(path: Checked) -> dict[str, ShardedTensor]:
    """Shapes and dtypes of all tensors of a checkpoint. Raises Refusal."""
    with _refusals(path), readable(path.path):
        return _LoadTensors(path).load_tensors_metadata(path.path, _Reader(path).read_metadata())


@contextmanager
def _refusals(path: Checked) -> Iterator[None]:
    """If torch has wrapped a Refusal in a CheckpointException, raise that Refusal."""
    try:
        yield
    except Refusal as refusal:
        inner: BaseException | None = refusal.__cause__
        if isinstance(inner, CheckpointException):
            first = next(iter(inner.failures.values()))[0]
            if isinstance(first, Refusal):
                raise Refusal(f"checkpoint {path}: {first}") from None
        raise


class _Reader(FileSystemReader):
    """PyTorch's reader, except that it reads ``.metadata`` only once and unpickles everything with :mod:`unpickle`."""

    def __init__(self, checked: Checked) -> None:
        super().__init__(str(checked))
        self._checked = checked
        self._metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._checked.metadata()
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        of_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            of_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in of_file.items():
            with unpickle.parts_of(self._checked.file(name)) as read:
                for item in items:
                    place = self.storage_data[item.storage_index]
                    data = read(place.offset, place.length)
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(data))
                    else:
                        self._put(item, unpickle.read_bytes(data, item.storage_index.fqn), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _put(item: ReadItem, stored: Any, planner: LoadPlanner) -> None:
        """Copy the requested part of a stored tensor into the state."""
        target = planner.resolve_tensor(item).detach()
        corner = item.storage_offsets
        if isinstance(stored, torch.Tensor) and stored.dim() == len(corner):
            stored = stored[tuple(slice(first, first + length) for first, length in zip(corner, item.lengths))]
        if not isinstance(stored, torch.Tensor) or stored.shape != target.shape:
            raise Refusal(f"{item.storage_index.fqn} is not the tensor that .metadata describes")
        target.copy_(stored)
        planner.commit_tensor(item, target)


class _Planner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        read = unpickle.read_bytes(value.getvalue(), name, complete=True)
        set_element(self.original_state_dict, self.mappings[name], read)


class _LoadTensors(TorchDistLoadShardedStrategy):
    """core's strategy with the reader and planner above.

    core's ``load`` creates its reader and planner itself, so this class repeats it line by line.
    """

    def __init__(self, checked: Checked) -> None:
        super().__init__()
        self._checked = checked

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        wanted = [part for part in nested_values(sharded_state_dict) if isinstance(part, ShardedTensor)]
        planner = _Planner(
            shapes_validation_sharded_tensors=[part for part in wanted if not part.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={part.key: part for part in wanted if part.allow_shape_mismatch},
        )
        by_key, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, True)
        reader = _Reader(self._checked)
        refuse_together(reader.read_metadata)  # on an error here, torch would print a traceback and try other files
        _load_state_dict(state, reader, planner=planner)
        tensors = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(tensors, flat, renamed)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def check_engine_states(loaded: Any, where: object) -> None:
    """Refuse states of Transformer Engine's layers that could run code: it reads them with the plain unpickler."""
    items = loaded.items() if isinstance(loaded, dict) else enumerate(loaded) if isinstance(loaded, list) else ()
    for key, value in items:
        if isinstance(key, str) and key.endswith(EXTRA_STATE):
            if isinstance(value, torch.Tensor):
                unpickle.check_engine_state(value.detach().cpu().numpy().tobytes(), f"{where}: {key}")
            elif isinstance(value, io.BytesIO):
                unpickle.check_plain(value.getvalue(), f"{where}: {key}")
        else:
            check_engine_states(value, where)
