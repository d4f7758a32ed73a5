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
def on_one_process(pool: Pool, shared: Shared, long_runs: bool) -> Callable[..., Any]:
    """Reference run of a model (flags, llama, steps) on one process, computed once for all tests."""

    def reference(flags: str, llama: bool, steps: int | None = None) -> tuple[list[float], list[float], dict]:
        flags, steps = " ".join(flags.split()), steps or (20 if long_runs else 3)
        key = ("reference", flags, llama, steps)
        return shared(key, lambda: pool.run(run_training, 1, flags, llama, steps, timeout=120)[0])

    return reference
