# SPDX-License-Identifier: Apache-2.0
"""Change the source in one place at a time, and run the tests of that line: does one of them fail?

    python -m tests.mutants --count tests/unit tests/distributed   # which tests run which line; once, takes long
    python -m tests.mutants --sample 20                            # a random sample
    python -m tests.mutants                                        # all, before a release
    python -m tests.mutants --list

A change that no test notices survives, and is listed. Write a test for it, or a reason in tests/mutants/reasons.json
why no test can notice it. Exit code 0: at least 97 % are noticed and each survivor has a reason; 1: otherwise.
Ctrl-C ends the trials and prints the report of those that are done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.mutants import covering
from tests.mutants.changes import PLACES, ROOT, Change, all_changes

REASONS = Path(__file__).with_name("reasons.json")
FOLDER = ROOT / "out" / "mutants"
WANTED = 0.97
NOTICED, SURVIVED, UNTESTED = "noticed", "survived", "no test runs it"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    places = tuple(args.only) or PLACES
    changes = all_changes(places)
    if args.list:
        for change in changes:
            print(change)
        print(f"{len(changes)} changes: {dict(Counter(change.kind for change in changes).most_common())}")
        return 0
    lines = covering.count(args.count, FOLDER) if args.count else covering.read(FOLDER)
    if args.count and args.sample is None:
        return 0
    if not lines:
        print("error: no lines are counted: run python -m tests.mutants --count tests/unit first", file=sys.stderr)
        return 2
    if args.sample is not None:
        tested = [change for change in changes if tests_of(change, lines, {}, args.seconds)]
        print(f"{len(changes)} changes, {len(tested)} on lines that the counted tests run; a sample of {args.sample}")
        changes = random.Random(args.seed).sample(tested, min(args.sample, len(tested)))
    results: dict[Change, str] = {}
    try:
        for change, outcome in trials(changes, lines, args.seconds):
            results[change] = outcome
    except KeyboardInterrupt:
        print(f"interrupted after {len(results)} of {len(changes)} changes")
    return report(results)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", nargs="+", default=[], metavar="TESTS", help="count which lines these tests run")
    options.add_argument("--sample", type=int, metavar="N", help="try N random changes")
    options.add_argument("--seed", type=int, default=0, help="of the sample")
    options.add_argument("--only", nargs="+", default=[], metavar="PATH", help="change these files or folders alone")
    options.add_argument("--seconds", type=float, default=60, help="longest time of a change's tests (default: 60)")
    options.add_argument("--list", action="store_true", help="list the changes, and try none")
    return options


def tests_of(change: Change, lines: covering.Lines, times: dict[str, float], most: float) -> list[str]:
    """The tests that run the line, quickest first, as many as take ``most`` seconds together."""
    every = sorted(lines.get(change.file, {}).get(str(change.line), []), key=lambda test: times.get(test, 1.0))
    chosen, total = [], 0.0
    for test in every:
        total += times.get(test, 1.0)
        if chosen and total > most:
            break
        chosen.append(test)
    return chosen


def trials(changes: list[Change], lines: covering.Lines, most: float) -> Iterator[tuple[Change, str]]:
    """(change, outcome) of each change, tried in a copy of the repository."""
    times = covering.seconds(FOLDER)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".*_cache", ".hypothesis")
        )
        for number, change in enumerate(changes, 1):
            begin = time.monotonic()
            tests = tests_of(change, lines, times, most)
            outcome = run(change, tests, copy, most) if tests else UNTESTED
            print(f"[{number}/{len(changes)}, {time.monotonic() - begin:.0f} s] {outcome}: {change}", flush=True)
            yield change, outcome


def run(change: Change, tests: list[str], copy: Path, most: float) -> str:
    """Whether one of the tests fails with the change. A test that no longer ends has failed."""
    file = copy / change.file
    source = file.read_bytes()
    file.write_bytes(change.apply((ROOT / change.file).read_bytes()))
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        with open(os.devnull, "wb") as nothing:
            done = subprocess.Popen(
                command, cwd=copy, env=environment, stdout=nothing, stderr=nothing, start_new_session=True
            )
            code = done.wait(60 + 5 * most)
    except subprocess.TimeoutExpired:
        done.kill()  # its workers end with it
        done.wait()
        code = 1
    finally:
        file.write_bytes(source)
    return SURVIVED if code == 0 else NOTICED


def report(results: dict[Change, str]) -> int:
    """Print the survivors and the share of changes that are noticed; returns the exit code."""
    reasons = json.loads(REASONS.read_text())
    counts = Counter(results.values())
    tried = counts[NOTICED] + counts[SURVIVED]
    unexplained = [change for change, outcome in results.items() if outcome == SURVIVED and change.key not in reasons]
    print(f"\n{counts[NOTICED]} of {tried} changes are noticed; {counts[UNTESTED]} are on lines that no test runs")
    for change, outcome in results.items():
        if outcome == SURVIVED:
            print(f"survived: {change}\n  {reasons.get(change.key, 'no reason is given')}\n  {change.key}")
    if not tried:
        return 1
    return 0 if counts[NOTICED] / tried >= WANTED and not unexplained and not counts[UNTESTED] else 1


if __name__ == "__main__":
    sys.exit(main())
