# SPDX-License-Identifier: Apache-2.0
"""Errors as changes of the right programs, and where certify must place them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.referee.runs import Program


@dataclass(frozen=True)
class Error:
    """One change of a program.

    Attributes:
        what: in words.
        kind, module: what certify must report as the first difference; ``module`` is a regular expression.
    """

    what: str
    program: Program
    kind: str
    module: str


ERRORS: list[Error] = []
