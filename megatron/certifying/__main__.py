# SPDX-License-Identifier: Apache-2.0
"""Check that a program computes on several processes what it computes on one: losses, every gradient, norm and update.

    python -m megatron.certifying --grid ranks=2 program.py:step

The function is called with the sizes of a grid and returns (model, loss), or an Outcome. Exit code 0: all agree; 1:
something differs; 2: the program cannot be checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from megatron.certifying.certificate import Certificate, certify
from megatron.certifying.of_file import OfFile, sizes_of
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
    options.add_argument("program", metavar="FILE.py:NAME", help="the function")
    args = options.parse_args(argv)
    return report(lambda: certify(OfFile(args.program), [sizes_of(text) for text in args.grid], sees=args.sees))


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
