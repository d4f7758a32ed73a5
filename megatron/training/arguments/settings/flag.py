# SPDX-License-Identifier: Apache-2.0
"""A setting and its command-line flag, defined together as a field of a dataclass."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def flag(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field that is a command-line flag.

    ``extra`` may hold ``choices``; ``nargs``; ``type`` (needed when the default is None); ``aliases``, other spellings
    of the flag; ``flags``, the spellings that replace the one made from the field's name. The flag of a bool field
    stores True, or False if the default is True and ``flags`` are given.
    """
    metadata = {"help": help, **extra}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
