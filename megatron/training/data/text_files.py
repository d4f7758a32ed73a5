# SPDX-License-Identifier: Apache-2.0
"""Reads text from JSON, Parquet, .txt and FASTA files, compressed or not; writes files atomically."""

from __future__ import annotations

import codecs
import contextlib
import errno
import glob
import itertools
import json
import os
import uuid
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from megatron.training.data import genome, row_files
from megatron.training.data.row_files import COMPRESSED, advice, decompressed
from megatron.training.disk import sync_file, sync_folder, sync_folders_up
from megatron.training.json_file import PART, read_most
from megatron.training.refusal import Refusal

LONGEST = 1 << 31  # limit of a decompressed document in bytes: an index cannot count more tokens


class Record(NamedTuple):
    """A line of a JSON-lines file, a .txt file (``line`` 0), a record of a FASTA file, or a row of another file.

    A row is JSON, and ``line`` is its number.
    """

    path: str
    line: int
    content: bytes | bytearray
    unit: str = "line"

    def where(self) -> str:
        """The place of the record, for messages."""
        return f"{self.path}, {self.unit} {self.line}" if self.line else self.path


class BadRecord(ValueError):
    """A record is invalid."""


def no_memory(where: str) -> Refusal:
    """The refusal if memory runs out at ``where``, a place in the input."""
    return Refusal(
        f"memory ran out at {where}: try fewer --workers, or shorter documents (each byte of one may need 25 bytes of "
        "memory)"
    )


def expand(patterns: list[str]) -> list[str]:
    """The files of names and globs in the given order, each glob in alphabetical order.

    Raises:
        Refusal: a file is missing, repeated, a folder, or of amino acids.
    """
    paths: list[str] = []
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        matches = [path for path in matches if path == pattern or os.path.isfile(path)]
        if not matches:
            raise Refusal(f"--input {pattern}: no such file")
        paths += matches
    seen = set()
    for path in paths:
        if os.path.isdir(path):
            raise Refusal(f"--input {path}: a folder; name its files, for example '{os.path.join(path, '*.jsonl')}'")
        if _kind(path) in genome.PROTEIN:
            raise Refusal(f"--input {path}: amino acids; genomes are read from {', '.join(genome.SUFFIXES)}")
        if os.path.realpath(path) in seen:
            raise Refusal(f"--input: {path} is named twice")
        seen.add(os.path.realpath(path))
    return paths


def is_plain_text(path: str) -> bool:
    """Whether the file is one document (.txt)."""
    return _kind(path) == ".txt"


def is_fasta(path: str) -> bool:
    """Whether the file holds genomes, with one document per record."""
    return _kind(path) in genome.SUFFIXES


def _kind(path: str) -> str:
    """The end of a file's name, without .gz and .zst."""
    return os.path.splitext(os.path.splitext(path)[0] if path.endswith(COMPRESSED) else path)[1].lower()


class Reader:
    """The records of some files in order. ``bytes_read`` counts the bytes on disk that were read, of ``bytes_total``.

    Args:
        columns: needed columns of Parquet files; by default all.
    """

    def __init__(self, paths: list[str], columns: Sequence[str] = ()) -> None:
        self.paths, self.columns = paths, columns
        self.bytes_total = sum(os.path.getsize(path) for path in paths)
        self.bytes_read = 0

    def __iter__(self) -> Iterator[Record]:
        before = 0
        for path in self.paths:
            try:
                with open(path, "rb") as raw, decompressed(path, raw) as stream:
                    size = os.path.getsize(path)  # 0 for a pipe, which has no position
                    if is_plain_text(path):
                        content = read_most(stream, LONGEST)
                        self.bytes_read = before + size
                        yield Record(path, 0, content)
                    elif not is_fasta(path) and _head(stream).startswith(row_files.PARQUET):
                        if path.endswith(COMPRESSED):
                            raise Refusal(f"--input {path}: Parquet is compressed already: decompress it")
                        for number, content, share in row_files.parquet_rows(path, self.columns):
                            self.bytes_read = before + int(share * size)
                            yield Record(path, number, content, "row")
                    else:
                        unit, records = _records(path, stream)
                        for number, content in records:
                            _check_length(content, f"{path}: {unit} {number}")
                            self.bytes_read = before + (raw.tell() if size else 0)
                            yield Record(path, number, content, unit)
                    before += size
            except MemoryError:
                raise no_memory(f"--input {path} after {self.bytes_read:,} bytes") from None
            except Refusal:
                raise  # a Refusal is a ValueError too
            except (OSError, EOFError, ValueError, zlib.error) as error:
                raise Refusal(f"--input {path}: cannot be read: {_reason(error)}") from error


def unit_of(path: str) -> str:
    """The name of a record in messages: line or row."""
    with contextlib.suppress(OSError, EOFError, ValueError, zlib.error), open(path, "rb") as raw:
        with decompressed(path, raw) as stream:
            head = _head(stream)
            return "row" if head.startswith(row_files.PARQUET) or row_files.is_array(head) else "line"
    return "line"


def _head(stream: Any) -> bytes:
    """The beginning of a stream, which is not consumed."""
    return stream.peek(1 << 12)


def _records(path: str, stream: IO[bytes]) -> tuple[str, Iterator[tuple[int, bytes | bytearray]]]:
    """The name of a record in messages, and the numbered records."""
    if is_fasta(path):
        return "line", _fasta(stream, 1)
    head = _head(stream)
    if advice_on_format := row_files.unsupported_format(head):
        raise Refusal(f"--input {path}: {advice_on_format}")
    return ("row", row_files.array_rows(stream, LONGEST)) if row_files.is_array(head) else ("line", _lines(stream, 1))


def _lines(stream: IO[bytes], first: int) -> Iterator[tuple[int, bytes]]:
    """Numbered lines. Long ones are read in parts; one that is too long is cut soon after the limit."""
    for number in itertools.count(first):
        line = stream.readline(PART)
        if not line:
            return
        if len(line) == PART:
            parts, size = [line], PART
            while parts[-1] and parts[-1][-1:] != b"\n" and size <= LONGEST:
                parts.append(stream.readline(PART))
                size += len(parts[-1])
            line = b"".join(parts)
        yield number, line


def _check_length(content: bytes | bytearray, name: str) -> None:
    if len(content) > LONGEST:
        raise Refusal(f"--input {name} has more than {LONGEST >> 30} GiB decompressed, a document's limit: split it")


def _fasta(stream: IO[bytes], first: int) -> Iterator[tuple[int, bytearray]]:
    """The records of a FASTA file, each with the number of its first line, without blank lines at the beginning."""
    record, first_line = bytearray(), first
    for number, line in _lines(stream, first):
        if number == first:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line[:1] == b">" and record:
            yield first_line, record
            record = bytearray()
        if not record:
            if not line.strip():
                continue
            first_line = number
        record += line
        _check_length(record, f"{stream.name if hasattr(stream, 'name') else 'FASTA'}: record of line {first_line}")
    if record:
        yield first_line, record


def parse(record: Record, keys: tuple[str, ...]) -> dict[str, str] | None:
    """The texts of a record by key; None for a blank line. Raises BadRecord."""
    if is_fasta(record.path):
        try:
            return {keys[0]: genome.read_fasta_record(record.content, record.line)}
        except ValueError as error:
            raise BadRecord(error) from None
    try:
        text = record.content.decode("utf-8-sig" if record.line <= 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start}") from None
    if not record.line:
        return {keys[0]: text}
    if not text.strip():
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRecord("not a JSON object")
    for key in keys:
        if key not in fields:
            raise BadRecord(f'no key "{key}"{advice(fields)}')
        if not isinstance(fields[key], str):
            raise BadRecord(f'key "{key}" is not a string')
        try:
            fields[key].encode()
        except UnicodeEncodeError:
            raise BadRecord(f'key "{key}" has half of a surrogate pair, which is not valid text') from None
    return {key: fields[key] for key in keys}


@contextlib.contextmanager
def atomic_files(paths: list[str], overwrite: bool) -> Iterator[list[str]]:
    """Yields temporary names for some files. At the end all of them are put in place; after an error, none."""
    existing = [path for path in paths if os.path.exists(path)]
    if existing and not overwrite:
        raise Refusal(f"{existing[0]} exists: give --overwrite to replace it")
    ending = f".{uuid.uuid4().hex}.tmp"  # two containers may have the same host name and process id
    temporary = [f"{path}{ending}" for path in paths]
    folders = sorted({os.path.dirname(os.path.abspath(path)) for path in paths})
    replacing = False
    try:
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        yield temporary
        for path in temporary:
            sync_file(path)
        if existing:
            for folder in folders:
                sync_folder(folder)  # the new files are safe before the old ones are removed
            replacing = True
            for path in reversed(existing):  # a power cut leaves a missing file, never a wrong pair
                os.unlink(path)
            for folder in folders:
                sync_folder(folder)
        for source, target in zip(temporary, paths):
            os.rename(source, target)
        for folder in folders:
            sync_folders_up(folder)
    except OSError as error:
        name = error.filename or paths[0]
        raise Refusal(f"cannot write {name.removesuffix(ending)}: {_reason(error)}") from error
    finally:
        for path in temporary if not replacing else ():  # if the old files may be gone, the new ones stay
            with contextlib.suppress(OSError):
                os.unlink(path)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
