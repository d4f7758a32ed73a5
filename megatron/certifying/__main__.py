# SPDX-License-Identifier: Apache-2.0
"""Check that a program computes on several processes what it computes on one: losses, every gradient, norm and update.

    python -m megatron.certifying --grid ranks=2 program.py:step
    python -m megatron.certifying --grid ranks=2 --loss "train loss" train.py --batch-size {8/ranks}

A function is called with the sizes of a grid and returns (model, loss), or an Outcome. A script runs as torchrun would
start it, until its second step; in its arguments {ranks} is a size of the grid, and {8/ranks} is 8 over this size. Exit
code 0: all agree; 1: something differs; 2: the program cannot be checked.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec

from megatron.certifying.certificate import Certificate, certify
from megatron.certifying.of_file import program_of, sizes_of
from megatron.certifying.processes_of_program import ProgramFailed

WRONG, REFUSED = 1, 2


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="python -m megatron.certifying",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument(
        "--grid", action="append", required=True, metavar="AXIS=N,...", help="a grid to compare; may be given again"
    )
    options.add_argument("--sees", action="store_true", help="also change single tokens, to see which outputs change")
    options.add_argument("--loss", metavar="TEXT", help="compare the numbers that the program prints after this text")
    options.add_argument("--loss-file", metavar="FILE", help="the file in which it writes them, if it prints none")
    options.add_argument("--picture", metavar="FILE", help="write a picture: parameters by grids, coloured by error")
    options.add_argument(
        "--words", metavar="TEXT", help="PROGRAM and its arguments as one text, split and quoted as in a shell"
    )
    options.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="FILE.py:NAME, or FILE.py ARGS..."
    )
    args = options.parse_args(argv)
    try:
        grids = [sizes_of(text) for text in args.grid]
        program = program_of([*shlex.split(args.words or ""), *args.program])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    if program is None:
        print("error: give a function, FILE.py:NAME, or a script that exists, FILE.py", file=sys.stderr)
        return REFUSED
    if args.picture and find_spec("matplotlib") is None:
        print("error: --picture needs matplotlib, which is not installed: pip install matplotlib", file=sys.stderr)
        return REFUSED
    return report(
        lambda: certify(program, grids, sees=args.sees, loss=args.loss, loss_file=args.loss_file), args.picture
    )


def report(make: Callable[[], Certificate], picture: str | None = None) -> int:
    """Print a certificate, or why there is none; returns the exit code."""
    try:
        certificate = make()
    except (ProgramFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(certificate)
    if picture:
        certificate.draw(picture)
    return 0 if certificate.right else WRONG


if __name__ == "__main__":
    sys.exit(main())
