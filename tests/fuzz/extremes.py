# SPDX-License-Identifier: Apache-2.0
"""Each number of a valid file replaced by extreme ones: in text, JSON, headers of safetensors, pickles and archives."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator

from tests.fuzz.mutations import archive_parts, integer_of, spans

EXTREMES = ["1" + "0" * 30, "100000000", str(2**33), "1e308", "-1", "0", "NaN", "9" * 5000, "0x" + "f" * 5000]
NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
NUMBERS = [b"K", b"M", b"J", b"\x8a", b"\x8b", b"G"]  # instructions of a pickle that give one
MOST = 40  # numbers of a file that are replaced; of more, some at equal distances


def with_extremes(data: bytes) -> Iterator[bytes]:
    """The file again and again, each time with another of its numbers, or another extreme one in its place."""
    if parts := archive_parts(data):
        for at, (name, part) in enumerate(parts):
            if name.endswith("data.pkl"):
                for changed in _pickled(part):
                    yield _archive([*parts[:at], (name, changed), *parts[at + 1 :]])
    elif data[:1] == b"\x80":
        yield from _pickled(data)
    elif 0 < (length := int.from_bytes(data[:8], "little")) <= len(data) - 8:
        for text in _texts(data[8 : 8 + length]):
            yield len(text).to_bytes(8, "little") + text + data[8 + length :]
    elif _is_text(data):
        yield from _texts(data)


def _is_text(data: bytes) -> bool:
    try:
        return data.decode().replace("\n", " ").replace("\t", " ").replace("\r", " ").isprintable()
    except UnicodeDecodeError:
        return False


def _some(places: list) -> list:
    return places[:: -(-len(places) // MOST) or 1]


def _texts(data: bytes) -> Iterator[bytes]:
    for found in _some(list(NUMBER.finditer(data))):
        for extreme in EXTREMES:
            yield data[: found.start()] + extreme.encode() + data[found.end() :]


def _pickled(data: bytes) -> Iterator[bytes]:
    numbers = [(begin, end) for begin, end in spans(data) if data[begin : begin + 1] in NUMBERS]
    for begin, end in _some(numbers):
        for extreme in EXTREMES[:-2]:
            value = float(extreme) if extreme in ("1e308", "NaN") else int(extreme)
            code = pickle.dumps(value, 2)[2:-1] if isinstance(value, float) else integer_of(value)
            yield data[:begin] + code + data[end:]


def _archive(parts: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")  # about a repeated name
        for name, part in parts:
            archive.writestr(zipfile.ZipInfo(name), part)
    return file.getvalue()
