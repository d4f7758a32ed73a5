# SPDX-License-Identifier: Apache-2.0
"""A setting and its command-line flag, defined together as a field of a dataclass."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from functools import partial
from typing import Any, NamedTuple

from megatron.training.refusal import Refusal
from megatron.training.settings.read_with import Condition
from megatron.training.untrusted.largest_numbers import MOST_LAYERS

# Roles of settings that are part of the network, which a checkpoint and the run that loads it are compared by.
WEIGHTS = "weights"  # determines the shapes of weights: must agree
FUNCTION = "function"  # changes what is computed with them: may change where a run begins, but not where it resumes
ADAPTERS = "adapters"  # of LoRA: must agree, if both have adapters
# What --use-checkpoint-args does with a setting of the model; with the others, a flag that is given wins.
ALWAYS = "always"  # the checkpoint wins, as in Megatron-LM (load_args_from_checkpoint in its training/checkpointing.py)
NEVER = "never"  # the run sets it: the tokenizer does, or it does not change the network


class Range(NamedTuple):
    """Which numbers a setting may have, and what a refusal says of the others."""

    holds: Callable[[float], bool]
    text: str


AT_LEAST_1 = Range(lambda value: value >= 1, "must be at least 1")
NOT_NEGATIVE = Range(lambda value: value >= 0, "must not be negative")
ABOVE_ZERO = Range(lambda value: value > 0, "must be above 0")
BELOW_1 = Range(lambda value: 0 <= value < 1, "must be from 0 up to, not including, 1")
SHARE = Range(lambda value: 0 <= value <= 1, "must be from 0 to 1")
AT_MOST_1 = Range(lambda value: value <= 1, "must be at most 1")
AT_MOST_A_YEAR = Range(lambda value: value <= 366 * 24 * 60, f"is above {366 * 24 * 60}, a year")
NOT_TINY = Range(
    lambda value: value == 0 or value >= 2**-15,
    "is too small to be distinguished from 0: use 0, or at least 3.1e-05",
)


def flag(
    default: Any,
    help: str,
    *,
    type: Callable[[str], Any] | None = None,
    choices: Sequence[Any] | None = None,
    nargs: int | str | None = None,
    aliases: Sequence[str] = (),
    flags: Sequence[str] = (),
    range: Range | tuple[Range, ...] = (),
    needs: tuple[str, ...] = (),
    read_with: Condition | tuple[Condition, ...] = (),
    network: str | None = None,
    loaded: str | None = None,
    stage: bool = False,
    generation: bool | str = False,
    computes: bool | None = None,
    core: bool | str = False,
) -> Any:
    """A dataclass field that is a command-line flag, with all that is known of it alone.

    The flag of a bool field stores True, or False if the default is True and ``flags`` are given.

    Args:
        type: reads one word, where it is not that of the annotation.
        aliases: other spellings of the flag.
        flags: the spellings that replace the one made from the field's name.
        range: the numbers that it may be.
        needs: settings without which it is refused.
        read_with: what must hold for it to have an effect; else a note says that it has none.
        network: its role in the network: WEIGHTS, FUNCTION or ADAPTERS; None: it is not part of it.
        loaded: what --use-checkpoint-args does with it: ALWAYS or NEVER; None: a flag that is given wins.
        stage: whether a stage of --seq-length-schedule may set it: it changes no model, data or updates.
        generation: whether generation reads it; a text: why it does not.
        computes: whether it says what a step computes, for the small program of tools/certify.py; None: as its section.
        core: whether megatron-core's configuration gets it; a text: its name there.
    """
    metadata = {name: value for name, value in locals().items() if name != "default" and value not in (None, (), False)}
    metadata |= {"computes": computes} if computes is not None else {}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


count = partial(flag, range=AT_LEAST_1)  # of iterations, layers and the like
# By their roles in the network; a size is one of weights that megatron-core gets.
function, weights = partial(flag, network=FUNCTION), partial(flag, network=WEIGHTS)
size = partial(weights, range=AT_LEAST_1, core=True)


def name_of(setting: Field) -> str:
    """The first spelling of a setting's flag."""
    return (setting.metadata.get("flags") or ["--" + setting.name.replace("_", "-")])[0]


def reader_of(setting: Field) -> Callable[[str], Any]:
    """What reads one word of a setting: its ``type``, or that of its annotation, as in ``list[int] | None``."""
    of_annotation = setting.type.removesuffix(" | None").split("[")[-1].rstrip("]")
    return setting.metadata.get("type") or {"int": int, "float": float, "str": str}[of_annotation]


def every(setting: Field, key: str) -> tuple[Any, ...]:
    """What ``setting`` has of ``key``, one or several."""
    value = setting.metadata.get(key, ())
    return value if type(value) is tuple else (value,)


def kinds_of(setting: Field) -> list[Condition]:
    """The conditions of the kinds of layers that the setting belongs to."""
    return [condition for condition in every(setting, "read_with") if condition.switch]


def names_with(section: Any, key: str, *values: Any) -> list[str]:
    """Names of the settings of a section, or of its class, that have ``key``, as one of ``values``."""
    having = (one for one in fields(section) if key in one.metadata)
    return [one.name for one in having if not values or one.metadata[key] in values]


def for_core(section: Any, config: Any) -> dict[str, Any]:
    """The settings of ``section`` by their names in megatron-core; of kinds of layers, those that the model has."""

    def used(setting: Field) -> bool:
        return all(condition.holds(config) for condition in kinds_of(setting))

    passed = (one for one in fields(section) if one.metadata.get("core") and used(one))
    return {
        one.name if one.metadata["core"] is True else one.metadata["core"]: getattr(section, one.name) for one in passed
    }


def tokens(text: str) -> int:
    """A number of tokens: ``131072``, or ``128K`` (K = 1024, M = 1024 K)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km])", text.strip().lower())
    if match is None:
        return int(text)
    value = float(match[1]) * {"k": 2**10, "m": 2**20}[match[2]]
    if not value.is_integer():
        raise ValueError(text)
    return int(value)


def layer_pattern(text: str) -> int | list[int]:
    """Layers that are different: every N-th (N), or 1 and 0 for each layer, as in ``[0]*3+[1]*29``."""

    def value(node: ast.AST) -> int | list[int]:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(one) for one in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            layers, times = value(node.left), value(node.right)
            if isinstance(layers, list) and isinstance(times, int) and len(layers) * times <= MOST_LAYERS:
                return layers * times
        raise ValueError(text)

    try:
        pattern = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(text) from None
    if isinstance(pattern, list) and any(one not in (0, 1) for one in pattern):
        raise ValueError(text)
    return pattern


def expert_pattern(text: str) -> int | list[int]:
    """:func:`layer_pattern`; -1 is every layer, because Megatron-LM takes the layers i with i % N == 0."""
    return 1 if text.strip() == "-1" else layer_pattern(text)


def check_pattern(flag: str, frequency: int | list[int] | None, layers: int) -> None:
    """Refuse a pattern of layers, every n-th one or a number for each layer, that does not fit the model."""
    if isinstance(frequency, int) and frequency < 1:
        raise Refusal(f"{flag} {frequency}", "must be at least 1: 2 means every second layer")
    if isinstance(frequency, list) and len(frequency) != layers:
        raise Refusal(
            f"{flag} with {len(frequency)} layers",
            f"does not fit --num-layers {layers}: give one number for each layer",
        )
