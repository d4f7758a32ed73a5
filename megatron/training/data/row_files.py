# SPDX-License-Identifier: Apache-2.0
"""Rows of files that are not lines: JSON arrays and Parquet. Each row becomes JSON, as a line of JSON lines holds it.

Both are read in bounded memory: an array element by element, Parquet in batches of rows of one row group.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from megatron.training.json_file import PART
from megatron.training.refusal import Refusal, one_line, short

# Files that are packed by gzip or zstd, as streams of what is in them.


PACKED = (".gz", ".zst")
ZSTD_PART = 1 << 12  # bytes of a .zst that are unpacked at a time: four of them can stand for 128 KiB


def unpacked(path: str, raw: IO[bytes]) -> IO[bytes]:
    """The stream of a file's content."""
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.endswith(".zst"):
        return io.BufferedReader(Zstd(raw), 1 << 20)
    return raw


class Zstd(io.RawIOBase):
    """A .zst of any number of frames. zstandard's own stream ends in silence where a file is cut off."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise Refusal("--input of .zst files needs the package zstandard: pip install zstandard") from None
        self.raw, self.error, self.new = raw, zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj
        self.frame: Any = None
        self.packed = self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            self.packed = self.packed or self.raw.read(1 << 15)
            if not self.packed:
                if self.frame is not None:
                    raise EOFError("cut off in the middle of a zstd frame")
                return 0
            self.frame = self.frame or self.new()
            part, rest = self.packed[:ZSTD_PART], self.packed[ZSTD_PART:]
            try:
                self.ready = self.frame.decompress(part)
            except self.error as error:
                raise OSError(f"not zstd: {error}") from error
            self.packed = self.frame.unused_data + rest if self.frame.eof else rest
            if self.frame.eof:
                self.frame = None
        count = min(len(self.ready), len(buffer))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


# Published forms of rows: which one a row has, its messages where it holds a conversation, and what to do with it.
#
# Read as conversations: ``messages``, ShareGPT's ``conversations``, Alpaca's ``instruction``, ``input`` and ``output``,
# ``prompt`` and ``completion`` (texts, or messages).


Row = dict[str, Any]
# Who speaks, in ShareGPT's words.
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
READ = '"messages", ShareGPT\'s "conversations", Alpaca\'s "instruction" and "output", "prompt" and "completion"'


def form_of(row: Row) -> str:
    """The name of a row's form; empty where it has none that is known."""
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "ShareGPT"
    if "instruction" in row and "output" in row:
        return "Alpaca"
    if "prompt" in row and "completion" in row:
        return "prompt and completion"
    if "chosen" in row and "rejected" in row:
        return "preferences"
    return "text" if isinstance(row.get("text"), str) else ""


def advice(row: Row) -> str:
    """What to do with a row that has not the key that was asked for, as the end of a refusal."""
    form, keys = form_of(row), _keys(row)
    if form in ("messages", "ShareGPT", "Alpaca", "prompt and completion"):
        return (
            f"; the row is of the form {form}, which pretrain_gpt.py --sft reads as it is; to train on its texts "
            f"alone, name their keys with --json-keys: {keys}"
        )
    return f"; it has {keys}: name keys with --json-keys" if keys else ""


def _keys(row: Row) -> str:
    """The first keys of a row, for a line."""
    return short(", ".join(f'"{key}"' for key in list(row)[:8])).strip("'") if row else ""


def messages_of(row: Row, where: str) -> list[Any]:
    """The messages of a row, not checked yet.

    Raises:
        Refusal: the row is of no form that is a conversation; it says which forms are, or what to do.
    """
    form = form_of(row)
    if form == "Alpaca":
        return _alpaca(row, where)
    if form == "prompt and completion":
        return _completion(row, where)
    found = row.get("messages" if form == "messages" else "conversations")
    if isinstance(found, list) and found:
        return [_shared(message, f"{where}, message {number}") for number, message in enumerate(found, 1)]
    if form in ("messages", "ShareGPT"):
        hint = f"; its {'messages' if form == 'messages' else 'conversations'} are {short(found)}"
    elif form == "preferences":
        hint = (
            ': "chosen" and "rejected" are preferences, and --sft learns from answers alone: rename chosen to messages'
        )
    elif form == "text":
        hint = ": a plain text, which tools/preprocess_data.py tokenizes for training without --sft"
    else:
        keys = _keys(row)
        hint = f"; read are {READ}" + (f": rename the row's {keys}" if keys else "")
    raise Refusal(f'{where}: no list "messages" of {{"role", "content"}}{hint}')


def _shared(message: Any, where: str) -> Any:
    """A message of ShareGPT's form, ``from`` and ``value``, in our words; any other as it is."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= set(message):
        return message
    speaker = message["from"]
    if speaker == "function_call":
        raise Refusal(f'{where}: a function_call: write it as {{"role": "assistant", "tool_calls": [...]}}')
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise Refusal(f"{where}: from {short(speaker)} is none of {', '.join(SPEAKERS)}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": message["value"], **rest}


def _alpaca(row: Row, where: str) -> list[Row]:
    """The instruction, an empty line and the input ask; the output answers. Earlier turns may stand in ``history``."""
    given, history = row.get("input"), row.get("history") or []
    texts = [row["instruction"], row["output"], given or ""]
    pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not pairs or not all(isinstance(text, str) for text in [*texts, *(text for pair in history for text in pair)]):
        raise Refusal(f'{where}: of Alpaca\'s form, and its "instruction", "input", "output" or "history" is no text')
    question = f"{row['instruction']}\n\n{given}" if given and given.strip() else row["instruction"]
    return [
        message
        for asked, answered in [*history, (question, row["output"])]
        for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})
    ]


def _completion(row: Row, where: str) -> list[Any]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list) and prompt and completion:
        return [*prompt, *completion]
    raise Refusal(f'{where}: its "prompt" and "completion" are not two texts, nor two lists of messages')


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
