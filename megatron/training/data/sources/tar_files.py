# SPDX-License-Identifier: Apache-2.0
"""Samples of WebDataset archives: the files of a .tar that follow each other and have the same name up to a dot.

A sample becomes a row: the text of ``0001.txt`` is under ``txt`` and ``text``, the fields of the object in
``0001.json`` are fields of the row, and ``__key__`` is ``0001``. Other files are skipped. Headers are parsed here, in
bounded memory; nothing is written to disk, so that paths in an archive lead nowhere. (Python's tarfile takes a damaged
header for the end of a stream, without a word, and reads long names whole.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from megatron.training.json_file import PART, parse_json

BLOCK = 512
LONGEST_NAME = 1 << 16  # bytes of a header that has a long name
FILE, LONG_NAME, PAX, PAX_GLOBAL = (b"0", b"\0", b"7"), b"L", b"x", b"g"
TEXTS = ("txt", "text")


def tar_rows(stream: IO[bytes], longest: int) -> Iterator[tuple[int, bytes, str]]:
    """(number from 1, row as JSON, error) of each sample of an archive.

    A sample that is not valid text or JSON has an error instead of a row.

    Args:
        longest: bytes that a file of a sample may have.

    Raises:
        ValueError, EOFError: it is not an archive, or is cut off.
    """
    number, key, row, error = 0, None, {}, ""
    for name, size in _members(stream):
        folder, _, base = name.rpartition("/")
        stem, dot, ending = base.partition(".")
        member = f"{folder}/{stem}" if folder else stem
        ending = ending.lower()
        wanted = bool(dot and stem) and ending in (*TEXTS, "json")
        if member != key:
            if row or error:
                number += 1
                yield number, _row(key, row), error
            key, row, error = member, {}, ""
        if not wanted:
            _skip(stream, size)
            continue
        if size > longest:
            raise ValueError(f"its file {name[:100]!r} has more than {longest >> 20:,} MiB: split it")
        content = _exactly(stream, size)
        try:
            if ending == "json":
                fields = parse_json(content)
                row = {**fields, **row} if isinstance(fields, dict) else {"json": fields, **row}
            else:
                row[ending] = row["text"] = content.decode("utf-8-sig")
        except ValueError as problem:
            at = f" at byte {problem.start}" if isinstance(problem, UnicodeDecodeError) else f" ({problem})"
            error = error or f"{base[:100]!r} is not {'JSON' if ending == 'json' else 'UTF-8'}{at}"
        _skip(stream, -size % BLOCK, exact=True)
    if row or error:
        yield number + 1, _row(key, row), error


def _row(key: str | None, row: dict[str, Any]) -> bytes:
    return json.dumps({"__key__": key, **row}).encode() if row else b""


def _members(stream: IO[bytes]) -> Iterator[tuple[str, int]]:
    """(name, size) of each regular file. Its content must be read, or skipped with its padding, before the next."""
    long_name: str | None = None
    while True:
        header = _exactly(stream, BLOCK, end=True)
        if not header or not header.strip(b"\0"):  # an archive ends with blocks of zeros
            return
        if _octal(header[148:156]) != sum(header[:148]) + 256 + sum(header[156:]):
            raise ValueError("not a tar archive: a header with a wrong checksum")
        size, kind = _size(header[124:136]), header[156:157]
        if kind in (LONG_NAME, PAX):
            if size > LONGEST_NAME:
                raise ValueError("a name in its headers is too long")
            content = _exactly(stream, size)
            _skip(stream, -size % BLOCK, exact=True)
            long_name = _text(content) if kind == LONG_NAME else _pax_path(content) or long_name
            continue
        name = _text(header[:100])
        if header[257:262] == b"ustar" and header[345:346] != b"\0" and header[257:263] != b"ustar ":
            name = f"{_text(header[345:500])}/{name}"
        name, long_name = long_name or name, None
        if kind in FILE and not name.endswith("/"):
            yield name, size
        else:
            _skip(stream, size if kind not in (b"1", b"2", b"3", b"4", b"5", b"6") else 0)


def _size(field: bytes) -> int:
    """A size: octal digits, or, with its first bit set, a binary number."""
    if field[0] & 0x80:
        size = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    else:
        size = _octal(field)
    if not 0 <= size < 1 << 60:
        raise ValueError("a header with an impossible size")
    return size


def _octal(field: bytes) -> int:
    """A number as text of octal digits; -1 if it is something else, which no checksum and no size is."""
    digits = field.split(b"\0")[0].strip() or b"0"
    return int(digits, 8) if digits.isdigit() and not digits.translate(None, b"01234567") else -1


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode("utf-8", "replace")


def _pax_path(content: bytes) -> str | None:
    """The path of a header of records ``LENGTH KEY=VALUE``."""
    while content:
        length, blank, _ = content.partition(b" ")
        if not blank or not length.isdigit() or len(length) > 6 or not 0 < int(length) <= len(content):
            return None
        key, _, value = content[len(length) + 1 : int(length)].partition(b"=")
        if key == b"path":
            return value.rstrip(b"\n").decode("utf-8", "replace")
        content = content[int(length) :]
    return None


def _exactly(stream: IO[bytes], count: int, end: bool = False) -> bytes:
    """``count`` bytes, read in parts; none if the stream is at its end and may be."""
    parts, missing = [], count
    while missing:
        part = stream.read(min(missing, PART))
        if not part:
            if end and missing == count:
                return b""
            raise EOFError("cut off in the middle of an archive")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _skip(stream: IO[bytes], count: int, exact: bool = False) -> None:
    """Read over ``count`` bytes, by default to the end of their last block."""
    left = count if exact else count + -count % BLOCK
    while left:
        part = stream.read(min(left, PART))
        if not part:
            raise EOFError("cut off in the middle of an archive")
        left -= len(part)
