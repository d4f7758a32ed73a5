# SPDX-License-Identifier: Apache-2.0
"""``checksums.json``: the list of a checkpoint's files, by which damage to them is noticed.

It holds the size and the CRC-32 of each file, what the checkpoint is (its form, folder, iteration and run), and a
CRC-32 of all this. Lists of version 1 (November 2026) hold the files alone, as {name: {"size": ..., "crc32": ...}}.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.json_file import parse_json, read_bytes

CHECKSUMS = "checksums.json"
VERSION = 2
TORCH_DIST, HUGGING_FACE = "torch_dist", "hugging_face"  # forms
BLOCK = 1 << 22  # bytes read at once


class Damaged(Exception):
    """Files that are not what was written: one line that names the first of them."""


@dataclass(frozen=True)
class Sum:
    """What a file is recognised by."""

    size: int  # bytes
    crc32: int


@dataclass(frozen=True)
class FileList:
    """What ``checksums.json`` says.

    Attributes:
        files: by their names in the folder.
        form: TORCH_DIST or HUGGING_FACE.
        folder: name of the checkpoint's folder; None where any name will do.
        iteration: of the checkpoint; None where it has none.
        run: identity of the run that wrote it; empty if unknown.
        version: of the list's format.
    """

    files: Mapping[str, Sum]
    form: str = TORCH_DIST
    folder: str | None = None
    iteration: int | None = None
    run: str = ""
    version: int = field(default=VERSION, compare=False)

    def packed(self) -> bytes:
        """The contents of ``checksums.json``."""
        said = {name: value for name, value in asdict(self).items() if name != "files"}
        said["files"] = {name: asdict(one) for name, one in sorted(self.files.items())}
        return json.dumps({**said, "crc32": _crc32_of(said)}, indent=1).encode()


def read_list(path: Path) -> FileList:
    """What the list ``path`` says.

    Raises:
        Damaged: it is not what was written, or names no files.
        OSError: it cannot be read.
    """
    try:
        said = parse_json(read_bytes(path), unique=True)
        first = "version" not in said
        own = None if first else said.pop("crc32")
        files = {name: Sum(**one) for name, one in (said if first else said["files"]).items()}
        numbers = [number for one in files.values() for number in (one.size, one.crc32)]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("sizes and sums are numbers")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise Damaged(f"{path} cannot be read; {anew(path.parent)}") from None
    if not first and own != _crc32_of(said):
        raise Damaged(f"{path} is not what was written (its own CRC-32 differs); {anew(path.parent)}")
    if not first and said["version"] != VERSION:
        raise Damaged(f"{path} is of version {said['version']}, and this program reads {VERSION}: use a newer one")
    if not files:
        raise Damaged(f"{path} names no files; {anew(path.parent)}")
    if odd := outside(files):
        raise Damaged(f"{path} names {odd}, which lies outside of its folder")
    if first:
        return FileList(files, version=1)
    return FileList(files, said["form"], said["folder"], said["iteration"], said["run"])


def anew(path: Path) -> str:
    """How a checkpoint that is meant to be as it is gets a list."""
    return f"if its files are meant to be as they are, python tools/check_checkpoint.py {path} --write-list lists them"


def outside(names: Iterable[str]) -> str | None:
    """The first name that is not that of a file in the folder itself, None if all are."""
    return next((name for name in names if name in ("", ".", "..") or Path(name).name != name), None)


def crc32_of_file(path: Path) -> int:
    """Raises OSError."""
    found, block = 0, bytearray(BLOCK)
    view = memoryview(block)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            found = zlib.crc32(view[:count], found)
    return found


def sum_of(path: Path) -> Sum:
    """Of a file as it is. Raises OSError."""
    return Sum(path.stat().st_size, crc32_of_file(path))


def _crc32_of(said: Mapping[str, Any]) -> int:
    """Of the contents of a list, however they are laid out in its file."""
    return zlib.crc32(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
