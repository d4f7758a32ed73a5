# SPDX-License-Identifier: Apache-2.0
"""The tree of rows that share beginnings: answers to one prompt, or conversations that branch.

A token is shared by rows that have the same tokens up to it and the same next one, because what a token predicts is
computed once for all rows that share it. So the last token before rows differ is the first one of each branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.context_parallel.layout.tree import Tree

LEAST = 16
"""Fewer common tokens are not worth a segment of their own."""


@dataclass(frozen=True)
class SharedRows:
    """Rows as one tree.

    Attributes:
        tree: of segments, depth first.
        tokens: int64 [n], of the tree.
        places: for each row, the places of its tokens among these.
    """

    tree: Tree
    tokens: np.ndarray
    places: list[np.ndarray]

    @property
    def saving(self) -> Saving:
        """What the tree saves."""
        lengths = [len(row) for row in self.places]
        return Saving(sum(lengths), len(self.tokens), sum(n * (n + 1) // 2 for n in lengths), self.tree.pairs)


@dataclass(frozen=True)
class Saving:
    """Tokens, and (query, key) pairs under a causal mask: of separate rows, and of their trees."""

    tokens: int
    tree_tokens: int
    pairs: int
    tree_pairs: int

    def __add__(self, other: Saving) -> Saving:
        return Saving(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def __str__(self) -> str:
        return (
            f"{self.tree_tokens:,} of {self.tokens:,} tokens ({self.tree_tokens / self.tokens:.0%}) and "
            f"{self.tree_pairs / self.pairs:.0%} of attention's pairs are computed"
        )


def share(rows: Sequence[np.ndarray], least: int = LEAST, limits: Sequence[int] | None = None) -> SharedRows:
    """The tree of some rows of token ids, none of them empty.

    Args:
        least: fewer tokens are not shared.
        limits: for each row, how many of its first tokens may be shared at most; default: all.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].tolist())
    known = [_common(rows[a], rows[b]) for a, b in zip(order, order[1:])]  # of neighbours in this order
    most = [len(row) for row in rows] if limits is None else limits
    ends: list[int] = []
    parents: list[int] = []
    pieces: list[np.ndarray] = []
    places = [np.empty(len(row), np.int64) for row in rows]

    def add(chosen: Sequence[int], start: int, stop: int, parent: int) -> int:
        """A segment of the tokens start..stop of some rows, which all have them; returns its number."""
        first = ends[-1] if ends else 0
        for row in chosen:
            places[row][start:stop] = np.arange(first, first + stop - start)
        pieces.append(rows[chosen[0]][start:stop])
        ends.append(first + stop - start)
        parents.append(parent)
        return len(ends) - 1

    waiting = [(0, len(order), 0, -1)]  # rows low..high of the order have the same tokens before ``start``
    while waiting:
        low, high, start, parent = waiting.pop()
        common = min(known[low : high - 1], default=0)
        chosen = order[low:high]
        same = high - low > 1 and all(len(rows[row]) == common for row in chosen)
        stop = min(common - (not same), *(most[row] for row in chosen)) if high - low > 1 else 0
        if stop - start >= least or (same and stop == common):
            parent, start = add(chosen, start, stop, parent), stop
        if high - low == 1:
            add(chosen, start, len(rows[chosen[0]]), parent)
        elif not same:
            cuts = [low, *(at + 1 for at in range(low, high - 1) if known[at] == common), high]
            waiting += reversed([(a, b, start, parent) for a, b in zip(cuts, cuts[1:])])
        elif start < common:
            waiting += reversed([(at, at + 1, start, parent) for at in range(low, high)])
    return SharedRows(Tree(ends, parents), np.concatenate(pieces), places)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens are the same."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
