# SPDX-License-Identifier: Apache-2.0
"""Losses that a program prints, logs or gives to TensorBoard instead of returning them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, is_dataclass, replace
from importlib.util import find_spec
from typing import Any

from torch import nn

from megatron.certifying.scripts.trained import trained

AFTER = r"[^\d\n+-]{0,20}?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan\b|inf\b))"  # a number soon after the text


@dataclass(frozen=True)
class Printed:
    """A program whose losses are the numbers that it prints after a text, such as ``train loss``.

    Attributes:
        program: returns nothing, its model, or what every program returns.
    """

    program: Callable[..., Any]
    text: str

    def __call__(self, **sizes: int) -> Any:
        with trained() as found, captured() as output:
            result = self.program(**sizes)
            losses = re.findall(re.escape(self.text) + AFTER, output())
        if is_dataclass(result):
            return replace(result, losses=losses)
        model = result if result is None or isinstance(result, nn.Module) else result[0]
        return found.model() if model is None else model, losses


@contextmanager
def captured() -> Iterator[Callable[[], str]]:
    """Take what the process writes to its output and error streams; the function returns it so far."""
    with tempfile.TemporaryFile("w+", errors="replace") as file, _printed_scalars():
        sys.stdout.flush()
        sys.stderr.flush()
        kept = {stream: os.dup(stream) for stream in (1, 2)}
        for stream in kept:
            os.dup2(file.fileno(), stream)

        def text() -> str:
            sys.stdout.flush()
            sys.stderr.flush()
            file.seek(0)
            return file.read()

        try:
            # a handler of logging keeps the stream of the first run, which therefore stays open and leads to 1 or 2
            out, err = (open(stream, "w", buffering=1, closefd=False) for stream in kept)
            with redirect_stdout(out), redirect_stderr(err):
                yield text
        finally:
            for stream, was in kept.items():
                os.dup2(was, stream)
                os.close(was)


@contextmanager
def _printed_scalars() -> Iterator[None]:
    """Print what a program gives to TensorBoard, if that is installed."""
    if find_spec("tensorboard") is None:
        yield
        return
    from torch.utils.tensorboard import SummaryWriter

    add = SummaryWriter.add_scalar

    def add_scalar(self: Any, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
        print(f"{tag}: {float(scalar_value)!r}")
        add(self, tag, scalar_value, *args, **kwargs)

    SummaryWriter.add_scalar = add_scalar
    try:
        yield
    finally:
        SummaryWriter.add_scalar = add
