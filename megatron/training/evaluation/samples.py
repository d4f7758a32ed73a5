# SPDX-License-Identifier: Apache-2.0
"""Samples of an exact length: needles hidden in a haystack, and a question at the end.

Exactly the share d of the haystack's tokens precedes a needle at depth d. The test is G. Kamradt's "Needle in a
haystack" (2023), but the answer is not generated: its tokens are scored with teacher forcing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from megatron.training.data.batches import Batch, stacked_ends
from megatron.training.evaluation.haystack import Name, Number, Words, draw, pairs


@dataclass(frozen=True)
class Sample:
    """``ids`` int64 [n], and ``scored`` bool [n], whether each belongs to an answer."""

    ids: np.ndarray
    scored: np.ndarray


@dataclass(frozen=True)
class Pieces:
    """The parts of a sample in addition to its haystack."""

    hidden: list[tuple[float, np.ndarray]]  # (depth from 0 to 1, ids) of each needle, by increasing depth
    tail: list[tuple[np.ndarray, bool]]  # (ids, whether they are an answer) of the parts after the haystack

    @property
    def size(self) -> int:
        return sum(ids.size for _, ids in self.hidden) + sum(ids.size for ids, _ in self.tail)


def compose(pieces: Pieces, words: Words, random: np.random.Generator, length: int) -> Sample:
    """A sample of exactly ``length`` ids, at least ``pieces.size``."""
    hay = words.haystack(length - pieces.size, random)
    parts, done = [], 0
    for depth, ids in pieces.hidden:
        at = round(depth * hay.size)
        parts += [hay[done:at], ids]
        done = at
    parts.append(hay[done:])
    before = sum(part.size for part in parts)
    ids = np.concatenate([*parts, *(ids for ids, _ in pieces.tail)])
    answers = [np.full(ids.size, answer) for ids, answer in pieces.tail]
    return Sample(ids, np.concatenate([np.zeros(before, bool), *answers]))


def needle(words: Words, random: np.random.Generator, length: int, depth: float | None) -> Pieces:
    """One needle, at ``depth``."""
    ((name, number),) = _codes(words, random, 1, True)
    return Pieces([(depth or 0.0, statement(words, name, number))], question_and_answer(words, name, number))


def statement(words: Words, name: Name, number: Number) -> np.ndarray:
    """The phrase of a needle."""
    return words.write(("needle", name, "is", number, "stop"))


def question_and_answer(words: Words, name: Name, number: Number) -> list[tuple[np.ndarray, bool]]:
    """The question for a needle, and the answer."""
    question = ("ask", name) if words.base else ("ask", name, "recall", name, "is")
    return [(words.write(question), False), (words.write((number,)), True)]


def _codes(words: Words, random: np.random.Generator, count: int, held_out: bool) -> list[tuple[Name, Number]]:
    """``count`` different names, all or none of them held out for evaluation, with different numbers.

    No numbers are held out: a model would learn never to answer with a number that training does not have.
    """
    names = draw(random, words.names, count, held_out)
    numbers = draw(random, words.numbers, count, None)
    return [(Name(name), Number(number)) for name, number in zip(names, numbers)]


def many_needles(words: Words, random: np.random.Generator, count: int, asked: int, held_out: bool) -> Pieces:
    """``count`` needles at random depths, and a question for ``asked`` of them."""
    codes = _codes(words, random, count, held_out)
    depths = np.sort(random.random(count))
    tail = [part for index in random.permutation(count)[:asked] for part in question_and_answer(words, *codes[index])]
    return Pieces([(float(depth), statement(words, *code)) for depth, code in zip(depths, codes)], tail)


def repeat_questions(pieces: Pieces, random: np.random.Generator, rounds: int) -> Pieces:
    """``pieces`` with all questions of its tail asked ``rounds`` times, each time in another order."""
    pairs = list(zip(pieces.tail[::2], pieces.tail[1::2]))
    more = [part for _ in range(rounds - 1) for index in random.permutation(len(pairs)) for part in pairs[index]]
    return Pieces(pieces.hidden, pieces.tail + more)


# Three tasks after RULER (Hsieh et al. 2024, section 3): several needles and a question for one of them, assignments of
# variables, and the most frequent words of a list.
NEEDLES = 4
CHAINS, HOPS = 2, 4
COMMON = 10  # frequent names in a list, but at most a ninth of all names


def multi_key(words: Words, random: np.random.Generator, length: int, depth: float | None = None) -> Pieces:
    """Four needles at random depths, and a question for one of them."""
    return many_needles(words, random, NEEDLES, 1, True)


def variable_tracking(words: Words, random: np.random.Generator, length: int, depth: float | None = None) -> Pieces:
    """Two chains, in each of which five names get the same number in turn; the answer is all names of one number."""
    names = np.array(draw(random, words.names, CHAINS * (HOPS + 1), None)).reshape(CHAINS, HOPS + 1, 2).tolist()
    chains = [[Name(tuple(pair)) for pair in chain] for chain in names]
    numbers = [Number(pair) for pair in draw(random, words.numbers, CHAINS, None)]
    turns = random.permutation(np.repeat(np.arange(CHAINS), HOPS + 1))  # the chain of each assignment
    depths, written, hidden = np.sort(random.random(turns.size)), [0] * CHAINS, []
    for depth, chain in zip(depths.tolist(), turns.tolist()):
        value = chains[chain][written[chain] - 1] if written[chain] else numbers[chain]
        hidden.append((depth, words.write(("let", chains[chain][written[chain]], "be", value, "stop"))))
        written[chain] += 1
    wanted = int(random.integers(CHAINS))
    return Pieces(hidden, [(words.write(("which", numbers[wanted], "answer")), False), *_list(words, chains[wanted])])


def common_words(words: Words, random: np.random.Generator, length: int, depth: float | None = None) -> Pieces:
    """A list of names as long as the sample. Ten names fill a quarter of it: the answer, by first occurrence."""
    all_pairs = pairs(words.names, None)
    common = min(COMMON, len(all_pairs) // 9)
    order = random.permutation(len(all_pairs)).tolist()
    question = words.write(("common", "answer"))
    answer = max(_longest(words), 1) * common
    slots = max((length - question.size - 2 * answer) // _longest(words), 3 * common)
    often = max(2, slots // (4 * common))
    rare = order[common:]
    listed = order[:common] * often + [rare[n % len(rare)] for n in range(slots - common * often)]
    shuffled = [listed[n] for n in random.permutation(len(listed))]
    items = _items(words)
    first = sorted(order[:common], key=shuffled.index)
    tail = [(question, False), *_list(words, [Name(all_pairs[index]) for index in first])]
    return Pieces([(1.0, np.concatenate([items[index] for index in shuffled]))], tail)


TASKS = {"ruler-multi-key": multi_key, "ruler-variable-tracking": variable_tracking, "ruler-common-words": common_words}


def _list(words: Words, names: list[Name]) -> list[tuple[np.ndarray, bool]]:
    """Names with separators, which do not belong to the answer."""
    tail: list[tuple[np.ndarray, bool]] = []
    for name in names:
        tail += [(words.write((name,)), True), (words.write(("and",)), False)]
    return tail[:-1]


@lru_cache(maxsize=4)
def _items(words: Words) -> tuple[np.ndarray, ...]:
    """Every name as an item of a list."""
    return tuple(words.write((Name(pair), "and")) for pair in pairs(words.names, None))


def _longest(words: Words) -> int:
    return max(ids.size for ids in _items(words))


# Rows of --seq-length tokens: packed samples, or windows of a text; and micro-batches of rows.

MakeRow = Callable[[int], Batch]


def pack(lengths: Sequence[int], seq_length: int, together: bool) -> list[list[int]]:
    """The numbers of the samples in each row: by first-fit decreasing, or one per row."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    if not together:
        return [[number] for number in order]
    rows: list[list[int]] = []
    free: list[int] = []  # tokens of each row
    for number in order:
        row = next((row for row, tokens in enumerate(free) if tokens >= lengths[number]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(seq_length)
        rows[row].append(number)
        free[row] -= lengths[number]
    return rows


def row_of(samples: Sequence[tuple[int, Sample]], seq_length: int, eod: int, last: bool = False) -> Batch:
    """A row of samples as documents, padded with ``eod``. Only scored ids count as labels.

    Args:
        samples: (number, sample) of each; the number is the group of its tokens.
        last: the mask has the last token of each sample instead, for its reward.
    """
    tokens = np.full(seq_length + 1, eod, np.int64)
    counts, groups, ends = np.zeros(seq_length + 1, np.float32), np.zeros(seq_length, np.int64), []
    start = 0
    for number, sample in samples:
        stop = start + sample.ids.size
        tokens[start:stop] = sample.ids
        counts[start + 1 : stop] = 0 if last else sample.scored[1:]
        counts[stop] = last  # of the token at stop - 1
        groups[start:stop] = number
        ends.append(stop)
        start = stop
    return _row(tokens, counts, groups, [*ends, seq_length])


def windows(tokens: int, seq_length: int, stride: int) -> list[int]:
    """The beginnings of windows, so that each of ``tokens`` tokens except the first is a label in at least one."""
    starts = [0]
    while starts[-1] + seq_length < tokens - 1:
        starts.append(starts[-1] + stride)
    return starts


def window(ids: np.ndarray, start: int, seq_length: int, stride: int, eod: int, group: int) -> Batch:
    """A window of a text. A label counts if no earlier window has it."""
    piece = ids[start : start + seq_length + 1]
    tokens = np.full(seq_length + 1, eod, np.int64)
    tokens[: piece.size] = piece
    counts = np.zeros(seq_length + 1, np.float32)
    counts[1 if start == 0 else seq_length - stride + 1 : piece.size] = 1
    return _row(tokens, counts, np.full(seq_length, group), [min(piece.size, seq_length), seq_length])


def _row(tokens: np.ndarray, counts: np.ndarray, groups: np.ndarray, ends: list[int]) -> Batch:
    """The tensors [s] of a row, from ids and their weights in the loss [s + 1], and its ends of documents [n]."""
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
    """A data-parallel rank's micro-batches [b, s] of ``count`` rows, then empty ones without end."""
    empty = _row(np.zeros(seq_length + 1, np.int64), np.zeros(seq_length + 1, np.float32),
                 np.zeros(seq_length, np.int64), [seq_length])  # fmt: skip
    first = rank * micro_batch
    while True:
        rows = [make_row(n) if n < count else empty for n in range(first, first + micro_batch)]
        yield stack(rows, seq_length, by_documents)
        first += micro_batch * ranks


def stack(rows: Sequence[Batch], seq_length: int, by_documents: bool) -> Batch:
    """A batch of rows. The ends of documents are padded with the length of the sequence, or omitted."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0] if key != "document_ends"}
    if by_documents:
        batch["document_ends"] = stacked_ends([row["document_ends"] for row in rows])
    return batch
