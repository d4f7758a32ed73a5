# SPDX-License-Identifier: Apache-2.0
"""Reads text from files of many formats, compressed or not, local or remote."""

from __future__ import annotations

import codecs
import contextlib
import errno
import itertools
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from megatron.training.data import genome, row_files
from megatron.training.data.row_files import COMPRESSED, advice, decompressed
from megatron.training.data.sources import columnar
from megatron.training.data.sources.remote import exists, is_folder, is_remote, matches, open_input, size_of
from megatron.training.data.sources.tar_files import tar_rows
from megatron.training.json_file import PART, read_most
from megatron.training.refusal import Refusal, one_line

LONGEST = 1 << 31  # limit of a decompressed document in bytes: an index cannot count more tokens


class Record(NamedTuple):
    """A line of a JSON-lines file, a .txt file (``line`` 0), a record of a FASTA file, or a row of another file.

    A row is JSON, and ``line`` is its number. ``error`` says why a part of a file cannot be read. ``offset`` is the
    byte at which a line begins, if it is known.
    """

    path: str
    line: int
    content: bytes | bytearray
    unit: str = "line"
    error: str = ""
    offset: int = -1

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
    """The files of names, URLs, globs and folders in the given order, each glob and folder in alphabetical order.

    A folder stands for its files that can be read, and those of its folders; one that Hugging Face's ``datasets`` has
    saved for the files of the data set.

    Raises:
        Refusal: a file is missing, repeated, or of amino acids; or a folder has none.
    """
    paths: list[str] = []
    for pattern in patterns:
        try:
            named = [pattern] if exists(pattern) else matches(pattern)
        except OSError as error:
            raise Refusal(f"--input {pattern}: cannot be read: {_reason(error)}") from error
        if not named:
            raise Refusal(f"--input {pattern}: no such file")
        for path in named:
            paths += (columnar.saved_files(path) or files_of(path)) if is_folder(path) else [path]
    seen = set()
    for path in paths:
        if _kind(path) in genome.PROTEIN:
            raise Refusal(f"--input {path}: amino acids; genomes are read from {', '.join(genome.SUFFIXES)}")
        real = path if is_remote(path) else os.path.realpath(path)
        if real in seen:
            raise Refusal(f"--input: {path} is named twice")
        seen.add(real)
    return paths


READABLE = (".jsonl", ".json", ".parquet", ".arrow", ".tar", ".tgz", ".txt", ".md", *genome.SUFFIXES)
MOST_FILES = 1_000_000  # of a folder


def files_of(folder: str) -> list[str]:
    """The readable files of a folder and its folders, in alphabetical order, without hidden ones."""
    if is_remote(folder):
        raise Refusal(f"--input {folder}: a folder; name its files, for example '{os.path.join(folder, '*.jsonl')}'")
    found = [file for file in _files_in(folder) if _kind(file) in READABLE]
    if not found:
        raise Refusal(f"--input {folder}: none of its files is of a kind that is read: {', '.join(READABLE)}")
    return sorted(found)


def in_folder(folder: str) -> str:
    """A line about the files of a local folder: how many of each kind, and the kinds that are not read."""
    kinds = Counter(_kind(file) or "without ending" for file in _files_in(folder))
    counted = {kind: f"{kinds[kind]:,} {kind}" for kind in sorted(kinds)}
    read, others = ([text for kind, text in counted.items() if (kind in READABLE) == own] for own in (True, False))
    return f"{folder}: files read: {', '.join(read)}" + (f"; not read: {', '.join(others)}" if others else "")


def _files_in(folder: str) -> list[str]:
    """All files of a folder and its folders, without hidden ones. Links to folders are not followed."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
        if len(found) > MOST_FILES:
            raise Refusal(f"--input {folder}: more than {MOST_FILES:,} files: name them by globs")
    return found


def is_plain_text(path: str) -> bool:
    """Whether the file is one document (.txt, .md)."""
    return _kind(path) in (".txt", ".md")


def is_fasta(path: str) -> bool:
    """Whether the file holds genomes, with one document per record."""
    return _kind(path) in genome.SUFFIXES


def _kind(path: str) -> str:
    """The end of a file's name, without .gz and .zst."""
    return os.path.splitext(os.path.splitext(path)[0] if path.endswith(COMPRESSED) else path)[1].lower()


ALL = (0.0, math.inf)  # a span of bytes that contains every file


class Reader:
    """The records of some files in order. ``bytes_read`` counts the bytes on disk that were read, of ``bytes_total``.

    Args:
        columns: needed columns of Parquet and Arrow files; by default all.
        span: the range of bytes of all files, one after another, to which the reader is limited. A line belongs to the
            range in which it begins; so does a group of rows, or any other file as a whole. So the records of adjacent
            ranges are all records, each once.
        sizes: of the files in bytes, if they are known; asking a server for many sizes takes long.
    """

    def __init__(
        self,
        paths: list[str],
        columns: Sequence[str] = (),
        span: tuple[float, float] = ALL,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.paths, self.columns, self.span = paths, columns, span
        try:
            self.sizes = [size_of(path) for path in paths] if sizes is None else list(sizes)
        except OSError as error:
            raise Refusal(f"--input: {getattr(error, 'filename', None) or paths[0]}: {_reason(error)}") from error
        self.bytes_total = int(min(sum(self.sizes), span[1]) - span[0])
        self.bytes_read = 0

    def __iter__(self) -> Iterator[Record]:
        before = 0
        for path, size in zip(self.paths, self.sizes):
            begin, end = self.span[0] - before, self.span[1] - before
            before += size
            if end <= 0 or begin > max(size - 1, 0):
                continue
            done = self.bytes_read
            try:
                yield from self._of_file(path, size, (max(begin, 0), end), done)
            except MemoryError:
                raise no_memory(f"--input {path} after {self.bytes_read:,} bytes") from None
            except Refusal:
                raise  # a Refusal is a ValueError too
            except (OSError, EOFError, ValueError, zlib.error) as error:
                raise Refusal(f"--input {path}: cannot be read: {_reason(error)}") from error
            self.bytes_read = done + int(min(size, end) - max(begin, 0))

    def _of_file(self, path: str, size: int, span: tuple[float, float], done: int) -> Iterator[Record]:
        with open_input(path) as raw, decompressed(path, raw) as stream:
            head = b"" if is_plain_text(path) or is_fasta(path) or is_tar(path) else _head(stream)
            if head.startswith((columnar.PARQUET, columnar.ARROW, columnar.ARROW_STREAM)):
                if path.endswith(COMPRESSED):
                    raise Refusal(f"--input {path}: Parquet and Arrow are compressed already: decompress it")
                for number, content, share, error in columnar.columnar_rows(path, head, self.columns, size, span):
                    _check_length(content, f"{path}: row {number}")
                    self.bytes_read = done + max(0, int(share * size - span[0]))
                    yield Record(path, number, content, "row group" if error else "row", error)
                return
            if raw is stream and size and is_lines(path, head):
                for number, offset, content in _lines_of_span(stream, span):
                    record = Record(path, offset if span[0] else number, content,
                                    "line at byte" if span[0] else "line", offset=offset)  # fmt: skip
                    _check_length(content, f"{path}: {record.unit} {record.line}")
                    self.bytes_read = done + offset + len(content) - int(span[0])
                    yield record
                return
            if span[0] > 0:
                return  # the file belongs to the range in which it begins
            if is_plain_text(path):
                yield Record(path, 0, read_most(stream, LONGEST))
            elif is_tar(path):
                for number, content, error in tar_rows(stream, LONGEST):
                    self.bytes_read = done + (raw.tell() if size else 0)
                    yield Record(path, number, content, "sample", error)
            else:
                unit, records = "line", _fasta(stream) if is_fasta(path) else _lines(stream)
                if what_to_do := row_files.unsupported_format(head):
                    raise Refusal(f"--input {path}: {what_to_do}")
                if row_files.is_array(head):
                    unit, records = "row", row_files.array_rows(stream, LONGEST)
                for number, content in records:
                    _check_length(content, f"{path}: {unit} {number}")
                    self.bytes_read = done + (raw.tell() if size else 0)
                    yield Record(path, number, content, unit)


def is_tar(path: str) -> bool:
    """Whether the file is an archive of WebDataset."""
    return _kind(path) in (".tar", ".tgz")


def is_lines(path: str, head: bytes) -> bool:
    """Whether the file is JSON lines, by its first bytes."""
    return not (is_plain_text(path) or is_fasta(path) or is_tar(path) or row_files.is_array(head)
                or row_files.unsupported_format(head))  # fmt: skip


def _lines_of_span(stream: IO[bytes], span: tuple[float, float]) -> Iterator[tuple[int, int, bytes]]:
    """(number from the start of the range, offset, line) of the lines that begin in a range of bytes."""
    offset = begin = int(span[0])
    if begin:
        stream.seek(begin - 1)
        offset = begin - 1
        while part := stream.readline(PART):  # the rest of the line before
            offset += len(part)
            if part[-1:] == b"\n":
                break
    for number, line in _lines(stream):
        if offset >= span[1]:
            return
        yield number, offset, line
        offset += len(line)


def unit_of(path: str) -> str:
    """The name of a record in messages: line or row."""
    with contextlib.suppress(OSError, EOFError, ValueError, zlib.error), open_input(path) as raw:
        with decompressed(path, raw) as stream:
            head = _head(stream)
            tables = (columnar.PARQUET, columnar.ARROW, columnar.ARROW_STREAM)
            return "row" if head.startswith(tables) or row_files.is_array(head) else "line"
    return "line"


def _head(stream: Any) -> bytes:
    """The beginning of a stream, which is not consumed."""
    return stream.peek(1 << 12)


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Numbered lines. Long ones are read in parts; one that is too long is cut soon after the limit."""
    for number in itertools.count(1):
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


def _fasta(stream: IO[bytes]) -> Iterator[tuple[int, bytearray]]:
    """The records of a FASTA file, each with the number of its first line, without blank lines at the beginning."""
    record, first_line = bytearray(), 1
    for number, line in _lines(stream):
        if number == 1:
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


def fields_of(record: Record, key: str, parse: Callable[[str], Any] = json.loads) -> dict[str, Any] | None:
    """The fields of a record; the text of a record without fields is under ``key``. None for a blank line.

    Args:
        parse: reads JSON; raises ValueError.

    Raises:
        BadRecord: it is not valid.
    """
    if record.error:
        raise BadRecord(record.error)
    if is_fasta(record.path):
        try:
            return {key: genome.read_fasta_record(record.content, record.line)}
        except ValueError as error:
            raise BadRecord(error) from None
    try:
        text = record.content.decode("utf-8-sig" if record.line <= 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start}") from None
    if not record.line:
        return {key: text}
    if not text.strip():
        return None
    try:
        fields = parse(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON: {one_line(error, 200)}") from None
    if not isinstance(fields, dict):
        raise BadRecord("not a JSON object")
    return fields


def texts_of(fields: dict[str, Any], keys: tuple[str, ...]) -> dict[str, str]:
    """The texts of a record by key. Raises BadRecord if one is missing, or is not text."""
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


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
