# SPDX-License-Identifier: Apache-2.0
"""Numbers in files, read and never mapped, and token ids that are checked as they are read.

A page of a mapping that lies behind the end of its file ends the process with SIGBUS, without a line, and files do
become shorter while a program runs: someone writes them anew, a file server loses them. A read that comes back short is
an error like any other.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.training.refusal import reason

logger = logging.getLogger(__name__)

PASSING = (errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)  # errors of file servers that may be gone a moment later
PAUSES = (1.0, 5.0, 25.0)  # seconds before a read that failed with one of them is tried again


class DataError(Exception):
    """Data that cannot be used, noticed while they are read: the job ends on all ranks, with this one line."""


class OpenFile:
    """A file that is kept open, so that what happens to its name (deleted, replaced) does not matter.

    Threads and forked processes may share it: a read has no position of its own.

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
            DataError: the file ends before, or the system cannot read it.
        """
        try:
            data = os.pread(self.descriptor, count, offset)
        except OSError as error:
            data = self._again(error, count, offset)
        while len(data) < count:  # the system reads 2 GiB at most
            more = self.read(min(count - len(data), 1 << 30), offset + len(data)) if data else b""
            if not more:
                raise DataError(
                    f"{self.path} ends before byte {offset + count}, up to which it was to be read: it became shorter "
                    "while it was in use, or the file that points into it is damaged"
                )
            data += more
        return data

    def _again(self, error: OSError, count: int, offset: int) -> bytes:
        """Read after an error that may pass."""
        for pause in PAUSES:
            if error.errno not in PASSING:
                break
            logger.warning("%s: %s; it is read again in %g s", self.path, reason(error), pause)
            time.sleep(pause)
            try:
                return os.pread(self.descriptor, count, offset)
            except OSError as next_error:
                error = next_error
        raise DataError(f"{self.path}: cannot be read at byte {offset}: {reason(error)}")


class FileArray:
    """An array in a file. An index or a slice reads from the file, numpy's functions read all of it.

    Args:
        file: where it is.
        dtype: of its numbers.
        shape: of the array; its rows, along the first dim, are what is indexed.
        offset: of its first byte.
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
        """A row, or the rows of a slice, whose step is 1.

        Raises:
            IndexError: there is no such row.
            DataError: the file cannot be read.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError(f"a slice with step {step}: only 1 is read")
            return self._rows(start, max(start, stop))
        row = operator.index(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} in {self.file.path}")
        return self._rows(row % len(self), row % len(self) + 1)[0]

    def number(self, row: int) -> int:
        """A row of an array [n] of signed whole numbers: what an index gives, in half the time."""
        data = self.file.read(self.row_bytes, self.offset + row * self.row_bytes)
        return int.from_bytes(data, sys.byteorder, signed=True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._rows(0, len(self)).astype(dtype or self.dtype, copy=bool(copy))

    def _rows(self, start: int, stop: int) -> np.ndarray:
        data = self.file.read((stop - start) * self.row_bytes, self.offset + start * self.row_bytes)
        return np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])


def unmapped(array: np.ndarray) -> np.ndarray | FileArray:
    """The same array, read from its file where it was a mapping of it."""
    if not isinstance(array, np.memmap):
        return array
    if not array.flags.c_contiguous:
        raise DataError(f"{array.filename} holds its numbers in another order: remove it")
    return FileArray(OpenFile(array.filename), array.dtype, array.shape, array.offset)


def first_outside(ids: np.ndarray, size: int) -> int | None:
    """Where the first of some token ids [n] stands that is not one of 0 to ``size - 1``; None where all are.

    One pass over the ids: as numbers without a sign, negative ones are the largest.
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
        source: names the tokenizer.
        where: names the file and the document; called where it is needed.

    Raises:
        DataError: one is not.
    """
    if (at := first_outside(ids, size)) is not None:
        raise DataError(
            f"{where()} holds token id {ids[at]}, outside the {size} ids of {source}: made with another tokenizer"
        )


class TokenFile:
    """The documents of one .bin, as core's datasets ask for them.

    Args:
        prefix: of the .bin.
        dtype: of its token ids.
        lengths: tokens of each document, int32 [documents].
        starts: where each begins in the .bin, in bytes, int64 [documents].

    Raises:
        DataError: the .bin cannot be opened.
    """

    def __init__(self, prefix: str, dtype: Any, lengths: FileArray, starts: FileArray) -> None:
        self.path_prefix, self.dtype, self.lengths, self.starts = prefix, np.dtype(dtype), lengths, starts
        self.file, self.documents = OpenFile(f"{prefix}.bin"), len(lengths)

    def __len__(self) -> int:
        return self.documents

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each document, all read now: only an index of samples that is being built asks for them."""
        return np.asarray(self.lengths)

    def get(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """``length`` ids of a document from its token ``offset`` on, not checked; all that follow where it is None.

        Raises:
            DataError: the document has not so many, or a file cannot be read.
        """
        if not 0 <= document < self.documents:
            raise DataError(f"{self.file.path} has {self.documents} documents, and no document {document}")
        there = self.lengths.number(document)
        if length is None:
            length = there - offset
        if not 0 <= offset <= offset + length <= there:
            raise DataError(
                f"{self.file.path}: document {document} has {there} tokens, and {offset} to {offset + length} are "
                "asked for: the index of samples is damaged, remove the index cache"
            )
        size = self.dtype.itemsize
        return np.frombuffer(self.file.read(length * size, self.starts.number(document) + offset * size), self.dtype)

    def where(self, document: int) -> str:
        """Names a document in messages."""
        return f"{self.file.path}: document {document}"
