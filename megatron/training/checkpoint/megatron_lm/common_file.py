# SPDX-License-Identifier: Apache-2.0
"""``common.pt``: what a checkpoint holds beside tensors, checked before anybody works with it.

A file can say of its model, and of how far its run had come, whatever it likes. What is of another kind than the
setting that it claims to be is refused here, so that those who read it need not ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from megatron.training.arguments.config import ModelConfig
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.refusal import Refusal, short

MOST = {"num_layers": 100_000}  # layers are counted through one by one
SECTIONS = ("model", "data", "optimizer", "attention")  # of the settings, that are read
LARGEST = 1 << 40  # no width or vocabulary is near it


def read_common(path: Path) -> dict[str, Any]:
    """``common.pt`` of the checkpoint ``path``.

    Raises:
        Refusal: it cannot be read, or what it says of its run cannot be.
    """
    common = unpickle.read(path / "common.pt")
    if not isinstance(common, dict) or not all(isinstance(name, str) for name in common):
        raise Refusal(f"checkpoint {path}: common.pt does not hold what a checkpoint does")
    if "config" in common:
        sections = common["config"]
        if not isinstance(sections, dict) or not all(isinstance(sections.get(one, {}), dict) for one in SECTIONS):
            raise Refusal(f"checkpoint {path}: common.pt holds no settings of its run")
        fitting(sections.get("model", {}), path)
        if not isinstance(common.get("progress", {}), dict):
            raise Refusal(f"checkpoint {path} does not say how far its run had come")
    for where, name in ((common.get("progress", {}), "iteration"), (common, "iteration"), (common, "vocab_size")):
        if name in where and where[name] is not None and not _whole(where[name]):
            raise Refusal(f"checkpoint {path}: {name} {short(where[name])} is no whole number")
    return common


def fitting(settings: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """``settings``, in which each that :class:`ModelConfig` knows is of its kind; others are not looked at.

    Raises:
        Refusal: one is not; the message names it.
    """
    for name, right in _kinds().items():
        if name in settings and not right(settings[name]):
            raise Refusal(f"checkpoint {where}: {name} {short(settings[name])} is not what --{_flag(name)} can be")
        if name in MOST and (settings.get(name) or 0) > MOST[name]:
            raise Refusal(f"checkpoint {where}: {name} {settings[name]} is more than {MOST[name]}")
    return settings


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < LARGEST


_RIGHT: dict[Any, Callable[[Any], bool]] = {
    type(None): lambda value: value is None,
    bool: lambda value: type(value) is bool,
    int: _whole,
    float: _number,
    str: lambda value: type(value) is str and len(value) < 1000,
    list[str]: lambda value: type(value) is list and all(type(one) is str for one in value),
}


@cache
def _kinds() -> dict[str, Callable[[Any], bool]]:
    """For each setting of a model, whether a value can be one."""
    return {name: _one_of(hint) for name, hint in get_type_hints(ModelConfig).items()}


def _one_of(hint: Any) -> Callable[[Any], bool]:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return lambda value: any(_RIGHT[kind](value) for kind in kinds)
