# SPDX-License-Identifier: Apache-2.0
"""Samples that share beginnings as one sequence: a tree of segments, in which documents are the trees of one segment.

A tree stands where the ends of documents do, and is a tuple of the ends of its segments. Masks, positions, states and
the distribution over ranks read the parents as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span, whole_numbers


class Tree(tuple[int, ...]):
    """Segments of one sequence. A token sees its own segment up to itself, and all segments before it on its path.

    Args:
        ends: ascending, one past the last token of each segment; the last is the length of the sequence.
        parents: for each segment the number of the one that it continues, which comes before it; -1: it continues none,
            and a document begins with it.

    Raises:
        ValueError: the ends do not ascend, or a segment continues none that comes before it.
    """

    parents: tuple[int, ...]

    def __new__(cls, ends: Iterable[int], parents: Iterable[int]) -> Tree:
        tree = super().__new__(cls, whole_numbers(ends, "the ends of a tree's segments"))
        tree.parents = whole_numbers(parents, "the parents of a tree's segments")
        if not tree or any(a >= b for a, b in zip((0, *tree), tree)):
            raise ValueError("the ends of a tree's segments must ascend, from 1 or more to the length of the sequence")
        if len(tree.parents) != len(tree):
            raise ValueError(f"a tree of {len(tree)} segments has {len(tree.parents)} parents: give one for each")
        for number, parent in enumerate(tree.parents):
            if not -1 <= parent < len(tree):
                raise ValueError(
                    f"segment {number} is an orphan: its parent {parent} does not exist; use -1 for a segment that "
                    f"begins a document, or one of 0 to {number - 1}"
                )
            if parent >= number:
                raise ValueError(
                    f"segment {number} has the parent {parent}, which does not come before it: a tree has no cycles, "
                    "and its segments are given with parents first"
                )
        return tree

    def __getnewargs__(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self), self.parents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and tuple(self) == tuple(other) and self.parents == other.parents

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.parents))

    def __repr__(self) -> str:
        return f"Tree({tuple(self)}, {self.parents})"

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Of each segment."""
        return tuple(zip((0, *self[:-1]), self))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The position of each segment's first token in the samples that contain it."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.spans[parent][1] - self.spans[parent][0])
        return tuple(depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each segment, those from its root to itself."""
        paths: list[tuple[int, ...]] = []
        for number, parent in enumerate(self.parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), number))
        return tuple(paths)

    @cached_property
    def documents(self) -> tuple[int, ...]:
        """Ends of what lies between two beginnings of documents."""
        return (*(start for (start, _), parent in zip(self.spans, self.parents) if parent < 0 < start), self[-1])

    @cached_property
    def forks(self) -> dict[int, int]:
        """Where a segment begins that does not continue the token before it: the end of its parent."""
        return {
            self.spans[number][0]: self[parent]
            for number, parent in enumerate(self.parents)
            if 0 <= parent < number - 1
        }

    @cached_property
    def on_path(self) -> Tensor:
        """bool [segments, segments]: whether the second is on the path of the first."""
        seen = torch.zeros(len(self), len(self), dtype=torch.bool)
        for number, path in enumerate(self.paths):
            seen[number, list(path)] = True
        return seen

    @property
    def pairs(self) -> int:
        """(query, key) pairs under a causal mask."""
        lengths = [stop - start for start, stop in self.spans]
        return sum(n * depth + n * (n + 1) // 2 for n, depth in zip(lengths, self.depths))


def segment_ends(ends: Iterable[int], what: str) -> tuple[int, ...]:
    """The ends of documents as a tuple; a tree as it is. Raises ValueError, which begins with ``what``."""
    return ends if isinstance(ends, Tree) else whole_numbers(ends, what)


def documents_of(ends: tuple[int, ...]) -> tuple[int, ...]:
    """The ends of documents, of a tree those of its roots: no state or position passes from one to the next."""
    return ends.documents if isinstance(ends, Tree) else ends
