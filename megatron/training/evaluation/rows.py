# SPDX-License-Identifier: Apache-2.0
"""Rows of --seq-length tokens: samples packed side by side, or a text in windows; and micro-batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from megatron.training.data.batches import Batch
from megatron.training.evaluation.samples import Sample

MakeRow = Callable[[int], Batch]


def pack(lengths: Sequence[int], seq_length: int, together: bool) -> list[list[int]]:
    """Which samples share a row, by number: first fit, longest first; or each one by itself."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    if not together:
        return [[number] for number in order]
    rows: list[list[int]] = []
    room: list[int] = []
    for number in order:
        row = next((row for row, free in enumerate(room) if free >= lengths[number]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(seq_length)
        rows[row].append(number)
        room[row] -= lengths[number]
    return rows


def row_of(samples: Sequence[tuple[int, Sample]], seq_length: int, eod: int) -> Batch:
    """Samples side by side, as documents; the rest is filled with ``eod``. Scored ids become the labels that count.

    Args:
        samples: (number, sample) of each; the number is the group of all its tokens.
    """
    tokens = np.full(seq_length + 1, eod, np.int64)
    counts, groups, ends = np.zeros(seq_length + 1, np.float32), np.zeros(seq_length, np.int64), []
    start = 0
    for number, sample in samples:
        stop = start + sample.ids.size
        tokens[start:stop] = sample.ids
        counts[start + 1 : stop] = sample.scored[1:]
        groups[start:stop] = number
        ends.append(stop)
        start = stop
    return _row(tokens, counts, groups, [*ends, seq_length])


def windows(tokens: int, seq_length: int, stride: int) -> list[int]:
    """Where windows begin, so that each of so many tokens but the first is the label of one at least."""
    starts = [0]
    while starts[-1] + seq_length < tokens - 1:
        starts.append(starts[-1] + stride)
    return starts


def window(ids: np.ndarray, start: int, seq_length: int, stride: int, eod: int, group: int) -> Batch:
    """A window of a text, whose labels count where no window before it had them."""
    piece = ids[start : start + seq_length + 1]
    tokens = np.full(seq_length + 1, eod, np.int64)
    tokens[: piece.size] = piece
    counts = np.zeros(seq_length + 1, np.float32)
    counts[1 if start == 0 else seq_length - stride + 1 : piece.size] = 1
    return _row(tokens, counts, np.full(seq_length, group), [min(piece.size, seq_length), seq_length])


def _row(tokens: np.ndarray, counts: np.ndarray, groups: np.ndarray, ends: list[int]) -> Batch:
    """One row [s] of each tensor, from ids and what counts of them [s + 1]; and where its documents end [n]."""
    return {
        "tokens": torch.from_numpy(tokens[:-1].copy()),
        "labels": torch.from_numpy(tokens[1:].copy()),
        "loss_mask": torch.from_numpy(counts[1:].copy()),
        "groups": torch.from_numpy(groups),
        "document_ends": torch.tensor(list(dict.fromkeys(ends))),
    }


def micro_batches_of(
    make_row: MakeRow, count: int, seq_length: int, micro_batch: int, rank: int, ranks: int, by_documents: bool
) -> Iterator[Batch]:
    """A data-parallel rank's micro-batches [b, s] of ``count`` rows, and then empty ones without end."""
    empty = _row(np.zeros(seq_length + 1, np.int64), np.zeros(seq_length + 1, np.float32),
                 np.zeros(seq_length, np.int64), [seq_length])  # fmt: skip
    first = rank * micro_batch
    while True:
        rows = [make_row(n) if n < count else empty for n in range(first, first + micro_batch)]
        yield stack(rows, seq_length, by_documents)
        first += micro_batch * ranks


def stack(rows: Sequence[Batch], seq_length: int, by_documents: bool) -> Batch:
    """Rows of one batch; the ends of documents are filled up with the length of the sequence, or left out."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0] if key != "document_ends"}
    if by_documents:
        ends = [row["document_ends"] for row in rows]
        batch["document_ends"] = torch.full((len(ends), max(map(len, ends))), seq_length)
        for filled, found in zip(batch["document_ends"], ends):
            filled[: len(found)] = found
    return batch
