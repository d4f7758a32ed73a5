# SPDX-License-Identifier: Apache-2.0
"""Which tests run a line, counted by coverage.py in every process of a test."""

from __future__ import annotations

import json
from collections import Counter
from multiprocessing import util
from pathlib import Path

from tests.mutants.changes import ROOT

Lines = dict[str, dict[str, list[str]]]  # tests by file and line


def start(data_file: str) -> None:
    """Count the lines of this process and of its forks; tests/distributed/worker.py saves those of the workers."""
    from coverage import Coverage

    counting = Coverage(data_file=data_file, data_suffix=True, config_file=False, source=[str(ROOT / "megatron")])
    counting.start()
    # Other processes of a test, as of concurrent.futures, save when they end.
    util.register_after_fork(counting, lambda _: util.Finalize(None, save, exitpriority=0))


def save() -> None:
    from coverage import Coverage

    if counting := Coverage.current():
        counting.stop()
        counting.save()


def lines_in(folder: Path) -> dict[str, list[int]]:
    """The lines by file that the processes have saved in this folder, which is emptied."""
    from coverage import CoverageData, exceptions

    result: dict[str, set[int]] = {}
    for part in folder.iterdir():
        data = CoverageData(str(part))
        try:
            data.read()
            for file in data.measured_files():
                result.setdefault(str(Path(file).relative_to(ROOT)), set()).update(data.lines(file) or [])
        except exceptions.DataError:  # its process was killed while it saved
            pass
        finally:
            part.unlink(missing_ok=True)
    return {file: sorted(lines) for file, lines in result.items()}


def read(folder: Path) -> tuple[Lines, dict[str, float]]:
    """(tests by file and line, seconds by test) of the tests that were counted."""
    by_line: Lines = {}
    times: dict[str, float] = {}
    if (file := folder / "counted.jsonl").exists():
        for text in file.read_text().splitlines():
            counted = json.loads(text)
            times[counted["test"]] = counted["seconds"]
            for name, lines in counted["lines"].items():
                for line in lines:
                    by_line.setdefault(name, {}).setdefault(str(line), []).append(counted["test"])
    return by_line, times


def sizes(lines: Lines) -> tuple[Counter, Counter]:
    """(number of lines by file and test, number of lines by test)."""
    in_file = Counter((file, test) for file, tests in lines.items() for line in tests.values() for test in line)
    in_all: Counter = Counter()
    for (_, test), count in in_file.items():
        in_all[test] += count
    return in_file, in_all
