# SPDX-License-Identifier: Apache-2.0
"""Syncs files and names to the disk, so that they survive a power cut.

The system keeps written data in memory for a while and writes it to the disk in any order. An fsync of a file makes its
data safe, but not its name; the names in a folder (new, renamed, removed) are safe after an fsync of the folder.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

# Errors of a folder that cannot be synced: its file system does not support it, or this user may not read it.
CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)


def sync_file(path: str | Path) -> None:
    """Make the data of a file safe. Raises OSError."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder safe, if its file system can. Raises OSError, for example for a broken disk."""
    number = -1
    try:
        number = os.open(folder, os.O_RDONLY)
        os.fsync(number)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
    finally:
        if number >= 0:
            os.close(number)


def sync_folders_up(folder: str | Path) -> None:
    """Make the names in a folder safe, and its own name: any folder above it may be new. Raises OSError."""
    folder = Path(folder).resolve()
    device = folder.stat().st_dev
    for path in (folder, *folder.parents):
        if path.stat().st_dev != device:
            return
        sync_folder(path)


def sync_tree(folder: str | Path) -> None:
    """Make everything in a folder safe, except the folder's own name. Raises OSError."""
    for path, _, files in os.walk(folder):
        for name in files:
            sync_file(os.path.join(path, name))
        sync_folder(path)
