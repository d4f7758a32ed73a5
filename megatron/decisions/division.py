# SPDX-License-Identifier: Apache-2.0
"""How work is divided, for context_parallel and for the formulas.

These functions distribute heads over Ulysses ranks (DeepSpeed-Ulysses paper, section 3.1), also if there are fewer
key/value heads than ranks. They give the order of FPDT's loops, the layers that choose keys, and the unit of sequence
lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm

SCORED = 128, 1024  # queries and keys of a block of an indexer's scores
SCORED_TOGETHER = 16  # blocks of keys whose scores Triton's kernel computes at once: it keeps no scores of heads
GATHERED = 2**26  # numbers of chosen keys, or of parts of their gradients, that Triton's kernels write at a time
GATHERED_ON_CPU = 2**24  # the same of PyTorch's operations
IN_FLIGHT = 2  # device tensors whose copies to the host may be unfinished: limits the memory that they hold
PARTS = 4  # number of parts in which a product is added to a sum of a wider dtype


def goes_by_keys(heads: int, kv_heads: int, itemsize: int) -> bool:
    """Whether FPDT's backward loop by keys copies fewer bytes to and from the host than the loop by queries.

    By queries, each tile copies k, v and their fp32 gradients, in and out; by keys, q, out, dout and dq.
    """
    return heads * (3 * itemsize + 8) < kv_heads * (2 * itemsize + 16)


def choosing_layer(layer: int, every: int, own: int) -> int:
    """The layer, from 1, whose choice of keys a layer uses: the first ``own`` choose, then every ``every``-th."""
    return layer - max(layer - max(own, 1), 0) % every


def pieces_together(rows: int, hidden_size: int, itemsize: int) -> int:
    """How many chunks of the loss, with ``rows`` rows of logits each, are added to the weight's gradient together.

    The gradients of their logits then take at most a quarter of the weight's fp32 sum (2,048 rows in bf16 at a hidden
    size of 4,096).
    """
    return max(1, hidden_size // itemsize // rows)


HeadSpans = list[tuple[int, int]]
"""By rank: its first head, and one past its last."""


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each Ulysses rank computes, and which key/value heads it gets for them."""

    q_heads: int  # query heads of each rank
    kv_heads: tuple[tuple[int, ...], ...]  # by rank: the key/value heads that are sent to it
    kv_index: tuple[tuple[int, ...], ...]  # by rank: for each local key/value head, its index among kv_heads

    @property
    def q_spans(self) -> HeadSpans:
        return [(rank * self.q_heads, (rank + 1) * self.q_heads) for rank in range(len(self.kv_heads))]

    @property
    def kv_spans(self) -> HeadSpans:
        return [(heads[0], heads[-1] + 1) for heads in self.kv_heads]  # they are consecutive

    def needs_expansion(self, rank: int) -> bool:
        """Whether received key/value heads must be repeated, because they serve unequal numbers of query heads."""
        return self.kv_index[rank] != tuple(range(len(self.kv_heads[rank])))


@lru_cache(maxsize=256)
def head_plan(heads: int, kv_heads: int, ranks: int) -> HeadPlan:
    """Distribute ``heads`` query heads and ``kv_heads`` key/value heads over ``ranks``.

    Raises:
        ValueError: heads cannot be distributed evenly.
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
    each = gcd(group, local)  # query heads of each local key/value head
    sent, index = [], []
    for rank in range(ranks):
        wanted = [q // group for q in range(rank * local, (rank + 1) * local, each)]
        unique = sorted(set(wanted))
        places = {head: place for place, head in enumerate(unique)}
        sent.append(tuple(unique))
        index.append(tuple(places[head] for head in wanted))
    return HeadPlan(local, tuple(sent), tuple(index))


def uneven_heads(heads: int, ranks: int) -> float:
    """How much longer attention would take if ``ranks`` had unequal shares of the heads: 0.14 for 28 heads on 8.

    The rank with the most heads has 4 of them, the mean is 3.5. The program refuses such grids, because a ring is
    faster: by the planner, of Qwen 2.5 7B on 8 H100, U 4 x R 2 takes 2.5 % longer than an even U 8 at 32K, 0.9 % at
    128K, 0.3 % at 512K; unequal shares 4, 9 and 13 %.
    """
    return -(-heads // ranks) * ranks / heads - 1


NARROW = 32
"""Bands with fewer keys are not cut into two triangles, which would be too small; their tiles get a mask."""


def length_unit(ulysses: int, ring: int, balance: str, tensor: int = 1) -> int:
    """Sequence lengths must be multiples of this. ``tensor``: TP size under TP sequence parallelism, else 1."""
    blocks = 2 * ring if balance == "zigzag" and ring > 1 else ring
    return lcm(blocks, ulysses * ring * tensor)
