# SPDX-License-Identifier: Apache-2.0
"""Bad inputs: one clear line, exit code 2 (or 1, where a run had begun), no traceback, and no file is changed."""

import os
import random
import re
import time
from pathlib import Path

import pytest

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tests.distributed.test_program import PROGRAM
from tests.faults.bad_inputs import all_cases, make_good, of_contradictions, of_unknown_flags, of_values
from tests.program import ENVIRONMENT, run_forked

COUNT = int(os.environ.get("BAD_INPUTS", "0"))
STARTED = re.compile(r"/dev/null|nowhere|hf:$|--gpu|999$|--use-checkpoint-args")  # checked only by a run


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.lab
def test_flags_are_refused_in_a_line():
    draw = random.Random(3)
    cases = [case for case in of_contradictions() if case.program == PROGRAM and not STARTED.search(case.name)]
    cases += [*of_unknown_flags(draw), *of_values(draw)]
    accepted = []
    for case in cases:
        try:
            parse(case.flags, None, 1)
            accepted.append(case.name)
        except Refusal as refusal:
            assert len(str(refusal).splitlines()) == 1 and "--" in str(refusal), case.name
    assert len(cases) > 200 and not accepted


@pytest.mark.skipif(not COUNT, reason="each case starts a program: bash tests/faults/run.sh")
def test_one_line_and_nothing_changes(tmp_path, monkeypatch):
    begin = time.monotonic()
    make_good(tmp_path / "good")
    (tmp_path / "work").mkdir()
    every = all_cases(tmp_path / "good", tmp_path / "work", 1)
    cases = random.Random(2).sample(every, min(COUNT, len(every)))
    before, wrong = files(tmp_path), []
    for case in cases:
        done = run_forked(case.program, case.flags, ENVIRONMENT)
        lines = [line for line in done.stderr.splitlines() if re.match(r"(\S+: )?error: ", line)]
        after = files(tmp_path)
        if len(lines) != 1 or done.returncode not in (1, 2) or "Traceback" in done.stdout + done.stderr:
            wrong.append(f"{case.name}: exit code {done.returncode}, {done.stderr[-500:]}")
        elif after != before:
            wrong.append(f"{case.name}: changed {set(after.items()) ^ set(before.items())}")
        before = after
    assert not wrong, "\n".join(wrong)
    print(f"\n{len(cases)} bad inputs of {len(every)}: a line each, nothing changed; {time.monotonic() - begin:.0f} s")
