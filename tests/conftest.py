# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests, and which of them run: the usual ones, --quick a few, --lab the laboratory, --full all."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

import tests.properties  # noqa: E402, F401 (the profiles)
from tests.distributed.pool import Pool  # noqa: E402
from tests.patience import patience  # noqa: E402
from tests.shared import Shared  # noqa: E402

settings.load_profile("ci")  # --hypothesis-profile is read later and replaces it

DESELECTED = pytest.StashKey[dict[str, int]]()
SLOW = {  # files of tests/unit that --quick leaves out, except tests marked ``quick``
    "test_dry_run.py",
    "test_whole_step.py",
    "test_examples.py",
    "test_formulas.py",
    "test_gpu_benchmark.py",
    "test_measure_hardware.py",
    "test_memory.py",
    "test_planner.py",
    "test_preprocess.py",
    "test_elastic.py",
    "test_refusals.py",
    "test_reproduce_measure.py",
    "test_rope_kernel.py",
    "test_plot_run.py",
    "test_triton_compile.py",
}


@pytest.fixture(scope="session")
def long_runs(pytestconfig: pytest.Config) -> bool:
    """Whether runs take all their steps, and checks all their cases (--full)."""
    return pytestconfig.getoption("--full")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The pool of gloo workers, one for the whole run."""
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Values that are made once for all tests, in all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    return Shared((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "limit of a test in seconds; needs pytest-timeout to act")
    parser.addoption("--quick", action="store_true", help="only the tests to run after every change")
    parser.addoption("--lab", action="store_true", help="only the laboratory, which is to run once a day")
    parser.addoption("--full", action="store_true", help="all combinations too, as before a release")
    parser.addoption(
        "--schedules", type=int, default=5, metavar="N", help="schedules of copies in each case of --full (default: 5)"
    )


@pytest.fixture(scope="session")
def schedules(pytestconfig: pytest.Config) -> int:
    """The number of schedules of copies (tests/adversary.py) for each case."""
    return pytestconfig.getoption("--schedules") if pytestconfig.getoption("--full") else 3


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DESELECTED] = {}
    if sum(config.getoption(option) for option in ("--quick", "--lab", "--full")) > 1:
        raise pytest.UsageError("--quick, --lab and --full: give one of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that were not requested; without a GPU skip those that need one (all of tests/gpu)."""
    import torch

    rare_cases_to_lab(items)
    more: dict[str, list[pytest.Item]] = {}
    if not config.getoption("--full"):
        lab = config.getoption("--lab")
        for item in items:
            if item.get_closest_marker("full"):
                more.setdefault("with --full", []).append(item)
            elif bool(item.get_closest_marker("lab")) != lab:
                more.setdefault("without --lab" if lab else "with --lab", []).append(item)
            elif config.getoption("--quick") and not quick(item):
                more.setdefault("without --quick", []).append(item)
    deselected = {item for some in more.values() for item in some}
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=list(deselected))
    config.stash[DESELECTED] = {option: len(some) for option, some in more.items()}
    if hasattr(config, "workeroutput"):  # of pytest-xdist: reported to its controller at the end
        config.workeroutput["deselected"] = config.stash[DESELECTED]
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("gpu") or item.path.parent.name == "gpu":
            item.add_marker(no_gpu)


def rare_cases_to_lab(items: list[pytest.Item]) -> None:
    """Of a test with the marker ``usual``, the cases whose numbers it does not have go to the laboratory."""
    seen: Counter[str] = Counter()
    for item in items:
        usual = item.get_closest_marker("usual")
        if usual and not item.get_closest_marker("full"):
            name = item.nodeid.partition("[")[0]
            if seen[name] not in usual.args and not item.get_closest_marker("quick"):
                item.add_marker("lab")
            seen[name] += 1


def quick(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("quick")) or item.path.parent.name == "unit" and item.path.name not in SLOW


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """Exclude the million imported objects from garbage collections and from searches for tensors.

    It is repeated before each module, because tests import more. Otherwise each collection takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[DESELECTED].update(getattr(node, "workeroutput", {}).get("deselected", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if more := config.stash[DESELECTED]:
        counts = ", ".join(f"{count} {option}" for option, count in more.items())
        terminalreporter.write_line(f"more tests run: {counts}")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Calls a function that compiles Triton kernels in a separate process, where Triton's interpreter is off."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
            started = process.submit(abs, 0)
        started.result(patience(60))
        yield lambda function, *arguments: process.submit(function, *arguments).result(patience(300))
