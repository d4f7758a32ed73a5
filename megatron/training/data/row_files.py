# SPDX-License-Identifier: Apache-2.0
"""Rows of files that are not lines: JSON arrays and Parquet. Each row becomes JSON, as a line of JSON lines holds it.

Both are read in bounded memory: an array element by element, Parquet in batches of rows of one row group.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from megatron.training.json_file import PART
from megatron.training.refusal import Refusal, one_line

BLANKS = re.compile(r"[ \t\r\n]*")
NEAR_THE_END = 16  # characters: a literal or an escape that the end of a part cuts
PARQUET, BATCH_ROWS = b"PAR1", 32
PYARROW = "pip install 'pyarrow>=18,<27'"
OTHERS = {
    b"ARROW1": "an Arrow file: write it as Parquet",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"BZh": "packed by bzip2: unpack it, or pack it by gzip or zstd",
    b"\xfd7zXZ": "packed by xz: unpack it, or pack it by gzip or zstd",
    b"\x1f\x8b": "packed by gzip: give it a name that ends in .gz",
    b"(\xb5/\xfd": "packed by zstd: give it a name that ends in .zst",
}


def is_array(head: bytes) -> bool:
    """Whether a file of rows that begins so is one JSON array; a line of JSON lines is an object."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def foreign(head: bytes) -> str | None:
    """What a file that begins so is, and what to do with it, where no rows can be read from it."""
    return next((what for magic, what in OTHERS.items() if head.startswith(magic)), None)


def array_rows(stream: IO[bytes], longest: int) -> Iterator[tuple[int, bytes]]:
    """The elements of a JSON array, numbered from 1, as JSON.

    Args:
        longest: characters of an element.

    Raises:
        ValueError: it is no array of JSON; one line says from which element on.
    """
    text, number = _Text(stream, longest), 0
    scan = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode
    text.at += text.peek() == "["
    if text.peek() == "]":
        text.at += 1
    else:
        closed = False
        while not closed:
            number += 1
            text.peek()
            end = _end(text, scan, number)
            yield number, text.text[text.at : end].encode()
            text.at = end
            mark = text.peek()
            if mark not in (",", "]"):
                what = f"{mark!r} follows" if mark else "the file ends"
                raise ValueError(f"after element {number} of its JSON array {what}, where a comma or ] should")
            text.at += 1
            closed = mark == "]"
    if text.peek():
        raise ValueError("it goes on after the end of its JSON array: give one array, or JSON lines of objects")


class _Text:
    """A stream of UTF-8 as text, as much of it as is being read."""

    def __init__(self, stream: IO[bytes], longest: int) -> None:
        self.stream, self.longest = stream, longest
        self.text, self.at, self.ended = "", 0, False
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode

    def more(self) -> None:
        """Read on, about as much as is left: to try an element again costs little then."""
        self.text, self.at = self.text[self.at :], 0
        if len(self.text) > self.longest:
            raise ValueError(f"an element of its JSON array has more than {self.longest:,} characters: split it")
        part = self.stream.read(max(PART, len(self.text)))
        self.ended = not part
        try:
            self.text += self.decode(part, self.ended)
        except UnicodeDecodeError:
            raise ValueError("not UTF-8") from None

    def peek(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            self.at = BLANKS.match(self.text, self.at).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()


def _end(text: _Text, scan: Callable[[str, int], tuple[Any, int]], number: int) -> int:
    """Where the element that begins at ``text.at`` ends; more is read while the end of what is there may cut it."""
    while True:
        try:
            end = scan(text.text, text.at)[1]
            if end < len(text.text) - NEAR_THE_END or text.ended:  # "1." and "1e+" are cut numbers that begin with one
                return end
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string") or error.pos >= len(text.text) - NEAR_THE_END
            if text.ended or not cut:
                raise ValueError(f"element {number} of its JSON array is not JSON: {error.msg}") from None
        except RecursionError:
            raise ValueError(f"element {number} of its JSON array is nested too deep") from None
        text.more()


def parquet_rows(path: str, columns: Sequence[str]) -> Iterator[tuple[int, bytes, float]]:
    """The rows of a Parquet file, numbered from 1, as JSON, and the share of the file that is read with each.

    Args:
        columns: to read; all where one of them is not there, or none is named.

    Raises:
        Refusal: pyarrow is not installed. OSError, ValueError: the file cannot be read.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise Refusal(f"--input {path}: Parquet is read by the package pyarrow: {PYARROW}") from None
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=PART) as file:
            total, number = file.metadata.num_rows, 0
            chosen = list(columns) if columns and set(columns) <= set(file.schema_arrow.names) else None
            for batch in file.iter_batches(BATCH_ROWS, columns=chosen, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, json.dumps(_without_nulls(row), default=_plain).encode(), number / max(total, 1)
    except (pyarrow.ArrowException, OverflowError, RecursionError) as error:
        raise ValueError(one_line(error, 200)) from None


def _without_nulls(value: Any) -> Any:
    """A column holds one type alone, so what only some rows have is null in the others: there it is absent.

    The content of a message stays: without its key a template that asks for it fails.
    """
    if isinstance(value, dict):
        found = {key: _without_nulls(part) for key, part in value.items() if part is not None}
        return found | ({"content": None} if "role" in found and "content" in value and "content" not in found else {})
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """What JSON has no word for: bytes as text where they are UTF-8 and as null else, dates and decimals as printed."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return str(value)
