# SPDX-License-Identifier: Apache-2.0
"""Samples of an exact length: things hidden in a haystack, and a question at the end.

A needle at a depth of d has d of the haystack's tokens before it, to the token. The test is G. Kamradt's "Needle in a
haystack" (2023); what is scored here are the answer's tokens, each after the right ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.training.evaluation.words import Name, Number, Words, draw


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
