# SPDX-License-Identifier: Apache-2.0
"""A function in a file of the user, as a program for :func:`certify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.system.user_function import user_function


@dataclass(frozen=True)
class OfFile:
    """Calls the function NAME of FILE.py:NAME with the sizes of a grid."""

    spec: str

    def __call__(self, **sizes: int) -> Any:
        return user_function(self.spec, self.spec)(**sizes)


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
