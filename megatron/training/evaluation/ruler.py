# SPDX-License-Identifier: Apache-2.0
"""Three tasks in the manner of RULER (Hsieh et al. 2024, section 3), written anew: several needles of which one is
asked for, variables that stand for each other, and the commonest words of a list."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megatron.training.evaluation.samples import Pieces, many_needles
from megatron.training.evaluation.words import Name, Number, Words, draw, pairs

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
