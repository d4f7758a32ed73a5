# SPDX-License-Identifier: Apache-2.0
"""Change the source in one place at a time, and run the tests of that line: does one of them fail?

    python -m tests.mutants --count tests/unit tests/distributed   # which tests run which line; once, takes long
    python -m tests.mutants                                        # 400 changes of all files and kinds
    python -m tests.mutants --all                                  # before a release
    python -m tests.mutants --again --tests 30 --cases 10          # those that no test has noticed yet, with more tests
    python -m tests.mutants --again --only FILE --with TESTS       # does my new test notice what others did not?
    python -m tests.mutants --list

A change that no test notices survives, and is listed. Write a test for it, or a reason in tests/mutants/reasons.json
why no test can notice it. Which test runs which line, and which noticed which change, is kept in out/mutants, on this
machine alone. Exit code 0: at least 97 % are noticed, and each survivor has a reason; 1: otherwise. Ctrl-C ends the
trials and prints the report of those that are done.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.mutants import covering, in_memory, warm
from tests.mutants.changes import PLACES, ROOT, Change, all_changes
from tests.mutants.warm import IN_TIME, NOTICED, SURVIVED, UNTESTED, Trial

REASONS = Path(__file__).with_name("reasons.json")
FOLDER = ROOT / "out" / "mutants"
KNOWN = FOLDER / "noticed.json"  # the test that noticed a change, by the change's key
HANGS = " (it hangs)"  # after the test of a change because of which it does not end
WANTED = 0.97  # share of the changes that can be noticed


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    changes = all_changes(tuple(args.only) or PLACES)
    if args.list:
        for change in changes:
            print(change)
        print(f"{len(changes)} changes: {dict(Counter(change.kind for change in changes).most_common())}")
        noticed, explained = ({change.key for change in changes} & read(file).keys() for file in (KNOWN, REASONS))
        print(
            f"{len(noticed)} are noticed by a test, {len(explained)} have a reason, "
            f"{len(changes) - len(noticed | explained)} are left"
        )
        return 0
    if args.count:
        FOLDER.mkdir(parents=True, exist_ok=True)
        warm.run(warm.Count(FOLDER / "counted.jsonl", args.minutes, args.seconds, args.cases), args.count)
        return 0
    (lines, times), known = covering.read(FOLDER), read(KNOWN)
    tested = [change for change in changes if change.key in known or lines.get(change.file, {}).get(str(change.line))]
    print(f"{len(changes)} changes, {len(tested)} of them on lines that the counted tests run")
    if args.tests_to_run:
        tested = changes
    if not tested:
        print("error: no lines are counted: run python -m tests.mutants --count tests/unit first", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * args.minutes
    if args.again:
        reasons = read(REASONS)
        chosen = [change for change in changes if change.key not in known and change.key not in reasons]
        print(f"trying {len(chosen)} that no test has noticed yet and that have no reason")
    else:
        chosen = tested if args.all else sample(tested, args.sample, args.seed)
        print("trying all of them" if args.all else f"trying {len(chosen)} of them, --seed {args.seed}")
    sizes = covering.sizes(lines)
    trials = [
        Trial(
            change,
            None if args.tests_to_run else tests_of(change, lines, sizes, times, known, args.tests, args.seconds),
        )
        for change in chosen
        if in_memory.differing(change)  # otherwise it is outside functions
    ]
    done: list[Trial] = []

    def note(trial: Trial) -> bool:
        done.append(trial)
        by = f" by {trial.by}" if trial.by else f" ({len(trial.tests)} tests)"
        print(f"[{len(done)}/{len(trials)}, {trial.seconds:.1f} s] {trial.outcome}{by}: {trial.change}", flush=True)
        if trial.outcome == SURVIVED:
            known.pop(trial.change.key, None)
        elif trial.outcome in (NOTICED, IN_TIME):
            known[trial.change.key] = trial.by + HANGS * (trial.outcome == IN_TIME)
        KNOWN.parent.mkdir(parents=True, exist_ok=True)
        KNOWN.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
        return time.monotonic() < end

    try:
        files = {test.partition("::")[0] for trial in trials for test in trial.tests or []}
        warm.run(
            warm.Try(trials, note, args.cases),
            args.tests_to_run or sorted(file for file in files if Path(ROOT, file).exists()),
            args.profile,
        )
    except KeyboardInterrupt:
        print(f"interrupted after {len(done)} of {len(trials)} changes")
    return report({trial.change: trial.outcome for trial in done})


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", nargs="+", default=[], metavar="TESTS", help="count which lines these tests run")
    options.add_argument("--minutes", type=float, default=600, help="stop after so many; the next --count continues")
    options.add_argument("--cases", type=int, default=1, help="cases of each test function (default: 1)")
    options.add_argument("--sample", type=int, default=400, metavar="N", help="try N random changes (default: 400)")
    options.add_argument("--seed", default="0", help="seed of the random choice")
    options.add_argument("--all", action="store_true", help="try all changes")
    options.add_argument(
        "--again", action="store_true", help="only changes without a test that notices them or a reason"
    )
    options.add_argument("--only", nargs="+", default=[], metavar="PATH", help="change only these files or folders")
    options.add_argument("--with", nargs="+", default=[], dest="tests_to_run", metavar="TESTS", help="run all of these "
                         "tests for each change, in this order, not those that were counted")  # fmt: skip
    options.add_argument("--tests", type=int, default=5, help="largest number of tests for a change (default: 5)")
    options.add_argument("--seconds", type=float, default=30, help="longest time of a change's tests (default: 30)")
    options.add_argument("--profile", default="few", help="Hypothesis profile; ci: as many examples as ordinary runs")
    options.add_argument("--list", action="store_true", help="list the changes, and try none")
    return options


def read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def sample(changes: list[Change], count: int, seed: str) -> list[Change]:
    """Every n-th change of a list ordered by file and kind, in random order: each file and kind has its share."""
    draw = random.Random(seed)
    ordered = sorted(changes, key=lambda change: (change.file, change.kind, draw.random()))
    step = max(1.0, len(ordered) / count)
    start = draw.random() * step
    chosen = [ordered[int(start + n * step)] for n in range(count) if start + n * step < len(ordered)]
    draw.shuffle(chosen)  # so that a run that ends early is a sample too
    return chosen


def tests_of(
    change: Change,
    lines: covering.Lines,
    sizes: tuple[Counter, Counter],
    times: dict[str, float],
    known: dict[str, str],
    most: int,
    seconds: float,
) -> list[str]:
    """Tests that run the line: the one that noticed the change before, then one case of each test function, then all.

    The two that noticed most other changes of this function come first, then quick tests and those of which a large
    share of the lines is in the changed file.
    """
    in_file, in_all = sizes
    share = {test: in_file[change.file, test] / in_all[test] for test in lines.get(change.file, {}).get(
        str(change.line), [])}  # fmt: skip
    every = sorted(share, key=lambda test: times.get(test, 1.0) / share[test])
    first = list({test.partition("[")[0]: test for test in reversed(every)}.values())[::-1]
    function = ":".join(change.key.split(":")[:2]) + ":"
    near = Counter(test for key, test in known.items() if key.startswith(function) and test in share)
    earlier = [known[change.key].removesuffix(HANGS)] if change.key in known else []
    earlier += [test for test, _ in near.most_common(2)]
    chosen, total = [], 0.0
    for test in dict.fromkeys([*earlier, *first, *every]):
        total += times.get(test, 1.0)
        if chosen and (total > seconds or len(chosen) == most):
            break
        chosen.append(test)
    return chosen


def report(results: dict[Change, str]) -> int:
    """Print the survivors and the share of changes that are noticed; returns the exit code."""
    reasons = read(REASONS)
    counts = Counter(results.values())
    noticed = counts[NOTICED] + counts[IN_TIME]
    survivors = [change for change, outcome in results.items() if outcome == SURVIVED]
    unexplained = [change for change in survivors if change.key not in reasons]
    tried = noticed + len(unexplained)
    for change in survivors:
        print(f"survived: {change}\n  {reasons.get(change.key, 'no reason is given')}\n  {change.key}")
    print(
        f"\n{len(results)} changes tried: {noticed} are noticed ({counts[IN_TIME]} because a test no longer ends), "
        f"{len(survivors)} survive, of which {len(survivors) - len(unexplained)} have a reason why no test can notice "
        f"them; {counts[UNTESTED]} have no test.\n"
        f"Noticed of those that can be: {noticed} of {tried}, {noticed / max(1, tried):.1%}."
    )
    return 0 if noticed and noticed / tried >= WANTED and not unexplained else 1


if __name__ == "__main__":
    sys.exit(main())
