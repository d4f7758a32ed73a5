# SPDX-License-Identifier: Apache-2.0
"""Shared by several programs in tools/: parsers, tokenizer options, a progress bar, the time taken, one-line errors."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

from megatron.training.data.read_tokens import DataError
from megatron.training.refusal import Refusal, one_line, printable
from megatron.training.settings.config import DataConfig
from megatron.training.settings.flag import reader_of
from tools.option_parser import in_one_line

TOKENIZER_FIELDS = [
    field
    for field in fields(DataConfig)
    if field.name.startswith(("tokenizer_", "vocab_file", "merge_file", "tiktoken_"))
]


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training program that choose a tokenizer."""
    for field in TOKENIZER_FIELDS:
        options = {key: field.metadata[key] for key in ("choices", "help") if key in field.metadata}
        options |= {"type": reader_of(field), "default": field.default}
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def timed(write: Callable[[Callable[[int], Callable[[], Any]]], list[str]]) -> list[str]:
    """Call ``write(bar)``, and add the seconds it took to the first of the lines that it returns.

    ``bar(total)`` starts a progress bar, and returns a function that counts one tensor.
    """
    from tqdm import tqdm

    begin = time.monotonic()
    with ExitStack() as stack:

        def bar(total: int) -> Callable[[], Any]:
            return stack.enter_context(tqdm(total=total, unit=" tensors", disable=None)).update

        lines = write(bar)
    return [f"{lines[0]}; {time.monotonic() - begin:.1f} s", *lines[1:]]


@in_one_line(Refusal)
def run(convert: Callable[[list[str] | None], list[str]], argv: list[str] | None) -> int:
    """Print the lines that ``convert(argv)`` returns, or its error; returns the exit code."""
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    try:
        print("\n".join(convert(argv)))
    except KeyboardInterrupt:
        print("error: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


@contextmanager
def one_line_errors(program: str, interrupted: str = "nothing was written") -> Iterator[None]:
    """Print a refusal, an error of a file or an interrupt in one line, and exit; signals remove unfinished files."""
    exit_on_signals()
    try:
        yield
    except (Refusal, DataError, OSError, MemoryError) as error:
        print(f"{program}: error: {printable(one_line(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{program}: interrupted, {interrupted}", file=sys.stderr)
        sys.exit(130)


def exit_on_signals(patience: float = 5.0) -> None:
    """On SIGTERM, or SIGHUP of a closed terminal, exit by an exception, so that unfinished files are removed.

    More signals within ``patience`` seconds are ignored. Later ones count again, because an exception that is raised
    inside a finalizer is lost. SIGHUP stays ignored under nohup.
    """
    last = -patience

    def stop(number: int, _: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= patience:
            last = now
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stop)
