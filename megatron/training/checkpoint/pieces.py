# SPDX-License-Identifier: Apache-2.0
"""Where what a rank holds of parameters lies in a checkpoint, whoever cut them.

megatron-core writes a parameter as one block of a regular grid. FSDP cuts by rows, core's distributed optimizer
(ZeRO 1) anywhere, both without regard to layouts in which a parameter is several blocks (SwiGLU's first layer). So a
shard is written as the boxes of core's blocks that it holds, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Copied for every call: core writes process groups into it.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Piece:
    """A part of what this rank holds of a parameter, and its place in the checkpoint."""

    place: ShardedTensor  # without data
    part: slice  # of the elements held here, in their order

    def of(self, tensor: Tensor, prefix: str = "") -> ShardedTensor:
        """This part of ``tensor``, which has as many elements as are held here."""
        data = self._of(tensor).view(self.place.local_shape)
        return replace(self.place, key=prefix + self.place.key, data=data, dtype=data.dtype)

    def put(self, loaded: Tensor, tensor: Tensor) -> None:
        """Write what was loaded into ``tensor``."""
        self._of(tensor).copy_(loaded.reshape(-1))

    def _of(self, tensor: Tensor) -> Tensor:
        return to_local_if_dtensor(tensor).detach().view(-1)[self.part]


@dataclass(frozen=True)
class Places:
    """Where the parameters of a model chunk lie in a checkpoint."""

    pieces: dict[nn.Parameter, list[Piece]]
    others: list[Any]  # what core saves beside parameters

    def only(self, wanted: Callable[[nn.Parameter, str], bool]) -> Places:
        """Those of some parameters, told by themselves and their names in a checkpoint, and nothing beside them."""
        names = {parameter: pieces[0].place.key if pieces else "" for parameter, pieces in self.pieces.items()}
        return Places({one: pieces for one, pieces in self.pieces.items() if wanted(one, names[one])}, [])


Held = tuple[int, int]  # first element of a parameter that is here, and how many are


def find_places(chunk: nn.Module, held: Callable[[nn.Parameter], Held] | None = None) -> Places:
    """Ask core where it would save whole parameters, and cut its blocks down to the elements that are here.

    Args:
        held: which ones, on no two ranks of DP x CP the same; default those of the parameter itself.
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
            whole = held is None and not isinstance(owner, DTensor)
            pieces[owner] += _cut(block, owner, (held or elements_here)(owner), whole)
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


def _cut(block: ShardedTensor, parameter: nn.Parameter, held: Held, whole: bool) -> list[Piece]:
    """The pieces of core's block that are among the elements held of the parameter.

    Args:
        whole: whether all ranks of DP x CP hold the same.
    """
    first, count = held
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
            axis_fragmentations=None,  # no regular grid
            prepend_axis_num=0,
            replica_id=replica if whole else (*replica[:-1], 0),  # (pp, tp, dp x cp)
        )
        pieces.append(Piece(place, slice(start + begin - first, start + begin - first + prod(shape))))
    return pieces


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Elements ``start`` to ``stop`` of a contiguous tensor, what lies outside it left out, as boxes: the end of a row,
    whole rows, the begin of a row.

    Yields:
        (first element, corner, shape) of each.
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


def elements_here(parameter: Tensor) -> Held:
    """(first element, number of elements) that this rank holds of a parameter: all of them, or FSDP's share."""
    row = prod(parameter.shape[1:])
    first, count = rows_here(parameter)
    return first * row, count * row


def rows_here(parameter: Tensor) -> tuple[int, int]:
    """(first row, number of rows) that this rank holds: all of them, or FSDP's share, as torch.chunk cuts."""
    rows = parameter.size(0)
    if not isinstance(parameter, DTensor):
        return 0, rows
    share = ceil(rows / parameter.device_mesh.size())
    return min(parameter.device_mesh.get_local_rank() * share, rows), parameter.to_local().size(0)
