# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the busiest rank: Ulysses' all-to-alls, the hops of a ring.

A ring's transfers travel beside the tiles of the block before, gradients of keys one hop behind; the last gradients
come home when nothing is left to hide them (context_parallel/attention/ring.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron.decisions.heads import head_plan
from megatron.formulas.communication import RingBlocks, ring_blocks_sent
from megatron.formulas.sizes import heads_of
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.operations import BF16, FP32, MANY_TILES, memory, tile
from megatron.simulator.cost.segment import Segment
from megatron.simulator.cost.trace import Kernel, Transfer


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
    balanced: bool
    seen: float = 0.0

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
        blocks=ring_blocks_sent(strategy, causal),
        causal=causal,
        balanced=strategy.balance == "zigzag",
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
    """A rank's own block, or another's. Zigzag: half of each; contiguous: the last rank has all pairs of the others."""
    n = a.queries
    pairs, keys = float(n) * n, n
    if a.causal and first:
        pairs /= 2
    elif a.causal and a.balanced:
        pairs, keys = pairs / 2, n // 2
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
