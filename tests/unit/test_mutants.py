# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.mutants``: its changes, its choice of tests, its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants import covering, warm
from tests.mutants.changes import ROOT, all_changes, changes_of
from tests.patience import patience

LOSS = ("megatron/training/loss.py",)


def test_changes_of_a_source() -> None:
    source = (
        b"def f(x, axis):\n    dist.all_reduce(x, group=axis.group)\n    work.wait()\n"
        b"    if axis.rank < axis.size - 1:\n        x = x.float() * scale\n    return -x[: n + 1]\n"
    )
    kinds = Counter(change.kind for change in changes_of("f.py", source))
    assert kinds == {
        "call left out": 2, "call doubled": 1, "wrong group": 1, "off by one": 4, "sign": 3, "ranks swapped": 1,
        "scale left out": 1, "dtype": 1,
    }  # fmt: skip
    for change in changes_of("f.py", source):
        assert change.apply(source) != source


def test_enough_changes_of_step_and_core() -> None:
    some = all_changes((*LOSS, "megatron/training/step.py", "megatron/context_parallel/core"))
    assert len(some) > 100 and len({change.key for change in some}) == len(some)
    assert any("all_reduce" in change.old for change in some)


def test_a_sample_has_each_file_and_kind_by_its_share() -> None:
    changes = all_changes(("megatron/context_parallel/layout",))
    some = mutants.sample(changes, 100, "a")
    assert len(set(some)) == 100 and some == mutants.sample(changes, 100, "a") != mutants.sample(changes, 100, "b")
    for part in ("file", "kind"):
        every = Counter(getattr(change, part) for change in changes)
        chosen = Counter(getattr(change, part) for change in some)
        assert all(abs(chosen[name] - count * 100 / len(changes)) < 7 for name, count in every.items())


def test_quick_tests_of_this_file_come_first_and_one_case_of_each() -> None:
    change = all_changes(LOSS)[0]
    here = {change.file: {str(change.line): ["a[1]", "a[2]", "b", "c"]}}
    lines = here | {"other.py": {str(line): ["c"] for line in range(9)}}
    times = {"a[1]": 2.0, "a[2]": 1.0, "b": 3.0, "c": 1.0}

    def chosen(known: dict[str, str], most: int, seconds: float) -> list[str]:
        return mutants.tests_of(change, lines, covering.sizes(lines), times, known, most, seconds)

    assert chosen({}, 3, 60) == ["a[2]", "b", "c"]
    assert chosen({change.key: "c"}, 2, 60) == ["c", "a[2]"]
    assert chosen({}, 3, 4) == ["a[2]", "b"]
    assert chosen({f"{change.key}0": "b"}, 2, 60) == ["b", "a[2]"], "it noticed another change of this function"


def test_a_change_in_memory_reaches_functions_that_others_hold() -> None:
    """Run in a fork, because this process should stay as it is."""
    code = (
        "from tests.mutants import in_memory; from tests.mutants.changes import all_changes, ROOT\n"
        "from megatron.context_parallel.layout.spans import count, split\n"
        "spans = all_changes(('megatron/context_parallel/layout/spans.py',))\n"
        "change = next(change for change in spans if ':count:sign:' in change.key)\n"
        "assert count(((2, 5),)) == 3\n"
        "assert in_memory.apply(change, in_memory.functions_in(ROOT / 'megatron'))\n"
        "assert count(((2, 5),)) == 7 and split((0, 3), 2) == [(0, 2), (2, 3)]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_a_survivor_is_listed_with_its_reason(capsys: pytest.CaptureFixture) -> None:
    some = all_changes(LOSS)[:3]
    code = mutants.report({some[0]: mutants.NOTICED, some[1]: mutants.IN_TIME, some[2]: mutants.SURVIVED})
    assert code == 1 and f"survived: {some[2]}" in capsys.readouterr().out
    assert mutants.report(dict.fromkeys(some, mutants.NOTICED)) == 0


def test_new_tests_are_tried_with_what_others_did_not_notice(monkeypatch, tmp_path, capsys) -> None:
    """Of five changes one is known and one has a reason. Of the others a test notices one, hangs, and passes."""
    some = all_changes(LOSS)[:5]
    monkeypatch.setattr(mutants, "KNOWN", tmp_path / "noticed.json")
    monkeypatch.setattr(mutants, "REASONS", tmp_path / "reasons.json")
    monkeypatch.setattr(mutants, "FOLDER", tmp_path)
    monkeypatch.setattr(mutants, "all_changes", lambda places: some)
    (tmp_path / "noticed.json").write_text(json.dumps({some[0].key: "tests/unit/a.py::b"}))
    (tmp_path / "reasons.json").write_text(json.dumps({some[1].key: "a reason"}))
    ran: list[list[str]] = []

    def run(plugin: warm.Try, tests: list[str], profile: str) -> None:
        ran.append(tests)
        assert [trial.tests for trial in plugin.trials] == [None] * 3, "all that are collected"
        for trial, outcome in zip(plugin.trials, (mutants.NOTICED, mutants.IN_TIME, mutants.SURVIVED)):
            trial.outcome, trial.by, trial.tests = outcome, "c.py::d" * (outcome != mutants.SURVIVED), ["c.py::d"]
            plugin.done(trial)

    monkeypatch.setattr(warm, "run", run)
    assert mutants.main(["--again", "--with", "c.py", "e.py"]) == 1
    assert ran == [["c.py", "e.py"]]
    assert json.loads((tmp_path / "noticed.json").read_text()) == {
        some[0].key: "tests/unit/a.py::b", some[2].key: "c.py::d", some[3].key: "c.py::d (it hangs)",
    }  # fmt: skip
    known = {some[3].key: "c.py::d (it hangs)"}
    assert mutants.tests_of(some[3], {}, covering.sizes({}), {}, known, 1, 9) == ["c.py::d"]
    capsys.readouterr()
    assert mutants.main(["--list"]) == 0
    assert "3 are noticed by a test, 1 have a reason, 1 are left" in capsys.readouterr().out


def test_each_reason_is_of_this_source() -> None:
    reasons = json.loads(mutants.REASONS.read_text())
    assert not reasons.keys() - {change.key for change in all_changes()}, "delete these, or look at them again"
    assert all(reasons.values())


@pytest.mark.lab
def test_tests_of_layouts_notice_changes_of_layouts(tmp_path) -> None:
    """Count which lines the tests of layouts run, and let these tests try 20 changes of them."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        code = (
            "import sys; from pathlib import Path; from tests.mutants import __main__ as mutants\n"
            f"mutants.FOLDER, mutants.KNOWN = Path({str(tmp_path)!r}), Path({str(tmp_path / 'noticed.json')!r})\n"
            f"sys.exit(mutants.main({list(arguments)!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                              timeout=patience(300))  # fmt: skip
        print(done.stdout[-5000:], done.stderr[-2000:])
        return done

    assert run("--count", "tests/unit/test_layout.py", "--cases", "3").returncode == 0
    done = run("--only", "megatron/context_parallel/layout/sequence_layout.py", "--sample", "20", "--tests", "10")
    assert done.stdout.count("] noticed") >= 15
