# SPDX-License-Identifier: Apache-2.0
"""Files of ``torch.save``: zip archives, which hold a CRC-32 of each record that ``torch.load`` does not look at."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training.checkpoint.megatron_lm.file_list import Damaged
from megatron.training.refusal import reason

MAGIC = b"PK\x03\x04"


def check_torch_file(path: Path) -> bool:
    """Compare the records of a file of ``torch.save`` with their sums; False where it has none.

    Raises:
        Damaged: a record is not what was written.
        OSError: the file cannot be read.
    """
    return check_torch_files_in(path, [(0, path.stat().st_size)])


def check_torch_files_in(path: Path, places: Sequence[tuple[int, int]]) -> bool:
    """The same of several such files that lie in one, each at (offset, length) in bytes; False where any has none."""
    with open(path, "rb", buffering=0) as raw:
        return all([_check(path, _Part(raw, offset, length)) for offset, length in places])


def _check(path: Path, part: _Part) -> bool:
    """False where there are no sums: before torch 1.6, and where ``torch.save`` was told to write none."""
    is_zip = part.read(len(MAGIC)) == MAGIC or zipfile.is_zipfile(part)
    if not is_zip:
        return False
    try:
        with zipfile.ZipFile(part) as archive:
            records = [record for record in archive.infolist() if record.file_size]
            if any(record.compress_type for record in records) or sum(one.file_size for one in records) > part.length:
                raise ValueError("it is compressed, which torch.save never does")  # and could expand without end
            if not any(record.CRC for record in records):
                return False
            wrong = archive.testzip()
    except Exception as error:  # whatever zipfile raises where the archive's directory is damaged
        raise Damaged(f"{path} is not what was written ({reason(error)})") from None
    if wrong is not None:
        raise Damaged(f"{path} is not what was written (the CRC-32 of its record {wrong} differs)")
    return True


class _Part(io.RawIOBase):
    """``length`` bytes of a file from ``offset`` on, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self.length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as zipfile expects
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self.length - self._at), 0)
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(view[:count])
        self._at += read
        return read
