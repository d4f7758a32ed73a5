# SPDX-License-Identifier: Apache-2.0
"""Tokenizes documents in several worker processes, in the order of the input.

It imports neither megatron-core nor torch, whose imports would cost each worker seconds.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.system.processes import end_with_parent
from megatron.training.data.sources.filters import Filter
from megatron.training.data.text_files import BadRecord, Reader, Record, fields_of, no_memory, texts_of
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer, check_vocab
from megatron.training.refusal import Refusal
from megatron.training.settings.config import DataConfig

BATCH_BYTES, BATCH_RECORDS, LONGEST = 1 << 19, 512, 2**31 - 1
WAITING_BYTES = 1 << 28  # limit of the input in workers, so that long records do not accumulate


@dataclass(frozen=True)
class Settings:
    """The settings of a worker."""

    tokenizer: tuple[tuple[str, object], ...]
    vocab_size: int | None
    dtype: str  # of the tokens in the output file
    keys: tuple[str, ...]
    append_eod: bool
    codon_frame: int
    filter: str | None = None  # the expression of the rows that are kept
    metadata: tuple[str, ...] | None = None  # columns to keep for each document; None keeps nothing

    def columns(self) -> tuple[str, ...]:
        """The columns that a reader of tables needs."""
        names = filter_of(self.filter).names if self.filter is not None else ()
        return tuple(dict.fromkeys([*self.keys, *sorted(names), *(self.metadata or ())]))


@dataclass
class Encoded:
    """Some records, encoded: for each key the tokens of its documents, one after another, and their lengths.

    ``metadata`` has for each key a line of JSON per document, if the settings ask for it.
    """

    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    metadata: dict[str, list[str]] = field(default_factory=dict)
    text_bytes: int = 0
    empty: int = 0  # documents without tokens
    filtered: int = 0  # records that the filter leaves out
    bad: list[str] = field(default_factory=list)  # a message for each record that is left out


@functools.cache
def tokenizer_of(flags: tuple[tuple[str, object], ...], vocab_size: int | None) -> Tokenizer:
    """One tokenizer per process; a forked worker uses its parent's."""
    tokenizer = build_tokenizer(DataConfig(**dict(flags)), vocab_size)
    check_vocab(vocab_size, tokenizer)
    return tokenizer


@functools.cache
def filter_of(text: str | None) -> Filter | None:
    """One filter per process."""
    return None if text is None else Filter(text)


def encode(settings: Settings, records: list[Record]) -> Encoded:
    """Tokenize some records, in a worker."""
    tokenizer, dtype = tokenizer_of(settings.tokenizer, settings.vocab_size), np.dtype(settings.dtype).type
    keep, encoded = filter_of(settings.filter), Encoded()
    read: list[tuple[Record, dict[str, str], str]] = []
    for record in records:
        encoded.text_bytes += len(record.content)
        try:
            fields = fields_of(record, settings.keys[0])
            if fields is None:
                encoded.empty += 1
            elif keep is not None and not keep(fields):
                encoded.filtered += 1
            else:
                read.append((record, texts_of(fields, settings.keys), _metadata(settings, record, fields)))
        except BadRecord as error:
            encoded.bad.append(f"{record.where()}: {error}")
        except MemoryError:  # the record is not bad, so it must not be left out
            raise _too_large(record) from None
    documents: dict[str, list[np.ndarray]] = {key: [] for key in settings.keys}
    encoded.metadata = {key: [] for key in settings.keys}
    many = _encode_together(tokenizer, [text for _, texts, _ in read for text in texts.values()], settings)
    for record, texts, metadata in read:
        given = {key: next(many) for key, text in texts.items() if text.strip()} if many else {}
        try:
            ids = {key: _ids(tokenizer, text, settings, dtype, given.get(key)) for key, text in texts.items()}
        except BadRecord as error:
            encoded.bad.append(f"{record.where()}: {error}")
            continue
        except MemoryError:
            raise _too_large(record) from None
        for key, document in ids.items():
            encoded.empty += not document.size
            if document.size:
                documents[key].append(document)
                if settings.metadata is not None:
                    encoded.metadata[key].append(f'{{"length": {document.size}, {metadata}}}')
    for key, arrays in documents.items():
        encoded.lengths[key] = [array.size for array in arrays]
        encoded.tokens[key] = np.concatenate([np.empty(0, dtype), *arrays])
    return encoded


def _too_large(record: Record) -> Refusal:
    return no_memory(f"{record.where()}, which has {len(record.content):,} bytes")


def _metadata(settings: Settings, record: Record, fields: dict[str, Any]) -> str:
    """Where a document comes from, and its chosen columns, as the inner part of a JSON object.

    A line is named by its offset, because a reader of a part of a file does not know its number.
    """
    if settings.metadata is None:
        return ""
    place = {"source": record.path}
    if record.line:
        place |= {"byte": record.offset} if record.offset >= 0 else {record.unit: record.line}
    try:
        return json.dumps(place | {name: fields.get(name) for name in settings.metadata}, allow_nan=False)[1:-1]
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else "NaN or infinity, which JSON does not have"
        raise BadRecord(f"a column of --keep-metadata is {reason}: leave it out") from None


def _encode_together(tokenizer: Tokenizer, texts: list[str], settings: Settings) -> Iterator[np.ndarray] | None:
    """The ids of all texts that are not blank, in order; None if they have to be encoded one by one.

    That is so for one text that cannot be encoded, whose record is then named.
    """
    if tokenizer.encode_many is None or settings.codon_frame:
        return None
    try:
        return iter(tokenizer.arrays([text for text in texts if text.strip()]))
    except Refusal:
        return None


def _ids(tokenizer: Tokenizer, text: str, settings: Settings, dtype: type, ids: np.ndarray | None) -> np.ndarray:
    """The tokens of a document, in the dtype of the file; a document of blanks has none."""
    if not text.strip():
        return np.empty(0, dtype)
    try:
        ids = tokenizer.array(text[settings.codon_frame :]) if ids is None else ids
    except MemoryError:
        raise
    except Exception as error:  # for example words for NullTokenizer
        raise BadRecord(f"{tokenizer.kind} cannot tokenize the text: {error}") from None
    if not ids.size:
        return ids.astype(dtype)
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        raise BadRecord(f"{tokenizer.kind} gave an id outside its vocabulary of {tokenizer.vocab_size}")
    if ids.size >= LONGEST:
        raise BadRecord(f"longer than {LONGEST} tokens, the limit of a document: split it")
    ids = ids.astype(dtype)
    return np.append(ids, dtype(tokenizer.end_for("--append-eod"))) if settings.append_eod else ids


def batches(reader: Reader) -> Iterator[tuple[list[Record], int]]:
    """Batches of records, each with the number of bytes of input read so far."""
    records: list[Record] = []
    size = 0
    for record in reader:
        records.append(record)
        size += len(record.content)
        if size >= BATCH_BYTES or len(records) >= BATCH_RECORDS:
            yield records, reader.bytes_read
            records, size = [], 0
    if records:
        yield records, reader.bytes_read


def encode_all(settings: Settings, reader: Reader, workers: int, method: str) -> Iterator[tuple[Encoded, int]]:
    """Encode all batches in order, in ``workers`` processes. Memory holds only a few batches at a time."""
    if workers == 1:
        for records, position in batches(reader):
            yield encode(settings, records), position
        return
    context = type(multiprocessing.get_context(method))()
    context.Process = {"fork": _ForkedWorker, "spawn": _SpawnedWorker}[method]
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        waiting: deque[tuple[Future, int, int]] = deque()
        waiting_bytes = 0
        try:
            for records, position in batches(reader):
                size = sum(len(record.content) for record in records)
                waiting.append((pool.submit(encode, settings, records), position, size))
                waiting_bytes += size
                while len(waiting) > 3 * workers or (waiting_bytes > WAITING_BYTES and len(waiting) > 1):
                    future, position, size = waiting.popleft()
                    yield future.result(), position
                    waiting_bytes -= size
            while waiting:
                future, position, _ = waiting.popleft()
                yield future.result(), position
        except MemoryError:  # for batches in transfer to or from a worker
            raise no_memory(f"{len(waiting)} batches of {waiting_bytes:,} bytes of input") from None
        except BrokenProcessPool:
            raise Refusal("a worker process died, perhaps because memory ran out: try fewer --workers") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """A process that ends without a traceback if memory is too small to receive a batch; the parent reports it."""

    def run(self) -> None:
        try:
            super().run()
        except Exception:  # errors in a batch's records go to the parent instead
            sys.exit(1)


class _ForkedWorker(_Worker, multiprocessing.context.ForkProcess):
    pass


class _SpawnedWorker(_Worker, multiprocessing.context.SpawnProcess):
    pass


def _start_worker() -> None:
    """Let only the parent handle interrupts, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
