# SPDX-License-Identifier: Apache-2.0
"""Tries changes in forks of one process that has imported everything and collected the tests.

A fork applies its change in memory and runs a few tests until one fails; the processes of distributed tests are its
own forks, and so have the change too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants import covering, in_memory
from tests.mutants.changes import ROOT, Change

NOTICED, IN_TIME, SURVIVED, UNTESTED = "noticed", "noticed: it hangs", "survived", "no test runs it"
PASSED, FAILED, LATE, NOT_APPLIED = 0, 1, 2, 3
ENVIRONMENT = {  # before torch is imported; as in tests/distributed/pool.py
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCH_GLOO_LAZY_INIT": "1",
    "TRITON_INTERPRET": "1",
    "FORK_THIS_PROCESS": "1",
}
FLOOR = 20.0  # seconds that a test may always take
FACTOR = 6.0  # a test hangs after this many times its time without a change


@dataclass
class Trial:
    change: Change
    tests: list[str] | None  # None: all that are collected
    outcome: str = UNTESTED
    by: str = ""  # the test that noticed
    seconds: float = 0.0


class Try:
    """A plugin of pytest that tries changes instead of running the tests."""

    def __init__(self, trials: list[Trial], done: Callable[[Trial], bool], cases: int = 1) -> None:
        self.trials = trials
        self.cases = cases  # of each test function; 1: only those that were counted
        self.done = done  # called after each trial; False ends the trials
        self.unchanged: dict[str, tuple[int, float]] = {}  # (code, seconds) of a test without a change

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        in_memory.import_all({trial.change.file for trial in self.trials})
        functions = in_memory.functions_in(ROOT / "megatron")
        share_memory()
        for trial in self.trials:
            begin = time.monotonic()
            self.run(trial, items, lambda trial=trial: in_memory.apply(trial.change, functions))
            trial.seconds = time.monotonic() - begin
            if not self.done(trial):
                break
        return True

    def run(self, trial: Trial, items: dict[str, Any], apply: Callable[[], bool]) -> None:
        """Run the trial's tests with the change until one fails that passes without it."""
        tests = list(items) if trial.tests is None else [test for test in trial.tests if test in items]
        for name in dict.fromkeys(test.partition("[")[0] for test in tests if self.cases > 1):
            every = [test for test in items if test.partition("[")[0] == name]
            tests += [test for test in every[:: -(-len(every) // self.cases)] if test not in tests]
        trial.tests = tests
        while tests:
            limits = [max(FLOOR, FACTOR * self.unchanged.get(test, (0, 0.0))[1]) for test in tests]
            code, ran = in_fork([items[test] for test in tests], apply, limits)
            if code == NOT_APPLIED:
                return
            if code == PASSED:
                trial.outcome = SURVIVED
                return
            test = tests[ran]
            if test not in self.unchanged:
                start = time.monotonic()
                passed, _ = in_fork([items[test]], lambda: True, [3 * FLOOR])
                self.unchanged[test] = (passed, time.monotonic() - start)
                if code == LATE and FACTOR * self.unchanged[test][1] > FLOOR:
                    tests = tests[ran:]  # with a limit that is now known
                    continue
            if self.unchanged[test][0] == PASSED:
                trial.outcome, trial.by = (IN_TIME if code == LATE else NOTICED), test
                return
            tests = tests[ran + 1 :]
            trial.outcome = SURVIVED if ran or trial.outcome == SURVIVED else UNTESTED


class Count:
    """A plugin of pytest that writes which lines a few cases of each test function run."""

    def __init__(self, file: Path, minutes: float, longest: float, cases: int) -> None:
        self.file, self.end, self.longest, self.cases = file, time.monotonic() + 60 * minutes, longest, cases

    def pytest_runtestloop(self, session: Any) -> bool:
        known = {json.loads(text)["test"] for text in self.file.read_text().splitlines()} if self.file.exists() else ()
        functions: dict[str, list[Any]] = {}
        for item in session.items:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        chosen = [item for items in functions.values() for item in items[:: -(-len(items) // self.cases)]]
        share_memory()
        with tempfile.TemporaryDirectory(prefix="lines-") as folder, open(self.file, "a") as output:
            for item in chosen:
                if item.nodeid in known:
                    continue
                if time.monotonic() > self.end:
                    print(f"the time is over before {item.nodeid}")
                    break
                begin = time.monotonic()
                start = lambda: covering.start(f"{folder}/lines") or True  # noqa: E731
                code, _ = in_fork([item], start, [self.longest], covering.save)
                seconds, lines = time.monotonic() - begin, covering.lines_in(Path(folder))
                print(f"{seconds:.1f} s, {['passed', 'failed', 'too long'][code]}: {item.nodeid}", flush=True)
                found = {"test": item.nodeid, "seconds": round(seconds, 2), "lines": lines if code == PASSED else {}}
                print(json.dumps(found), file=output, flush=True)
        return True


def share_memory() -> None:
    gc.collect()
    gc.freeze()  # forks share these pages


def in_fork(
    items: list[Any], apply: Callable[[], bool], limits: list[float], after: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Run tests in a fork that applies a change, each with a limit in seconds; (code, index of the deciding test)."""
    from _pytest.runner import runtestprotocol

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            end_with_parent()
            os.register_at_fork(after_in_child=end_with_parent)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(nothing, number)
            if not apply():
                os.write(write, bytes([NOT_APPLIED]))
                os._exit(0)
            for number, item in enumerate(items):
                following = items[number + 1] if number + 1 < len(items) else None
                reports = runtestprotocol(item, nextitem=following, log=False)
                after()
                os.write(write, bytes([FAILED if any(report.failed for report in reports) else PASSED]))
                if any(report.failed for report in reports):
                    break
        finally:
            os._exit(0)
    os.close(write)
    answers, deadline = b"", time.monotonic() + limits[0]
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(read, 100) if ready else b""
        answers += part
        if not part or FAILED in part or NOT_APPLIED in part or len(answers) == len(items):
            break
        deadline = time.monotonic() + limits[len(answers)]
    os.close(read)
    os.kill(child, signal.SIGKILL)  # its workers end with it
    os.waitpid(child, 0)
    if NOT_APPLIED in answers:
        return NOT_APPLIED, 0
    if FAILED in answers:
        return FAILED, answers.index(FAILED)
    if len(answers) == len(items):
        return PASSED, 0
    return (FAILED if ready else LATE), len(answers)  # no answer before the limit: the process died


def end_with_parent() -> None:
    """Let the kernel end this process when the one that forked it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run(plugin: Try | Count, tests: Iterable[str], profile: str = "few") -> None:
    """Collect these tests in this process, which imports everything, and let the plugin use them."""
    import pytest

    os.environ.update(ENVIRONMENT)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        options = ["-s", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler", "-p", "no:xdist",
                   "-p", "no:cov", "--basetemp", f"{folder}/tests", "--rootdir", str(ROOT),
                   f"--hypothesis-profile={profile}"]  # fmt: skip
        pytest.main([*options, *tests], plugins=[plugin])
