#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Start processes as torchrun does; if they refuse their settings, end with their line alone, and exit code 2.

    python tools/torchrun.py --nproc-per-node 8 pretrain_llama.py --model llama3-8b ...

torchrun itself prints thirty more lines after a refusal and ends with 1. Everything else is as with torchrun.
In .venv, scripts/setup.sh makes `torchrun` a start of this program.
"""

from __future__ import annotations

import logging
import sys

EXIT_REFUSED = 2
LOGS = ("run", "elastic.multiprocessing.api", "elastic.multiprocessing.errors.error_handler")
# parts of the launcher's lines about such an end, and about a default that it chooses
REPORTED = (f"(exitcode: {EXIT_REFUSED})", "closing signal", "OMP_NUM_THREADS")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words in (["-h"], ["--help"]):
        print(f"usage: torchrun.py [OPTIONS of torchrun] PROGRAM [ARGS ...]\n\n{__doc__}")
        return 0
    return launch(words)


def launch(words: list[str]) -> int:
    """Run torchrun with these words; returns the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in LOGS:
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.addFilter(lambda record: not any(part in record.getMessage() for part in REPORTED))
    try:
        run.main(words)
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode != EXIT_REFUSED:
            raise
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
