# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores

import pytest  # noqa: E402

from tests.distributed.pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The pool of gloo workers, one for the whole run."""
    with Pool() as workers:
        yield workers


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "limit of a test in seconds; needs pytest-timeout to act")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, and all of tests/gpu, where there is no GPU."""
    import torch

    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no GPU")
    for item in items:
        if "gpu" in item.keywords or item.path.parent.name == "gpu":
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Keep garbage collections, and what walks through all tensors, out of the million objects that were imported."""
    gc.collect()
    gc.freeze()
