# SPDX-License-Identifier: Apache-2.0
"""Read any block of any tensor of a ``torch_dist`` folder, without process groups and without core.

The files are PyTorch's distributed checkpoint: ``.metadata`` lists the tensors, the chunks of each, and the file
(``__RANK_N.distcp``) and bytes of each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.refusal import Refusal

Shape = tuple[int, ...]


class StoredTensors:
    """The tensors in ``folder``. Raises Refusal if they cannot be read."""

    def __init__(self, folder: Checked) -> None:
        self._checked, self.folder = folder, folder.path
        metadata = folder.metadata()
        self._tensors = {key: one for key, one in metadata.state_dict_metadata.items() if hasattr(one, "chunks")}
        self._places: dict[str, dict[Shape | None, Any]] = {}
        for index, place in metadata.storage_data.items():
            offset = None if index.offset is None else tuple(index.offset)
            self._places.setdefault(index.fqn, {})[offset] = place

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> Shape:
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """The block [``offset``, ``offset + shape``) of a tensor, perhaps into ``out``; zeros outside of the tensor."""
        dtype = self.dtype(key)
        out = torch.zeros(tuple(shape), dtype=dtype) if out is None else out.zero_()
        inside = 1
        for first, length, size in zip(offset, shape, self.shape(key)):
            inside *= max(min(first + length, size) - first, 0)
        copied = 0
        for chunk in self._tensors[key].chunks:
            at = tuple(chunk.offsets)
            if overlap(offset, shape, at, chunk.sizes) is None:
                continue
            data = self._read(key, at)
            if not isinstance(data, Tensor) or data.dtype != dtype or data.numel() != chunk.sizes.numel():
                raise Refusal(f"checkpoint {self.folder}: {key} is not the tensor that .metadata describes")
            copied += copy_overlap(out, offset, data.reshape(tuple(chunk.sizes)), at)
        if copied != inside:
            raise Refusal(f"checkpoint {self.folder}: {key} is incomplete, {inside - copied} numbers are missing")
        return out

    def object(self, key: str) -> Any:
        """The object (not a tensor) stored under the key of core's ShardedObject, its first part; None if none is."""
        names = (name for name in self._places if name.rpartition("/")[0] == key and name not in self._tensors)
        return next((self.part_of_object(name, complete=False) for name in names), None)

    def part_of_object(self, name: str, *, complete: bool = True) -> Any:
        """What is stored under the unique key of a ShardedObject.

        Args:
            complete: refuse objects that would become an :class:`Unread`.
        """
        stored = self._read(name, None, complete=complete)
        return stored[0] if isinstance(stored, list) and len(stored) == 1 else stored

    def _read(self, key: str, at: Shape | None, *, complete: bool = False) -> Any:
        """The object with this key, or the chunk of a tensor at an offset."""
        place = self._places.get(key, {}).get(at)
        if place is None:
            raise Refusal(f"checkpoint {self.folder}: .metadata does not say where {key} lies")
        with unpickle.parts_of(self._checked.file(place.relative_path)) as read:
            return unpickle.read_bytes(read(place.offset, place.length), self.folder / key, complete=complete)


def overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> list[tuple[int, int]] | None:
    """[first, stop) in every dimension of the intersection of two blocks; None if it is empty."""
    common = [
        (max(first, second), min(first + length, second + other_length))
        for first, length, second, other_length in zip(offset, shape, other, other_shape)
    ]
    return None if any(first >= stop for first, stop in common) else common


def copy_overlap(out: Tensor, offset: Sequence[int], data: Tensor, at: Sequence[int]) -> int:
    """Copy the intersection of two blocks of one tensor from ``data`` to ``out``; returns its number of elements."""
    common = overlap(offset, out.shape, at, data.shape)
    if common is None:
        return 0
    into = tuple(slice(first - start, stop - start) for (first, stop), start in zip(common, offset))
    part = data[tuple(slice(first - start, stop - start) for (first, stop), start in zip(common, at))]
    out[into] = part
    return part.numel()


class WholeTensors:
    """The interface of `StoredTensors`, for formats in which a function reads each complete weight.

    A weight is read when a block of it is requested, and only the last one is kept, so memory holds one weight.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        self.folder, self._tensors = folder, tensors
        self._last: tuple[str, Tensor] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> Shape:
        return tuple(self._whole(key).shape)

    def dtype(self, key: str) -> torch.dtype:
        return self._whole(key).dtype

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block [``offset``, ``offset + shape``) of a tensor; zeros outside of the tensor."""
        whole = self._whole(key)
        out = torch.zeros(tuple(shape), dtype=whole.dtype)
        copy_overlap(out, offset, whole, (0,) * whole.dim())
        return out

    def object(self, key: str) -> None:
        """None: these formats have only tensors."""

    def _whole(self, key: str) -> Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None  # free its memory before the next one is read
            self._last = (key, self._tensors[key]())
        return self._last[1]
