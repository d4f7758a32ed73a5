# SPDX-License-Identifier: Apache-2.0
"""One right program and one error always, all of them with --lab."""

from __future__ import annotations

import pytest

from tests.referee.errors import ERRORS, Error
from tests.referee.runs import RIGHT, Program, judge, placed


@pytest.mark.parametrize("program", RIGHT, ids=str)
@pytest.mark.usual(1)
def test_a_right_program_is_not_accused(pool, program: Program) -> None:
    verdict = judge(program, pool.run)
    assert verdict.certificate and verdict.certificate.right, verdict.failure or str(verdict.certificate)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{error.program.name}-{error.what}".replace(" ", "_"))
@pytest.mark.usual(5)
def test_an_error_is_found_and_placed(pool, error: Error) -> None:
    verdict = judge(error.program, pool.run)
    assert placed(verdict, error.kind, error.module) == "placed", verdict.said
