# SPDX-License-Identifier: Apache-2.0
"""Read the ``.metadata`` of a ``torch_dist`` checkpoint: its tensors, and where each part of them lies.

PyTorch writes it as a pickle of PyTorch's classes. This module reads it with :class:`Machine`, creates only the classes
below, and checks each value: no path leaves the folder, and no tensor has more elements than its file has bytes for.
Everything else in it (mainly the writer's plans) is ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.training.checkpoint.megatron_lm.pickle_machine import BadPickle, Machine, Pair, Table
from megatron.training.refusal import refusing

LONGEST = 256 << 20  # bytes of a file; 50,000 parts take about ten million
DIMENSIONS = 64
LARGEST = 1 << 62  # elements in a tensor, and bytes in a file

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
DTYPES: Mapping[Pair, Any] = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}


def whole_number(value: Any) -> bool:
    """Whether ``value`` can be a length or an offset."""
    return type(value) is int and 0 <= value < LARGEST


def make_size(*parts: Any) -> torch.Size:
    """``torch.Size`` of its pickled arguments. Raises BadPickle."""
    (lengths,) = parts
    if type(lengths) not in (tuple, list) or len(lengths) > DIMENSIONS or not all(map(whole_number, lengths)):
        raise BadPickle("a shape in it is invalid")
    if prod(lengths) >= LARGEST:
        raise BadPickle("a shape in it is larger than any tensor")
    return torch.Size(lengths)


def _without_state(kind: type) -> Callable[[], Any]:
    return lambda: kind.__new__(kind)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise BadPickle("a tensor in it is not dense")
    return torch.strided


def _state(state: Any, **kinds: Callable[[Any], bool]) -> dict[str, Any]:
    """The attributes named in ``kinds``, each checked by its function; others are ignored."""
    if type(state) is not dict:
        raise BadPickle("the state of an object in it is not a dictionary")
    for name, is_valid in kinds.items():
        if not is_valid(state.get(name)):
            raise BadPickle(f"{name} of an object in it has a wrong type or value")
    return {name: state.get(name) for name in kinds}


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(type(item) in kinds for item in value)


def _dict_of(key: type, *kinds: type) -> Callable[[Any], bool]:
    return lambda value: (
        type(value) in (dict, OrderedDict)
        and all(type(item) is key for item in value)
        and all(type(item) in kinds for item in value.values())
    )


def _build_index(index: MetadataIndex, state: Any) -> None:
    vars(index).update(
        _state(state, fqn=_is(str), offset=_is(torch.Size, type(None)), index=_is(int, type(None)))
    )  # the class is frozen


def _build_place(place: _StorageInfo, state: Any) -> None:
    vars(place).update(_state(state, relative_path=_is(str), offset=whole_number, length=whole_number))
    name = place.relative_path
    if not name.isprintable() or "/" in name or "\\" in name or name in ("", ".", ".."):
        raise BadPickle("it names a file outside of its folder")
    if state.get("transform_descriptors"):
        raise BadPickle("its files are compressed or encrypted, which is not supported")
    place.transform_descriptors = None


def _build_chunk(chunk: ChunkStorageMetadata, state: Any) -> None:
    vars(chunk).update(_state(state, offsets=_is(torch.Size), sizes=_is(torch.Size)))
    if len(chunk.offsets) != len(chunk.sizes):
        raise BadPickle("the shape and the offset of a tensor's part in it have different lengths")


def _build_properties(properties: TensorProperties, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5 or not isinstance(state[0], torch.dtype):
        raise BadPickle("the dtype of a tensor in it cannot be read")
    # A reader needs none of the rest, and unexpected values could make torch fail.
    properties.__setstate__((state[0], torch.strided, False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False))


def _build_tensor(tensor: TensorStorageMetadata, state: Any) -> None:
    vars(tensor).update(
        _state(state, properties=_is(TensorProperties), size=_is(torch.Size), chunks=_list_of(ChunkStorageMetadata))
    )
    if "dtype" not in vars(tensor.properties):
        raise BadPickle("the dtype of a tensor in it cannot be read")
    for chunk in tensor.chunks:
        if len(chunk.sizes) != len(tensor.size) or any(
            first + length > size for first, length, size in zip(chunk.offsets, chunk.sizes, tensor.size)
        ):
            raise BadPickle("a part of a tensor in it lies outside of the tensor")


def _build_metadata(metadata: Metadata, state: Any) -> None:
    vars(metadata).update(
        _state(
            state,
            state_dict_metadata=_dict_of(str, TensorStorageMetadata, BytesStorageMetadata),
            storage_data=_dict_of(MetadataIndex, _StorageInfo),
        ),
        planner_data=None,
        storage_meta=StorageMeta(),
        version=None,
    )
    for index, place in metadata.storage_data.items():
        if "relative_path" not in vars(place):
            raise BadPickle("a part in it has no place in a file")
        if not index.fqn.isprintable():
            raise BadPickle("a name in it cannot be printed")
    for name, tensor in metadata.state_dict_metadata.items():
        for chunk in getattr(tensor, "chunks", ()):
            place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is not None and place.length < chunk.sizes.numel() * tensor.properties.dtype.itemsize:
                raise BadPickle(f"{name} has more elements than bytes for them")


TABLE = Table(
    constants=DTYPES,
    makers={
        ("torch", "Size"): make_size,
        ("torch.serialization", "_get_layout"): _layout,
        ("collections", "OrderedDict"): OrderedDict,
        (METADATA, "_MEM_FORMAT_ENCODING"): lambda value: None,
        **{
            (METADATA, kind.__name__): _without_state(kind)
            for kind in (
                Metadata,
                MetadataIndex,
                TensorProperties,
                TensorStorageMetadata,
                BytesStorageMetadata,
                ChunkStorageMetadata,
            )
        },
        (FILESYSTEM, "_StorageInfo"): _without_state(_StorageInfo),
    },
    builders={
        Metadata: _build_metadata,
        MetadataIndex: _build_index,
        TensorProperties: _build_properties,
        TensorStorageMetadata: _build_tensor,
        BytesStorageMetadata: lambda nothing, state: None,
        ChunkStorageMetadata: _build_chunk,
        _StorageInfo: _build_place,
    },
)


def read_metadata(path: Path) -> Metadata:
    """Read torch's ``.metadata``.

    Raises:
        Refusal: it is damaged, or names something that does not belong to a checkpoint, or a file outside its folder.
    """
    with refusing(f"{path} cannot be read", OSError, ValueError):
        if path.stat().st_size > LONGEST:
            raise BadPickle(f"it has more than {LONGEST:,} bytes")
        metadata = Machine(path.read_bytes(), TABLE).load()
        if type(metadata) is not Metadata or "storage_data" not in vars(metadata):
            raise BadPickle("it is not a list of tensors")
    return metadata
