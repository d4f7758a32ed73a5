# SPDX-License-Identifier: Apache-2.0
"""Runs the programs and the errors, and prints a line for each; see the package."""

from __future__ import annotations

import argparse
import sys
import time

from megatron.certifying.processes_of_program import Processes
from tests.referee.errors import ERRORS
from tests.referee.runs import RIGHT, Verdict, judge, placed, with_seeds


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.referee", description=__doc__)
    options.add_argument("--only", default="", help="programs and errors whose name contains this")
    options.add_argument("--errors", action="store_true", help="only the errors")
    options.add_argument("--details", action="store_true", help="print whole certificates")
    options.add_argument("--seeds", type=int, default=0, help="only right programs, with this many seeds")
    args = options.parse_args()
    start, bad, counts = time.monotonic(), [], [0, 0]
    print("|program|error|found|what certify says|seconds|\n|---|---|---|---|---|")
    with Processes(timeout=120) as processes:
        for program in with_seeds(args.seeds) if args.seeds else () if args.errors else RIGHT:
            if args.only in str(program):
                verdict = judge(program, processes.run)
                right = verdict.certificate is not None and verdict.certificate.right
                counts[0] += right
                show(str(program), "none", "not accused" if right else "ACCUSED", verdict, args.details)
                bad += [] if right else [str(program)]
        for error in () if args.seeds else ERRORS:
            if args.only in str(error.program) or args.only in error.what:
                verdict = judge(error.program, processes.run)
                found = placed(verdict, error.kind, error.module)
                counts[1] += found == "placed"
                show(str(error.program), error.what, found, verdict, args.details)
                bad += [] if found == "placed" else [error.what]
    print(f"\n{counts[0]} right programs not accused, {counts[1]} errors found and placed, "
          f"{time.monotonic() - start:.0f} s" + (f"; not: {', '.join(bad)}" if bad else ""))  # fmt: skip
    return bool(bad)


def show(program: str, error: str, found: str, verdict: Verdict, details: bool) -> None:
    print(f"|{program}|{error}|{found}|{verdict.said}|{verdict.seconds:.1f}|", flush=True)
    if details:
        print(verdict.failure or verdict.certificate, flush=True)


if __name__ == "__main__":
    sys.exit(main())
