# SPDX-License-Identifier: Apache-2.0
"""One rank's state in one file, that anything which reads safetensors can read, with a CRC-32 of the whole file.

It is written as it comes, tensor by tensor, so that nothing is held twice; safetensors' own writer wants all of it at
once. The sum is put into its place in the header when all is there.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
ABOUT, FIELD, NO_SUM = "__metadata__", b'"crc32":"', b"00000000"
BLOCK = 1 << 22  # bytes


def write(path: Path, tensors: Sequence[tuple[str, Tensor]], about: Mapping[str, str]) -> None:
    """Write tensors of any device by name, and what there is to say about them; :func:`seal` it afterwards.

    Raises:
        OSError: there is no room.
    """
    ordered = sorted(tensors, key=lambda one: -one[1].element_size())  # so that each begins where its dtype may
    header: dict[str, object] = {ABOUT: {**about, "crc32": NO_SUM.decode()}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=BLOCK) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy())


def seal(path: Path) -> int:
    """Put the sum of a file into it; its size in bytes. Raises OSError."""
    _, found, at = _sums(path)
    number = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(number, found, at)
    finally:
        os.close(number)
    return path.stat().st_size


def whole(path: Path) -> bool:
    """Whether a file is what was written."""
    try:
        told, found, _ = _sums(path)
        with safe_open(path, "pt"):  # its header is one, too
            return told == found
    except (OSError, ValueError, SafetensorError):
        return False


def about(path: Path) -> dict[str, str]:
    """What :func:`write` was told; empty where it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _sums(path: Path) -> tuple[bytes, bytes, int]:
    """(the sum in the header, that of the file, where in the file the first one is). Raises OSError, ValueError."""
    with open(path, "rb", buffering=0) as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if 8 + size > os.fstat(file.fileno()).st_size:
            raise ValueError("it ends within its header")
        head = length + file.read(size)
        at = head.index(FIELD) + len(FIELD)
        crc = zlib.crc32(head[:at] + NO_SUM + head[at + 8 :])
        block = bytearray(BLOCK)
        view = memoryview(block)
        while count := file.readinto(block):
            crc = zlib.crc32(view[:count], crc)
    return head[at : at + 8], b"%08x" % crc, at
