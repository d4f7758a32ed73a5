# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the busiest rank, as segments: its sizes, Ulysses' all-to-alls, tiles and hops of a ring.

A ring's transfers overlap the tiles of the previous block. Gradients of keys travel one hop later, and nothing overlaps
the last of these transfers (context_parallel/attention/ring.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron.decisions.division import head_plan
from megatron.formulas.ring_work import RingBlocks, block_pairs, ring_blocks
from megatron.formulas.sizes import heads_of
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.operations import BF16, FP32, MANY_TILES, Segment, memory, tile
from megatron.simulator.cost.trace import Kernel, Transfer


@dataclass(frozen=True)
class Attended:
    """Sizes of a rank's attention, after the all-to-all."""

    rows: int  # tokens before the all-to-all, times the micro-batch
    queries: int  # tokens of a ring rank's sequence
    batch: int  # sequences
    heads: int  # of this rank
    kv_heads: int  # of this rank
    sent_kv: int  # key/value heads that are sent to this rank, before they are repeated
    sent_kv_away: int  # key/value heads that this rank sends to all other Ulysses ranks together
    head_dim: int
    value_dim: int
    ring: int
    blocks: RingBlocks  # what the busiest rank sends on the ring
    causal: bool
    balance: str
    # average number of keys that a query sees under a window or with documents; 0: as many as `causal` says
    seen: float = 0.0

    @property
    def pair_dim(self) -> int:
        """Numbers of a key head and its value head."""
        return self.head_dim + self.value_dim

    @property
    def balanced(self) -> bool:
        return self.balance == "zigzag"

    @property
    def kernel(self) -> str:
        """The name of the kernel that runs the tiles."""
        return MANY_TILES if self.seen else "attention"

    @property
    def travels(self) -> float:
        """Share of a rank's keys that travels around the ring, because another rank needs them.

        Under a window these are the keys just before the other ranks' zigzag halves.
        """
        if not self.seen or self.ring == 1:
            return 1.0
        return min(1.0, 2 * self.seen / ((self.ring - 1) * self.queries))


def attended(workload: Workload, strategy: Strategy) -> Attended:
    """Sizes of a rank's attention. Raises ValueError where Ulysses does not divide the heads."""
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
        value_dim=shape.value_dim,
        ring=strategy.ring,
        blocks=ring_blocks(strategy.ring, strategy.balance, causal),
        causal=causal,
        balance=strategy.balance,
        seen=workload.keys,
    )


# --- Ulysses ---


def to_heads(a: Attended, strategy: Strategy, rows: float, count: int = 1, backward: bool = False) -> list[Segment]:
    """One all-to-all for q, k and v, with packing; ``rows``: tokens of this rank."""
    others = strategy.ulysses - 1
    sent = a.head_dim * a.heads * others + a.pair_dim * (a.sent_kv * others if backward else a.sent_kv_away)
    return _exchange(strategy, rows, a.head_dim * a.heads + a.pair_dim * a.sent_kv, sent, 2, count, backward)


def to_sequence(a: Attended, strategy: Strategy, rows: float, count: int = 1, backward: bool = False) -> list[Segment]:
    """The all-to-all of the output."""
    width = a.value_dim * a.heads
    return _exchange(strategy, rows, width, width * (strategy.ulysses - 1), 1, count, backward)


def _exchange(
    strategy: Strategy, rows: float, width: int, sent: int, copies: int, count: int, backward: bool
) -> list[Segment]:
    """An all-to-all of ``sent`` numbers for each of ``rows`` tokens.

    Each of ``copies`` copies reads and writes a tensor with ``width`` x Ulysses numbers for each.
    """
    if strategy.ulysses == 1:
        return []
    transfer = Transfer("all_to_all", "ulysses", strategy.group("ulysses"), BF16 * rows * sent)
    pack = memory("pack", 2 * copies * BF16 * rows * width * strategy.ulysses, backward=backward)
    return [Segment((pack,), count=count), Segment((), (transfer,), count=count)]


# --- tiles around a ring ---


def ring_forward(a: Attended, strategy: Strategy) -> list[Segment]:
    """Tiles and transfers of the forward pass around a ring."""
    if a.ring == 1:
        return [Segment((_tile(a, first=True),))]
    begin, merge = merges(a.queries * a.batch * a.heads * a.value_dim)
    hop, meeting, keys = _work(a, merge), _meeting(a), _hop(a, strategy, BF16)
    return [
        Segment((_tile(a, first=True), begin), (keys,)),
        Segment(hop, (keys,), count=meeting - 1),
        Segment((), (keys,), count=a.ring - 1 - meeting),
        Segment(hop),
    ]


def merges(size: float) -> tuple[Kernel, Kernel]:
    """(cast of an output of ``size`` numbers at the end, merge of another output into it).

    A merge is one kernel (attention/kernels/sums.py). The first reads both outputs in bf16, which is subtracted from
    the cast. Other programs cast the first output, too (layer_program.py).
    """
    return memory("widen", 2 * BF16 * size), memory("merge_output", (BF16 + 2 * FP32) * size)


def ring_backward(a: Attended, strategy: Strategy) -> list[Segment]:
    """Tiles and transfers of the backward pass around a ring."""
    if a.ring == 1:
        return [Segment((_tile(a, first=True, backward=True),))]
    width = a.head_dim * a.heads + a.pair_dim * a.kv_heads
    sums = memory("merge", (BF16 + 2 * FP32) * width * a.batch * a.queries, backward=True)
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
    """Number of other ranks' blocks that the busiest rank's queries need.

    Under a window these blocks hold the keys just before each half of a zigzag rank, or just before a contiguous rank.
    On a ring of two ranks, the keys before one of the halves are in the rank's own block.
    """
    if not a.seen:
        return a.ring - 1
    spans, length = (2, a.queries / 2) if a.balanced else (1, a.queries)
    return max(1, min(a.ring - 1, spans * ceil(a.seen / length)))


def _work(a: Attended, sums: Kernel, *, backward: bool = False) -> tuple[Kernel, ...]:
    """Kernels for another rank's block. The kernel for many tiles adds to the sums itself."""
    tile = _tile(a, first=False, backward=backward)
    return (tile,) if a.kernel == MANY_TILES else (tile, sums)


def _hop(a: Attended, strategy: Strategy, itemsize: int, blocks: float = 1.0) -> Transfer:
    sent = blocks * a.travels * itemsize * a.queries * a.batch * a.kv_heads * a.pair_dim
    return Transfer("p2p", "ring", strategy.group("ring"), sent)


def _tile(a: Attended, *, first: bool, backward: bool = False) -> Kernel:
    """The kernel for the busiest rank's own block (``first``), or for another rank's block."""
    n = a.queries
    pairs, keys = block_pairs(n, a.balance, a.causal, own=first)
    if a.seen:  # the keys nearest to a query are in its own block
        spans, length = (2, n / 2) if a.balanced and a.ring > 1 else (1, n)
        near = min(a.seen, length)
        own = spans * (length - near / 2) * near
        if spans == a.ring == 2:  # the keys before the second half also belong to this rank
            own += near * near / 2
        every = max(n * a.seen, own)
        pairs = own if first and a.ring > 1 else every if first else (every - own) / _meeting(a)
        keys = min(float(keys), max(pairs / n, 1.0))
    heads = a.heads * a.batch
    return tile(n, keys, heads, a.head_dim, pairs, backward=backward, name=a.kernel, value_dim=a.value_dim)
