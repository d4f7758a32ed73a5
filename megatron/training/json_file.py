# SPDX-License-Identifier: Apache-2.0
"""Reads JSON from untrusted files: any text gives plain values or an error of one line, within bounded memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import IO, Any

from megatron.training.refusal import Refusal, one_line, reason, refusing

PART = 1 << 20
MOST_BYTES = 64 << 20  # limit of a settings file; its Python objects may take about thirty times as much
DEEPEST = 100  # nested lists and objects, so that recursive functions can walk through them
LONGEST_NUMBER = 300  # digits of an integer, so that it fits in a float
SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value that a JSON text stands for.

    Args:
        text: bytes are UTF-8.
        unique: refuse an object with a repeated key, because another reader might take its other value.

    Raises:
        ValueError: the text is not JSON, is nested deeper than ``DEEPEST``, or has an integer too large for a float or
            half of a surrogate pair, which cannot be written to a file. The message is one line.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError(f"nested more than {DEEPEST} deep")
    if SURROGATE.search(text) or (re.search(r"\\u[dD][89a-fA-F]", text) and _has_surrogate(value)):
        raise ValueError("half of a surrogate pair, which is not valid text")
    return value


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a repeated key in an object")
    return values


def _has_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [child for part in parts for child in part if isinstance(child, dict | list)]
    return bool(level)


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: it cannot be read. ValueError: it has more than ``most`` bytes.
    """
    with open(path, "rb") as file:
        return read_most(file, most)


def read_text(path: str | Path, flag: str, most: int = MOST_BYTES) -> str:
    """The text of a file that ``flag`` names. Raises Refusal if it cannot be read, is too long, or is not text."""
    with refusing(f"{flag} {path}", OSError, ValueError):
        return read_bytes(path, most).decode("utf-8")


def read_most(stream: IO[bytes], most: int) -> bytes:
    """All bytes of a stream, read in parts, because ``read(most)`` would allocate ``most`` bytes.

    Raises:
        OSError: it cannot be read. ValueError: it has more than ``most`` bytes.
    """
    parts, size = [], 0
    while part := stream.read(PART):
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"longer than {most >> 20} MiB")
    return b"".join(parts)


def json_object(path: str | Path | None) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        value = {} if path is None else parse_json(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_json(path: str | Path, flag: str = "", most: int = MOST_BYTES) -> Any:
    """The value in a JSON file.

    Args:
        flag: the flag that named the file, for messages.
        most: bytes that it may have.

    Raises:
        Refusal: the file cannot be read, is too long, or is not JSON.
    """
    where = f"{flag} {path}" if flag else f"{path}"
    try:
        return parse_json(read_bytes(path, most))
    except OSError as error:
        raise Refusal(f"{where}: cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise Refusal(f"{where}: not JSON: {one_line(error, 200)}") from None
