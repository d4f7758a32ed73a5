# SPDX-License-Identifier: Apache-2.0
"""FPDT: tiles between chunks, and copies from and to host memory.

These are the loops of fpdt/by_queries.py, which loads keys for each query chunk, and fpdt/by_keys.py, which loads
queries for each key chunk. A ring's backward pass runs by keys, and so does its forward pass without offloading. The
double buffer lets a tile overlap the copies for the next one. Nothing overlaps the loads for the first chunk of a
backward pass; with one chunk nothing overlaps at all.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from megatron.decisions.division import goes_by_keys
from megatron.formulas.host_bytes import forward_loads, waiting_chunks
from megatron.formulas.ring_work import chunk_pairs, key_blocks_by_queries
from megatron.formulas.strategy import Strategy
from megatron.simulator.cost.kinds.ring_operations import Attended, merges, ring_backward, ring_forward
from megatron.simulator.cost.operations import BF16, FP32, Segment, memory, tile
from megatron.simulator.cost.trace import HostCopy, Kernel, Transfer


def chunked_forward(a: Attended, strategy: Strategy, chunks: int, *, saving: bool) -> list[Segment]:
    """All tiles of the forward pass. ``saving``: a backward pass follows, and chunks are copied to the host for it."""
    size, met = a.queries / chunks, _met(a, chunks)
    q, out, kv, lse = _chunk_bytes(a, chunks)
    begin, merge = merges(size * a.batch * a.value_dim * a.heads)
    own = (_chunk_tile(a, size, own=True), begin) if strategy.fused else (_chunk_tile(a, size, own=True),)
    offload, travelling = saving and strategy.fpdt_offload, float(a.blocks.keys)
    if strategy.fpdt_offload:
        travelling = key_blocks_by_queries(a.ring, strategy.balance, a.causal, chunks)
    kept = _copies(q + out + kv + lse, 0) if offload and not _overlaps_layer(a, strategy) else ()
    if chunks == 1:
        head, *rest = ring_forward(a, strategy)
        return [replace(head, copies=kept), *rest]
    first = _copies(q + kv, 0) if offload and _overlaps_layer(a, strategy) else kept
    loaded = forward_loads(chunks, a.ring, early_half=a.causal and a.balanced, causal=a.causal)
    back = _copies(0, (loaded.keys * kv + loaded.queries * q) / met) if offload else ()
    hops = _hops(a, strategy, size, chunks, travelling)
    return [
        Segment(own, copies=first),  # the first chunk's queries and keys are copied before its output
        Segment(own, copies=kept, count=chunks - 1),
        Segment((_chunk_tile(a, size), merge), hops, back, met),
    ]


def stored_in_forward(a: Attended, strategy: Strategy, chunks: int) -> tuple[HostCopy, ...]:
    """Copies to the host for backward that overlap the complete layer, the FFN included.

    The queries and keys of the first chunk are not included: `chunked_forward` counts them.
    """
    if not _overlaps_layer(a, strategy):
        return ()
    q, out, kv, lse = _chunk_bytes(a, chunks)
    return _copies(chunks * (q + out + kv + lse) - (q + kv) * (chunks > 1), 0)


def loaded_in_backward(a: Attended, strategy: Strategy, chunks: int) -> tuple[HostCopy, ...]:
    """In a backward pass by queries, loads that overlap the complete layer.

    A chunk is loaded while the previous one is in the FFN and in attention.
    """
    if not _overlaps_layer(a, strategy) or chunks == 1 or _backward_by_keys(a):
        return ()
    q, out, kv, lse = _chunk_bytes(a, chunks)
    return _copies(0, (chunks - 1) * (q + out + lse) + chunks * kv)


def _overlaps_layer(a: Attended, strategy: Strategy) -> bool:
    """Whether copies overlap the complete layer.

    They do not on a ring, where attention of all chunks comes before the first FFN. For the papers' programs
    (``fused`` False) this is unknown; their copies are assumed to overlap attention's tiles only.
    """
    return strategy.fpdt_offload and strategy.fused and a.ring == 1


def _backward_by_keys(a: Attended) -> bool:
    return a.ring > 1 or goes_by_keys(a.heads, a.kv_heads, BF16)


def _chunk_bytes(a: Attended, chunks: int) -> tuple[float, float, float, float]:
    """Bytes of a chunk's queries, of its outputs, of its keys and values, and of lse."""
    tokens = a.queries / chunks * a.batch
    queries, out = BF16 * tokens * a.head_dim * a.heads, BF16 * tokens * a.value_dim * a.heads
    return queries, out, BF16 * tokens * a.pair_dim * a.kv_heads, FP32 * tokens * a.heads


def chunked_backward(a: Attended, strategy: Strategy, chunks: int) -> list[Segment]:
    """All tiles, transfers and host copies of the backward pass."""
    size, met = a.queries / chunks, _met(a, chunks)
    q, out, kv, lse = _chunk_bytes(a, chunks)
    own, other = _chunk_tile(a, size, own=True, backward=True), _chunk_tile(a, size, backward=True)
    width = size * a.batch * (a.head_dim * a.heads + a.pair_dim * a.kv_heads)
    sums = memory("merge", 2 * (BF16 + 2 * FP32) * width, backward=True)
    travel = _hops(a, strategy, size, chunks, a.blocks.keys, a.blocks.grads)
    if not strategy.fpdt_offload:
        if chunks == 1:
            return ring_backward(a, strategy)
        return [Segment((own, sums), count=chunks), Segment((other, sums), travel, count=met)]
    by_keys = _backward_by_keys(a)
    if _one_rank_by_keys(a, strategy):
        return _by_keys((own, sums), (other, sums), chunks, met, q, out, kv, lse)
    if not by_keys:
        first, pair = _copies(0, q + out + lse + kv), _copies(2 * kv, 3 * kv)
    else:
        new = 2 * q if a.ring > 1 else 0  # dq sums, which do not exist yet for the first queries
        first = _copies(out + 2 * q, 3 * q + 3 * out + lse + kv - new)
        pair = _copies(2 * q, 3 * q + 2 * out + lse)
    before = [Segment(copies=first)]
    if chunks == 1:
        return [*before, *ring_backward(a, strategy)]
    if not by_keys and strategy.fused:
        return [
            Segment(copies=_copies(0, q + out + lse)),
            Segment((own, sums), count=chunks),
            Segment((other, sums), travel, pair, met),
        ]
    if a.ring == 1:
        return [
            *before,
            Segment((own, sums), (), first, chunks - 1),
            Segment((own, sums)),
            Segment((other, sums), travel, pair, met),
        ]
    # Queries are loaded after a block of keys has arrived, so nothing overlaps the first load of each block.
    blocks, coming = chunks * a.ring, _copies(0, 3 * q + 2 * out + lse)
    if a.seen:  # blocks within the window of each half of a zigzag rank, or of a contiguous rank
        blocks = min(blocks, chunks + (2 if a.balanced else 1) * ceil(a.seen / size))
    waiting = waiting_chunks(chunks, balanced=a.balanced)
    last = min(blocks - chunks, met)  # last pairs of a block: no further loads overlap them
    begun = min(chunks - 1, met - last)  # pairs whose dq sums begin and need not be loaded
    return [
        *before,
        Segment(copies=_copies(2 * kv, 2 * kv), count=waiting),
        Segment(copies=coming, count=blocks - 1),
        Segment((own, sums), (), _copies(out + 2 * q, out + kv), chunks - 1),
        Segment((own, sums)),
        Segment((other, sums), travel, _copies(2 * q, q + 2 * out + lse), begun),
        Segment((other, sums), travel, pair, met - last - begun),
        Segment((other, sums), travel, _copies(2 * q, 0), last),
        Segment(copies=_copies(0, 2 * q), count=chunks),  # dq, once it is final
    ]


def copied_in_ffn_backward(a: Attended, strategy: Strategy, chunks: int) -> tuple[HostCopy, ...]:
    """In a backward pass by keys without a ring, copies for attention that overlap the FFN's backward pass.

    All outputs but the first are loaded, and their gradients stored.
    """
    if not _one_rank_by_keys(a, strategy):
        return ()
    out = BF16 * a.queries * a.batch * a.value_dim * a.heads
    return _copies(out, out * (chunks - 1) / chunks)


def _one_rank_by_keys(a: Attended, strategy: Strategy) -> bool:
    return strategy.fpdt_chunk > 0 and _overlaps_layer(a, strategy) and _backward_by_keys(a)


def _by_keys(
    own: tuple[Kernel, ...],
    other: tuple[Kernel, ...],
    chunks: int,
    met: float,
    q: float,
    out: float,
    kv: float,
    lse: float,
) -> list[Segment]:
    """A backward pass by keys without a ring: one key chunk after another, each with its queries (fpdt/by_keys.py).

    A key chunk's first queries are requested after the keys of the next chunk, so nothing overlaps their load. Further
    queries are loaded during a tile; the last tile overlaps nothing. Then dq of the chunk, which is complete, is loaded
    for the all-to-all. With the first key chunk no dq is loaded, because its sums begin there. Outputs have been loaded
    before, and their gradients stored (:func:`copied_in_ffn_backward`). FPDT's public code (DeepSpeed,
    sequence/fpdt_layer.py) loads the next key chunk's queries during the last tile and keeps dq on the device, so that
    all its loads but the first are overlapped.
    """
    new = q + 2 * out + lse  # bytes of queries, dout, out and lse
    summed = new + 2 * q  # the same with dq sums
    pairs = max(met - (chunks - 1), 0.0)  # pairs of two chunks during whose tile other queries are loaded
    alone = _copies(2 * q, 0)
    first = min(max(chunks - 2, 0), pairs)  # the pairs with the first key chunk
    return [
        Segment(copies=_copies(0, out + kv + new)),
        Segment(copies=_copies(0, kv + summed), count=chunks - 1),
        Segment(own, copies=_copies(2 * q, new), count=min(chunks - 1, 1)),
        Segment(own, copies=_copies(2 * q, summed), count=max(chunks - 2, 0)),
        Segment(own, copies=alone),
        Segment(other, copies=_copies(2 * q, new), count=first),
        Segment(other, copies=_copies(2 * q, summed), count=pairs - first),
        Segment(other, copies=alone, count=met - pairs),
        Segment(copies=_copies(0, 2 * q), count=chunks),
    ]


def _met(a: Attended, chunks: int) -> float:
    """Pairs of a query chunk and another key chunk, of any rank, that meet on the busiest rank."""
    if a.seen:  # a query chunk meets only the key chunks that its queries see
        return min((chunks * chunks * a.ring - chunks) / 2, chunks * ceil(a.seen / (a.queries / chunks)))
    return chunk_pairs(chunks, a.ring, a.balance, a.causal)


def _chunk_tile(a: Attended, size: float, *, own: bool = False, backward: bool = False) -> Kernel:
    pairs = float(size) * size / (2 if own and a.causal else 1)
    if a.seen:
        within = min(a.seen, size / 2)
        chunks = round(a.queries / size)
        pairs = size * within if own else a.queries * (a.seen - within) / max(_met(a, chunks), 1)
    heads = a.heads * a.batch
    return tile(size, size, heads, a.head_dim, pairs, backward=backward, name=a.kernel, value_dim=a.value_dim)


def _hops(
    a: Attended, strategy: Strategy, size: float, chunks: int, keys: float, grads: float = 0.0
) -> tuple[Transfer, ...]:
    """A tile's share of the ring's transfers: blocks of keys, and of their fp32 gradients."""
    if a.ring == 1:
        return ()
    sent = (BF16 * keys + FP32 * grads) * a.travels * size * chunks * a.batch * a.kv_heads * a.pair_dim
    return (Transfer("p2p", "ring", strategy.group("ring"), sent / _met(a, chunks)),)


def _copies(to_host: float, to_device: float) -> tuple[HostCopy, ...]:
    copies = (HostCopy("to_host", to_host), HostCopy("to_device", to_device))
    return tuple(copy for copy in copies if copy.bytes)
