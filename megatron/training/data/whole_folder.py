# SPDX-License-Identifier: Apache-2.0
"""A folder of a cache that appears whole or not at all, whoever else makes the same one at the same time.

It is filled under a name of its own and then renamed: of several builders the first one wins, and what an interrupted
one leaves behind is never taken for a cache. A list of its files tells when some of them were deleted later.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron.training.disk import sync_tree
from megatron.training.refusal import Refusal, reason

LIST = "files.json"  # {name: bytes}
LEFT_BEHIND = 24 * 3600  # seconds after which an unfinished folder is not being built any more


@contextmanager
def whole_folder(folder: str) -> Iterator[str]:
    """Yields a folder beside ``folder`` to fill, which takes that name when all went well, and goes otherwise.

    Raises:
        OSError: nothing can be written there; or ``folder`` is there, because another run was faster.
    """
    temporary = f"{folder}.{uuid.uuid4().hex}.tmp"  # two containers may agree in host name and process number
    try:
        os.makedirs(temporary)
        _remove_left_behind(*os.path.split(folder), os.stat(temporary).st_mtime)
        yield temporary
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(temporary)}
        with open(os.path.join(temporary, LIST), "w", encoding="utf-8") as file:
            json.dump(sizes, file, indent=2, sort_keys=True)
        sync_tree(temporary)  # after a power cut, what has the name must be whole
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_whole(folder: str) -> None:
    """Check that all files are there, each with its size.

    Raises:
        Refusal: some are not.
    """
    name = LIST
    try:
        with open(os.path.join(folder, LIST), encoding="utf-8") as file:
            sizes = json.load(file)
        for name, size in sizes.items():
            if (found := os.path.getsize(os.path.join(folder, name))) != size:
                raise ValueError(f"{found} bytes in place of {size}")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise Refusal(
            f"{folder} is not whole any more ({name}: {reason(error)}): remove it, and it is made anew"
        ) from None


def _remove_left_behind(root: str, name: str, now: float) -> None:
    """Remove what runs that were killed have left of the same folder; ``now``: by the clock of the file system."""
    with suppress(OSError):  # another run removes it too
        for entry in os.scandir(root):
            if entry.name.startswith(f"{name}.") and entry.name.endswith(".tmp"):
                if now - entry.stat().st_mtime > LEFT_BEHIND:
                    shutil.rmtree(entry.path, ignore_errors=True)
