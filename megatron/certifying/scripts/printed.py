# SPDX-License-Identifier: Apache-2.0
"""Losses that a program prints, logs, gives to TensorBoard or W&B, or writes to a file instead of returning them."""

from __future__ import annotations

import csv
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.certifying.scripts.trained import trained

AFTER = r"[^\d\n+-]{0,20}?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan\b|inf\b))"  # a number soon after the text


@dataclass(frozen=True)
class Printed:
    """A program whose losses are the numbers that it prints after a text, such as ``train loss``.

    Attributes:
        program: returns nothing, its model, or what every program returns.
        file: where one of its ranks writes the text; default: its output.
    """

    program: Callable[..., Any]
    text: str
    file: str | None = None

    def __call__(self, **sizes: int) -> Any:
        with ExitStack() as stack:
            found, text = stack.enter_context(trained()), stack.enter_context(captured())
            if self.file is not None:
                text = stack.enter_context(written(Path(self.file)))
            result = self.program(**sizes)
            losses = re.findall(re.escape(self.text) + AFTER, text())
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
def written(file: Path) -> Iterator[Callable[[], str]]:
    """Take what the ranks write to a file, by appending to it or anew; the function returns it once all have ended."""

    def state() -> tuple[str, int]:
        if not file.is_file():
            return "", 0
        text = file.read_text(errors="replace")
        if file.suffix == ".csv":  # each number after the name of its column
            text = "".join(f"{name}: {x}\n" for row in csv.DictReader(text.splitlines()) for name, x in row.items())
        return text, file.stat().st_mtime_ns

    def text() -> str:
        dist.barrier()
        now, changed = state()
        dist.barrier()  # a rank that goes on may write again
        if changed == was:
            return ""
        return now if now == before else now.removeprefix(before)

    before, was = state()
    dist.barrier()
    yield text


@contextmanager
def _printed_scalars() -> Iterator[None]:
    """Print what a program gives to TensorBoard or W&B, if these are installed; W&B keeps and sends nothing."""
    with ExitStack() as stack:
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            add = SummaryWriter.add_scalar

            def add_scalar(self: Any, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
                _print(tag, scalar_value)
                add(self, tag, scalar_value, *args, **kwargs)

            stack.enter_context(_replaced(SummaryWriter, add_scalar=add_scalar))
        if find_spec("wandb") is not None:
            os.environ["WANDB_MODE"] = "disabled"  # this process runs nothing but programs to certify
            import wandb

            stack.enter_context(_replaced(wandb, init=partial(_started, wandb, wandb.init), log=wandb.log))
        yield


@contextmanager
def _replaced(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    kept = {name: getattr(owner, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(owner, name, function)


def _started(wandb: Any, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A run of W&B that prints what it logs."""
    run = init(*args, **kwargs)
    run.log = wandb.log = lambda data, *_, **__: [*map(_print, data, data.values())]
    return run


def _print(name: str, value: Any) -> None:
    with suppress(TypeError, ValueError):  # pictures, tables
        print(f"{name}: {float(value)!r}")
