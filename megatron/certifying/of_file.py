# SPDX-License-Identifier: Apache-2.0
"""A function in a file of the user, or a complete script, as a program for :func:`certify`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.certifying.scripts.script import Script, as_started
from megatron.system.user_function import user_function


@dataclass(frozen=True)
class OfFile:
    """Calls the function NAME of FILE.py:NAME with the sizes of a grid."""

    spec: str

    def __call__(self, **sizes: int) -> Any:
        with as_started(self.spec):
            return user_function(self.spec, self.spec)(**sizes)


def program_of(words: Sequence[str]) -> Callable[..., Any] | None:
    """The program that FILE.py:NAME or a script with its arguments names; None if the words are neither."""
    if len(words) == 1 and re.search(r"\.py:\w+$", words[0]):
        path, _, name = words[0].rpartition(":")
        return OfFile(f"{os.path.abspath(path)}:{name}")
    if words and words[0].endswith(".py") and Path(words[0]).is_file():
        return Script(os.path.abspath(words[0]), tuple(words[1:]))
    return None


def sizes_of(text: str) -> dict[str, int]:
    """``ulysses=2,ring=2`` as sizes by name.

    Raises:
        ValueError: a size is missing or not from 1 to 64.
    """
    result = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdigit() or not 1 <= int(size) <= 64:
            raise ValueError(f"--grid {text}: give sizes from 1 to 64 by name, for example ulysses=2,ring=2")
        result[name] = int(size)
    return result
