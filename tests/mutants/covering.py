# SPDX-License-Identifier: Apache-2.0
"""Which tests run a line, counted by coverage.py in every process of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.changes import ROOT

Lines = dict[str, dict[str, list[str]]]  # tests by file and line


def count(tests: Sequence[str], folder: Path) -> Lines:
    """Run tests, and add the lines that they run to ``folder/lines.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    data, times = folder / "coverage", folder / "times.json"
    environment = {**os.environ, "COVERAGE_FILE": str(data), "COVERAGE_BY_TEST": "1", "TIMES": str(times)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.times", "--cov", "--cov-context=test",
               "--cov-report=", *tests]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    from coverage import CoverageData

    coverage = CoverageData(str(data))
    coverage.read()
    known = read(folder)
    for file in coverage.measured_files():
        if not Path(file).is_relative_to(ROOT):
            continue
        lines = known.setdefault(str(Path(file).relative_to(ROOT)), {})
        for line, contexts in coverage.contexts_by_lineno(file).items():
            named = {context.partition("|")[0] for context in contexts} - {""}
            lines[str(line)] = sorted({*lines.get(str(line), []), *named})
    (folder / "lines.json").write_text(json.dumps(known))
    return known


def read(folder: Path) -> Lines:
    file = folder / "lines.json"
    return json.loads(file.read_text()) if file.exists() else {}


def seconds(folder: Path) -> dict[str, float]:
    """How long each test takes."""
    file = folder / "times.json"
    return json.loads(file.read_text()) if file.exists() else {}
