# SPDX-License-Identifier: Apache-2.0
"""Files that are packed by gzip or zstd, as streams of what is in them."""

from __future__ import annotations

import gzip
import io
from typing import IO, Any

from megatron.training.refusal import Refusal

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
