# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer states as parts of a checkpoint: the same files from every grid and every ZeRO stage.

Each rank writes the pieces that pieces.py finds. The files have the layout of core's ``fully_reshardable``, for which
core itself gathers all states of ZeRO 1 on every rank. Its ``fully_sharded_model_space`` gathers nothing, but needs
flattened ranges, which core 0.16 refuses (mapping.py, ``validate_metadata_integrity``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn

from megatron.training.checkpoint.pieces import METADATA, Held, Piece, Places
from megatron.training.refusal import Refusal

PARTITIONED = "is_expert_parallel"  # core's name: here, the groups of partitioned positions


def elements_of_shard(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> Held:
    """(first element, number of elements) of a parameter whose states this rank of core's distributed optimizer has."""
    part = _part_with(optimizer, parameter)
    if parameter not in part.model_param_gbuf_map:
        return 0, 0
    found = part._get_model_param_range_map(parameter)["param"]
    return found.start, found.size


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
    """Main weights and states of an optimizer of any ZeRO stage, as core's distributed optimizer saves them.

    Partitioned positions have a second one in core's chain. Groups and step, which are equal in both, are saved once:
    a checkpoint looks as if there were one.
    """
    part, _ = parts_of(optimizer)
    inner = part.optimizer
    if loading:
        make_states(optimizer)
    steps = {float(state["step"]) for state in inner.state.values() if "step" in state}
    shared = {"step": steps.pop()} if steps else {}  # of Transformer Engine's Adam, the groups hold it
    groups = [{key: value for key, value in group.items() if key != "params"} | shared for group in inner.param_groups]
    state = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": METADATA["distrib_optim_sharding_type"],
    }
    here = {
        f"{number}": {
            name: {f"{index}": piece.of(tensor, f"optimizer.state.{name}.") for index, piece in enumerate(pieces)}
            for name, tensor in _tensors(optimizer, parameter).items()
        }
        for number, (parameter, pieces) in enumerate(_parameters(places))
        if pieces
    }
    # What is empty here alone would count as something that ranks disagree on.
    here = {number: tensors for number, tensors in here.items() if tensors}
    if here:
        state["param_state"] = here
    if getattr(part, "grad_scaler", None):
        state["grad_scaler"] = part.grad_scaler.state_dict()
    return state


def make_states(optimizer: MegatronOptimizer) -> None:
    """Have the states there that an optimizer would make in its first step, to be loaded into."""
    for one in parts_of(optimizer):
        if one is not None:
            one.init_state_fn(one.optimizer, one.config)


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
    for one in parts_of(optimizer):
        for state in one.optimizer.state.values() if one is not None else ():
            if "step" in state:
                state["step"].fill_(saved[0]["step"])
    if getattr(part, "grad_scaler", None) and "grad_scaler" in loaded:
        part.grad_scaler.load_state_dict(loaded["grad_scaler"])


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
    """Those that the optimizer has: all but frozen ones."""
    for one in places:
        yield from ((parameter, pieces) for parameter, pieces in one.pieces.items() if parameter.requires_grad)


def _tensors(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The fp32 weight that the optimizer updates, and what it remembers; of the elements held here."""
    part = _part_with(optimizer, parameter)
    if not isinstance(part, DistributedOptimizer):
        main = getattr(parameter, "main_param", parameter)
    elif parameter in part.model_param_gbuf_map:
        group, index = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][index]
    else:
        return {}
    states = {name: value for name, value in part.optimizer.state[main].items() if name != "step"}
    return {"param": main, **states}


def _identity(group: dict[str, Any]) -> tuple:
    """What makes two groups the same, in a checkpoint or here; whether positions are partitioned does not count."""
    return tuple(group[key] for key in param_group_identifier_keys if key != PARTITIONED)
