# SPDX-License-Identifier: Apache-2.0
"""What a program may do at a path that a user named: write there as the only job, and remove what it wrote itself."""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from megatron.system.whole_file import is_special
from megatron.training.ownership.lock_file import POLL, InUse, Owner, acquire, pattern_of
from megatron.training.refusal import refuse_together

SILENT = 5.0  # seconds of waiting for another job without a message
TEMPORARY = r"\.[0-9a-f]{32}\.tmp"  # the end of a temporary name, which has the token of its job's lock


@contextmanager
def one_job(target: str | Path, wait: float = 0.0) -> Iterator[Owner]:
    """Hold the lock of a file or folder that is written, whose name need not exist yet.

    Args:
        wait: seconds to wait for another job that has it; it is named on stderr.

    Raises:
        InUse: another job has it. Refusal: no lock file can be written next to it.
    """
    path, begin, told, has = Path(os.path.abspath(target)), time.monotonic(), False, False
    while True:
        owner = Owner(path.parent, uuid.uuid4().hex, name=path.name)
        try:
            acquire(owner, [])
            has = True
            yield owner
            return
        except InUse as error:
            waited = time.monotonic() - begin
            if has or waited >= wait:
                raise
            if waited > SILENT and not told:
                print(f"{error.state}: waiting for it, for up to {wait:g} s", file=sys.stderr, flush=True)
                told = True
            time.sleep(min(POLL, wait))
        finally:
            owner.release()


@contextmanager
def one_job_of_ranks(target: str | Path | None, first: bool) -> Iterator[None]:
    """Hold the lock of a file on the first rank of a job, which writes it; all ranks enter it.

    Args:
        target: None: nothing is written, so there is nothing to hold.

    Raises:
        Refusal: on every rank; another job has it, or no lock file can be written.
    """

    def hold(stack: ExitStack) -> None:
        if first and target is not None and not is_special(target):
            stack.enter_context(one_job(target))
            for path in unfinished(target):
                os.unlink(path)

    with ExitStack() as stack:
        refuse_together(lambda: hold(stack))
        yield


def remove_left(target: str | Path) -> None:
    """Remove the lock file and unfinished files that a killed job has left at a complete target."""
    folder, name = os.path.split(os.path.abspath(target))
    if unfinished(target) or any(map(pattern_of(name).fullmatch, os.listdir(folder))):
        with suppress(InUse), one_job(target):  # in use: its job has just completed it
            for path in unfinished(target):
                os.unlink(path)


def temporary_name(target: str | Path, owner: Owner) -> str:
    """The name of an unfinished file or folder, which says whose it is."""
    return f"{target}.{owner.token}.tmp"


def unfinished(*targets: str | Path) -> list[str]:
    """What jobs have left under temporary names of targets. Whoever has their lock knows that these jobs have ended."""
    names: dict[str, list[str]] = {}
    for folder, name in (os.path.split(os.path.abspath(target)) for target in targets):
        names.setdefault(folder, []).append(re.escape(name))
    found = []
    for folder, wanted in names.items():
        pattern = re.compile(f"({'|'.join(wanted)}){TEMPORARY}")
        found += [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if pattern.fullmatch(name)]
    return found


def remove_listed(folder: str | Path, names: Iterable[str]) -> list[str]:
    """Remove files of a folder by their relative names, and then each folder that is empty.

    A name that leads out of the folder is left alone, also if it does so by a link.

    Returns:
        What is left in the folder: files that are not in the list.

    Raises:
        OSError: a file cannot be removed.
    """
    root, parents = Path(folder), set()
    inside = root.resolve()
    for name in names:
        path = root / name
        if path.parent.resolve().is_relative_to(inside) and (path.is_symlink() or not path.is_dir()):
            path.unlink(missing_ok=True)
            parents |= {path.parent, *(one for one in path.parent.parents if one.is_relative_to(root))}
    for one in sorted(parents | {root}, key=lambda one: -len(one.parts)):
        with suppress(OSError):  # it is not empty, or a link
            one.rmdir()
    return sorted(os.listdir(root)) if root.is_dir() else []


def remove_made(folder: str | Path, names: Iterable[str]) -> list[str]:
    """Remove the files anywhere below a folder that have one of these names, and then each folder that is empty.

    Links are not followed; one in place of the folder is left alone.

    Args:
        names: of the files that a program writes, as patterns like ``*.json``.

    Returns:
        What is left, relative to the folder: files that have other names.

    Raises:
        OSError: a file cannot be removed.
    """
    patterns, left = [*names], []
    if os.path.islink(folder):
        return [""]
    for place, folders, files in os.walk(folder, topdown=False):
        for name in [*files, *(one for one in folders if os.path.islink(os.path.join(place, one)))]:
            path = os.path.join(place, name)
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                os.unlink(path)
            else:
                left.append(os.path.relpath(path, folder))
        with suppress(OSError):  # it is not empty
            os.rmdir(place)
    return sorted(left)
