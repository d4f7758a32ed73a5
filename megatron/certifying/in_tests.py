# SPDX-License-Identifier: Apache-2.0
"""``same_as_one_process``: a certificate as an assertion, and a pytest plugin with a fixture of this name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from megatron.certifying.of_file import OfFile

if TYPE_CHECKING:
    from megatron.certifying.certificate import Certificate, Sizes
    from megatron.certifying.processes_of_program import Run
    from megatron.certifying.recording import Program


def same_as_one_process(
    program: Program, *grids: Sizes | int, sees: bool = False, run: Run | None = None
) -> Certificate:
    """Assert that a program computes on grids what it computes on one process; see :func:`certify`.

    Args:
        program: a function at the top of a file, which new processes can run; or an object of such a class.
        grids: sizes by name, {"ring": 2}; a number N is {"ranks": N}.
        sees: also change single tokens, to see which outputs change.
        run: see :func:`certify`.

    Raises:
        AssertionError: with the certificate: what differs, and the first module, its positions and ranks.
        ValueError, ProgramFailed: it cannot be checked.
    """
    __tracebackhide__ = True
    from megatron.certifying.certificate import certify

    if inspect.isfunction(program):
        if program.__qualname__ != program.__name__:
            raise ValueError(
                f"{program.__qualname__} is defined inside another function or class, where new processes cannot find "
                "it: put it at the top of its file"
            )
        program = OfFile(f"{os.path.abspath(inspect.getsourcefile(program))}:{program.__name__}")
    certificate = certify(program, grids, sees=sees, run=run)
    if not certificate.right:
        raise AssertionError(f"not the same as one process\n{certificate}")
    return certificate


try:
    import pytest
except ImportError:
    pass
else:

    @pytest.fixture(scope="session", name="same_as_one_process")
    def _same_as_one_process() -> Iterator[object]:
        """:func:`same_as_one_process`, whose processes stay between tests."""
        from megatron.certifying.processes_of_program import Processes

        with Processes() as processes:
            yield partial(same_as_one_process, run=processes.run)
