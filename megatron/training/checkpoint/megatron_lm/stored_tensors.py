# SPDX-License-Identifier: Apache-2.0
"""The tensors of a ``torch_dist`` folder, any block of any of them, without process groups and without core.

The files are PyTorch's distributed checkpoint: ``.metadata`` says which tensors there are, of which chunks each
consists, and at which bytes of which ``__RANK_N.distcp`` each chunk lies.
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
    """What lies in ``folder``. Raises Refusal where that cannot be read."""

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

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block [``offset``, ``offset + shape``) of a tensor; zeros where it lies outside."""
        out = torch.zeros(tuple(shape), dtype=self.dtype(key))
        inside = 1
        for first, length, size in zip(offset, shape, self.shape(key)):
            inside *= max(min(first + length, size) - first, 0)
        copied = 0
        for chunk in self._tensors[key].chunks:
            at = tuple(chunk.offsets)
            if overlap(offset, shape, at, chunk.sizes) is None:
                continue
            data = self._read(key, at)
            if not isinstance(data, Tensor) or data.dtype != out.dtype or data.numel() != chunk.sizes.numel():
                raise Refusal(f"checkpoint {self.folder}: {key} is not the tensor that .metadata describes")
            copied += copy_overlap(out, offset, data.reshape(tuple(chunk.sizes)), at)
        if copied != inside:
            raise Refusal(f"checkpoint {self.folder}: {key} is not whole, {inside - copied} numbers are missing")
        return out

    def object(self, key: str) -> Any:
        """Something that is no tensor, by the name that core's ShardedObject has; None where there is none."""
        for name, places in self._places.items():
            if name.rpartition("/")[0] == key and name not in self._tensors:
                found = self._read(name, next(iter(places)))
                return found[0] if isinstance(found, list) and len(found) == 1 else found
        return None

    def _read(self, key: str, at: Shape | None) -> Any:
        """What lies in the files under a name, of a tensor the chunk at an offset."""
        place = self._places.get(key, {}).get(at)
        if place is None:
            raise Refusal(f"checkpoint {self.folder}: .metadata does not say where {key} lies")
        with unpickle.parts_of(self._checked.file(place.relative_path)) as read:
            return unpickle.read_bytes(read(place.offset, place.length), self.folder / key)


def overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> list[tuple[int, int]] | None:
    """[first, stop) in every dimension of what two blocks have in common; None if that is nothing."""
    common = [
        (max(first, second), min(first + length, second + other_length))
        for first, length, second, other_length in zip(offset, shape, other, other_shape)
    ]
    return None if any(first >= stop for first, stop in common) else common


def copy_overlap(out: Tensor, offset: Sequence[int], data: Tensor, at: Sequence[int]) -> int:
    """Copy what two blocks of one tensor have in common from ``data`` to ``out``; how many numbers that were."""
    common = overlap(offset, out.shape, at, data.shape)
    if common is None:
        return 0
    into = tuple(slice(first - start, stop - start) for (first, stop), start in zip(common, offset))
    part = data[tuple(slice(first - start, stop - start) for (first, stop), start in zip(common, at))]
    out[into] = part
    return part.numel()


# Weights that are made whole by functions, any block of any of them: what StoredTensors is to ``torch_dist`` folders.
#
# A weight is made when a block of it is asked for, and only the last one is kept, so memory holds a weight, not a
# model.


class WholeTensors:
    """The weights of ``folder``, each by the function that makes it."""

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
        """The block [``offset``, ``offset + shape``) of a tensor; zeros where it lies outside."""
        whole = self._whole(key)
        out = torch.zeros(tuple(shape), dtype=whole.dtype)
        copy_overlap(out, offset, whole, (0,) * whole.dim())
        return out

    def object(self, key: str) -> None:
        """There is nothing but tensors."""

    def _whole(self, key: str) -> Tensor:
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next one is there
            self._last = (key, self._tensors[key]())
        return self._last[1]
