# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer states as parts of a checkpoint: the same files from every grid and every ZeRO stage.

megatron-core writes a parameter as one block of a regular grid. FSDP cuts by rows, unevenly and without regard to
layouts in which a parameter is several blocks (SwiGLU's first layer), so a shard is written as the pieces of core's
blocks that it holds, and nothing is gathered. Optimizer states have the layout of core's distributed optimizer
(``fully_reshardable``), which writes and reads ZeRO 1 itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.training.refusal import Refusal

# Copied for every call: core writes process groups into it.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
PARTITIONED = "is_expert_parallel"  # core's name: here, the groups of partitioned positions


@dataclass(frozen=True)
class Piece:
    """Some rows of what this rank holds of a parameter, and their place in the checkpoint."""

    place: ShardedTensor  # without data
    rows: slice

    def of(self, tensor: Tensor, prefix: str = "") -> ShardedTensor:
        """These rows of ``tensor``, which has the shape of what this rank holds."""
        data = to_local_if_dtensor(tensor).detach()[self.rows].reshape(self.place.local_shape)
        return replace(self.place, key=prefix + self.place.key, data=data, dtype=data.dtype)

    def put(self, loaded: Tensor, tensor: Tensor) -> None:
        """Write loaded rows into ``tensor``."""
        target = to_local_if_dtensor(tensor).detach()[self.rows]
        target.copy_(loaded.reshape(target.shape))


@dataclass(frozen=True)
class Places:
    """Where the parameters of a model chunk lie in a checkpoint."""

    pieces: dict[nn.Parameter, list[Piece]]
    others: list[Any]  # what core saves beside parameters


def find_places(chunk: nn.Module) -> Places:
    """Ask core where it would save whole parameters, and cut its blocks down to the rows that are here."""
    with _parameters_without_data(chunk) as owners:
        state = chunk.sharded_state_dict(metadata=dict(METADATA))
        apply_factories(state)
    pieces: dict[nn.Parameter, list[Piece]] = {parameter: [] for parameter in owners.values()}
    others = []
    for block in nested_values(state):
        owner = owners.get(block.data.untyped_storage()._cdata) if isinstance(block, ShardedTensor) else None
        if owner is None:
            others.append(block)
        else:
            pieces[owner] += _cut(block, owner)
    return Places(pieces, others)


@contextmanager
def _parameters_without_data(chunk: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Put stand-ins of whole size in place of the parameters; yields which one each storage stands for."""
    owned = [
        (module, name) for module in chunk.modules() for name, found in module._parameters.items() if found is not None
    ]
    real = {(module, name): module._parameters[name] for module, name in owned}
    stand_ins = {
        parameter: nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        for parameter in real.values()
    }
    try:
        for (module, name), parameter in real.items():
            vars(stand_ins[parameter]).update(vars(parameter))
            module._parameters[name] = stand_ins[parameter]
        yield {stand_in.untyped_storage()._cdata: parameter for parameter, stand_in in stand_ins.items()}
    finally:
        for (module, name), parameter in real.items():
            module._parameters[name] = parameter


def _cut(block: ShardedTensor, parameter: nn.Parameter) -> list[Piece]:
    """The piece of core's block that lies in this rank's rows of the parameter, if any."""
    first, count = rows_here(parameter)
    start = block.data.storage_offset() // prod(parameter.shape[1:])  # the block's first row in the parameter
    low, high = max(start, first), min(start + block.local_shape[0], first + count)
    if low >= high:
        return []
    axis, replica = block.prepend_axis_num, block.replica_id
    offset = list(block.global_offset)
    offset[axis] += low - start
    place = replace(
        block,
        data=None,
        local_shape=(1,) * axis + (high - low, *block.local_shape[1:]),
        global_offset=tuple(offset),
        axis_fragmentations=None,  # no regular grid
        prepend_axis_num=0,
        replica_id=(*replica[:-1], 0) if isinstance(parameter, DTensor) else replica,  # (pp, tp, dp x cp)
    )
    return [Piece(place, slice(low - first, high - first))]


def rows_here(parameter: Tensor) -> tuple[int, int]:
    """(first row, number of rows) that this rank holds: all of them, or FSDP's share, as torch.chunk cuts."""
    rows = parameter.size(0)
    if not isinstance(parameter, DTensor):
        return 0, rows
    share = ceil(rows / parameter.device_mesh.size())
    return min(parameter.device_mesh.get_local_rank() * share, rows), parameter.to_local().size(0)


def weights_state(places: Places, dtype: torch.dtype) -> dict[str, Any]:
    """The weights under FSDP, as other ZeRO stages save them: in the compute dtype."""
    state: dict[str, Any] = {f"other {index}": other for index, other in enumerate(places.others)}
    for number, (parameter, pieces) in enumerate(places.pieces.items()):
        local = to_local_if_dtensor(parameter).to(dtype)
        state[f"{number}"] = {f"{index}": piece.of(local) for index, piece in enumerate(pieces)}
    return state


def load_weights(loaded: dict[str, Any], places: Places) -> None:
    """Take over what :func:`weights_state` asked for."""
    for number, (parameter, pieces) in enumerate(places.pieces.items()):
        for index, piece in enumerate(pieces):
            piece.put(loaded[f"{number}"][f"{index}"], parameter)


def optimizer_state(optimizer: MegatronOptimizer, places: Iterable[Places], *, loading: bool) -> dict[str, Any]:
    """Main weights and states of a replicated or an FSDP optimizer, as core's distributed optimizer saves them."""
    part, _ = parts_of(optimizer)
    inner = part.optimizer
    if loading:
        for one in parts_of(optimizer):
            if one is not None:
                one.init_state_fn(one.optimizer, one.config)
    steps = {float(state["step"]) for state in inner.state.values() if "step" in state}
    shared = {"step": steps.pop()} if steps else {}  # of Transformer Engine's Adam, the groups hold it
    groups = [{key: value for key, value in group.items() if key != "params"} | shared for group in inner.param_groups]
    state = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": METADATA["distrib_optim_sharding_type"],
        "param_state": {
            f"{number}": {
                name: {f"{index}": piece.of(tensor, f"optimizer.state.{name}.") for index, piece in enumerate(pieces)}
                for name, tensor in _tensors(optimizer, parameter).items()
            }
            for number, (parameter, pieces) in enumerate(_parameters(places))
        },
    }
    if getattr(part, "grad_scaler", None):
        state["grad_scaler"] = part.grad_scaler.state_dict()
    return state


def load_optimizer(optimizer: MegatronOptimizer, loaded: dict[str, Any], places: Iterable[Places]) -> None:
    """Take over what :func:`optimizer_state` asked for.

    Raises:
        Refusal: the checkpoint's parameters are grouped in another way.
    """
    part, rows = parts_of(optimizer)
    saved = loaded["optimizer"]["param_groups"]
    _load_groups(part, saved)
    if rows is not None:
        _load_groups(rows, saved)
    for number, (parameter, pieces) in enumerate(_parameters(places)):
        for name, tensor in _tensors(optimizer, parameter).items():
            for index, piece in enumerate(pieces):
                piece.put(loaded["param_state"][f"{number}"][name][f"{index}"], tensor)
        state = _part_with(optimizer, parameter).optimizer.state[_main(parameter)]
        if "step" in state:
            state["step"].fill_(saved[0]["step"])
    if getattr(part, "grad_scaler", None) and "grad_scaler" in loaded:
        part.grad_scaler.load_state_dict(loaded["grad_scaler"])


def core_optimizer_state(optimizer: MegatronOptimizer, models: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The same with ZeRO 1, made by core's distributed optimizer.

    Partitioned positions have a second one in core's chain. Groups and step, which are equal in both, are saved once:
    a checkpoint looks as if there were one.
    """
    part, rows = parts_of(optimizer)
    with _little_garbage():
        state = part.sharded_state_dict(models, is_loading=loading, metadata=dict(METADATA))
    if rows is not None:
        if loading and rows.get_parameters() and not rows.optimizer.state:
            rows.load_state_dict(rows.state_dict())  # makes states: Transformer Engine's Adam has none before a step
        state["positions"] = rows.sharded_param_state_fully_reshardable(models, loading, dict(METADATA))
    return state


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Keep a collection within from walking over all that the program has imported: 0.3 s of a small save.

    A program that has frozen that itself keeps it so.
    """
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def load_core_optimizer(optimizer: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    """Take over what :func:`core_optimizer_state` asked for."""
    part, rows = parts_of(optimizer)
    positions = loaded.pop("positions", None)
    part.load_state_dict(loaded)
    if rows is None:
        return
    saved = loaded["optimizer"]["param_groups"]
    _load_groups(rows, saved)
    for state in rows.optimizer.state.values():
        if "step" in state:
            state["step"].fill_(saved[0]["step"])
    rows.load_parameter_state_from_fully_reshardable(positions)


def _load_groups(part: MegatronOptimizer, saved: Sequence[dict[str, Any]]) -> None:
    known = {_identity(group): group for group in saved}
    for group in part.optimizer.param_groups:
        if _identity(group) not in known:
            raise Refusal(
                "the checkpoint's optimizer has no group of parameters with these multipliers of weight decay and "
                f"learning rate ({_identity(group)}): give --decoupled-lr as there, or pass --no-load-optim"
            )
        group.update(known[_identity(group)] | {PARTITIONED: group[PARTITIONED]})


def parts_of(optimizer: MegatronOptimizer) -> tuple[MegatronOptimizer, MegatronOptimizer | None]:
    """The optimizers in core's chain: that of nearly everything, and that of partitioned positions if there are any."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts[0], parts[1] if len(parts) > 1 else None


def _part_with(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> MegatronOptimizer:
    part, rows = parts_of(optimizer)
    return part if getattr(parameter, "allreduce", True) else rows


def _parameters(places: Iterable[Places]) -> Iterator[tuple[nn.Parameter, Sequence[Piece]]]:
    for one in places:
        yield from one.pieces.items()


def _main(parameter: nn.Parameter) -> Tensor:
    """The fp32 weight that the optimizer updates."""
    return getattr(parameter, "main_param", parameter)


def _tensors(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    main, inner = _main(parameter), _part_with(optimizer, parameter).optimizer
    states = {name: value for name, value in inner.state[main].items() if name != "step"}
    return {"param": main, **states}


def _identity(group: dict[str, Any]) -> tuple:
    """What makes two groups the same, in a checkpoint or here; whether positions are partitioned does not count."""
    return tuple(group[key] for key in param_group_identifier_keys if key != PARTITIONED)
