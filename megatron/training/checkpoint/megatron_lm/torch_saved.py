# SPDX-License-Identifier: Apache-2.0
"""Read files of ``torch.save``, in both of its formats, with :class:`Machine` instead of ``torch.load``.

A file is a zip archive with a pickle and a record of bytes for each storage. A file from PyTorch before 1.6 is several
pickles followed by the bytes. Each tensor must lie within the bytes that the file really has, so reading a file never
takes more memory than its size. Compressed archives, which PyTorch never writes, are refused.

``torch.load(weights_only=True)`` of PyTorch 2.6 and later does not keep this promise: a kilobyte that calls
``bytearray(2**33)`` takes 8 GB, with ``mmap`` too, and a megabyte of a compressed archive 1 GB. It reads no pickle of
protocol 4, which ``.metadata`` is, and none with a class that is not installed.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoint.megatron_lm.metadata_file import make_size, whole_number
from megatron.training.checkpoint.megatron_lm.pickle_machine import BadPickle, Machine, Pair, Table, Unread

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the older format


def never_called(*_: Any) -> Any:
    """Refuse a call of a name that a file may contain but not call."""
    raise BadPickle("it calls a name that a checkpoint may contain but not call")


STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
STORAGE_NAMES: dict[Pair, Callable[..., Any]] = {
    **{("torch", name): never_called for name in STORAGES},
    ("torch.storage", "UntypedStorage"): never_called,
}


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes of a storage, and its dtype in the file."""

    data: Tensor  # uint8
    dtype: torch.dtype


def load(data: Any, table: Table) -> Any:
    """The object in the bytes of a file.

    Args:
        data: a buffer. If it is writable, as a ``bytearray`` is, tensors share its memory.

    Raises:
        ValueError: it is damaged, or could do harm.
    """
    view = memoryview(data)
    return _load_archive(view, table) if bytes(view[:2]) == b"PK" else _load_older(view, table)


def _load_archive(view: memoryview, table: Table) -> Any:
    records = _records(view)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise BadPickle("it is not a file of torch.save")
    root = pickles[0].removesuffix("data.pkl")
    if bytes(records.get(f"{root}byteorder", sys.byteorder.encode())[:10]).decode() != sys.byteorder:
        raise BadPickle("it has the byte order of another machine")
    known: dict[str, Tensor] = {}

    def stored(persistent_id: Any) -> Storage:
        key, dtype, size = _storage_id(persistent_id)
        if key not in known:
            part = records.get(f"{root}data/{key}")
            if part is None:
                raise BadPickle("the bytes of a tensor in it are missing")
            known[key] = as_bytes(part)
        if known[key].numel() != size:
            raise BadPickle("the bytes of a tensor in it do not match the tensor's size")
        return Storage(known[key], dtype)

    return Machine(bytes(records[pickles[0]]), table, stored=stored).load()


def _records(view: memoryview) -> dict[str, memoryview]:
    """The uncompressed records of a zip archive by name."""
    records, ends = {}, []
    try:
        with zipfile.ZipFile(Window(len(view), partial(_copy, view))) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                    raise BadPickle("it is compressed, which torch.save never does")
                begin = info.header_offset
                name, extra = (int.from_bytes(view[begin + at : begin + at + 2], "little") for at in (26, 28))
                start = begin + 30 + name + extra
                stop = start + info.file_size
                if not 0 <= begin < stop <= len(view) and info.file_size or info.filename in records:
                    raise BadPickle("a record in it occurs twice or reaches beyond the file")
                records[info.filename] = view[start:stop]
                ends.append((begin, stop))
    except (zipfile.BadZipFile, NotImplementedError, OSError, UnicodeDecodeError) as error:
        raise BadPickle(f"it is damaged ({type(error).__name__})") from None
    ends.sort()
    if any(stop > begin for (_, stop), (begin, _) in zip(ends, ends[1:])):
        raise BadPickle("its parts overlap")
    return records


class Window(io.RawIOBase):
    """``length`` bytes as a read-only file; ``copy`` fills a buffer from a position on and returns the bytes copied."""

    def __init__(self, length: int, copy: Callable[[memoryview, int], int]) -> None:
        self.length, self._copy, self._at = length, copy, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as zipfile expects
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        read = self._copy(view[: max(min(len(view), self.length - self._at), 0)], self._at)
        self._at += read
        return read


def _copy(view: memoryview, buffer: memoryview, at: int) -> int:
    buffer[:] = view[at : at + len(buffer)]
    return len(buffer)


def _load_older(view: memoryview, table: Table) -> Any:
    at, bytes_left = 0, len(view)
    known: dict[str, Storage] = {}

    def stored(persistent_id: Any) -> Storage:
        nonlocal bytes_left
        if type(persistent_id) is tuple and len(persistent_id) == 6 and persistent_id[5] is None:
            persistent_id = persistent_id[:5]
        key, dtype, size = _storage_id(persistent_id)
        if key not in known:
            bytes_left -= size
            if bytes_left < 0:
                raise BadPickle("its tensors have more bytes than the file")
            known[key] = Storage(torch.empty(size, dtype=torch.uint8), dtype)
        if known[key].data.numel() != size:
            raise BadPickle("the bytes of a tensor in it do not match the tensor's size")
        return Storage(known[key].data, dtype)

    def next_pickle(names: Table = Table({}, {}, {}, strict=True)) -> Any:
        nonlocal at
        machine = Machine(view, names, at, stored)
        loaded = machine.load()
        at = machine.at
        return loaded

    if next_pickle() != MAGIC or next_pickle() != PROTOCOL:
        raise BadPickle("it is not a file of torch.save")
    next_pickle()  # properties of the machine that wrote it
    loaded, keys = next_pickle(table), next_pickle()
    if type(keys) is not list or any(type(key) is not str for key in keys) or sorted(keys) != sorted(known):
        raise BadPickle("it does not say where its tensors lie")
    for key in keys:
        data, dtype = known[key].data, known[key].dtype
        count = int.from_bytes(view[at : at + 8], "little")
        size = data.numel()
        if count * dtype.itemsize != size or at + 8 + size > len(view):
            raise BadPickle("it ends too early")
        if size:
            data.copy_(as_bytes(view[at + 8 : at + 8 + size]))
        at += 8 + size
    return loaded


def _storage_id(persistent_id: Any) -> tuple[str, torch.dtype, int]:
    """(name, dtype, bytes) of a storage, from its persistent id in the pickle."""
    if type(persistent_id) is not tuple or len(persistent_id) != 5:
        raise BadPickle("it refers to an object outside of the file")
    word, kind, key, _, count = persistent_id
    if word != "storage" or type(kind) is bool or not isinstance(kind, Unread) or not isinstance(key, str):
        raise BadPickle("it refers to an object outside of the file")
    module, _, name = kind.of.rpartition(".")
    dtype = (
        STORAGES.get(name) if module == "torch" else torch.uint8 if kind.of == "torch.storage.UntypedStorage" else None
    )
    if dtype is None or not whole_number(count):
        raise BadPickle("the dtype of a tensor in it is unknown")
    return key, dtype, count * dtype.itemsize


def as_bytes(part: memoryview) -> Tensor:
    """A uint8 tensor of the bytes in a buffer; it shares the buffer's memory if that is writable."""
    if not len(part):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8)


def make_tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    more: Any = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor within a storage, without gradient. Raises BadPickle if it would reach beyond the storage."""
    if type(storage) is not Storage or hooks or more:
        raise BadPickle("a tensor in it is invalid")
    shape = make_size(size)
    if type(stride) is not tuple or len(stride) != len(shape) or not all(map(whole_number, (offset, *stride))):
        raise BadPickle("a tensor in it has invalid strides")
    dtype = dtype or storage.dtype
    available = storage.data.numel() // dtype.itemsize
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride))
    if prod(shape) and not (last < available and prod(shape) <= available):
        raise BadPickle("a tensor in it has more elements than bytes for them")
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    data = storage.data[: available * dtype.itemsize]
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).as_strided(shape, stride, offset)


def _tensor_with_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, more: Any = None
) -> Tensor:
    if not isinstance(dtype, torch.dtype):
        raise BadPickle("a tensor in it has no dtype")
    return make_tensor(storage, offset, size, stride, requires_grad, hooks, more, dtype)


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> Tensor:
    if not isinstance(data, Tensor) or hooks:
        raise BadPickle("a parameter in it is invalid")
    return data.view_as(data)


def _of_type(maker: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    """A tensor of a subclass or with attributes, as a plain tensor without them."""
    if not isinstance(maker, Unread) or type(arguments) is not tuple or maker.of not in _BY_NAME:
        raise BadPickle("a tensor in it is of an unknown kind")
    return _BY_NAME[maker.of](*arguments)


TENSORS: dict[Pair, Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): make_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_with_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch", "Tensor"): never_called,
    ("torch.nn.parameter", "Parameter"): never_called,
    ("torch", "Size"): make_size,
    ("collections", "OrderedDict"): lambda pairs=(): _ordered(pairs),
    **STORAGE_NAMES,
}
_BY_NAME = {".".join(pair): maker for pair, maker in TENSORS.items() if pair[0] == "torch._utils"}


def _ordered(pairs: Any) -> OrderedDict:
    if pairs:
        raise BadPickle("an OrderedDict in it is created with arguments")
    return OrderedDict()
