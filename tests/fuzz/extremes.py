# SPDX-License-Identifier: Apache-2.0
"""Each number of a valid file replaced by extreme ones.

Numbers are found in text (also compressed), in headers of safetensors, NumPy and tar, in pickles and Protocol Buffers.
Other formats are replaced word by word.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator

from tests.fuzz.mutations import archive_parts, integer_of, spans

EXTREMES = ["1" + "0" * 30, "-1" + "0" * 30, "100000000", str(2**33), "1e308", "-1e308", "-1", "0"]
EXTREMES += ["NaN", "Infinity", "9" * 5000, "0x" + "f" * 5000]
NO_INTEGERS = {"1e308", "-1e308", "NaN", "Infinity"}
WORDS = [struct.pack("<q", number) for number in (0, -1, 10**8, 2**33, 2**63 - 1, -(2**63))]
WORDS += [struct.pack("<i", number) for number in (-1, 10**8, 2**31 - 1, -(2**31))]
WORDS += [struct.pack("<d", number) for number in (1e308, math.nan)]
WORDS += [struct.pack("<f", number) for number in (3e38, math.nan)]
NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
NUMBERS = [b"K", b"M", b"J", b"\x8a", b"\x8b", b"G"]  # instructions of a pickle that give one
MOST = 40  # numbers of a file that are replaced; of more, some at equal distances
MOST_WORDS = 120  # the same for words of a format that is not parsed
# Numbers in the header of a tar, and whether the member is a list of further ones.
TAR_NUMBERS = [(100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (329, 8), (337, 8)]
PAX_RECORD = re.compile(rb"\d+ ([\w.]+)=([\d.]+)\n")


def with_extremes(data: bytes) -> Iterator[bytes]:
    """The file again and again, each time with another of its numbers, or another extreme one in its place."""
    if parts := archive_parts(data):
        for at, (name, part) in enumerate(parts):
            if name.endswith("data.pkl"):
                for changed in _pickled(part):
                    yield _archive([*parts[:at], (name, changed), *parts[at + 1 :]])
    elif data[:2] == b"\x1f\x8b":
        for changed in with_extremes(gzip.decompress(data)):
            yield gzip.compress(changed, 1, mtime=0)
    elif data[:6] == b"\x93NUMPY":
        yield from _numpy(data)
    elif data[257:262] == b"ustar":
        yield from _tar(data)
    elif data[:1] == b"\x80":
        yield from _pickled(data)
    elif 0 < (length := int.from_bytes(data[:8], "little")) <= len(data) - 8:
        for text in _texts(data[8 : 8 + length]):
            yield len(text).to_bytes(8, "little") + text + data[8 + length :]
    elif _is_text(data):
        yield from _texts(data)
    else:
        if data[-4:] == b"PAR1":
            yield from _parquet(data)
        if (fields := _protocol_buffer(data)) and len(fields) > 1:
            yield from _with_other_fields(fields)
        yield from _words(data)


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
            value = float(extreme) if extreme in NO_INTEGERS else int(extreme)
            code = pickle.dumps(value, 2)[2:-1] if isinstance(value, float) else integer_of(value)
            yield data[:begin] + code + data[end:]


def _archive(parts: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")  # about a repeated name
        for name, part in parts:
            archive.writestr(zipfile.ZipInfo(name), part)
    return file.getvalue()


def _words(data: bytes) -> Iterator[bytes]:
    """Words at every byte of a small file, and at some multiples of 4 in a larger one."""
    step = 1 if len(data) <= MOST_WORDS else 4 * -(-len(data) // (4 * MOST_WORDS))
    for at in range(0, len(data), step):
        for word in WORDS:
            yield data[:at] + word + data[at + len(word) :]


def _numpy(data: bytes) -> Iterator[bytes]:
    length = int.from_bytes(data[8:10], "little")
    for text in _texts(data[10 : 10 + length]):
        yield data[:8] + len(text).to_bytes(2, "little") + text + data[10 + length :]
    for body in _words(data[10 + length :]):
        yield data[: 10 + length] + body


def _tar(data: bytes) -> Iterator[bytes]:
    """With checksums that are right again."""
    for at in range(0, len(data) - 511, 512):
        block = data[at : at + 512]
        if block[257:262] != b"ustar":
            continue
        for begin, size in TAR_NUMBERS:
            numbers = [b"7" * (size - 1), b"-1", b"NaN", b"1e308", b"\x80" + b"\x7f" * (size - 1), b"\xff" * size]
            for number in [*numbers, b"0" * (size - 1), b"\x80".ljust(size - 8, b"\0") + (2**33).to_bytes(8, "big")]:
                yield data[:at] + _summed(block, begin, number[:size].ljust(size, b"\0")) + data[at + 512 :]
        if block[156:157] in b"xg":
            length = int(block[124:135], 8)
            end = at + 512 + -(-length // 512) * 512
            records = data[at + 512 : at + 512 + length]
            for found in PAX_RECORD.finditer(records):
                for extreme in EXTREMES:
                    record = b" " + found[1] + b"=" + extreme.encode() + b"\n"
                    size = next(n for n in range(len(record), len(record) + 9) if n == len(record) + len(str(n)))
                    changed = records[: found.start()] + str(size).encode() + record + records[found.end() :]
                    header = _summed(block, 124, b"%011o\0" % len(changed))
                    yield data[:at] + header + changed + bytes(-len(changed) % 512) + data[end:]


def _summed(block: bytes, at: int, number: bytes) -> bytes:
    changed = bytearray(block[:at] + number + block[at + len(number) :])
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


def _varint(number: int) -> bytes:
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    return bytes([*result, number])


VARINTS = [_varint(number) for number in (0, 1, 2 * 10**8, 2**34, 2**32 - 1, 2**64 - 1, 2**64 - 2, 10**30)]


def _parquet(data: bytes) -> Iterator[bytes]:
    """With another number in place of each byte of the footer that can be a number, and the new length."""
    length = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - length : -8]
    for at in [at for at, byte in enumerate(footer) if byte < 128][:: -(-length // MOST_WORDS)]:
        for number in VARINTS:
            changed = footer[:at] + number + footer[at + 1 :]
            yield data[: -8 - length] + changed + len(changed).to_bytes(4, "little") + b"PAR1"


Fields = list[tuple[int, int, "int | bytes | Fields"]]  # number, kind, value


def _protocol_buffer(data: bytes) -> Fields | None:
    """The fields of a message, nested; None if it is not one."""
    result: Fields = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    try:
        while at < len(data):
            key = varint()
            number, kind = key >> 3, key & 7
            if not number or kind not in (0, 1, 2, 5):
                return None
            if kind == 0:
                result.append((number, kind, varint()))
                continue
            size = varint() if kind == 2 else 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
            if len(value) < size:
                return None
            nested = None if kind != 2 or value.isascii() and value.decode().isprintable() else _protocol_buffer(value)
            result.append((number, kind, nested or value))
    except IndexError:
        return None
    return result


def _message(fields: Fields) -> bytes:
    result = b""
    for number, kind, value in fields:
        content = _varint(value) if isinstance(value, int) else _message(value) if isinstance(value, list) else value
        result += _varint(number << 3 | kind) + (_varint(len(content)) if kind == 2 else b"") + content
    return result


def _with_other_fields(fields: Fields) -> Iterator[bytes]:
    """The message with another number in one of its fields."""
    for changed in _other_fields(fields):
        yield _message(changed)


def _other_fields(fields: Fields) -> Iterator[Fields]:
    for at, (number, kind, value) in _some(list(enumerate(fields))):
        others: Iterator[int | bytes | Fields] = iter(())
        if isinstance(value, list):
            others = _other_fields(value)
        elif kind == 0:
            others = iter([0, 1, 10**8, 2**31, 2**33, 2**63 - 1, 2**64 - 1])
        elif kind in (1, 5):
            others = iter([word for word in WORDS if len(word) == len(value)])
        for other in others:
            yield [*fields[:at], (number, kind, other), *fields[at + 1 :]]
