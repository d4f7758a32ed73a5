# SPDX-License-Identifier: Apache-2.0
"""Check that a program computes on several processes what it computes on one: losses, every gradient, norm and update.

    python -m megatron.certifying --grid ranks=2 program.py:step

The function is called with the sizes of a grid and returns (model, loss), or an Outcome. Exit code 0: all agree; 1:
something differs; 2: the program cannot be checked.
"""

from __future__ import annotations

import argparse
import sys

from megatron.certifying.certificate import certify
from megatron.certifying.of_file import OfFile, sizes_of
from megatron.certifying.processes_of_program import ProgramFailed


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
    try:
        certificate = certify(OfFile(args.program), [sizes_of(text) for text in args.grid], sees=args.sees)
    except (ProgramFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(certificate)
    return 0 if certificate.right else 1


if __name__ == "__main__":
    sys.exit(main())
