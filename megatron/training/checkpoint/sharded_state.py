# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer states as parts of a checkpoint whose tensors are the same for every grid and ZeRO stage.

Each rank writes the pieces that it holds. The files have the layout of core's ``fully_reshardable``, for which
core itself gathers all states of ZeRO 1 on every rank. Its ``fully_sharded_model_space`` gathers nothing, but needs
flattened ranges, which core 0.16 refuses (mapping.py, ``validate_metadata_integrity``).

megatron-core saves a TP rank's part of a parameter as one block, or several (SwiGLU's first layer). FSDP splits this
part by rows, and core's distributed optimizer (ZeRO 1) at any element; such a shard may contain a fraction of a block.
So each rank writes its shard as boxes, each inside one block, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.platform.collectives import gathered_objects
from megatron.platform.core_versions import GROUP_KEYS
from megatron.training.model.fsdp import Range, local_elements
from megatron.training.refusal import Refusal

# METADATA is copied for every call, because core writes process groups into it.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Piece:
    """A part of this rank's shard of a parameter, and its place in the checkpoint."""

    place: ShardedTensor  # without data
    part: slice  # of the shard's elements, flattened

    def of(self, tensor: Tensor, prefix: str = "") -> ShardedTensor:
        """This part of ``tensor``, which has as many elements as the shard."""
        data = self._of(tensor).view(self.place.local_shape)
        return replace(self.place, key=prefix + self.place.key, data=data, dtype=data.dtype)

    def put(self, loaded: Tensor, tensor: Tensor) -> None:
        """Copy the loaded values into ``tensor``."""
        self._of(tensor).copy_(loaded.reshape(-1))

    def _of(self, tensor: Tensor) -> Tensor:
        return to_local_if_dtensor(tensor).detach().view(-1)[self.part]


@dataclass(frozen=True)
class ShardPlaces:
    """Where the parameters of a model chunk lie in a checkpoint."""

    pieces: dict[nn.Parameter, list[Piece]]
    others: list[Any]  # what core saves in addition to parameters, buffers among them

    def only(self, wanted: Callable[[nn.Parameter, str], bool]) -> ShardPlaces:
        """The places of the parameters for which ``wanted(parameter, key)`` is true, and of the buffers."""
        names = {parameter: pieces[0].place.key if pieces else "" for parameter, pieces in self.pieces.items()}
        pieces = {key: pieces for key, pieces in self.pieces.items() if wanted(key, names[key])}
        return ShardPlaces(pieces, [other for other in self.others if isinstance(other, ShardedTensor)])


def find_places(chunk: nn.Module, shard_of: Callable[[nn.Parameter], Range] | None = None) -> ShardPlaces:
    """Ask core where it would save complete parameters, and reduce its blocks to the elements of this rank's shards.

    Args:
        shard_of: a parameter's elements on this rank, disjoint over the ranks of DP x CP; default: those that the
            parameter itself holds.
    """
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
            replicated = shard_of is None and not isinstance(owner, DTensor)
            pieces[owner] += _cut(block, (shard_of or local_elements)(owner), replicated)
    return ShardPlaces(pieces, others)


@contextmanager
def _parameters_without_data(chunk: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace the parameters by full-size stand-ins on the meta device; yields {storage of a stand-in: parameter}."""
    owned = [
        (module, name) for module in chunk.modules() for name, value in module._parameters.items() if value is not None
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


def _cut(block: ShardedTensor, shard: Range, replicated: bool) -> list[Piece]:
    """The pieces of core's block that lie in this rank's shard of the parameter.

    Args:
        replicated: whether all ranks of DP x CP hold the same elements.
    """
    first, count = shard
    start = block.data.storage_offset()  # the block's first element in the parameter
    axis, replica = block.prepend_axis_num, block.replica_id
    pieces = []
    for begin, corner, shape in boxes(block.local_shape, first - start, first + count - start):
        offset = list(block.global_offset)
        for number, at in enumerate(corner, axis):
            offset[number] += at
        place = replace(
            block,
            data=None,
            local_shape=(1,) * axis + shape,
            global_offset=tuple(offset),
            axis_fragmentations=None,  # not a regular grid
            prepend_axis_num=0,
            replica_id=replica if replicated else (*replica[:-1], 0),  # (pp, tp, dp x cp)
        )
        pieces.append(Piece(place, slice(start + begin - first, start + begin - first + prod(shape))))
    return pieces


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Divide elements ``start`` to ``stop`` of a contiguous tensor into boxes: end of a row, full rows, start of a row.

    Elements outside the tensor are ignored.

    Yields:
        (first element, corner, shape) of each box.
    """
    start, stop = max(start, 0), min(stop, prod(shape))
    if start >= stop:
        return
    if len(shape) <= 1:
        yield start, (start,) * len(shape), (stop - start,) * len(shape)
        return
    size = prod(shape[1:])
    row, last = start // size, stop // size
    if start % size or row == last:
        end = min((row + 1) * size, stop)
        for begin, corner, inner in boxes(shape[1:], start - row * size, end - row * size):
            yield row * size + begin, (row, *corner), (1, *inner)
        row, start = row + 1, end
    if row < last:
        yield start, (row,) + (0,) * (len(shape) - 1), (last - row, *shape[1:])
        start = last * size
    if start < stop:
        for begin, corner, inner in boxes(shape[1:], 0, stop - start):
            yield start + begin, (last, *corner), (1, *inner)


PARTITIONED = "is_expert_parallel"  # core's name; here it marks groups of positions split over CP
OWN = (PARTITIONED, "fused", "foreach")  # of a group: where its states are, and how this run computes the update


def elements_of_shard(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> Range:
    """The elements of a parameter whose states this rank of core's distributed optimizer holds."""
    part = _part_with(optimizer, parameter)
    if parameter not in part.model_param_gbuf_map:  # a frozen parameter
        return 0, 0
    shard = part._get_model_param_range_map(parameter)["param"]
    return shard.start, shard.size


def weights_state(places: ShardPlaces, dtype: torch.dtype) -> dict[str, Any]:
    """The weights under FSDP, in the compute dtype as the other ZeRO stages save them."""
    state: dict[str, Any] = {f"other {index}": other for index, other in enumerate(places.others)}
    for number, (parameter, pieces) in enumerate(places.pieces.items()):
        local = to_local_if_dtensor(parameter).to(dtype)
        state[f"{number}"] = {f"{index}": piece.of(local) for index, piece in enumerate(pieces)}
    return state


def load_weights(loaded: dict[str, Any], places: ShardPlaces) -> None:
    """Copy the values loaded for :func:`weights_state` into the parameters and buffers."""
    for index, other in enumerate(places.others):
        if isinstance(other, ShardedTensor):
            other.data.copy_(loaded[f"other {index}"])
    for number, (parameter, pieces) in enumerate(places.pieces.items()):
        for index, piece in enumerate(pieces):
            piece.put(loaded[f"{number}"][f"{index}"], parameter)


def optimizer_state(optimizer: MegatronOptimizer, places: Iterable[ShardPlaces], *, loading: bool) -> dict[str, Any]:
    """Main weights and states of an optimizer of any ZeRO stage, as core's distributed optimizer saves them.

    Position embeddings that are split over CP have a second optimizer in core's chain. Groups and step are equal in
    both and are saved once, so the checkpoint looks as if there were one optimizer.
    """
    part = parts_of(optimizer)[0]
    inner = part.optimizer
    if loading:
        make_states(optimizer)
    steps = {float(state["step"]) for state in inner.state.values() if "step" in state}
    if not loading:  # rank 0 writes it, whose layers may have no adapter and thus no states
        steps = set().union(*gathered_objects(steps))
    shared = {"step": steps.pop()} if steps else {}  # Transformer Engine's Adam has it in the groups
    groups = [{key: value for key, value in group.items() if key != "params"} | shared for group in inner.param_groups]
    state = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": METADATA["distrib_optim_sharding_type"],
    }
    states = {
        f"{number}": {
            name: {f"{index}": piece.of(tensor, f"optimizer.state.{name}.") for index, piece in enumerate(pieces)}
            for name, tensor in _tensors(optimizer, parameter).items()
        }
        for number, (parameter, pieces) in enumerate(_parameters(places))
        if pieces
    }
    # If a dictionary were empty on only some ranks, core would report a difference between ranks.
    states = {number: tensors for number, tensors in states.items() if tensors}
    if states:
        state["param_state"] = states
    if getattr(part, "grad_scaler", None):
        state["grad_scaler"] = part.grad_scaler.state_dict()
    return state


def make_states(optimizer: MegatronOptimizer) -> None:
    """Allocate the states that an optimizer otherwise creates in its first step, so that they can be loaded."""
    for part in parts_of(optimizer):
        part.init_state_fn(part.optimizer, part.config)


def load_optimizer(optimizer: MegatronOptimizer, loaded: dict[str, Any], places: Iterable[ShardPlaces]) -> None:
    """Copy the values loaded for :func:`optimizer_state` into the optimizer.

    Raises:
        Refusal: the checkpoint has other groups of parameters.
    """
    saved = loaded["optimizer"]["param_groups"]
    for number, (parameter, pieces) in enumerate(_parameters(places)):
        for name, tensor in _tensors(optimizer, parameter).items():
            for index, piece in enumerate(pieces):
                piece.put(loaded["param_state"][f"{number}"][name][f"{index}"], tensor)
    for part in parts_of(optimizer):
        _load_groups(part, saved)
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(saved[0]["step"])
    main = parts_of(optimizer)[0]
    if getattr(main, "grad_scaler", None) and "grad_scaler" in loaded:
        main.grad_scaler.load_state_dict(loaded["grad_scaler"])


def _load_groups(part: MegatronOptimizer, saved: Sequence[dict[str, Any]]) -> None:
    known = {_identity(group): group for group in saved}
    for group in part.optimizer.param_groups:
        if _identity(group) not in known:
            raise Refusal(
                "the checkpoint's optimizer has no group of parameters with these multipliers of weight decay and "
                f"learning rate ({_identity(group)}): give the --decoupled-lr of its run, or pass --no-load-optim"
            )
        group.update(known[_identity(group)] | {name: group[name] for name in OWN if name in group})


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The main optimizer in core's chain, and that of the partitioned positions, if they have one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _part_with(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> MegatronOptimizer:
    return parts_of(optimizer)[0 if getattr(parameter, "allreduce", True) else -1]


def _parameters(places: Iterable[ShardPlaces]) -> Iterator[tuple[nn.Parameter, Sequence[Piece]]]:
    """The parameters that the optimizer has: all but frozen ones."""
    for of_chunk in places:
        yield from ((parameter, pieces) for parameter, pieces in of_chunk.pieces.items() if parameter.requires_grad)


def _tensors(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """For this rank's shard of the parameter: the fp32 weight that the optimizer updates, and its states."""
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
    """The values by which groups are matched: core's identifiers, except the mark of partitioned positions."""
    return tuple(group[key] for key in GROUP_KEYS if key != PARTITIONED)
