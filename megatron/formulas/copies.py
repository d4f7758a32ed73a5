# SPDX-License-Identifier: Apache-2.0
"""Bytes that FPDT copies between device and host (docs/inside/host-copies.md, "What is copied")."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.decisions.chunks import goes_by_keys


@dataclass(frozen=True)
class CopiedBytes:
    """(to the host, to the device) of one layer, on one rank."""

    forward: tuple[int, int]
    backward: tuple[int, int]


@dataclass(frozen=True)
class Loads:
    """How many chunks of a rank's keys, and of its queries, come back from the host in a forward pass by queries."""

    keys: int
    queries: int


def forward_loads(chunks: int, ring: int = 1, *, causal: bool = True, early_half: bool = True) -> Loads:
    """Of equal chunks. On a ring each of a rank's key chunks is sent to all query chunks that meet it on any rank.

    Args:
        early_half: a zigzag ring under a causal mask: the first half of a rank's chunks meets none of the second, on
            all ranks. Else each chunk meets all.
    """
    if ring == 1:
        return Loads(chunks * (chunks - 1) // 2, 0) if causal else Loads(chunks * (chunks - 1), chunks - 1)
    early = chunks // 2 if early_half else 0
    # Each query chunk meets one key chunk that has just been made: the one that it had to wait for. Of the queries,
    # those that were made last before a half is computed are still there: the very last, and the early half's if it
    # ends there.
    keys = early * (chunks - chunks // 2) + (chunks - early) * chunks - chunks
    return Loads(keys, chunks - 1 - (early > 0 and chunks % 2 == 0))


def waiting_chunks(chunks: int, *, balanced: bool) -> int:
    """Key chunks of a rank on a ring whose gradients are there, at most, before its queries of that chunk are done.

    Going back by keys, queries are done when the last key chunk of any rank has been with them: on a contiguous ring
    that is the very last. On a zigzag ring queries of the early half meet others' early half, on the first rank alone
    those of the late half others' late one: of half of the chunks all wait but that last one.
    """
    return (chunks - 1) // 2 if balanced else chunks - 1


def copied_bytes(chunks: int, *, tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> CopiedBytes:
    """What FPDT moves in a training pass, under a causal mask, on a ring of one, in equal chunks.

    Args:
        chunks: number of chunks.
        tokens: tokens of a chunk after its all-to-all, times the micro-batch size.
        heads, kv_heads: of a rank, after the all-to-all.
        head_dim, itemsize: size of a head, and bytes of an element; sums are in fp32.
    """
    wide = max(itemsize, 4)
    q, kv = tokens * heads * head_dim * itemsize, 2 * tokens * kv_heads * head_dim * itemsize
    dq, dkv, lse = q // itemsize * wide, kv // itemsize * wide, tokens * heads * wide
    n, below = chunks, chunks * (chunks - 1) // 2  # pairs of different chunks that meet
    forward = n * (2 * q + kv + lse), forward_loads(n).keys * kv
    if not goes_by_keys(heads, kv_heads, itemsize):
        return CopiedBytes(forward, (below * dkv, n * (2 * q + lse) + (n + below) * kv + below * dkv))
    # dq of each query chunk is written when each of its key chunks is done and read again for the next and at the end.
    moved = n + below
    to_host = n * q + moved * dq
    to_device = n * q + n * kv + moved * (3 * q + lse) + moved * dq
    return CopiedBytes(forward, (to_host, to_device))
