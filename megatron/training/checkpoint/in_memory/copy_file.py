# SPDX-License-Identifier: Apache-2.0
"""One rank's state as a safetensors file with a CRC-32 of the complete file, in a folder only this user can change.

It is written tensor by tensor, so nothing is in memory twice; the safetensors library needs all tensors at once. The
checksum is written into the header at the end.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.training.checkpoint.hugging_face.safetensors_folder import NAMES, make_header, writing

# With O_PATH (Linux), parent folders may be searchable without being readable.
FOLDER_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)

COPY = re.compile(r"\.?iter_\d+\.rank_\d+\.safetensors(\.by_\d+\.partial)?")  # names of copies, also unfinished ones


class NotPrivate(Exception):
    """Another user could change the folder; the message says why."""


def copies_in(folder: Path) -> list[Path]:
    """The copies in a folder, also unfinished ones. Raises OSError."""
    return [path for path in folder.iterdir() if COPY.fullmatch(path.name)]


@dataclass(frozen=True)
class PrivateFolder:
    """A folder that only this user can change, opened by :func:`open_private` for as long as the process runs.

    In a place that others can write to, such as /dev/shm, a path may lead to another user's files: somebody else may
    have created the folder, or may replace a part of the path by a link just before it is used. So each parent is
    opened from the one above it, without following links, and checked. Files are then reached through the descriptor
    of the last folder, so later changes of the path have no effect.
    """

    named: Path  # its absolute path, for messages
    number: int  # its descriptor
    parent: int  # descriptor of its parent folder

    @property
    def at(self) -> Path:
        """On Linux, a path to this folder that does not depend on its name; on other systems, its path."""
        return Path(f"/proc/self/fd/{self.number}") if sys.platform == "linux" else self.named

    def remove(self) -> None:
        """Remove the copies, and the folder if nothing else is in it."""
        with suppress(OSError):
            for path in copies_in(self.at):
                path.unlink(missing_ok=True)
            os.rmdir(self.named.name, dir_fd=self.parent)


def open_private(path: Path) -> PrivateFolder:
    """Open a folder that only this user can access (mode 0700); it and its parents are created if they are missing.

    Parents may also belong to root. They may be writable by others only if they are sticky, as /tmp is: then only the
    owner of an entry can rename it.

    Args:
        path: absolute.

    Raises:
        NotPrivate: the path contains a link, another user's folder, or a folder that others can write to.
        OSError: a folder cannot be created or opened.
    """
    parts = path.parts
    folder, parent = os.open(parts[0], FOLDER_FLAGS), -1
    try:
        # In a container without its own root user, the system's folders belong to the owner of the root folder.
        trusted = {0, os.geteuid(), os.fstat(folder).st_uid}
        _check(folder, Path(parts[0]), trusted)
        for count, name in enumerate(parts[1:], 2):
            above, folder = folder, _enter(folder, name, Path(*parts[:count]))
            if parent >= 0:
                os.close(parent)
            parent = above
            _check(folder, Path(*parts[:count]), trusted)
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise NotPrivate(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & 0o077:
            raise NotPrivate(f"{path} has the mode {status.st_mode & 0o777:o}, but other users must have no access")
        return PrivateFolder(path, folder, parent)
    except BaseException:
        for number in {folder, parent} - {-1}:
            os.close(number)
        raise


def _enter(above: int, name: str, path: Path) -> int:
    """Descriptor of a folder, which is created if it is missing."""
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=above)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another rank of this node may be faster
            os.mkdir(name, 0o700, dir_fd=above)
        return _enter(above, name, path)
    except OSError:
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise NotPrivate(f"{path} is a link, which is not followed") from None
        raise


def _check(number: int, path: Path, trusted: set[int]) -> None:
    status = os.fstat(number)
    if status.st_uid not in trusted:
        raise NotPrivate(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise NotPrivate(f"other users can replace what is in {path} (mode {status.st_mode & 0o777:o})")


FIELD, NO_SUM = b'"crc32":"', b"00000000"
BLOCK = 1 << 22  # bytes


def write(path: Path, tensors: Sequence[tuple[str, Tensor]], about: Mapping[str, str]) -> None:
    """Write tensors of any device and the metadata ``about``; call :func:`seal` afterwards. Raises OSError."""
    ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())  # so that each is aligned for its dtype
    shapes = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in ordered}
    header = make_header(shapes, {**about, "crc32": NO_SUM.decode()})
    with writing(path.parent, {path.name: header}) as put:
        for name, tensor in ordered:
            put(name, tensor.detach().cpu())


def seal(path: Path) -> int:
    """Write a file's checksum into it; returns its size in bytes. Raises OSError."""
    _, actual, at = _sums(path)
    number = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(number, actual, at)
    finally:
        os.close(number)
    return path.stat().st_size


def intact(path: Path) -> bool:
    """Whether a file is undamaged."""
    try:
        expected, actual, _ = _sums(path)
        with safe_open(path, "pt"):  # the header must be valid, too
            return expected == actual
    except (OSError, ValueError, SafetensorError):
        return False


def about(path: Path) -> dict[str, str]:
    """The metadata given to :func:`write`; empty if the file cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _sums(path: Path) -> tuple[bytes, bytes, int]:
    """(checksum in the header, checksum of the file, offset of the former). Raises OSError, ValueError."""
    with open(path, "rb", buffering=0) as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if 8 + size > os.fstat(file.fileno()).st_size:
            raise ValueError("it ends within its header")
        head = length + file.read(size)
        at = head.index(FIELD) + len(FIELD)
        crc = zlib.crc32(head[:at] + NO_SUM + head[at + 8 :])
        block = bytearray(BLOCK)
        view = memoryview(block)
        while count := file.readinto(block):
            crc = zlib.crc32(view[:count], crc)
    return head[at : at + 8], b"%08x" % crc, at


MESSAGE = 1 << 25  # bytes of a message between ranks


def swap(sent: tuple[Path, int] | None, wanted: tuple[Path, int, int] | None, group: dist.ProcessGroup) -> None:
    """Send one file and receive another at the same time, over gloo; the other ranks call it with their files.

    Args:
        sent: (file, to which rank).
        wanted: (file to write, from which rank, its size in bytes).
        group: of all ranks, on gloo.

    Raises:
        OSError: the file could not be written; it was still received completely, so that the sender does not wait.
    """
    sent_size = sent[0].stat().st_size if sent else 0
    wanted_size = wanted[2] if wanted else 0
    data = torch.from_file(str(sent[0]), shared=False, size=sent_size, dtype=torch.uint8) if sent else None
    buffer = torch.empty(min(MESSAGE, wanted_size), dtype=torch.uint8)
    error: OSError | None = None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(wanted[0], "wb", buffering=0)) if wanted else None
        except OSError as problem:
            error = problem
        for start in range(0, max(sent_size, wanted_size), MESSAGE):
            part, works = buffer[: max(wanted_size - start, 0)], []
            if start < wanted_size:  # receive first: otherwise gloo would use one direction at a time
                works.append(dist.irecv(part, wanted[1], group=group))
            if start < sent_size:
                works.append(dist.isend(data[start : start + MESSAGE], sent[1], group=group))
            for work in works:
                work.wait()
            if start < wanted_size and error is None:
                try:
                    view = memoryview(part.numpy())
                    while view:
                        view = view[file.write(view) :]
                except OSError as problem:
                    error = problem
    if error is not None:
        raise error
