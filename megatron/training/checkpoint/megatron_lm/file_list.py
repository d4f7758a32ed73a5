# SPDX-License-Identifier: Apache-2.0
"""``checksums.json``: the list of a checkpoint's files, which shows damage to them.

It holds the size and CRC-32 of each file, the checkpoint's form, folder, iteration and run, and a CRC-32 of all this.
Lists of version 1 (November 2026) hold only the files, as {name: {"size": ..., "crc32": ...}}.

megatron-core's own list is ``integrity.json``, with the SHA-256 of each file. From 0.19 on core writes it on request.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.data.sources.contents import digest_of
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.untrusted.links import file_in

CHECKSUMS, INTEGRITY = "checksums.json", "integrity.json"
VALIDATION = "validation_loss.json"  # in a checkpoint that was evaluated when it was saved
# Names of all files that this program writes into a checkpoint's folder; others there are the user's.
WRITTEN = ("__*.distcp", ".metadata", "metadata.json", "common.pt", CHECKSUMS, VALIDATION)
VERSION = 2
TORCH_DIST, HUGGING_FACE = "torch_dist", "hugging_face"  # forms
BLOCK = 1 << 22  # bytes read at once


class Damaged(Exception):
    """A file differs from what was written; the message is one line that names the file."""


@dataclass(frozen=True)
class Sum:
    """A file's size and checksum."""

    size: int  # bytes
    crc32: int


@dataclass(frozen=True)
class FileList:
    """The contents of ``checksums.json``."""

    files: Mapping[str, Sum]  # by file name
    form: str = TORCH_DIST  # TORCH_DIST or HUGGING_FACE
    folder: str | None = None  # name of the checkpoint's folder; None if it may have any name
    iteration: int | None = None  # of the checkpoint; None if it has none
    run: str = ""  # identity of the run that wrote it; empty if unknown
    version: int = field(default=VERSION, compare=False)  # of the list's format

    def packed(self) -> bytes:
        """The list as JSON."""
        table = {name: value for name, value in asdict(self).items() if name != "files"}
        table["files"] = {name: asdict(file_sum) for name, file_sum in sorted(self.files.items())}
        return json.dumps({**table, "crc32": _crc32_of(table)}, indent=1).encode()


def read_list(path: Path) -> FileList:
    """Read and check the list ``path``.

    Raises:
        Damaged: it differs from what was written, or names no files.
        OSError: it cannot be read.
    """
    try:
        table = parse_json(read_bytes(path), unique=True)
        version_1 = "version" not in table
        crc32 = None if version_1 else table.pop("crc32")
        files = {name: Sum(**fields) for name, fields in (table if version_1 else table["files"]).items()}
        numbers = [number for file_sum in files.values() for number in (file_sum.size, file_sum.crc32)]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("sizes and sums are numbers")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise Damaged(f"{path} cannot be read; {how_to_list(path.parent)}") from None
    if not version_1 and crc32 != _crc32_of(table):
        raise Damaged(f"{path} is not what was written (its own CRC-32 differs); {how_to_list(path.parent)}")
    if not version_1 and table["version"] != VERSION:
        raise Damaged(f"{path} has version {table['version']}, but this program reads {VERSION}: use a newer program")
    if not files:
        raise Damaged(f"{path} names no files; {how_to_list(path.parent)}")
    if wrong := outside(files):
        raise Damaged(f"{path} names {wrong}, which lies outside of its folder")
    if version_1:
        return FileList(files, version=1)
    return FileList(files, table["form"], table["folder"], table["iteration"], table["run"])


def how_to_list(path: Path) -> str:
    """How to list the files of a checkpoint that was changed on purpose."""
    return f"if files were changed on purpose, list them again: python tools/check_checkpoint.py {path} --write-list"


def outside(names: Iterable[str]) -> str | None:
    """The first name that does not refer to a file in the folder itself; None if all do."""
    return next((name for name in names if name in ("", ".", "..") or Path(name).name != name), None)


def crc32_of_file(path: Path) -> int:
    """CRC-32 of a file. Raises OSError."""
    crc32, block = 0, bytearray(BLOCK)
    view = memoryview(block)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc32 = zlib.crc32(view[:count], crc32)
    return crc32


def sum_of(path: Path) -> Sum:
    """Size and CRC-32 of a file. Raises OSError."""
    return Sum(path.stat().st_size, crc32_of_file(path))


def _crc32_of(table: Mapping[str, Any]) -> int:
    """CRC-32 of a list's contents, independent of the JSON's whitespace and order."""
    return zlib.crc32(json.dumps(table, sort_keys=True, separators=(",", ":")).encode())


def check_integrity(path: Path, names: Iterable[str], share: int = 0, shares: int = 1) -> bool:
    """Compare files of the folder ``path`` with their sums; False if it has none.

    Args:
        names: the checkpoint's files, all of which must have a sum.
        share, shares: compare only every ``shares``-th file, from number ``share`` on.

    Raises:
        Damaged: a file differs from its sum or has none, or the sums cannot be read.
        OSError: a file cannot be read.
    """
    if not (path / INTEGRITY).exists():
        return False
    where = file_in(path, INTEGRITY)
    try:
        table = parse_json(read_bytes(where), unique=True)
        kind, sums = table.get("algorithm", "sha256"), table["files"]
        sound = kind == "sha256" and all(isinstance(text, str) for pair in sums.items() for text in pair)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        sound = False
    if not sound or outside(sums):
        raise Damaged(f"{where} cannot be read; {how_to_list(path)}")
    for name in sorted(names)[share::shares]:
        if name not in sums:
            raise Damaged(f"{where} does not name {name}; {how_to_list(path)}")
        if digest_of(str(file_in(path, name))) != sums[name]:
            raise Damaged(f"{path / name} is not what was written (its SHA-256 differs); {how_to_list(path)}")
    return True
