# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the distributed tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.training_runs import run_training
from tests.shared import Shared


@pytest.fixture(scope="session")
def reference(pool: Pool, shared: Shared) -> Callable[..., Any]:
    """What a function returns on one process, by its arguments; computed once for all tests."""

    def alone(work: Callable[..., Any], *given: Any) -> Any:
        key = (work.__module__, work.__name__, *(getattr(one, "__name__", one) for one in given))
        return shared(key, lambda: pool.run(work, 1, *given, timeout=120)[0])

    return alone


@pytest.fixture(scope="session")
def on_one_process(reference: Callable[..., Any], long_runs: bool) -> Callable[..., Any]:
    """Reference run of a model (flags, llama, steps) on one process, computed once for all tests."""

    def training(flags: str, llama: bool, steps: int | None = None) -> tuple[list[float], list[float], dict]:
        flags, steps = " ".join(flags.split()), steps or (20 if long_runs else 3)
        return reference(run_training, flags, llama, steps)

    return training
