# SPDX-License-Identifier: Apache-2.0
"""Read pickled files of other programs without running code from them.

Tensors, numbers, strings and a few plain classes are loaded. An object of any other class becomes an :class:`Unread`,
which has no behaviour, so checkpoints of programs that are not installed can be read too. No name in a file is looked
up: see pickle_machine.py, metadata_file.py and torch_saved.py.
"""

from __future__ import annotations

import mmap as memory_map
import os
import stat
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron.training.checkpoint.megatron_lm import torch_saved
from megatron.training.checkpoint.megatron_lm.metadata_file import DTYPES, whole_number
from megatron.training.checkpoint.megatron_lm.metadata_file import read_metadata as read_metadata
from megatron.training.checkpoint.megatron_lm.pickle_machine import SCALARS, BadPickle, Machine, Pair, Table
from megatron.training.checkpoint.megatron_lm.pickle_machine import Unread as Unread
from megatron.training.refusal import Refusal, reason, refusing
from megatron.training.untrusted.links import file_in

FAILURES = (OSError, ValueError, TypeError, RuntimeError, MemoryError)  # of a file that is damaged or hostile


def read(path: Path, *, mmap: bool = False) -> Any:
    """The object that ``torch.save`` has written to ``path``, on the CPU.

    Args:
        mmap: map the file into memory, so that tensors that are not used are not read.

    Raises:
        Refusal: it cannot be read, or not safely.
    """
    with refusing(f"{path} cannot be read", *FAILURES):
        return torch_saved.load(_file(path, mmap), PLAIN)


def read_bytes(data: Any, where: object, *, complete: bool = False) -> Any:
    """As :func:`read`, from the bytes of a file.

    Args:
        data: a buffer; if it is writable, the tensors share its memory.
        where: names it in messages.
        complete: refuse objects that would become an :class:`Unread`.
    """
    with refusing(f"{where} cannot be read", *FAILURES):
        return torch_saved.load(data, WHOLE if complete else PLAIN)


def check_engine_state(data: bytes, where: object) -> None:
    """Raise Refusal if unpickling ``data`` could do more than create the state of a layer."""
    if data:
        with refusing(f"{where} cannot be read", *FAILURES):
            Machine(data, ENGINE).load()


@contextmanager
def parts_of(path: Path) -> Iterator[Callable[[int, int], bytearray]]:
    """Yields a function that reads ``length`` bytes at ``offset`` of a file in a checkpoint's folder.

    Raises:
        Refusal: the path leads out of that folder, is not a file, or ends before a requested part; or the block that
            uses the parts raises OSError or ValueError.
    """
    try:
        with open(file_in(path.parent, path.name), "rb", opener=_open_file) as file:
            size = os.fstat(file.fileno()).st_size

            def read(offset: int, length: int) -> bytearray:
                if offset + length > size:
                    raise ValueError(f"it has {size} bytes, at least {offset + length} were written")
                data = bytearray(length)
                file.seek(offset)
                if file.readinto(data) != length:
                    raise ValueError("it became shorter while it was read")
                return data

            yield read
    except Refusal:
        raise
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read: {reason(error)}") from None


def _file(path: Path, mapped: bool) -> Any:
    with open(path, "rb", opener=_open_file) as file:
        size = os.fstat(file.fileno()).st_size
        if mapped and size:
            return memory_map.mmap(file.fileno(), 0, access=memory_map.ACCESS_COPY)
        data = bytearray(size)
        file.readinto(data)
        return data


def _open_file(path: str, flags: int) -> int:
    """Open a regular file; refuse pipes, which could block, and devices, which may never end."""
    number = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError("it is not a regular file")
    return number


# Plain classes that checkpoints hold.


def _build_namespace(target: Any, state: Any) -> None:
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise BadPickle("the state of a namespace in it is invalid")
    vars(target).update(state)


def _path(*parts: Any) -> Path:
    if any(type(part) is not str or "\0" in part for part in parts):
        raise BadPickle("a path in it is invalid")
    return PosixPath(*parts)


def _device(kind: Any, index: Any = None) -> torch.device:
    if kind not in ("cpu", "cuda", "meta", "xpu", "mps", "hpu", "npu") or type(index) not in (int, type(None)):
        raise BadPickle("a device in it is invalid")
    return torch.device("cpu")  # all tensors are loaded to the CPU


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes as older pickle protocols store them."""
    if type(text) is not str or encoding != "latin1":
        raise BadPickle("bytes in it are invalid")
    return text.encode("latin1")


def _set_of(items: Any = ()) -> set:
    if type(items) is not list or any(type(item) not in SCALARS for item in items):
        raise BadPickle("a set in it is invalid")
    return set(items)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise BadPickle("a complex number in it is invalid")
    return complex(real, imaginary)


class _ArrayType:
    """A numpy dtype under construction: the file gives its byte order in a second step."""

    def __init__(self, name: Any, *_: Any) -> None:
        if type(name) is not str or name not in (
            "b1",
            *(f"{kind}{size}" for kind in "iufc" for size in (1, 2, 4, 8, 16)),
        ):
            raise BadPickle("an array in it does not contain numbers")
        self.type = np.dtype(name)

    def set_order(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise BadPickle("an array in it has an invalid byte order")
        self.type = self.type.newbyteorder(state[1])


def _fill_array(array: np.ndarray, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise BadPickle("an array in it is invalid")
    _, shape, kind, by_columns, data = state
    if type(kind) is not _ArrayType or type(data) is not bytes or type(by_columns) is not bool:
        raise BadPickle("an array in it is invalid")
    if type(shape) is not tuple or not all(map(whole_number, shape)) or len(shape) > 32:
        raise BadPickle("an array in it has an invalid shape")
    if prod(shape) * kind.type.itemsize != len(data):
        raise BadPickle("an array in it does not have the number of bytes of its shape")
    array.__setstate__((1, shape, kind.type, by_columns, data))


def _array_number(kind: Any, data: Any) -> Any:
    if type(kind) is not _ArrayType or type(data) is not bytes or len(data) != kind.type.itemsize:
        raise BadPickle("a number in it is invalid")
    return np.frombuffer(data, kind.type)[0]


_MAKERS: dict[Pair, Callable[..., Any]] = {
    **torch_saved.TENSORS,
    ("torch", "device"): _device,
    ("argparse", "Namespace"): lambda: Namespace(),
    ("types", "SimpleNamespace"): lambda: SimpleNamespace(),
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("collections", "defaultdict"): lambda *factory: {},
    ("_codecs", "encode"): _encoded,
    ("numpy", "ndarray"): lambda *_: np.empty(0, np.int8),
    ("numpy", "dtype"): _ArrayType,
}
for _module in ("builtins", "__builtin__"):
    _MAKERS |= {(_module, "bytes"): lambda: b"", (_module, "set"): _set_of, (_module, "complex"): _complex}
    factories = ("list", "dict", "int", "float")  # of defaultdict
    _MAKERS |= {(_module, name): torch_saved.never_called for name in factories}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _MAKERS |= {(_module, "_reconstruct"): _MAKERS["numpy", "ndarray"], (_module, "scalar"): _array_number}

PLAIN = Table(
    constants=DTYPES,
    makers=_MAKERS,
    builders={
        Namespace: _build_namespace,
        SimpleNamespace: _build_namespace,
        OrderedDict: lambda target, state: None,  # a state_dict's _metadata
        np.ndarray: _fill_array,
        _ArrayType: _ArrayType.set_order,
    },
)
WHOLE = replace(PLAIN, strict=True)

# The contents of the FP8 states of Transformer Engine's layers. It unpickles them itself with the plain unpickler, so
# only names that are harmless there are permitted, and only recipes may be given a state.
RECIPES = "transformer_engine.common.recipe"
RECIPE_NAMES = """
    Format _FormatHelper Recipe DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling
    NVFP4BlockScaling MMParams QParams _OverrideLinearPrecision
""".split()


class _Recipe:
    """Stands for one of Transformer Engine's recipes."""

    def set_state(self, state: Any) -> None:
        if type(state) is not dict or any(type(name) is not str or name.startswith("__") for name in state):
            raise BadPickle("the state of a recipe in it is invalid")


def _inner(data: Any) -> Any:
    """A storage, which is pickled as the bytes of a ``torch.save`` file."""
    if type(data) is not bytes:
        raise BadPickle("a tensor in it is invalid")
    return torch_saved.load(data, replace(ENGINE, makers=torch_saved.STORAGE_NAMES))


ENGINE = Table(
    constants=DTYPES,
    makers={
        ("torch._utils", "_rebuild_tensor_v2"): torch_saved.make_tensor,
        ("torch._utils", "_rebuild_parameter"): torch_saved.TENSORS["torch._utils", "_rebuild_parameter"],
        ("torch", "Size"): torch_saved.make_size,
        ("torch", "device"): _device,
        ("collections", "OrderedDict"): torch_saved.TENSORS["collections", "OrderedDict"],
        ("torch.storage", "_load_from_bytes"): _inner,
        ("megatron.core.safe_globals", "safe_load_from_bytes"): _inner,  # core 0.19 puts it in the other's place
        **{(RECIPES, name): lambda *_: _Recipe() for name in RECIPE_NAMES},
    },
    builders={_Recipe: _Recipe.set_state},
    strict=True,
)
