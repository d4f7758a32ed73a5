# SPDX-License-Identifier: Apache-2.0
"""Which heads each Ulysses rank computes (DeepSpeed-Ulysses paper, section 3.1), with fewer key/value heads as well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

HeadSpans = list[tuple[int, int]]
"""By rank: its first head, and one past its last."""


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each Ulysses rank computes, and which key/value heads it gets for them."""

    q_heads: int  # query heads a rank
    kv_heads: tuple[tuple[int, ...], ...]  # by rank: key/value heads it is sent
    kv_index: tuple[tuple[int, ...], ...]  # by rank: which of those each local key/value head is

    @property
    def q_spans(self) -> HeadSpans:
        return [(rank * self.q_heads, (rank + 1) * self.q_heads) for rank in range(len(self.kv_heads))]

    @property
    def kv_spans(self) -> HeadSpans:
        return [(heads[0], heads[-1] + 1) for heads in self.kv_heads]  # they lie side by side

    def needs_expansion(self, rank: int) -> bool:
        """Whether local query heads fall unevenly on the received key/value heads."""
        return self.kv_index[rank] != tuple(range(len(self.kv_heads[rank])))


@lru_cache(maxsize=256)
def head_plan(heads: int, kv_heads: int, ranks: int) -> HeadPlan:
    """Deal ``heads`` query heads and ``kv_heads`` key/value heads over ``ranks``.

    Raises:
        ValueError: heads cannot be dealt evenly.
    """
    if heads % ranks:
        usable = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"ulysses={ranks} does not divide the {heads} query heads of a rank: use one of {usable}, and ring for the "
            "rest"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of the {kv_heads} key/value heads")
    local, group = heads // ranks, heads // kv_heads
    each = gcd(group, local)  # query heads a local key/value head serves
    sent, index = [], []
    for rank in range(ranks):
        wanted = [q // group for q in range(rank * local, (rank + 1) * local, each)]
        unique = sorted(set(wanted))
        sent.append(tuple(unique))
        index.append(tuple(unique.index(head) for head in wanted))
    return HeadPlan(local, tuple(sent), tuple(index))
