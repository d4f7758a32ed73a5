# SPDX-License-Identifier: Apache-2.0
"""Read pickled files of others without running code of theirs.

Tensors, numbers, texts and a few plain classes come as they are. An object of any other class comes as an
:class:`Unread`, which holds what it was made of and can do nothing; so a checkpoint of a program that is not installed
here can still be read for what matters. torch's own reader refuses names of modules like ``os`` altogether.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpoint.megatron_lm.metadata_file import read_metadata as read_metadata
from megatron.training.refusal import Refusal, reason

PLAIN = {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "signal.Signals",
    "collections.defaultdict",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
}


class Unread:
    """In place of an object whose class was not loaded."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __new__(cls, *_: Any) -> Unread:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(path: Path, *, mmap: bool = False) -> Any:
    """What ``torch.save`` has written to ``path``, on the CPU. Raises Refusal where it cannot be read safely."""
    return _load(path, str(path), mmap=mmap)


def read_bytes(data: bytes, where: object, *, whole: bool = False) -> Any:
    """The same of bytes.

    Args:
        where: names them in messages.
        whole: refuse what would come as an :class:`Unread`.
    """
    return _load(data, str(where), whole=whole)


def _load(source: Path | bytes, where: str, *, whole: bool = False, **options: Any) -> Any:
    def file() -> Any:
        return io.BytesIO(source) if isinstance(source, bytes) else str(source)

    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file())
        found = [(_stand_in(name), name) for name in names]
        unknown = [name for one, name in found if isinstance(one, type) and issubclass(one, Unread)]
        if whole and unknown:
            raise pickle.UnpicklingError(f"{unknown[0]} is nothing that it should hold")
        with torch.serialization.safe_globals(found):
            return torch.load(file(), map_location="cpu", weights_only=True, **options)
    except (OSError, EOFError, KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise Refusal(f"{where} cannot be read: {reason(error)}") from None
    except pickle.UnpicklingError as error:
        raise Refusal(f"{where} is not read, for that could run code it brings along: {reason(error)}") from None


def _stand_in(name: str) -> Any:
    """What ``name`` means, if that is harmless and there; an Unread class otherwise."""
    known = name.replace("numpy.core.", "numpy._core.")
    module, _, attribute = known.rpartition(".")
    if known in PLAIN or known.startswith("numpy.dtypes.") or module.startswith("megatron.core."):
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            found = None
        enum = isinstance(found, type) and issubclass(found, Enum)
        if found is not None and (enum or not module.startswith("megatron.core.")):
            return found
    return type("Unread", (Unread,), {"of": name})


# What the FP8 states of Transformer Engine's layers consist of, beside recipes.
ENGINE_NAMES = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
}
RECIPES = "transformer_engine.common.recipe"


class _EngineUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if (module, name) in ENGINE_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == RECIPES and name.isidentifier():
            return type("Unread", (Unread,), {"of": f"{module}.{name}"})
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that such a state consists of")


def check_engine_state(data: bytes, where: object) -> None:
    """Raises Refusal where unpickling ``data`` could run code, and not only make the state of a layer."""
    if data:
        _checked(lambda: _EngineUnpickler(io.BytesIO(data)).load(), where)


def check_plain(data: bytes, where: object) -> None:
    """Raises Refusal where ``torch.load`` of ``data`` could run code."""
    _checked(lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), where)


def _checked(read: Callable[[], Any], where: object) -> None:
    try:
        read()
    except Exception as error:  # whatever unpickling may raise
        raise Refusal(f"{where} is not read, for that could run code it brings along: {reason(error)}") from None
