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
