# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a ring compute and send under a full or a causal mask, in closed form.

The program derives a plan from the tiles of any mask (context_parallel/attention/ring_plan.py). The formulas and the
simulator use these figures, and tests/unit/test_ring_work.py compares them with the plans of many grids.

A causal zigzag ring is even: all ranks compute equally much, and rank 1 sends the most. On a causal contiguous ring the
last rank computes the most; it sends no keys and waits for all keys of the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RingBlocks:
    """What the busiest rank sends in one pass of a layer, in blocks of one rank's keys and values.

    Attributes:
        keys: blocks of keys and values.
        grads: blocks of their gradients, in a backward pass.
        last_grads: the part of ``grads`` that is sent after the last tile, when no computation is left to hide it.
    """

    keys: int
    grads: float
    last_grads: float


def ring_blocks(ring: int, balance: str, causal: bool) -> RingBlocks:
    """What the busiest of ``ring`` ranks sends: rank 1 of a zigzag ring, the last one of a contiguous ring.

    The last block that reaches rank 1 of a causal zigzag ring is rank 0's, and rank 1 sees only its first half.
    """
    last = 0.5 if causal and balance == "zigzag" else 1.0
    return RingBlocks(ring - 1, ring - 2 + last, last) if ring > 1 else RingBlocks(0, 0.0, 0.0)


def key_blocks_by_queries(ring: int, balance: str, causal: bool, chunks: int) -> int:
    """Blocks of keys that the busiest rank sends in a forward pass of FPDT by queries (fpdt/by_queries.py).

    The keys of all R ranks go around the ring once for each of ``chunks`` query chunks. On a causal zigzag ring, rank 1
    sends half blocks: for a query chunk of the first half, rank 0's first half and its own, unless it is the last rank;
    for a query chunk of the second half, R - 1 first halves and R - 1 second halves.
    """
    if ring == 1 or not causal or balance == "contiguous":
        return chunks * (ring - 1)
    early = chunks // 2
    return early * (ring > 2) + (chunks - early) * (ring - 1)


def block_pairs(length: int, balance: str, causal: bool, *, own: bool) -> tuple[float, int]:
    """(query, key) pairs of the busiest rank with its own block or with another rank's, and the keys of that tile.

    Args:
        length: tokens of a block.
        own: the rank's own block, whose causal triangle is counted as half of its pairs, without the diagonal.
    """
    pairs = float(length) * length
    if causal and own:
        return pairs / 2, length
    if causal and balance == "zigzag":  # all queries see half of an earlier rank's keys; half see all of a later rank's
        return pairs / 2, length // 2
    return pairs, length


def chunk_pairs(chunks: int, ring: int, balance: str, causal: bool) -> float:
    """Number of pairs (query chunk, different key chunk of any rank) that the busiest rank computes under FPDT."""
    every, own = chunks * chunks * ring, chunks * chunks
    if not causal:
        return every - chunks
    return (every - chunks) / 2 if balance == "zigzag" else every - own + (own - chunks) / 2
