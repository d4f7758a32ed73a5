# SPDX-License-Identifier: Apache-2.0
"""Applies a change of the source to this running process: the functions that differ get the changed code."""

from __future__ import annotations

import gc
import importlib
import inspect
import linecache
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from tests.mutants.changes import ROOT, Change

Functions = dict[CodeType, list[FunctionType]]


def differing(change: Change) -> list[tuple[CodeType, CodeType]]:
    """(code, changed code) of the functions that differ; none if the change is outside functions."""
    source = (ROOT / change.file).read_bytes()
    old, new = (
        compile(text, str(ROOT / change.file), "exec", dont_inherit=True) for text in (source, change.apply(source))
    )
    return list(_differing(old, new))


def _differing(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    inner = ([part for part in code.co_consts if isinstance(part, CodeType)] for code in (old, new))
    for before, after in zip(*inner):
        if before != after:
            if before.co_flags & inspect.CO_OPTIMIZED:  # not the body of a class
                yield before, after
            yield from _differing(before, after)  # inner functions, of which there may be some already


def import_all(files: set[str]) -> None:
    """Import the modules of these files, because code that is imported later would not have the change."""
    for file in sorted(files):
        name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ImportError as error:  # of a package that is not installed here
            print(f"{name} cannot be imported: {error}")


def functions_in(folder: Path) -> Functions:
    """All functions of this process whose source is in a folder, by their code."""
    result: Functions = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(folder)):
            result[thing.__code__].append(thing)
    return result


def apply(change: Change, functions: Functions) -> bool:
    """Give the functions that differ the changed code; False if this process has no such function."""
    done = False
    for before, after in differing(change):
        for function in functions.get(before, []):
            function.__code__ = after
            done = True
    text = change.apply((ROOT / change.file).read_bytes()).decode()
    # Triton's interpreter reads the source of a kernel when it is first called.
    linecache.cache[str(ROOT / change.file)] = (len(text), None, text.splitlines(True), str(ROOT / change.file))
    return done
