# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a group sit, and so which links they cross.

Ranks are numbered TP < Ulysses < Ring < DP < PP, nodes hold as many in a row as they have GPUs. A group is ``size``
ranks ``stride`` apart; groups of its kind stand side by side, ``stride`` of them between one another, then begin again
after ``size`` x ``stride`` ranks. Where nodes do not divide these blocks the groups lie differently: the one that
spans the most nodes, and of those the one with the fewest ranks on a node, is what all wait for.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple


class Placement(NamedTuple):
    """Of the group that is placed worst.

    Attributes:
        nodes: that it spans. fewest, most: of its ranks on one of them.
        neighbours: whether those on a node follow one another.
    """

    nodes: int
    fewest: int
    most: int
    neighbours: bool

    def cards(self, interleaved: float) -> float:
        """Network cards of a node that its rings use: one for each of the ranks there, as every ring leaves by another
        GPU; where these are not neighbours, one and a share ``interleaved`` of the others."""
        return self.fewest if self.neighbours else 1 + interleaved * (self.fewest - 1)

    def hop_share(self, stride: int, gpus_per_card: int) -> int:
        """How many GPUs' parts of a shared network card a hop out of the node gets, such as a ring's.

        Of a group's ranks on a node one alone sends to the next node, while the others send inside. So the card
        carries one message for each of the ``stride`` groups that lie between one another, and not one a GPU.
        """
        return min(self.fewest, max(1, gpus_per_card // stride))


@lru_cache(maxsize=4096)
def placed(size: int, stride: int, gpus: int) -> Placement:
    """A group on nodes of ``gpus``. One whose block fits into a node is taken to lie in one."""
    if stride >= gpus:
        return Placement(size, 1, 1, True)
    if size * stride <= gpus:
        return Placement(1, size, size, stride == 1)
    if gpus % stride == 0 and size % (gpus // stride) == 0:
        each = gpus // stride
        return Placement(size * stride // gpus, each, each, stride == 1 or each == 1)
    worst = None
    for first in firsts(size * stride, stride, gpus):
        counts = Counter((first + rank * stride) // gpus for rank in range(size)).values()
        key = (-len(counts), min(counts))
        if worst is None or key < worst[0]:
            worst = key, Placement(len(counts), min(counts), max(counts), stride == 1 or max(counts) == 1)
    return worst[1]


def firsts(block: int, stride: int, gpus: int) -> set[int]:
    """Places in a node at which groups begin."""
    begins = {index * block % gpus for index in range(gpus)}
    return {(begin + beside) % gpus for begin in begins for beside in range(stride)}
