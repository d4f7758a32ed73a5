# SPDX-License-Identifier: Apache-2.0
"""One rank's state in one file, that anything which reads safetensors can read, with a CRC-32 of the whole file.

It is written as it comes, tensor by tensor, so that nothing is held twice; safetensors' own writer wants all of it at
once. The sum is put into its place in the header when all is there.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

# A folder that only this user can change, held by its descriptor.
#
# In a place that others can write to, such as /dev/shm, a path may lead to another user's files: the folder was made by
# somebody else, or a part of the path is exchanged for a link just before it is used. So each folder on the way is
# opened from the one above it, without following links, and checked. From then on files are reached by the
# descriptor of the last folder, and no change of the path can lead them elsewhere.


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


CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
ABOUT, FIELD, NO_SUM = "__metadata__", b'"crc32":"', b"00000000"
BLOCK = 1 << 22  # bytes


def write(path: Path, tensors: Sequence[tuple[str, Tensor]], about: Mapping[str, str]) -> None:
    """Write tensors of any device by name, and what there is to say about them; :func:`seal` it afterwards.

    Raises:
        OSError: there is no room.
    """
    ordered = sorted(tensors, key=lambda one: -one[1].element_size())  # so that each begins where its dtype may
    header: dict[str, object] = {ABOUT: {**about, "crc32": NO_SUM.decode()}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=BLOCK) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy())


def seal(path: Path) -> int:
    """Put the sum of a file into it; its size in bytes. Raises OSError."""
    _, found, at = _sums(path)
    number = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(number, found, at)
    finally:
        os.close(number)
    return path.stat().st_size


def whole(path: Path) -> bool:
    """Whether a file is what was written."""
    try:
        told, found, _ = _sums(path)
        with safe_open(path, "pt"):  # its header is one, too
            return told == found
    except (OSError, ValueError, SafetensorError):
        return False


def about(path: Path) -> dict[str, str]:
    """What :func:`write` was told; empty where it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _sums(path: Path) -> tuple[bytes, bytes, int]:
    """(the sum in the header, that of the file, where in the file the first one is). Raises OSError, ValueError."""
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


# Files between ranks, through host memory and gloo.


MESSAGE = 1 << 25  # bytes a message


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def swap(sent: tuple[Path, int] | None, wanted: tuple[Path, int, int] | None, group: dist.ProcessGroup) -> None:
    """Send one file while another one arrives; the other ranks do their part of it.

    Args:
        sent: (file, to which rank).
        wanted: (file to be made, from which rank, its bytes).
        group: of all ranks, on gloo.

    Raises:
        OSError: it could not be written; it was received to its end all the same, so that nobody waits.
    """
    mine = sent[0].stat().st_size if sent else 0
    theirs = wanted[2] if wanted else 0
    data = torch.from_file(str(sent[0]), shared=False, size=mine, dtype=torch.uint8) if sent else None
    buffer = torch.empty(min(MESSAGE, theirs), dtype=torch.uint8)
    error: OSError | None = None
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(wanted[0], "wb", buffering=0)) if wanted else None
        except OSError as problem:
            error = problem
        for start in range(0, max(mine, theirs), MESSAGE):
            part, works = buffer[: max(theirs - start, 0)], []
            if start < theirs:  # first: posted after our own data, gloo would send one direction at a time
                works.append(dist.irecv(part, wanted[1], group=group))
            if start < mine:
                works.append(dist.isend(data[start : start + MESSAGE], sent[1], group=group))
            for work in works:
                work.wait()
            if start < theirs and error is None:
                try:
                    view = memoryview(part.numpy())
                    while view:
                        view = view[file.write(view) :]
                except OSError as problem:
                    error = problem
    if error is not None:
        raise error
