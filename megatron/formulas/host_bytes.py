# SPDX-License-Identifier: Apache-2.0
"""Host memory that a rank needs for what it offloads, and the bytes that it copies there and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from megatron.decisions.division import goes_by_keys
from megatron.formulas.sizes import WIDE, chunks_of, heads_of
from megatron.formulas.strategy import Strategy, Workload

# Bytes that FPDT copies between device and host (docs/use/fpdt.md, "What is copied").


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


@dataclass(frozen=True)
class HostBytes:
    """Bytes of one rank at the peak of a step.

    Attributes:
        chunks: q, k, v, out and lse of FPDT's chunks, of all layers that keep them at once.
        sums: gradients of one layer on their way.
        hidden: layer inputs, streamed hidden states and their gradients.
    """

    chunks: int
    sums: int
    hidden: int

    @property
    def total(self) -> int:
        return self.chunks + self.sums + self.hidden


@lru_cache(maxsize=8192)
def host_memory(
    workload: Workload, strategy: Strategy, itemsize: int, *, streamed: bool = False, block: bool = False
) -> HostBytes:
    """What the first pipeline stage offloads; it has the most micro-batches in flight.

    Args:
        itemsize: of the compute dtype.
        streamed: --fpdt-stream-hidden.
        block: --recompute-method block, with ``strategy.recompute_layers`` a stage, in place of uniform.
    """
    shape, batch = workload.shape, strategy.micro_batch
    ring_tokens = workload.seq_length // strategy.ring * batch
    tokens = ring_tokens // strategy.ulysses // (strategy.tensor if strategy.sequence_parallel else 1)
    recomputed = strategy.recompute == "full"
    layers = strategy.most_layers(shape.layers)
    keeping, saved, passing = _layers(layers, strategy, block)
    flying = strategy.pipeline + (strategy.pipeline - 1 if strategy.virtual > 1 else 0)
    flying = min(flying, max(1, strategy.micro_batches(workload)))

    chunk_bytes = sums = 0
    if strategy.fpdt_chunk and strategy.fpdt_offload:
        heads = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
        query = ring_tokens * heads.local_q * shape.head_dim
        key = 2 * ring_tokens * heads.local_kv * shape.head_dim
        one = (2 * query + key) * itemsize + ring_tokens * heads.local_q * WIDE
        chunk_bytes = one * keeping * (1 if recomputed else flying)
        if chunk_bytes and recomputed and block:
            chunk_bytes = one * (keeping * flying if layers > strategy.recompute_layers else 1)
        on_ring, count = strategy.ring > 1, chunks_of(workload, strategy).attention
        # dk and dv of chunks that wait; a mask may make all wait.
        share = waiting_chunks(count, balanced=on_ring and strategy.balance == "zigzag")
        if on_ring or goes_by_keys(heads.local_q, heads.local_kv, itemsize):
            sums = query * (itemsize + WIDE)  # dout and dq
            share = share if on_ring else 0
        sums += WIDE * key * (share if workload.causal else count) // count
    hidden = tokens * shape.hidden * itemsize
    states = 0
    if streamed:
        states = (saved + passing) * hidden
        if not recomputed:  # all chunks are there when the loss is done, with its input, gradient and the next state's
            states = max(states, (saved + 3) * hidden - sums)
    elif strategy.offload_checkpoints:
        states = saved * hidden * flying
    return HostBytes(chunk_bytes, sums, states)


def _layers(layers: int, strategy: Strategy, block: bool) -> tuple[int, int, int]:
    """Layers that keep chunks at once; hidden states saved for backward; streamed ones that come and go besides."""
    passing = 2  # the gradients of output and input
    if strategy.recompute != "full":
        return layers, layers, passing
    unit = strategy.recompute_layers
    if not block:
        return unit, ceil(layers / unit), passing + (unit if unit > 1 else 0)
    return max(layers - unit, 1), layers, passing
