# SPDX-License-Identifier: Apache-2.0
"""Phrases, names, numbers and a haystack for any tokenizer: as text, or as symbols for ids without text.

A name is a pair of halves, and so is a number. A quarter of the names is held out for evaluation
(:func:`is_held_out`): a training set of needles never has these pairs, but has both halves of each in other pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron.training.data import genome
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.json_file import read_bytes
from megatron.training.refusal import Refusal, refusing

FIRST = (
    "amber brisk calm dusty eager faint gentle hollow icy jolly keen lucky mellow narrow oaken pale quiet rusty "
    "silver tidy upper vivid warm young"
).split()
SECOND = (
    "anchor basket candle drum engine feather garden hammer island jacket kettle ladder mirror needle orchard pillow "
    "quarry ribbon saddle tunnel umbrella violin wagon yard"
).split()
SENTENCES = (
    " The morning train was late again, and nobody on the platform seemed to mind.",
    " She folded the map twice and put it back into the drawer.",
    " Rain fell on the tin roof until well after midnight.",
    " Most of the shops along the river close early in winter.",
    " He counted the steps on the way up and forgot the number on the way down.",
    " A letter lay under the door, without a stamp and without a name.",
    " The bread comes out of the oven at six, and by eight it is gone.",
    " Two boats were tied to the pier, and neither had been used for years.",
    " They painted the fence green because there was green paint left.",
    " In the evening the wind turned and carried the smell of hay across the road.",
    " Nobody could remember who had planted the old pear tree.",
    " The clock in the hall is seven minutes fast, and everyone allows for it.",
)
TEXT = {
    "needle": " The code of",
    "is": " is",
    "stop": ".",
    "ask": "\nWhat is the code of",
    "recall": "? The code of",
    "let": " Let",
    "be": " be",
    "which": "\nWhich names are",
    "answer": "? Answer:",
    "and": ",",
    "common": "\nWhich of all these names come most often, in the order in which they came up",
}
SYMBOLS = {"needle": 0, "ask": 1, "let": 2, "which": 3, "common": 4}  # symbols do not need the other marks
# MARKS: symbols reserved for marks. ALPHABET, MOST: least and largest number of symbols. HALVES: most halves of names.
MARKS, ALPHABET, MOST, HALVES = 12, 64, 4096, 32
MOST_TEXT = 1 << 30  # limit of a haystack in bytes
SENTENCE = 8  # symbols of a sentence in the haystack


@dataclass(frozen=True)
class Name:
    """The key of a needle."""

    pair: tuple[int, int]


@dataclass(frozen=True)
class Number:
    """The value of a needle."""

    pair: tuple[int, int]


Atom = str | Name | Number  # a str is a key of TEXT


@dataclass(frozen=True, eq=False)
class Words:
    """How a tokenizer writes phrases."""

    tokenizer: Tokenizer
    names: int  # both halves of a pair are below this
    numbers: int  # both halves of a pair are below this
    sentences: tuple[np.ndarray, ...]  # of the haystack, ids [n] each; a haystack from a file is one sentence
    # base, width: a symbol is `width` ids, its digits in this base; both 0 for text
    base: int = 0
    width: int = 0

    def write(self, atoms: Sequence[Atom]) -> np.ndarray:
        """The ids of a phrase, int64 [n]. A phrase of text is tokenized in one piece."""
        if not self.base:
            return _encode(self.tokenizer, "".join(map(_text, atoms)))
        symbols: list[int] = []
        for atom in atoms:
            if isinstance(atom, str):
                symbols += [SYMBOLS[atom]] if atom in SYMBOLS else []
            else:
                first = MARKS + (2 * self.names if isinstance(atom, Number) else 0)
                symbols += [first + atom.pair[0], first + self.names + atom.pair[1]]
        return digits(np.array(symbols, np.int64), self.base, self.width)

    def haystack(self, tokens: int, random: np.random.Generator) -> np.ndarray:
        """Exactly ``tokens`` ids: a text repeated from a random place on, or sentences in random order."""
        if len(self.sentences) == 1:
            text = self.sentences[0]
            return np.take(text, np.arange(tokens) + random.integers(text.size), mode="wrap")
        count = tokens // min(part.size for part in self.sentences) + 1
        chosen = [self.sentences[index] for index in random.integers(len(self.sentences), size=count)]
        return np.concatenate(chosen)[:tokens]


def make_words(tokenizer: Tokenizer, haystack: str | None = None) -> Words:
    """The words of a tokenizer.

    Args:
        haystack: a text file; by default our sentences.

    Raises:
        Refusal: the file cannot be read or is empty, or the vocabulary is too small.
    """
    text = None if haystack is None else read_ids(tokenizer, haystack, "--eval-haystack")
    base = {"NullTokenizer": tokenizer.eod, "NucleotideTokenizer": len(genome.BASES), "CodonTokenizer": 64}
    if tokenizer.kind not in base:
        sentences = tuple(_encode(tokenizer, sentence) for sentence in SENTENCES)
        return Words(tokenizer, len(FIRST), 90, sentences if text is None else (text,))
    base = base[tokenizer.kind]
    if base < 2:
        raise Refusal(f"--eval-tasks: {tokenizer.source} has too few ids to write phrases: use 3 or more")
    width = max(math.ceil(math.log(ALPHABET, base) - 1e-9), 1)
    letters = min(base**width, MOST)
    halves = min((letters - MARKS) // 8, HALVES)
    filler = range(MARKS + 4 * halves, min(letters, MARKS + 4 * halves + 256))
    drawn = np.random.default_rng(8).integers(filler.start, filler.stop, (16, SENTENCE))
    sentences = tuple(digits(row, base, width) for row in drawn)
    return Words(tokenizer, halves, halves, sentences if text is None else (text,), base, width)


def digits(symbols: np.ndarray, base: int, width: int) -> np.ndarray:
    """The ids [n * width] of symbols [n]: ``width`` digits below ``base`` each, most significant first."""
    powers = base ** np.arange(width - 1, -1, -1)
    return (symbols[:, None] // powers % base).reshape(-1)


def read_ids(tokenizer: Tokenizer, path: str, flag: str) -> np.ndarray:
    """The ids of a text file, int64 [n]. For NullTokenizer and genomes white space does not matter.

    Raises:
        Refusal: it cannot be read or tokenized, or has less than two tokens.
    """
    with refusing(f"{flag} {path} cannot be read", OSError, ValueError):
        text = read_bytes(path, MOST_TEXT).decode("utf-8")
    if tokenizer.kind == "NullTokenizer":
        text = " ".join(text.split())
    elif tokenizer.kind in ("NucleotideTokenizer", "CodonTokenizer"):
        text = "".join(text.split())
    with refusing(f"{flag} {path}: {tokenizer.kind} cannot tokenize it", ValueError):
        ids = _encode(tokenizer, text) if text else np.empty(0, np.int64)
    if ids.size < 2:
        raise Refusal(f"{flag} {path} holds {ids.size} tokens, and at least 2 are needed: use a longer text")
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        raise Refusal(
            f"{flag} {path} has ids from {ids.min()} to {ids.max()}, outside the {tokenizer.vocab_size} ids of "
            f"{tokenizer.source}"
        )
    return ids


def is_held_out(pair: tuple[int, int]) -> bool:
    """Whether the name with this pair is used only in evaluations."""
    return sum(pair) % 4 == 0


@lru_cache
def pairs(halves: int, held_out: bool | None) -> tuple[tuple[int, int], ...]:
    """All pairs if ``held_out`` is None; else the pairs for evaluation (True) or for training (False)."""
    every = ((i, j) for i in range(halves) for j in range(halves))
    return tuple(pair for pair in every if held_out is None or is_held_out(pair) == held_out)


def draw(random: np.random.Generator, halves: int, count: int, held_out: bool | None) -> list[tuple[int, int]]:
    """``count`` different pairs in random order."""
    pool = pairs(halves, held_out)
    return [pool[index] for index in random.choice(len(pool), count, replace=False)]


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return tokenizer.array(text).astype(np.int64)


def _text(atom: Atom) -> str:
    if isinstance(atom, str):
        return TEXT[atom]
    first, second = atom.pair
    return f" {10 + first}{10 + second}" if isinstance(atom, Number) else f" {FIRST[first]} {SECOND[second]}"
