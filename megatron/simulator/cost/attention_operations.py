# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the busiest rank: Ulysses' all-to-alls, the hops of a ring.

A ring's transfers travel beside the tiles of the block before, gradients of keys one hop behind; the last gradients
come home when nothing is left to hide them (context_parallel/attention/ring.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from megatron.decisions.division import goes_by_keys, head_plan
from megatron.decisions.ring_work import RingBlocks, block_pairs, chunk_pairs, key_blocks_by_queries, ring_blocks
from megatron.formulas.host_bytes import forward_loads, waiting_chunks
from megatron.formulas.sizes import heads_of
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.operations import BF16, FP32, MANY_TILES, Segment, memory, tile
from megatron.simulator.cost.trace import HostCopy, Kernel, Transfer


@dataclass(frozen=True)
class Attended:
    """Sizes of a rank's attention, after the all-to-all.

    Attributes:
        rows: tokens before the all-to-all, times the micro-batch.
        queries: tokens of a ring rank's sequence.
        batch: sequences.
        heads, kv_heads: of this rank; sent_kv: key/value heads that it is sent, or was before replication.
        sent_kv_away: key/value heads that it sends to all other Ulysses ranks together.
        blocks: what passes by on the ring.
        seen: keys that a query sees on average, where a window or documents leave fewer than ``causal``; else 0.
    """

    rows: int
    queries: int
    batch: int
    heads: int
    kv_heads: int
    sent_kv: int
    sent_kv_away: int
    head_dim: int
    ring: int
    blocks: RingBlocks
    causal: bool
    balance: str
    seen: float = 0.0

    @property
    def balanced(self) -> bool:
        return self.balance == "zigzag"

    @property
    def kernel(self) -> str:
        """What runs the tiles."""
        return MANY_TILES if self.seen else "attention"

    @property
    def travels(self) -> float:
        """Share of a ring's blocks that somebody still needs: of each half of a zigzag rank the keys just before it."""
        if not self.seen or self.ring == 1:
            return 1.0
        return min(1.0, 2 * self.seen / ((self.ring - 1) * self.queries))


def attended(workload: Workload, strategy: Strategy) -> Attended:
    """Raises ValueError where Ulysses does not divide the heads."""
    shape, seq_length, causal = workload.shape, workload.seq_length, workload.causal
    held = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    plan = head_plan(held.q, held.kv, strategy.ulysses)
    return Attended(
        rows=seq_length * strategy.micro_batch // strategy.context,
        queries=seq_length // strategy.ring,
        batch=strategy.micro_batch,
        heads=plan.q_heads,
        kv_heads=len(plan.kv_index[0]),
        sent_kv=len(plan.kv_heads[0]),
        sent_kv_away=sum(map(len, plan.kv_heads[1:])),
        head_dim=shape.head_dim,
        ring=strategy.ring,
        blocks=ring_blocks(strategy.ring, strategy.balance, causal),
        causal=causal,
        balance=strategy.balance,
        seen=workload.keys,
    )


# --- Ulysses ---


def to_heads(a: Attended, strategy: Strategy, rows: float, count: int = 1, backward: bool = False) -> list[Segment]:
    """The fused all-to-all of q, k and v, packed and unpacked; ``rows`` tokens of this rank."""
    others = strategy.ulysses - 1
    sent = a.heads * others + 2 * (a.sent_kv * others if backward else a.sent_kv_away)
    return _exchange(strategy, rows * a.head_dim, a.heads + 2 * a.sent_kv, sent, 2, count, backward)


def to_sequence(a: Attended, strategy: Strategy, rows: float, count: int = 1, backward: bool = False) -> list[Segment]:
    """The all-to-all of the output."""
    return _exchange(strategy, rows * a.head_dim, a.heads, a.heads * (strategy.ulysses - 1), 1, count, backward)


def _exchange(
    strategy: Strategy, head: float, heads: int, sent: int, copies: int, count: int, backward: bool
) -> list[Segment]:
    """``head``: numbers of a head; ``heads``: of one rank, which holds those of all; ``sent``: heads that leave. Each
    copy reads and writes what is held."""
    if strategy.ulysses == 1:
        return []
    transfer = Transfer("all_to_all", "ulysses", strategy.group("ulysses"), BF16 * head * sent)
    pack = memory("pack", 2 * copies * BF16 * head * heads * strategy.ulysses, backward=backward)
    return [Segment((pack,), count=count), Segment((), (transfer,), count=count)]


# --- tiles around a ring ---


def ring_forward(a: Attended, strategy: Strategy) -> list[Segment]:
    if a.ring == 1:
        return [Segment((_tile(a, first=True),))]
    begin, merge = merges(strategy, a.queries * a.batch * a.heads * a.head_dim)
    hop, meeting, keys = _work(a, merge), _meeting(a), _hop(a, strategy, BF16)
    return [
        Segment((_tile(a, first=True), begin), (keys,)),
        Segment(hop, (keys,), count=meeting - 1),
        Segment((), (keys,), count=a.ring - 1 - meeting),
        Segment(hop),
    ]


def merges(strategy: Strategy, size: float) -> tuple[Kernel, Kernel]:
    """(the first output of ``size`` numbers made wide, and the last narrow; another one merged into it).

    A merge (attention/merge.py) takes the difference to what is there, weighs it, and subtracts it: each reads and
    writes fp32. The papers' programs are taken to have one kernel.
    """
    one = BF16 + 2 * FP32
    first, other = (2 * (BF16 + FP32), one + 5 * FP32) if strategy.fused else (one, one)
    return memory("widen", first * size), memory("merge_output", other * size)


def ring_backward(a: Attended, strategy: Strategy) -> list[Segment]:
    if a.ring == 1:
        return [Segment((_tile(a, first=True, backward=True),))]
    width = a.head_dim * a.batch
    sums = memory(
        "merge", (BF16 + 2 * FP32) * width * (a.heads * a.queries + 2 * a.kv_heads * a.queries), backward=True
    )
    first, hop = _tile(a, first=True, backward=True), _work(a, sums, backward=True)
    keys, grads, meeting = _hop(a, strategy, BF16), _hop(a, strategy, FP32), _meeting(a)
    home = Segment((), (_hop(a, strategy, FP32, a.blocks.last_grads),))
    if a.ring == 2:
        return [Segment((first, sums), (keys,)), Segment(hop), home]
    return [
        Segment((first, sums), (keys,)),
        Segment(hop if meeting > 1 else (), (keys,)),
        Segment(hop, (keys, grads), count=max(meeting - 2, 0)),
        Segment((), (keys, grads), count=a.ring - 1 - max(meeting, 2)),
        Segment(hop, (grads,)),
        home,
    ]


def _meeting(a: Attended) -> int:
    """Blocks of other ranks that queries of the busiest rank meet: under a window those that hold the keys just before
    each half of a zigzag rank, or before a contiguous one. A ring of two: one half's are its own."""
    if not a.seen:
        return a.ring - 1
    spans, length = (2, a.queries / 2) if a.balanced else (1, a.queries)
    return max(1, min(a.ring - 1, spans * ceil(a.seen / length)))


def _work(a: Attended, sums: Kernel, *, backward: bool = False) -> tuple[Kernel, ...]:
    """On another's block. A kernel for many tiles adds to the sums itself."""
    tile = _tile(a, first=False, backward=backward)
    return (tile,) if a.kernel == MANY_TILES else (tile, sums)


def _hop(a: Attended, strategy: Strategy, itemsize: int, blocks: float = 1.0) -> Transfer:
    sent = 2.0 * blocks * a.travels * itemsize * a.queries * a.batch * a.kv_heads * a.head_dim
    return Transfer("p2p", "ring", strategy.group("ring"), sent)


def _tile(a: Attended, *, first: bool, backward: bool = False) -> Kernel:
    """The busiest rank's own block (``first``), or another rank's."""
    n = a.queries
    pairs, keys = block_pairs(n, a.balance, a.causal, own=first)
    if a.seen:  # those nearest a query are its own block's
        spans, length = (2, n / 2) if a.balanced and a.ring > 1 else (1, n)
        near = min(a.seen, length)
        own = spans * (length - near / 2) * near
        if spans == a.ring == 2:  # the second half's keys before it are here too
            own += near * near / 2
        every = max(n * a.seen, own)
        pairs = own if first and a.ring > 1 else every if first else (every - own) / _meeting(a)
        keys = min(float(keys), max(pairs / n, 1.0))
    return tile(n, keys, a.heads * a.batch, a.head_dim, pairs, backward=backward, name=a.kernel)


# FPDT's attention: tiles between chunks, and what comes from and goes to host memory meanwhile.
#
# The loops are those of fpdt/by_queries.py and fpdt/by_keys.py. By queries keys move, by keys queries do; on a ring the
# backward pass goes by keys, and the forward pass where no host has the chunks. A tile and the copies for the next one
# are side by side, which is what the double buffer is for. What the first chunk of a backward pass needs comes while
# nothing else is there to do; one chunk alone hides nothing.


def chunked_forward(a: Attended, strategy: Strategy, chunks: int, *, saving: bool) -> list[Segment]:
    """All tiles of the forward pass. ``saving``: a backward pass follows, finished chunks go to host memory for it."""
    size, met = a.queries / chunks, _met(a, chunks)
    width = size * a.batch * a.head_dim
    q, kv, lse = _chunk_bytes(a, chunks)
    begin, merge = merges(strategy, width * a.heads)
    own = (_chunk_tile(a, size, own=True), begin) if strategy.fused else (_chunk_tile(a, size, own=True),)
    offload, travelling = saving and strategy.fpdt_offload, float(a.blocks.keys)
    if strategy.fpdt_offload:
        travelling = key_blocks_by_queries(a.ring, strategy.balance, a.causal, chunks)
    kept = _copies(2 * q + kv + lse, 0) if offload and not _beside_all(a, strategy) else ()
    if chunks == 1:
        head, *rest = ring_forward(a, strategy)
        return [replace(head, copies=kept), *rest]
    first = _copies(q + kv, 0) if offload and _beside_all(a, strategy) else kept
    loaded = forward_loads(chunks, a.ring, early_half=a.causal and a.balanced, causal=a.causal)
    back = _copies(0, (loaded.keys * kv + loaded.queries * q) / met) if offload else ()
    hops = _hops(a, strategy, size, chunks, travelling)
    return [
        Segment(own, copies=first),  # its output waits until they have left
        Segment(own, copies=kept, count=chunks - 1),
        Segment((_chunk_tile(a, size), merge), hops, back, met),
    ]


def stored_beside(a: Attended, strategy: Strategy, chunks: int) -> tuple[HostCopy, ...]:
    """What a forward pass keeps for its backward pass, where it leaves beside all of the layer, the FFN too, but for
    the queries and keys of the first chunk."""
    if not _beside_all(a, strategy):
        return ()
    q, kv, lse = _chunk_bytes(a, chunks)
    return _copies(chunks * (2 * q + kv + lse) - (q + kv) * (chunks > 1), 0)


def loaded_beside(a: Attended, strategy: Strategy, chunks: int) -> tuple[HostCopy, ...]:
    """By queries, what comes back beside all of a layer's backward pass: a chunk is on its way while the one before it
    goes through the FFN and meets its keys."""
    if not _beside_all(a, strategy) or chunks == 1 or _by_keys_back(a):
        return ()
    q, kv, lse = _chunk_bytes(a, chunks)
    return _copies(0, (chunks - 1) * (2 * q + lse) + chunks * kv)


def _beside_all(a: Attended, strategy: Strategy) -> bool:
    """On a ring all chunks go through attention before the first is at the FFN; of the paper's program we do not know
    it: there copies are beside the tiles."""
    return strategy.fpdt_offload and strategy.fused and a.ring == 1


def _by_keys_back(a: Attended) -> bool:
    return a.ring > 1 or goes_by_keys(a.heads, a.kv_heads, BF16)


def _chunk_bytes(a: Attended, chunks: int) -> tuple[float, float, float]:
    """Bytes of a chunk's queries (or outputs), of its keys and values, and of lse."""
    tokens = a.queries / chunks * a.batch
    return BF16 * tokens * a.head_dim * a.heads, 2 * BF16 * tokens * a.head_dim * a.kv_heads, FP32 * tokens * a.heads


def chunked_backward(a: Attended, strategy: Strategy, chunks: int) -> list[Segment]:
    size, met = a.queries / chunks, _met(a, chunks)
    width = size * a.batch * a.head_dim
    q, kv, lse = _chunk_bytes(a, chunks)
    own, other = _chunk_tile(a, size, own=True, backward=True), _chunk_tile(a, size, backward=True)
    sums = memory("merge", 2 * (BF16 + 2 * FP32) * width * (a.heads + 2 * a.kv_heads), backward=True)
    travel = _hops(a, strategy, size, chunks, a.blocks.keys, a.blocks.grads)
    if not strategy.fpdt_offload:
        if chunks == 1:
            return ring_backward(a, strategy)
        return [Segment((own, sums), count=chunks), Segment((other, sums), travel, count=met)]
    by_keys = _by_keys_back(a)
    if _one_rank_by_keys(a, strategy):
        return _by_keys((own, sums), (other, sums), chunks, met, q, kv, lse)
    if not by_keys:
        first, pair = _copies(0, 2 * q + lse + kv), _copies(2 * kv, 3 * kv)
    else:
        new = 2 * q if a.ring > 1 else 0  # sums of dq that have begun, which the first queries have not
        first, pair = _copies(3 * q, 6 * q + lse + kv - new), _copies(2 * q, 5 * q + lse)
    before = [Segment(copies=first)]
    if chunks == 1:
        return [*before, *ring_backward(a, strategy)]
    if not by_keys and strategy.fused:
        return [
            Segment(copies=_copies(0, 2 * q + lse)),
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
    # Queries begin to come when a block has: nothing hides the first ones.
    blocks, coming = chunks * a.ring, _copies(0, 5 * q + lse)
    if a.seen:  # those within reach of each half of a zigzag rank, or of a contiguous one
        blocks = min(blocks, chunks + (2 if a.balanced else 1) * ceil(a.seen / size))
    waiting = waiting_chunks(chunks, balanced=a.balanced)
    last = min(blocks - chunks, met)  # pairs of a block: nothing more comes beside them
    begun = min(chunks - 1, met - last)  # sums of dq that begin: nothing of them comes
    return [
        *before,
        Segment(copies=_copies(2 * kv, 2 * kv), count=waiting),
        Segment(copies=coming, count=blocks - 1),
        Segment((own, sums), (), _copies(3 * q, q + kv), chunks - 1),
        Segment((own, sums)),
        Segment((other, sums), travel, _copies(2 * q, 3 * q + lse), begun),
        Segment((other, sums), travel, pair, met - last - begun),
        Segment((other, sums), travel, _copies(2 * q, 0), last),
        Segment(copies=_copies(0, 2 * q), count=chunks),  # dq, once it is final
    ]


def beside_ffn_backward(a: Attended, strategy: Strategy, chunks: int) -> tuple[HostCopy, ...]:
    """What else attention's backward pass copies, before it begins: by keys on one rank all outputs but the first come,
    and their gradients leave, beside the FFN's backward pass."""
    if not _one_rank_by_keys(a, strategy):
        return ()
    q = BF16 * a.queries * a.batch * a.head_dim * a.heads
    return _copies(q, q * (chunks - 1) / chunks)


def _one_rank_by_keys(a: Attended, strategy: Strategy) -> bool:
    return strategy.fpdt_chunk > 0 and _beside_all(a, strategy) and _by_keys_back(a)


def _by_keys(
    own: tuple[Kernel, ...], other: tuple[Kernel, ...], chunks: int, met: float, q: float, kv: float, lse: float
) -> list[Segment]:
    """A key chunk after the other, each with its queries, on one rank (fpdt/by_keys.py).

    Its first queries are asked for when it is its turn, after the keys of the next one, and nothing hides them. The
    next come beside a tile, and the last tile has nothing to hide. Then its own dq, which is final, comes to be sent
    back. Sums of dq do not come to the first key chunk: they begin there. Outputs but the first have come, and
    their gradients have left (:func:`beside_ffn_backward`). The public code of FPDT brings the next key chunk's queries
    beside the last tile, and keeps its dq (DeepSpeed, sequence/fpdt_layer.py): there all but the first are hidden.
    """
    new, summed = 3 * q + lse, 5 * q + lse  # queries, dout and out; with dq
    pairs = max(met - (chunks - 1), 0.0)  # of two chunks, with other queries coming meanwhile
    alone = _copies(2 * q, 0)
    first = min(max(chunks - 2, 0), pairs)  # of these with the first key chunk
    return [
        Segment(copies=_copies(0, q + kv + new)),
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
    if a.seen:  # a query chunk meets those within its reach
        return min((chunks * chunks * a.ring - chunks) / 2, chunks * ceil(a.seen / (a.queries / chunks)))
    return chunk_pairs(chunks, a.ring, a.balance, a.causal)


def _chunk_tile(a: Attended, size: float, *, own: bool = False, backward: bool = False) -> Kernel:
    pairs = float(size) * size / (2 if own and a.causal else 1)
    if a.seen:
        within = min(a.seen, size / 2)
        chunks = round(a.queries / size)
        pairs = size * within if own else a.queries * (a.seen - within) / max(_met(a, chunks), 1)
    return tile(size, size, a.heads * a.batch, a.head_dim, pairs, backward=backward, name=a.kernel)


def _hops(
    a: Attended, strategy: Strategy, size: float, chunks: int, keys: float, grads: float = 0.0
) -> tuple[Transfer, ...]:
    """A tile's share of what goes round: blocks of keys, and of their fp32 gradients."""
    if a.ring == 1:
        return ()
    sent = (BF16 * keys + FP32 * grads) * a.travels * 2.0 * size * chunks * a.batch * a.kv_heads * a.head_dim
    return (Transfer("p2p", "ring", strategy.group("ring"), sent / _met(a, chunks)),)


def _copies(to_host: float, to_device: float) -> tuple[HostCopy, ...]:
    found = (HostCopy("to_host", to_host), HostCopy("to_device", to_device))
    return tuple(copy for copy in found if copy.bytes)
