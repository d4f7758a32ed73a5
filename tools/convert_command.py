# SPDX-License-Identifier: Apache-2.0
"""What the programs that convert checkpoints have in common: a bar, the time it took, errors in one line."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megatron.training.refusal import Refusal


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refusal(message)


def one_line_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose errors are Refusals."""
    return _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)


def timed(write: Callable[[Callable[[int], Callable[[], Any]]], list[str]]) -> list[str]:
    """Closing lines of ``write(bar)``, the first one with its seconds; ``bar(total)()`` counts one tensor on a bar."""
    from tqdm import tqdm

    begin = time.monotonic()
    with ExitStack() as stack:

        def bar(total: int) -> Callable[[], Any]:
            return stack.enter_context(tqdm(total=total, unit=" tensors", disable=None)).update

        lines = write(bar)
    return [f"{lines[0]}; {time.monotonic() - begin:.1f} s", *lines[1:]]


def run(convert: Callable[[list[str] | None], list[str]], argv: list[str] | None) -> int:
    """Print what ``convert(argv)`` closes with; returns the exit code."""
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    try:
        print("\n".join(convert(argv)))
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def exit_on_sigterm() -> None:
    """By an exception, so that unfinished folders go."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
