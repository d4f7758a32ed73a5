# SPDX-License-Identifier: Apache-2.0
"""Read a folder in core's format ``torch_dist`` without running code that the files contain.

core reads ``.metadata``, and every object among the tensors, with the plain unpickler. This module follows the steps of
core's ``dist_checkpointing.load``, but :class:`StoredTensors` reads the parts, with :mod:`unpickle`. Transformer Engine
unpickles the states of its FP8 layers itself, so those are checked first.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

from megatron.training.checkpoint.hugging_face.safetensors_folder import readable
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors
from megatron.training.refusal import Refusal, refuse_together

EXTRA_STATE = "_extra_state"


def load_state(state: dict[str, Any], path: Checked, *, whole_tensors_once: bool = True) -> dict[str, Any]:
    """Load a sharded state as core's ``dist_checkpointing.load`` does. All ranks call it.

    Args:
        whole_tensors_once: whether to check that the parts requested by all ranks cover each tensor exactly once.

    Raises:
        Refusal: on every rank; a tensor is damaged or missing, has another shape, or could run code.
    """
    with readable(path.path):
        force_all_tensors_to_non_fp8(state)
        state, not_stored, factories = load_preprocess(state)
        parts, _ = extract_sharded_base(state)
        if whole_tensors_once:
            validate_sharding_integrity(determine_global_metadata(parts)[1])
        loaded = refuse_together(lambda: _read(parts, path))
        loaded = apply_factory_merges(merge(loaded, not_stored), factories)
    check_engine_states(loaded, path)
    return loaded


def _read(parts: dict[str, Any], path: Checked) -> dict[str, Any]:
    """The common state, and the parts that this rank wants; tensors are read into the memory that they have."""
    stored = StoredTensors(path)

    def read(part: ShardedTensor | ShardedObject) -> Any:
        if isinstance(part, ShardedObject):
            return stored.part_of_object(part.unique_key)
        if part.key not in stored:
            raise Refusal(f"checkpoint {path} has no {part.key}")
        shape, own = stored.shape(part.key), tuple(part.global_shape)
        if shape != own and not (part.allow_shape_mismatch and shape[1:] == own[1:]):
            raise Refusal(f"checkpoint {path}: {part.key} is {list(shape)}, but this run requires {list(own)}")
        block = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        stored.read(part.key, part.global_offset, block, part.data.detach().view(block))
        return part.data.detach()

    with readable(path.path):  # here, so that an error of any kind on one rank is a Refusal, which stops the others too
        return merge(path.common(), dict_list_map_outplace(read, parts))


def check_engine_states(loaded: Any, where: object) -> None:
    """Refuse states of Transformer Engine's layers that could run code: it reads them with the plain unpickler."""
    items = loaded.items() if isinstance(loaded, dict) else enumerate(loaded) if isinstance(loaded, list) else ()
    for key, value in items:
        if isinstance(key, str) and key.endswith(EXTRA_STATE):
            if isinstance(value, torch.Tensor):
                unpickle.check_engine_state(value.detach().cpu().numpy().tobytes(), f"{where}: {key}")
            elif isinstance(value, io.BytesIO):
                unpickle.read_bytes(value.getvalue(), f"{where}: {key}", complete=True)
        else:
            check_engine_states(value, where)
