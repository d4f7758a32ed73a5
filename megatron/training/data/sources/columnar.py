# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet and Arrow files, and the files of folders that Hugging Face's ``datasets`` has saved.

A group is what the format can read alone: a row group of Parquet, a batch of Arrow. Groups are read one at a time, and
their rows a few at a time. A group that is damaged does not prevent the next ones from being read. A damaged file may
end the process that reads it, or take all memory, so a process of its own does that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import IO, Any

from megatron.system.own_process import Ended, in_own_process
from megatron.training.data.sources.remote import exists, open_input
from megatron.training.json_file import PART, parse_json
from megatron.training.refusal import Refusal, one_line

PARQUET, ARROW, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
BATCH_ROWS = 32
DECODED = 1 << 29  # bytes to which the rows of a batch of Parquet may grow
MOST_VALUES = 1 << 28  # of a row group: their counts take few bytes in the file, but eight each in memory
MEMORY, SECONDS = 8 << 30, 600  # limits of the process, besides twice the file's size, and of CPU time for a row
PYARROW = "pip install 'pyarrow>=18,<27'"
Row = tuple[int, bytes, float, str]


def _pyarrow(path: str, what: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise Refusal(f"--input {path}: {what} needs the package pyarrow: {PYARROW}") from None
    return pyarrow


def columnar_rows(
    path: str, head: bytes, columns: Sequence[str], size: int, span: tuple[float, float]
) -> Iterator[Row]:
    """(number, row as JSON, share of the file read so far, error) of each row of a Parquet or Arrow file.

    Rows are numbered from 1 in the file. A group that cannot be read gives one row with an error, and its number is
    that of the group, from 1.

    Args:
        head: the first bytes of the file.
        columns: to read; all columns if it is empty or one of them does not exist.
        size: of the file in bytes.
        span: a group belongs to the reader if its place, by an even division of the file, is in this range of bytes.

    Raises:
        Refusal: pyarrow is not installed. OSError, ValueError: the file cannot be read.
    """
    pyarrow = _pyarrow(path, "Parquet" if head.startswith(PARQUET) else "Arrow")
    limits = {"memory": MEMORY + 2 * max(size, 0), "seconds": SECONDS, "errors": (Refusal, OSError, ValueError)}
    try:
        yield from in_own_process(lambda: _rows(pyarrow, path, head, columns, size, span), **limits)
    except Ended as ended:
        raise ValueError(str(ended)) from None


def _rows(
    pyarrow: Any, path: str, head: bytes, columns: Sequence[str], size: int, span: tuple[float, float]
) -> Iterator[Row]:
    parquet = head.startswith(PARQUET)
    failures = (pyarrow.ArrowException, OverflowError, RecursionError, UnicodeDecodeError)
    try:
        with open_input(path) as raw:
            if head.startswith(ARROW_STREAM):
                yield from _stream(pyarrow, raw, columns, span, failures)
                return
            first = 0
            groups, rows_of, batches = _parquet(pyarrow, raw, columns) if parquet else _arrow(pyarrow, raw, columns)
            for group in range(groups):
                if span[0] <= size * group / groups < span[1]:
                    yield from _of_group(partial(batches, group), group + 1, first, (group + 1) / groups, failures)
                first += rows_of(group)
    except failures as error:
        raise ValueError(one_line(error, 200)) from None


def _of_group(
    batches: Callable[[], Iterator[Any]], group: int, number: int, share: float, failures: Any
) -> Generator[Row, None, int]:
    """The rows of a group, counted on from ``number``; returns the number of the last one."""
    try:
        for batch in batches():
            for row in batch.to_pylist():
                number += 1
                yield number, _as_json(row), share, ""
    except (*failures, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk or the network, not of the data
            raise
        yield group, b"", share, f"cannot be read: {one_line(error, 200)}"
    return number


def _parquet(pyarrow: Any, raw: IO[bytes], columns: Sequence[str]) -> tuple[int, Any, Any]:
    """The number of row groups, and functions of a group: its rows, and its batches."""
    file = pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=PART)
    chosen = list(columns) if columns and set(columns) <= set(file.schema_arrow.names) else None

    def batches(group: int) -> Iterator[Any]:
        """Each row may be as long as all values in the file: a dictionary has a value once that many rows have."""
        about = file.metadata.row_group(group)
        parts = [about.column(number) for number in range(about.num_columns)]
        parts = [part for part in parts if chosen is None or part.path_in_schema.split(".")[0] in chosen]
        if (values := sum(part.num_values for part in parts)) > MOST_VALUES:
            raise OverflowError(f"it has {values:,} values: write smaller row groups")
        rows = DECODED // max(1, sum(part.total_uncompressed_size for part in parts))
        return file.iter_batches(max(1, min(rows, BATCH_ROWS)), row_groups=[group], columns=chosen, use_threads=False)

    return file.num_row_groups, lambda group: file.metadata.row_group(group).num_rows, batches


def _arrow(pyarrow: Any, raw: IO[bytes], columns: Sequence[str]) -> tuple[int, Any, Any]:
    file = pyarrow.ipc.open_file(raw)
    counted: dict[int, int] = {}

    def batches(group: int) -> Iterator[Any]:
        batch = file.get_batch(group)
        counted[group] = batch.num_rows
        return _slices(batch, columns)

    def rows(group: int) -> int:
        """Rows of a batch; only reading it tells. A damaged one counts as none."""
        if group not in counted:
            try:
                counted[group] = file.get_batch(group).num_rows
            except (pyarrow.ArrowException, OSError):
                counted[group] = 0
        return counted[group]

    return file.num_record_batches, rows, batches


def _stream(pyarrow: Any, raw: IO[bytes], columns: Sequence[str], span: tuple[float, float], failures: Any) -> Any:
    """Rows of an Arrow stream, which has no index of its batches: the file belongs to one reader."""
    if not span[0] <= 0 < span[1]:
        return
    number = 0
    for group, batch in enumerate(pyarrow.ipc.open_stream(raw), 1):
        number = yield from _of_group(partial(_slices, batch, columns), group, number, 0.5, failures)


def _slices(batch: Any, columns: Sequence[str]) -> Iterator[Any]:
    """Parts of a batch. Its offsets are checked first: Arrow would follow wrong ones outside of its memory."""
    batch.validate(full=True)
    if columns and set(columns) <= set(batch.schema.names):
        batch = batch.select(list(columns))
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield batch.slice(start, BATCH_ROWS)


def _as_json(row: dict[str, Any]) -> bytes:
    return json.dumps(_without_nulls(row), default=_plain).encode()


def _without_nulls(value: Any) -> Any:
    """Remove nulls: a column has one type, so a field of some rows is null in the others.

    A null content of a message stays, because templates read that key.
    """
    if isinstance(value, dict):
        fields = {key: _without_nulls(part) for key, part in value.items() if part is not None}
        return fields | ({"content": None} if "role" in fields and "content" in value.keys() - fields.keys() else {})
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Values that JSON does not have: UTF-8 bytes become text, other bytes null; dates and decimals as printed."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return str(value)


def saved_files(folder: str) -> list[str] | None:
    """The Arrow files of a folder that ``Dataset.save_to_disk`` wrote, in order; None for any other folder.

    Raises:
        Refusal: it holds several splits, a selection of rows, or names of files outside of it.
    """
    state = _json_in(folder, "state.json")
    if state is None:
        splits = _json_in(folder, "dataset_dict.json")
        if splits is None:
            return None
        names = splits.get("splits") if isinstance(splits, dict) else None
        first = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "train"
        raise Refusal(f"--input {folder}: holds several splits: name one, for example {folder.rstrip('/')}/{first}")
    files = state.get("_data_files") if isinstance(state, dict) else None
    files = files if isinstance(files, list) else []
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise Refusal(f"--input {folder}: its state.json has no list of data files")
    for name in names:
        if name in (".", "..") or "/" in name or "\\" in name or "\x00" in name:
            raise Refusal(f"--input {folder}: its state.json names {name!r}, which is not a file of this folder")
    if state.get("_indices_data_files"):
        raise Refusal(f"--input {folder}: a selection of rows: write it out by flatten_indices() and save_to_disk()")
    return [f"{folder.rstrip('/')}/{name}" for name in names]


def _json_in(folder: str, name: str) -> Any:
    """The value of a JSON file in a folder; None if there is no such file."""
    path = f"{folder.rstrip('/')}/{name}" if folder != os.sep else f"/{name}"
    if not exists(path):
        return None
    try:
        with open_input(path) as file:
            text = file.read(PART + 1)
        if len(text) > PART:
            raise ValueError("too long")
        return parse_json(text)
    except (OSError, ValueError) as error:
        raise Refusal(f"--input {path}: cannot be read: {one_line(error, 200)}") from None
