# SPDX-License-Identifier: Apache-2.0
"""A folder that only this user can change, held by its descriptor.

In a place that others can write to, such as /dev/shm, a path may lead to another user's files: the folder was made by
somebody else, or a part of the path is exchanged for a link just before it is used. So each folder on the way is opened
from the one above it, without following links, and checked. From then on files are reached by the descriptor of the
last folder, and no change of the path can lead them elsewhere.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# O_PATH, which Linux has: a folder on the way must be searched, not read.
WAY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


class NotOwn(Exception):
    """Another user could change the folder; one clause that says why."""


@dataclass(frozen=True)
class OwnFolder:
    """Made by :func:`open_own`, and open as long as the process runs.

    Attributes:
        named: its absolute path, for messages.
        number: its descriptor.
        parent: descriptor of the folder that it is in.
    """

    named: Path
    number: int
    parent: int

    @property
    def at(self) -> Path:
        """A path that leads to this folder whatever happens to its name; outside of Linux, its name."""
        return Path(f"/proc/self/fd/{self.number}") if sys.platform == "linux" else self.named

    def remove(self) -> None:
        """Remove the folder and its files, as far as that is possible."""
        with suppress(OSError):
            for path in self.at.iterdir():
                path.unlink(missing_ok=True)
            os.rmdir(self.named.name, dir_fd=self.parent)


def open_own(path: Path) -> OwnFolder:
    """Open a folder that is this user's alone (mode 0700); it and those above it are made where they are missing.

    Folders above it may also belong to root. They may be writable by others only if they are sticky, as /tmp is: then
    nobody but its owner can rename what lies there.

    Args:
        path: absolute.

    Raises:
        NotOwn: a link or another user's folder is on the way, or one that others can write to.
        OSError: a folder cannot be made or opened.
    """
    parts = path.parts
    here, parent = os.open(parts[0], WAY), -1
    try:
        # In a container without a root user of its own, the system's folders belong to who owns the root folder.
        trusted = {0, os.geteuid(), os.fstat(here).st_uid}
        _check(here, Path(parts[0]), trusted)
        for count, name in enumerate(parts[1:], 2):
            above, here = here, _enter(here, name, Path(*parts[:count]))
            if parent >= 0:
                os.close(parent)
            parent = above
            _check(here, Path(*parts[:count]), trusted)
        found = os.fstat(here)
        if found.st_uid != os.geteuid():
            raise NotOwn(f"{path} belongs to user {found.st_uid}")
        if found.st_mode & 0o077:
            raise NotOwn(f"{path} has the mode {found.st_mode & 0o777:o}, and other users must have no access to it")
        return OwnFolder(path, here, parent)
    except BaseException:
        for number in {here, parent} - {-1}:
            os.close(number)
        raise


def _enter(above: int, name: str, path: Path) -> int:
    """Descriptor of a folder, which is made where it is missing."""
    try:
        return os.open(name, WAY, dir_fd=above)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another rank of this node was faster
            os.mkdir(name, 0o700, dir_fd=above)
        return _enter(above, name, path)
    except OSError:
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise NotOwn(f"{path} is a link, which is not followed") from None
        raise


def _check(number: int, path: Path, trusted: set[int]) -> None:
    found = os.fstat(number)
    if found.st_uid not in trusted:
        raise NotOwn(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise NotOwn(f"other users can exchange what is in {path} (mode {found.st_mode & 0o777:o})")
