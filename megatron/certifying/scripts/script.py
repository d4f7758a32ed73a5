# SPDX-License-Identifier: Apache-2.0
"""A complete script that torchrun would start, as a program for ``cp.certify``."""

from __future__ import annotations

import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.certifying.scripts.trained import trained

BESIDE: dict[Path, dict[str, ModuleType]] = {}  # by folder: the modules that its programs imported from it


class Enough(BaseException):
    """Ends a script when it would make another step; no ``except Exception`` stops it."""


@dataclass(frozen=True)
class Script:
    """Runs a script until an optimizer would make its second step, in the process group that exists already.

    Attributes:
        arguments: its own. ``{ranks}`` is replaced by a size of the grid, and ``{8/ranks}`` by 8 over this size.
    """

    path: str
    arguments: tuple[str, ...] = ()

    def __call__(self, **sizes: int) -> tuple[nn.Module | dict[str, nn.Module], None]:
        arguments = [filled(word, sizes) for word in self.arguments]
        with trained() as found, _one_step(), _words([self.path, *arguments]), as_started(self.path):
            try:
                runpy.run_path(self.path, run_name="__main__")
            except Enough:
                pass
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise ValueError(
                        f"{self.path} ended with exit code {end.code}; if it does not know an argument, give options "
                        "of certify before the script"
                    ) from None
            return found.model(), None


@contextmanager
def _words(words: list[str]) -> Iterator[None]:
    kept, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = kept


@contextmanager
def as_started(path: str) -> Iterator[None]:
    """A file runs as by ``python FILE``: modules in its folder can be imported, and a program elsewhere does not get
    them. It cannot make or end the process group, which exists already."""
    groups = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    folder, kept, loaded = Path(path).resolve().parent, list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    sys.modules.update(BESIDE.setdefault(folder, {}))
    try:
        yield
    finally:
        dist.init_process_group, dist.destroy_process_group = groups
        sys.path[:] = kept
        for name in set(sys.modules) - loaded:
            top = name.partition(".")[0]
            if top != "megatron" and ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
                BESIDE[folder][name] = sys.modules.pop(name)


def filled(word: str, sizes: Mapping[str, int]) -> str:
    """An argument with the sizes of a grid.

    Raises:
        ValueError: a number cannot be divided by a size.
    """

    def of(match: re.Match[str]) -> str:
        number, name = match.groups()
        if name not in sizes:
            return match[0]
        if number is None:
            return str(sizes[name])
        if int(number) % sizes[name]:
            raise ValueError(f"{word}: {number} is not a multiple of {name}={sizes[name]}")
        return str(int(number) // sizes[name])

    return re.sub(r"\{(?:(\d+)/)?(\w+)\}", of, word)


@contextmanager
def _one_step() -> Iterator[None]:
    steps: Counter[int] = Counter()

    def before(optimizer: Any, *_: object) -> None:
        if steps[id(optimizer)]:
            raise Enough
        steps[id(optimizer)] += 1

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
