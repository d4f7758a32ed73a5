# SPDX-License-Identifier: Apache-2.0
"""A setting and its command-line flag, defined together as a field of a dataclass."""

from __future__ import annotations

import ast
from dataclasses import field
from typing import Any

from megatron.training.untrusted.largest_numbers import MOST_LAYERS

# Roles of settings that are part of the network, which a checkpoint and the run that loads it are compared by.
WEIGHTS = "weights"  # determines the shapes of weights: must agree
FUNCTION = "function"  # changes what is computed with them: may change where a run begins, but not where it resumes


def flag(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field that is a command-line flag.

    ``extra`` may hold ``choices``; ``nargs``; ``type`` (needed when the default is None); ``aliases``, other spellings
    of the flag; ``flags``, the spellings that replace the one made from the field's name; ``network``, the role of a
    setting that is part of the network. The flag of a bool field stores True, or False if the default is True and
    ``flags`` are given.
    """
    metadata = {"help": help, **extra}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


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
