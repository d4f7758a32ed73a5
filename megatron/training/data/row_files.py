# SPDX-License-Identifier: Apache-2.0
"""Reads compressed files and JSON arrays, element by element in bounded memory, and knows formats of chats."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

from megatron.training.json_file import PART
from megatron.training.refusal import Refusal, short

COMPRESSED = (".gz", ".zst")  # endings of compressed files
ZSTD_PART = 1 << 12  # bytes of a .zst that are decompressed at a time: four bytes can become 128 KiB


def decompressed(path: str, raw: IO[bytes]) -> IO[bytes]:
    """The stream of a file's decompressed content."""
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.endswith(".zst"):
        return io.BufferedReader(Zstd(raw), 1 << 20)
    return raw


class Zstd(io.RawIOBase):
    """A .zst of any number of frames. zstandard's own stream reports no error if the file is cut off."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise Refusal("--input of .zst files needs the package zstandard: pip install zstandard") from None
        self.raw, self.error, self.new_frame = raw, zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj
        self.frame: Any = None
        self.compressed = self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            self.compressed = self.compressed or self.raw.read(1 << 15)
            if not self.compressed:
                if self.frame is not None:
                    raise EOFError("cut off in the middle of a zstd frame")
                return 0
            self.frame = self.frame or self.new_frame()
            part, remaining = self.compressed[:ZSTD_PART], self.compressed[ZSTD_PART:]
            try:
                self.ready = self.frame.decompress(part)
            except self.error as error:
                raise OSError(f"not zstd: {error}") from error
            self.compressed = self.frame.unused_data + remaining if self.frame.eof else remaining
            if self.frame.eof:
                self.frame = None
        count = min(len(self.ready), len(buffer))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


# Common formats of rows. These are read as conversations: ``messages``, ShareGPT's ``conversations``, Alpaca's
# ``instruction``, ``input`` and ``output``, and ``prompt`` with ``completion`` (texts, or messages).


Row = dict[str, Any]
# ShareGPT's names of the roles.
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
READ = '"messages", ShareGPT\'s "conversations", Alpaca\'s "instruction" and "output", "prompt" and "completion"'


def form_of(row: Row) -> str:
    """The name of a row's format; empty if it is unknown."""
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
    """What to do with a row that lacks the requested key, as the end of the refusal's message."""
    form, keys = form_of(row), _keys(row)
    if form in ("messages", "ShareGPT", "Alpaca", "prompt and completion"):
        return (
            f"; the row has the format {form}, which pretrain_gpt.py --sft reads directly; to train only on its texts, "
            f"name their keys with --json-keys: {keys}"
        )
    return f"; it has {keys}: name keys with --json-keys" if keys else ""


def _keys(row: Row) -> str:
    """The first keys of a row, for a message."""
    return short(", ".join(f'"{key}"' for key in list(row)[:8])).strip("'") if row else ""


def messages_of(row: Row, where: str) -> list[Any]:
    """The messages of a row, unchecked.

    Raises:
        Refusal: the row has no format of a conversation; the message names the formats, or what to do.
    """
    form = form_of(row)
    if form == "Alpaca":
        return _alpaca(row, where)
    if form == "prompt and completion":
        return _completion(row, where)
    messages = row.get("messages" if form == "messages" else "conversations")
    if isinstance(messages, list) and messages:
        return [_from_sharegpt(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)]
    if form in ("messages", "ShareGPT"):
        hint = f"; its {'messages' if form == 'messages' else 'conversations'} are {short(messages)}"
    elif form == "preferences":
        hint = ': "chosen" and "rejected" are preferences: give --dpo, or, for --sft, rename chosen to messages'
    elif form == "text":
        hint = ": a plain text, which tools/preprocess_data.py tokenizes for training without --sft"
    else:
        keys = _keys(row)
        hint = f"; --sft reads {READ}" + (f": rename the row's {keys}" if keys else "")
    raise Refusal(f'{where}: no list "messages" of {{"role", "content"}}{hint}')


def _from_sharegpt(message: Any, where: str) -> Any:
    """A message of ShareGPT's format (``from``, ``value``) with our keys; any other message unchanged."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= set(message):
        return message
    speaker = message["from"]
    if speaker == "function_call":
        raise Refusal(f'{where}: a function_call: write it as {{"role": "assistant", "tool_calls": [...]}}')
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise Refusal(f"{where}: from {short(speaker)} is none of {', '.join(SPEAKERS)}")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": message["value"], **others}


def _alpaca(row: Row, where: str) -> list[Row]:
    """The question is the instruction, an empty line and the input; ``history`` may have earlier turns."""
    given, history = row.get("input"), row.get("history") or []
    texts = [row["instruction"], row["output"], given or ""]
    pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not pairs or not all(isinstance(text, str) for text in [*texts, *(text for pair in history for text in pair)]):
        raise Refusal(f'{where}: Alpaca\'s format, but its "instruction", "input", "output" or "history" is not text')
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
    raise Refusal(f'{where}: its "prompt" and "completion" must be two texts or two lists of messages')


BLANKS = re.compile(r"[ \t\r\n]*")
NEAR_THE_END = 16  # characters: longer than a literal or an escape that the end of a part may cut
OTHERS = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"BZh": "compressed by bzip2: decompress it, or use gzip or zstd",
    b"\xfd7zXZ": "compressed by xz: decompress it, or use gzip or zstd",
    b"\x1f\x8b": "compressed by gzip: give it a name that ends in .gz",
    b"(\xb5/\xfd": "compressed by zstd: give it a name that ends in .zst",
}


def is_array(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a JSON array; a line of JSON lines is an object."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def unsupported_format(head: bytes) -> str | None:
    """The format of a file that begins with ``head``, and what to do with it; None if it may have rows."""
    return next((hint for magic, hint in OTHERS.items() if head.startswith(magic)), None)


def array_rows(stream: IO[bytes], longest: int) -> Iterator[tuple[int, bytes]]:
    """The elements of a JSON array, numbered from 1, as JSON.

    Args:
        longest: limit of the characters of an element.

    Raises:
        ValueError: it is not a JSON array; the message of one line names the element.
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
            separator = text.peek()
            if separator not in (",", "]"):
                actual = f"{separator!r} follows" if separator else "the file ends"
                raise ValueError(f"after element {number} of its JSON array {actual}, instead of a comma or ]")
            text.at += 1
            closed = separator == "]"
    if text.peek():
        raise ValueError("it continues after the end of its JSON array: give one array, or JSON lines of objects")


class _Text:
    """The part of a UTF-8 stream that is being parsed, as text."""

    def __init__(self, stream: IO[bytes], longest: int) -> None:
        self.stream, self.longest = stream, longest
        self.text, self.at, self.ended = "", 0, False
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode

    def more(self) -> None:
        """Read until the unparsed text has about doubled, so that repeated attempts to parse an element cost little."""
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
        """The next character that is not blank; empty at the end."""
        while True:
            self.at = BLANKS.match(self.text, self.at).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()


def _end(text: _Text, scan: Callable[[str, int], tuple[Any, int]], number: int) -> int:
    """The end of the element that begins at ``text.at``. Reads more as long as the element may be incomplete."""
    while True:
        try:
            end = scan(text.text, text.at)[1]
            if end < len(text.text) - NEAR_THE_END or text.ended:  # "1." may be the beginning of a longer number
                return end
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string") or error.pos >= len(text.text) - NEAR_THE_END
            if text.ended or not cut:
                raise ValueError(f"element {number} of its JSON array is not JSON: {error.msg}") from None
        except RecursionError:
            raise ValueError(f"element {number} of its JSON array is nested too deep") from None
        text.more()
