# SPDX-License-Identifier: Apache-2.0
"""A function in a file of the user, as a program for ``cp.certify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OfFile:
    """Calls the function NAME of FILE.py:NAME with the sizes of a grid."""

    spec: str

    def __call__(self, **sizes: int) -> Any:
        from megatron.training.model.attention_rule import function_of

        return function_of(self.spec, self.spec)(**sizes)
