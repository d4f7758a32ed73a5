# SPDX-License-Identifier: Apache-2.0
"""Runs tests/gpu with pytest if it is installed, otherwise with a small runner of the same functions."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.stage import Case, Figures, Sizes, Stage, reason

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "gpu"


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """A case for each file; without a GPU all tests are skipped."""
    by = by_pytest if importlib.util.find_spec("pytest") else by_ourselves
    stage.report["runner"] = by.__name__
    files = sorted(FOLDER.glob("test_*.py"))
    stage.run([Case(file.stem, partial(by, file, stage), 60.0) for file in files])


def by_pytest(file: Path, stage: Stage) -> Figures:
    results = stage.folder / f"{file.stem}.xml"
    # No conftest and no settings: they need plugins that may not be installed on a GPU machine.
    command = [sys.executable, "-m", "pytest", str(file), "-q", "--noconftest", "-c", os.devnull, f"--rootdir={ROOT}"]
    command += ["-p", "no:cacheprovider", f"--junitxml={results}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
    limit = max(stage.left(), 10)
    with (stage.folder / f"{stage.name}.log").open("a") as log:
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {limit:.0f} s") from None
    if not results.exists():
        raise RuntimeError(f"pytest ended with code {code}: see {stage.name}.log")
    return counted(ElementTree.parse(results).iter("testcase"))


def counted(cases: Iterator[ElementTree.Element]) -> Figures:
    """Number of passed tests, reasons of skipped ones, and first lines of failures."""
    result: Figures = {"passed": 0, "skipped": {}, "wrong": {}}
    for case in cases:
        skipped, wrong = case.find("skipped"), case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            result["wrong"][case.get("name")] = (wrong.get("message") or "").splitlines()[0][:300]
        elif skipped is not None:
            why = skipped.get("message") or ""
            result["skipped"][why] = result["skipped"].get(why, 0) + 1
        else:
            result["passed"] += 1
    return result


# --- without pytest ---


class Skipped(Exception):
    pass


def by_ourselves(file: Path, stage: Stage) -> Figures:
    result: Figures = {"passed": 0, "skipped": {}, "wrong": {}}
    with standing_in():
        module = fresh(file)
        for name, test in tests_of(module):
            if stage.left() < 5:
                raise RuntimeError(f"no time left after {result['passed']} tests")
            begin = time.monotonic()
            try:
                test()
                result["passed"] += 1
            except Skipped as skipped:
                result["skipped"][str(skipped)] = result["skipped"].get(str(skipped), 0) + 1
            except Exception as error:
                result["wrong"][name] = reason(error)
                stage.say(f"   {name}: {reason(error)} after {time.monotonic() - begin:.1f} s")
    return result


def fresh(file: Path) -> types.ModuleType:
    """A new module of a file, even if the file was imported before, with the real pytest."""
    spec = importlib.util.spec_from_file_location(f"by_ourselves_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tests_of(module: types.ModuleType) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test with each combination of its parameters."""
    skip = next((mark.args[0] for mark in marks(module) if mark.name == "skipif" and mark.args[0]), None)
    why = next((mark.kwargs.get("reason", "") for mark in marks(module) if mark.name == "skipif"), "")
    for name, function in vars(module).items():
        if not name.startswith("test_") or not inspect.isfunction(function):
            continue
        parameters = [mark.args for mark in getattr(function, "marks", []) if mark.name == "parametrize"]
        axes = [[dict(zip(words(names), values if len(words(names)) > 1 else [values])) for values in list(choices)]
                for names, choices in parameters]  # fmt: skip
        for chosen in itertools.product(*axes):
            given = {key: value for part in chosen for key, value in part.items()}
            label = f"{name}[{', '.join(str(value)[:20] for value in given.values())}]"
            yield label, partial(call, function, given, why if skip else None)


def words(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def call(function: Callable[..., None], given: dict[str, Any], why: str | None) -> None:
    if why is not None:
        raise Skipped(why)
    if "monkeypatch" not in inspect.signature(function).parameters:
        function(**given)
        return
    with ExitStack() as stack:
        function(**given, monkeypatch=Patches(stack))


class Patches:
    """The part of the fixture ``monkeypatch`` that tests/gpu uses; ``stack`` undoes the changes."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def setattr(self, target: Any, name: str, value: Any) -> None:
        self.stack.enter_context(patch.object(target, name, value))


class Mark:
    def __init__(self, name: str, args: tuple = (), kwargs: dict | None = None) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs or {}

    def __call__(self, function: Callable) -> Callable:
        function.marks = [*getattr(function, "marks", []), self]
        return function


class Marks:
    def __getattr__(self, name: str) -> Callable[..., Mark]:
        return lambda *args, **kwargs: Mark(name, args, kwargs)


def marks(module: types.ModuleType) -> list[Mark]:
    result = getattr(module, "pytestmark", [])
    return result if isinstance(result, list) else [result]


@contextmanager
def standing_in() -> Iterator[None]:
    """Within this context, ``import pytest`` gives a module with only the functions that tests/gpu uses."""

    def skip(why: str) -> None:
        raise Skipped(why)

    module = types.ModuleType("pytest")
    module.mark, module.skip = Marks(), skip
    # For the unit tests whose cases tests/gpu imports; these tests do not run.
    module.fixture = lambda *function, **_: function[0] if function else lambda function: function
    module.param = lambda *values, **_: values if len(values) > 1 else values[0]
    before = sys.modules.get("pytest")
    sys.modules["pytest"] = module
    try:
        yield
    finally:
        del sys.modules["pytest"]
        if before is not None:
            sys.modules["pytest"] = before
