# SPDX-License-Identifier: Apache-2.0
"""Turns valid files into broken and hostile ones: any bytes, pickles, zip archives, JSON, safetensors."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

Change = Callable[[Random, bytes], bytes]

INTEGERS = [
    0,
    1,
    -1,
    2,
    63,
    64,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    -(2**31),
    2**32 - 1,
    2**53,
    2**60,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64,
    10**30,
]
TEXTS = [
    "",
    ".",
    "..",
    "../../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "\x00",
    "a\nb",
    "\x1b[31mred",
    "\u202e",
    "é" * 40,
    "x" * 5000,
    "__class__",
    "__init__",
    "NaN",
    "1e999",
    "C:\\x",
    "\ud800",
    "-",
    "iter_0000002",
    "%s%n",
    "{0.__class__}",
]
NAMES = [
    ("os", "system"),
    ("posix", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("builtins", "list"),
    ("__builtin__", "exec"),
    ("torch.distributed.checkpoint.filesystem", "torch._strobelight.cli_function_profiler.subprocess.Popen"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch", "load"),
    ("torch", "Size"),
    ("torch", "ops"),
    ("torch", "device"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.hub", "load"),
    ("megatron.core.jit", "jit_fuser"),
    ("megatron.core.enums", "ModelType"),
    ("transformer_engine.common.recipe", "Format"),
    ("numpy", "load"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("argparse", "Namespace"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("a\nb", "c\x1bd"),
]


def any_bytes(random: Random, data: bytes) -> bytes:
    """Flip bits; remove, repeat and exchange parts; replace parts by numbers."""
    new = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 4, 16])):
        if not new:
            return bytes(random.randbytes(random.randrange(64)))
        at = random.randrange(len(new))
        length = min(random.choice([1, 1, 2, 4, 8, 40, 400]), len(new) - at)
        kind = random.randrange(7)
        if kind == 0:
            new[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            new[at] = random.randrange(256)
        elif kind == 2:
            del new[at : at + length]
        elif kind == 3:
            new[at:at] = new[at : at + length] * random.choice([1, 1, 5, 100])
        elif kind == 4:
            number = random.choice(INTEGERS) & (2**64 - 1)
            new[at : at + 8] = number.to_bytes(8, random.choice(["little", "big"]))
        elif kind == 5:
            other = random.randrange(len(new))
            new[at : at + length] = new[other : other + length]
        else:
            del new[at:]
    return bytes(new)


# Pickles.


def text_of(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer_of(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def name_of(module: str, name: str, random: Random) -> bytes:
    if random.random() < 0.3 and "\n" not in module + name:
        return f"c{module}\n{name}\n".encode()
    return text_of(module) + text_of(name) + b"\x93"


def hostile(random: Random) -> bytes:
    """Hostile instructions that leave one object on the stack."""
    kind = random.randrange(16)
    module, name = random.choice(NAMES)
    if kind <= 4:
        arguments = random.choice([text_of("touch /tmp/harm"), b")", integer_of(2**60), b"]", b"}"])
        call = random.choice([b"R", b"\x81"])
        state = random.choice([b"", b"", b"}b", b"}" + text_of("__class__") + integer_of(1) + b"sb", b"]b"])
        return name_of(module, name, random) + b"(" + arguments + b"t" + call + state
    if kind == 5:
        return (
            b"r\xff\xff\xff\x7f" if random.random() < 0.3 else b"Nr" + struct.pack("<I", random.choice([2**31, 10**6]))
        )
    if kind == 6:
        return random.choice([b"]", b"(", b"}"]) * random.choice([50, 2000, 100_000]) + b"N"
    if kind == 7:
        return b"]" * 2000 + b"a" * 1999
    if kind == 8:  # nested lists, each of which contains the previous one twice
        return b"]" + b"".join(b"q%c0]h%ch%c\x86a" % (i, i, i) for i in range(random.choice([10, 40, 90])))
    if kind == 9:  # nested tuples as a key of a dict, whose hash visits all of them
        return b"}N" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(40)) + b"Ns"
    if kind == 10:
        return random.choice([b"\x8e", b"\x8d", b"\x96"]) + struct.pack("<Q", random.choice([2**40, 2**62, 2**64 - 1]))
    if kind == 11:
        return random.choice([b"X", b"B"]) + struct.pack("<I", 2**32 - 1) + b"x"
    if kind == 12:
        return integer_of(random.choice(INTEGERS)) if random.random() < 0.8 else b"\x8b" + struct.pack("<i", 2**31 - 1)
    if kind == 13:
        return text_of(random.choice(TEXTS))
    if kind == 14:  # a list or a dict that contains itself
        return random.choice([b"]q\x07h\x07a", b"}q\x07Nh\x07s", b"]q\x07h\x07\x85q\x080h\x07h\x08a"])
    return b"I" + b"9" * random.choice([10, 10_000]) + b"\n"


def spans(data: bytes) -> list[tuple[int, int]]:
    """[begin, end) of each instruction, as far as they can be parsed."""
    begins = []
    try:
        for _, _, at in pickletools.genops(data):
            begins.append(at)
    except Exception:  # the pickle was already broken
        pass
    return list(zip(begins, [*begins[1:], len(data)]))


def pickled(random: Random, data: bytes) -> bytes:
    """Replace, remove, repeat and exchange instructions of a pickle; insert hostile ones."""
    if random.random() < 0.15:
        return any_bytes(random, data)
    if random.random() < 0.15:  # only the hostile ones
        return b"\x80\x04" + hostile(random) + b"."
    parts = [data[begin:end] for begin, end in spans(data)]
    if not parts:
        return any_bytes(random, data)
    for _ in range(random.choice([1, 1, 1, 2, 3, 8])):
        at = random.randrange(len(parts))
        kind = random.randrange(10)
        if kind <= 2 or not parts[at]:
            values = [n for n, part in enumerate(parts) if part[:1] in b"KMJGX\x8cN\x88\x89)C\x8a" and part]
            parts[random.choice(values) if values else at] = hostile(random)
        elif kind == 3:
            parts[at] = hostile(random) + b"0" + parts[at]
        elif kind == 4:
            del parts[at]
            parts = parts or [b"."]
        elif kind == 5:
            parts.insert(at, parts[random.randrange(len(parts))])
        elif kind == 6:
            other = random.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == 7:
            numbers = [n for n, part in enumerate(parts) if part[:1] in (b"K", b"M", b"J")]
            if numbers:
                parts[random.choice(numbers)] = integer_of(random.choice(INTEGERS))
        elif kind == 8:
            texts = [n for n, part in enumerate(parts) if part[:1] in (b"X", b"\x8c")]
            if texts:
                parts[random.choice(texts)] = text_of(random.choice(TEXTS))
        else:
            texts = [n for n, part in enumerate(parts) if part[:1] in (b"X", b"\x8c")]
            names = [n for n, part in enumerate(parts) if part[:1] == b"\x93"]
            if names and texts:
                parts[random.choice(names)] = b"00" + name_of(*random.choice(NAMES), random)
    return b"".join(parts)


def archive_parts(data: bytes) -> list[tuple[str, bytes]] | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(info.filename, archive.read(info)) for info in archive.infolist()]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None


def archived(random: Random, data: bytes) -> bytes:
    """Change a file of ``torch.save``: its pickle, or its records (renamed, removed, repeated, compressed, huge)."""
    parts = archive_parts(data)
    if parts is None or random.random() < 0.2:
        return any_bytes(random, data)
    packed = zipfile.ZIP_STORED
    kind = random.randrange(12)
    at = random.randrange(len(parts))
    if kind <= 6:
        parts = [(name, pickled(random, part) if name.endswith("data.pkl") else part) for name, part in parts]
    elif kind == 7:
        packed = random.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    elif kind == 8:
        parts[at] = parts[at][0], bytes(30_000_000)
        packed = zipfile.ZIP_DEFLATED
    elif kind == 9:
        del parts[at]
    elif kind == 10:
        parts.append((random.choice(parts)[0], random.choice(parts)[1]))
    else:
        name = random.choice(["../../harm", "/tmp/harm", "archive/constants.pkl", "data.pkl", "a/b/c/data.pkl"])
        parts[at] = name, any_bytes(random, parts[at][1])
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", packed) as archive:
        warnings.simplefilter("ignore")  # about a repeated name
        for name, part in parts:
            archive.writestr(zipfile.ZipInfo(name), part, packed)
    new = file.getvalue()
    return any_bytes(random, new) if random.random() < 0.1 else new


# JSON.


class _Raw:
    """A text that is inserted into JSON unchanged."""

    def __init__(self, text: str) -> None:
        self.text = text


RAW = [
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
    "-0",
    "1E400",
    "[" * 100_000,
    '{"a":' * 50_000,
    '"\\ud800"',
    "tru",
    '"\\u0000"',
    "{} {}",
    "1" + "0" * 400,
    "0.1e-400",
    '{"a": 1, "a": 2}',
    "",
    "\ufeff{}",
]


def hostile_value(random: Random) -> Any:
    kind = random.randrange(8)
    if kind == 0:
        return random.choice(INTEGERS)
    if kind == 1:
        return random.choice(TEXTS)
    if kind == 2:
        return random.choice([None, True, False, [], {}, "", 0.5, -0.0])
    if kind == 3:
        return _Raw(random.choice(RAW))
    if kind == 4:
        return [random.choice(INTEGERS) for _ in range(random.choice([1, 2, 100]))]
    if kind == 5:
        return {random.choice(TEXTS): random.choice(INTEGERS)}
    if kind == 6:
        return [[random.choice(INTEGERS), random.choice(TEXTS)]]
    return {"a": {"b": {"c": random.choice(INTEGERS)}}}


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of all nested values."""
    result, todo = [], [value]
    while todo:
        one = todo.pop()
        pairs = list(one.items()) if isinstance(one, dict) else list(enumerate(one)) if isinstance(one, list) else []
        for key, inner in pairs:
            result.append((one, key))
            todo.append(inner)
    return result


def _write(value: Any) -> str:
    if isinstance(value, _Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_write(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_write, value)) + "]"
    return json.dumps(value)


def changed_json(random: Random, value: Any) -> str:
    """JSON of a value with some parts replaced, removed, renamed or repeated."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        inside = places(value)
        if not inside or random.random() < 0.05:
            return _write(hostile_value(random))
        where, key = random.choice(inside)
        kind = random.randrange(6)
        if kind <= 2:
            where[key] = hostile_value(random)
        elif kind == 3:
            del where[key]
        elif kind == 4 and isinstance(where, dict):
            where[random.choice([*TEXTS, str(key) * 2])] = where.pop(key)
        elif isinstance(where, dict):  # a repeated key
            where[key] = _Raw(_write(where[key]) + f",{json.dumps(key)}:{_write(hostile_value(random))}")
        else:
            where.append(where[key])
    return _write(value)


def json_text(random: Random, data: bytes) -> bytes:
    if random.random() < 0.2:
        return any_bytes(random, data)
    return changed_json(random, json.loads(data)).encode("utf-8", "surrogatepass")


def safetensors(random: Random, data: bytes) -> bytes:
    """Change the header as JSON, and sometimes its stated length; or change any bytes."""
    if random.random() < 0.2:
        return any_bytes(random, data)
    length = int.from_bytes(data[:8], "little")
    text = changed_json(random, json.loads(data[8 : 8 + length])).encode("utf-8", "surrogatepass")
    stated = random.choice(INTEGERS) & (2**64 - 1) if random.random() < 0.1 else len(text)
    return stated.to_bytes(8, "little") + text + data[8 + length :]


def line_of_text(random: Random, data: bytes) -> bytes:
    """A file with one name or number."""
    if random.random() < 0.3:
        return any_bytes(random, data)
    return random.choice([*TEXTS, *map(str, INTEGERS), "9" * 5000, "²", "٣", "release\n\n", "\ufeff2"]).encode(
        "utf-8", "surrogatepass"
    )
