# SPDX-License-Identifier: Apache-2.0
"""Reads numbers from files without memory mapping, and checks token ids when they are read.

A file may become shorter while a program runs: somebody writes it again, a file server loses it. An access to a mapped
page behind the new end kills the process with SIGBUS and no message. A short read is an ordinary error.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron.training.data.sources.remote import is_remote, read_ranges
from megatron.training.refusal import reason

logger = logging.getLogger(__name__)

TEMPORARY = (errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)  # errors of file servers that may be temporary
PAUSES = (1.0, 5.0, 25.0)  # seconds to wait before each repetition of such a read


class DataError(Exception):
    """Data turned out to be unusable while they were read. The job ends on all ranks with this message of one line."""


class OpenFile:
    """A file that is kept open, so that it stays readable if its name is deleted or replaced.

    Threads and forked processes may share it, because a read does not use the file position.

    Raises:
        DataError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path}: {reason(error)}") from None
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, count: int, offset: int) -> bytes:
        """``count`` bytes from byte ``offset`` on.

        Raises:
            DataError: the file is too short, or the system cannot read it.
        """
        try:
            data = os.pread(self.descriptor, count, offset)
        except OSError as error:
            data = self._retry(error, count, offset)
        while len(data) < count:  # one call reads at most 2 GiB
            more = self.read(min(count - len(data), 1 << 30), offset + len(data)) if data else b""
            if not more:
                raise _too_short(self.path, offset + count)
            data += more
        return data

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """:meth:`read` for each (count, offset)."""
        return [self.read(*part) for part in ranges]

    def _retry(self, error: OSError, count: int, offset: int) -> bytes:
        """Read again after an error that may be temporary."""
        for pause in PAUSES:
            if error.errno not in TEMPORARY:
                break
            logger.warning("%s: %s; reading it again in %g s", self.path, reason(error), pause)
            time.sleep(pause)
            try:
                return os.pread(self.descriptor, count, offset)
            except OSError as next_error:
                error = next_error
        raise DataError(f"{self.path}: cannot be read at byte {offset}: {reason(error)}")


class RemoteFile:
    """A file of object storage. Each read is its own request, so that threads and forked processes may share it.

    Args:
        path: its URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """``count`` bytes from byte ``offset`` on for each (count, offset), requested at the same time.

        Raises:
            DataError: the file is too short, or cannot be read.
        """
        parts: dict[int, bytes] = {i: b"" for i, (count, _) in enumerate(ranges) if not count}
        for pause in (*PAUSES, None):
            missing = [i for i in range(len(ranges)) if i not in parts]
            error = self._fill(parts, missing, ranges) if missing else None
            if error is None:
                return [parts[i] for i in range(len(ranges))]
            if pause is None or isinstance(error, FileNotFoundError | PermissionError):
                raise DataError(f"{self.path}: cannot be read: {reason(error)}")
            logger.warning("%s: %s; reading it again in %g s", self.path, reason(error), pause)
            time.sleep(pause)
        raise AssertionError

    def _fill(self, parts: dict[int, bytes], missing: list[int], ranges: Sequence[tuple[int, int]]) -> OSError | None:
        """Read the missing parts; returns the last error."""
        try:
            found = read_ranges(self.path, [(ranges[i][1], sum(ranges[i])) for i in missing])
        except OSError as error:
            return error
        for i, part in zip(missing, found):
            if isinstance(part, bytes):
                if len(part) != ranges[i][0]:
                    raise _too_short(self.path, sum(ranges[i]))
                parts[i] = part
        return next((part for part in found if isinstance(part, OSError)), None)


def _too_short(path: str, end: int) -> DataError:
    return DataError(
        f"{path} ends before byte {end}, which was to be read: it became shorter while in use, or its index is damaged"
    )


class FileArray:
    """An array in a file. An index or a slice reads that part from the file; numpy's functions read all of it.

    Args:
        shape: of the array; indices address the first dim.
        offset: of the first byte of the array in the file.
    """

    def __init__(self, file: OpenFile, dtype: Any, shape: tuple[int, ...], offset: int) -> None:
        self.file, self.dtype, self.shape, self.offset = file, np.dtype(dtype), tuple(shape), offset
        self.row_bytes = self.dtype.itemsize * int(np.prod(shape[1:]))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """A row, or the rows of a slice with step 1.

        Raises:
            IndexError: there is no such row.
            DataError: the file cannot be read.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError(f"a slice with step {step}: only step 1 is supported")
            return self._rows(start, max(start, stop))
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} in {self.file.path}")
        return self._rows(row % len(self), row % len(self) + 1)[0]

    def number(self, row: int) -> int:
        """One element of an array [n] of signed integers; takes half the time of ``self[row]``."""
        data = self.file.read(self.row_bytes, self.offset + row * self.row_bytes)
        return int.from_bytes(data, sys.byteorder, signed=True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._rows(0, len(self)).astype(dtype or self.dtype, copy=bool(copy))

    def _rows(self, start: int, stop: int) -> np.ndarray:
        data = self.file.read((stop - start) * self.row_bytes, self.offset + start * self.row_bytes)
        return np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])


def unmapped(array: np.ndarray) -> np.ndarray | FileArray:
    """The same array; a memory-mapped array becomes one that reads from its file."""
    if not isinstance(array, np.memmap):
        return array
    if not array.flags.c_contiguous:
        raise DataError(f"{array.filename} is not in C order: remove it")
    return FileArray(OpenFile(array.filename), array.dtype, array.shape, array.offset)


def first_outside(ids: np.ndarray, size: int) -> int | None:
    """The index of the first token id [n] that is not from 0 to ``size - 1``; None if there is none.

    It takes one pass, because as unsigned numbers the negative ids are the largest.
    """
    limit = min(size, np.iinfo(ids.dtype).max + 1)
    unsigned = ids.view(f"u{ids.dtype.itemsize}")
    if limit > np.iinfo(unsigned.dtype).max or not ids.size or unsigned.max() < limit:
        return None
    return int(np.argmax(unsigned >= limit))


def check_ids(ids: np.ndarray, size: int, source: str, where: Callable[[], str]) -> None:
    """Check that all token ids [n] are in the vocabulary.

    Args:
        size: of the vocabulary, unpadded.
        source: name of the tokenizer.
        where: returns the name of the file and the document, for the message.

    Raises:
        DataError: an id is not in the vocabulary.
    """
    if (at := first_outside(ids, size)) is not None:
        raise DataError(
            f"{where()} holds token id {ids[at]}, outside the {size} ids of {source}: made with another tokenizer"
        )


class TokenFile:
    """The documents of a .bin, with the interface that core's datasets use.

    Args:
        prefix: the path of the .bin without ending.
        dtype: of its token ids.
        lengths: tokens of each document, int32 [documents].
        starts: offset of each document in the .bin, in bytes, int64 [documents].

    Raises:
        DataError: a .bin of the file system cannot be opened.
    """

    def __init__(self, prefix: str, dtype: Any, lengths: FileArray, starts: FileArray) -> None:
        self.path_prefix, self.dtype, self.lengths, self.starts = prefix, np.dtype(dtype), lengths, starts
        path = f"{prefix}.bin"
        self.file, self.documents = RemoteFile(path) if is_remote(path) else OpenFile(path), len(lengths)

    def __len__(self) -> int:
        return self.documents

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each document. Reads all of them; only the construction of an index of samples needs that."""
        return np.asarray(self.lengths)

    def size(self, document: int) -> int:
        """Tokens of a document.

        Raises:
            DataError: there is no such document.
        """
        if not 0 <= document < self.documents:
            raise DataError(f"{self.file.path} has {self.documents} documents, but no document {document}")
        return self.lengths.number(document)

    def get(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """``length`` ids of a document (by default all) from its token ``offset`` on. See :meth:`get_many`."""
        return self.get_many([(document, offset, self.size(document) - offset if length is None else length)])[0]

    def get_many(self, parts: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Ids, unchecked, for each (document, its first token, number of tokens).

        Raises:
            DataError: a document has fewer tokens, or a file cannot be read.
        """
        size, ranges = self.dtype.itemsize, []
        for document, offset, length in parts:
            total = self.size(document)
            if not 0 <= offset <= offset + length <= total:
                raise DataError(
                    f"{self.file.path}: document {document} has {total} tokens, but the index of samples asks for "
                    f"{offset} to {offset + length}: it is damaged, remove the index cache"
                )
            ranges.append((length * size, self.starts.number(document) + offset * size))
        return [np.frombuffer(data, self.dtype) for data in self.file.read_many(ranges)]

    def where(self, document: int) -> str:
        """The name of a document in messages."""
        return f"{self.file.path}: document {document}"


class JoinedFiles:
    """The documents of several files as those of one, with the interface of :class:`TokenFile`."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files, self.begins = files, np.cumsum([0, *map(len, files)])

    def __len__(self) -> int:
        return int(self.begins[-1])

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.concatenate([file.sequence_lengths for file in self.files])

    def _file(self, document: int) -> tuple[int, int]:
        """The number of the document's file, and its number in the file."""
        number = min(max(int(np.searchsorted(self.begins, document, side="right")) - 1, 0), len(self.files) - 1)
        return number, document - int(self.begins[number])

    def size(self, document: int) -> int:
        """As :meth:`TokenFile.size`."""
        number, inside = self._file(document)
        return self.files[number].size(inside)

    def get_many(self, parts: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """As :meth:`TokenFile.get_many`; each file is read once."""
        found: list[Any] = [None] * len(parts)
        numbers = [self._file(document) for document, *_ in parts]
        for number in {number for number, _ in numbers}:
            own = [at for at, (of, _) in enumerate(numbers) if of == number]
            for at, ids in zip(own, self.files[number].get_many([(numbers[at][1], *parts[at][1:]) for at in own])):
                found[at] = ids
        return found

    def where(self, document: int) -> str:
        """As :meth:`TokenFile.where`."""
        number, inside = self._file(document)
        return self.files[number].where(inside)
