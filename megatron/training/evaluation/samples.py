# SPDX-License-Identifier: Apache-2.0
"""Samples of an exact length: things hidden in a haystack, and a question at the end.

A needle at a depth of d has d of the haystack's tokens before it, to the token. The test is G. Kamradt's "Needle in a
haystack" (2023); what is scored here are the answer's tokens, each after the right ones before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from megatron.training.data.batches import Batch
from megatron.training.evaluation.haystack import Name, Number, Words, draw, pairs


@dataclass(frozen=True)
class Sample:
    """``ids`` int64 [n], and which of them are an answer, ``scored`` bool [n]."""

    ids: np.ndarray
    scored: np.ndarray


@dataclass(frozen=True)
class Pieces:
    """What a sample holds beside its haystack.

    Attributes:
        hidden: (depth from 0 to 1, ids) of each, shallow ones first.
        tail: (ids, whether they are an answer), after the haystack.
    """

    hidden: list[tuple[float, np.ndarray]]
    tail: list[tuple[np.ndarray, bool]]

    @property
    def size(self) -> int:
        return sum(ids.size for _, ids in self.hidden) + sum(ids.size for ids, _ in self.tail)


def compose(pieces: Pieces, words: Words, random: np.random.Generator, length: int) -> Sample:
    """A sample of exactly ``length`` ids, which is not less than ``pieces.size``."""
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
    return Pieces([(depth or 0.0, said(words, name, number))], asked(words, name, number))


def said(words: Words, name: Name, number: Number) -> np.ndarray:
    """A needle."""
    return words.write(("needle", name, "is", number, "stop"))


def asked(words: Words, name: Name, number: Number) -> list[tuple[np.ndarray, bool]]:
    """The question for it, and the answer."""
    question = ("ask", name) if words.base else ("ask", name, "recall", name, "is")
    return [(words.write(question), False), (words.write((number,)), True)]


def _codes(words: Words, random: np.random.Generator, count: int, held_out: bool) -> list[tuple[Name, Number]]:
    """So many names, all of them held out for evaluation or none, and different numbers.

    Numbers are drawn from all: a model would learn which ones training never has, and never answer with them.
    """
    names = draw(random, words.names, count, held_out)
    numbers = draw(random, words.numbers, count, None)
    return [(Name(name), Number(number)) for name, number in zip(names, numbers)]


def many_needles(words: Words, random: np.random.Generator, count: int, ask: int, held_out: bool) -> Pieces:
    """``count`` needles at random depths, and a question for ``ask`` of them."""
    codes = _codes(words, random, count, held_out)
    depths = np.sort(random.random(count))
    tail = [part for index in random.permutation(count)[:ask] for part in asked(words, *codes[index])]
    return Pieces([(float(depth), said(words, *code)) for depth, code in zip(depths, codes)], tail)


def asked_again(pieces: Pieces, random: np.random.Generator, rounds: int) -> Pieces:
    """The same with every question of its tail asked so many times, in another order each time."""
    pairs = list(zip(pieces.tail[::2], pieces.tail[1::2]))
    more = [part for _ in range(rounds - 1) for index in random.permutation(len(pairs)) for part in pairs[index]]
    return Pieces(pieces.hidden, pieces.tail + more)


# Three tasks in the manner of RULER (Hsieh et al. 2024, section 3), written anew: several needles of which one is
# asked for, variables that stand for each other, and the commonest words of a list.


NEEDLES = 4
CHAINS, HOPS = 2, 4
COMMON = 10  # of the names, or a ninth of all


def multi_key(words: Words, random: np.random.Generator, length: int, depth: float | None = None) -> Pieces:
    """Four needles at random depths; one is asked for."""
    return many_needles(words, random, NEEDLES, 1, True)


def variable_tracking(words: Words, random: np.random.Generator, length: int, depth: float | None = None) -> Pieces:
    """Two numbers, each handed on from name to name four times; the names that stand for one of them, in order."""
    names = np.array(draw(random, words.names, CHAINS * (HOPS + 1), None)).reshape(CHAINS, HOPS + 1, 2).tolist()
    chains = [[Name(tuple(pair)) for pair in chain] for chain in names]
    numbers = [Number(pair) for pair in draw(random, words.numbers, CHAINS, None)]
    turns = random.permutation(np.repeat(np.arange(CHAINS), HOPS + 1))  # whose turn it is to go on
    depths, told, hidden = np.sort(random.random(turns.size)), [0] * CHAINS, []
    for depth, chain in zip(depths.tolist(), turns.tolist()):
        value = chains[chain][told[chain] - 1] if told[chain] else numbers[chain]
        hidden.append((depth, words.write(("let", chains[chain][told[chain]], "be", value, "stop"))))
        told[chain] += 1
    wanted = int(random.integers(CHAINS))
    return Pieces(hidden, [(words.write(("which", numbers[wanted], "answer")), False), *_list(words, chains[wanted])])


def common_words(words: Words, random: np.random.Generator, length: int, depth: float | None = None) -> Pieces:
    """A list as long as the sample, a quarter of it the same ten names; which they are, in the order of coming up."""
    every = pairs(words.names, None)
    common = min(COMMON, len(every) // 9)
    order = random.permutation(len(every)).tolist()
    question = words.write(("common", "answer"))
    answer = max(_longest(words), 1) * common
    slots = max((length - question.size - 2 * answer) // _longest(words), 3 * common)
    often = max(2, slots // (4 * common))
    rare = order[common:]
    listed = order[:common] * often + [rare[n % len(rare)] for n in range(slots - common * often)]
    shuffled = [listed[n] for n in random.permutation(len(listed))]
    items = _items(words)
    first = sorted(order[:common], key=shuffled.index)
    tail = [(question, False), *_list(words, [Name(every[index]) for index in first])]
    return Pieces([(1.0, np.concatenate([items[index] for index in shuffled]))], tail)


TASKS = {"ruler-multi-key": multi_key, "ruler-variable-tracking": variable_tracking, "ruler-common-words": common_words}


def _list(words: Words, names: list[Name]) -> list[tuple[np.ndarray, bool]]:
    """Names one after another; what stands between them is no answer."""
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


# Rows of --seq-length tokens: samples packed side by side, or a text in windows; and micro-batches of them.


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
