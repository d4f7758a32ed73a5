# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer on the busiest rank, as segments: products, all-to-alls, a ring's hops, FPDT's copies.

A ring's transfers overlap the tiles of the previous block. Gradients of keys travel one hop later, and nothing overlaps
the last of these transfers (context_parallel/attention/ring.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from math import ceil
from types import ModuleType

from megatron.decisions.division import goes_by_keys, head_plan
from megatron.decisions.key_exchange import KEY_EXCHANGES
from megatron.formulas.host_bytes import forward_loads, waiting_chunks
from megatron.formulas.kinds import mixer_of
from megatron.formulas.ring_work import RingBlocks, block_pairs, chunk_pairs, key_blocks_by_queries, ring_blocks
from megatron.formulas.sizes import heads_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.operations import BF16, FP32, MANY_TILES, Segment, collective, gemm, memory, tile
from megatron.simulator.cost.row_operations import Rows
from megatron.simulator.cost.trace import Collective, HostCopy, Kernel, Transfer

# Bytes per rotated number. One kernel (context_parallel/positions/rope_kernel.py) reads and writes it once. PyTorch's
# operations in fp32 (rope.py): cast up 6, times cosine 8, plus the other half times sine 12, cast down 6.
ROTARY_BYTES, UNFUSED_ROTARY_BYTES = 2 * BF16, 32

# Bytes per number of attention's output with a gate (core/transformer_layer.py, gated). Forward: cast the gate up 6,
# sigmoid 8, product 10, cast down 6. Backward: cast up 6, two products 18, of the sigmoid 12, casts down 12.
GATE_BYTES, GATE_GRAD_BYTES = 30, 48


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


def ring_work(strategy: Strategy) -> ModuleType:
    """The module with the work of the strategy's exchange of keys."""
    return import_module(f"megatron.simulator.cost.kinds.{KEY_EXCHANGES[strategy.key_exchange].work}")


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


# --- FPDT: tiles between chunks, and copies from and to host memory ---
#
# These are the loops of fpdt/by_queries.py, which loads keys for each query chunk, and fpdt/by_keys.py, which loads
# queries for each key chunk. A ring's backward pass runs by keys, and so does its forward pass without offloading. The
# double buffer lets a tile overlap the copies for the next one. Nothing overlaps the loads for the first chunk of a
# backward pass; with one chunk nothing overlaps at all.


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


# --- a layer ---


@dataclass(frozen=True)
class LayerWork:
    """A layer and the numbers of its chunks."""

    workload: Workload
    strategy: Strategy
    attended: Attended
    chunks: int  # for projections and attention

    @property
    def shape(self) -> Shape:
        return self.workload.shape

    @property
    def rows(self) -> Rows:
        """The tokens of each chunk of projections and attention."""
        return Rows(self.shape, self.strategy, self.attended.rows / self.chunks, self.chunks)

    def stored(self) -> tuple[HostCopy, ...]:
        """Copies to host memory that a forward pass overlaps."""
        return stored_in_forward(self.attended, self.strategy, self.chunks) if self.strategy.fpdt_chunk else ()


def project(rows: Rows) -> list[Segment]:
    """Norm, QKV and rotary."""
    shape = rows.shape
    return [
        rows.run(rows.norm(shape.hidden)),
        *rows.enter(),
        rows.run(gemm("qkv", rows.tokens, _qkv(shape, rows.strategy.tensor), shape.hidden)),
        *_all_of_qkv("all_gather", rows),
        rows.run(*rotary(rows)),
    ]


def project_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`project`."""
    return [
        rows.run(*rotary(rows, backward=True)),
        *_all_of_qkv("reduce_scatter", rows),
        *rows.column_grad("qkv", _qkv(rows.shape, rows.strategy.tensor)),
        rows.run(rows.norm(rows.shape.hidden, backward=True)),
    ]


def output(rows: Rows) -> list[Segment]:
    """Output projection and residual."""
    width = mixer_of(rows.shape).out_width(rows.shape)
    return [*_gate(rows, GATE_BYTES * width), *rows.out(width)]


def output_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`output`."""
    width = mixer_of(rows.shape).out_width(rows.shape)
    grads = rows.row_grad("attention_out", width // rows.strategy.tensor)
    return [*grads, *_gate(rows, GATE_GRAD_BYTES * width, backward=True)]


def _gate(rows: Rows, moved: float, backward: bool = False) -> list[Segment]:
    """The gate on attention's output; that of a linear-attention layer is a part of its norm."""
    size, gated = moved * rows.tokens / rows.strategy.tensor, rows.shape.output_gate and not rows.shape.linear
    return [rows.run(memory("gate", size, backward=backward))] if gated else []


def _qkv(shape: Shape, tensor: int) -> int:
    """Columns of the first projection on a TP rank: an equal share, even if it is less than a key/value head."""
    return ((1 + shape.output_gate) * shape.heads + 2 * shape.kv_heads) * shape.head_dim // tensor


def _all_of_qkv(kind: Collective, rows: Rows) -> list[Segment]:
    """With more TP ranks than key/value heads core gathers queries, keys and values of all TP ranks.

    Each rank then selects those of its heads (core/transformer/attention.py, get_query_key_value_tensors).
    """
    shape, strategy = rows.shape, rows.strategy
    if shape.kv_heads >= strategy.tensor:
        return []
    whole, backward = BF16 * rows.tokens * _qkv(shape, 1), kind == "reduce_scatter"
    # A copy joins the ranks' columns; in backward a gradient for all columns is first filled with zeros.
    copies = memory("join", (4 if backward else 2) * whole, backward=backward)
    return [*rows.send(collective(kind, "tp", strategy.group("tp"), whole)), rows.run(copies)]


def rotary(rows: Rows, backward: bool = False) -> tuple[Kernel, ...]:
    """The kernel that rotates queries and keys."""
    shape, strategy = rows.shape, rows.strategy
    if shape.positions:
        return ()
    held = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
    each = ROTARY_BYTES if strategy.fused else UNFUSED_ROTARY_BYTES
    return (memory("rotary", each * rows.tokens * (held.q + held.kv) * shape.head_dim, backward=backward),)


def mix(work: LayerWork, *, saving: bool, kept: bool = False) -> list[Segment]:
    """The forward pass between the projections; ``kept``: its result is known, so that no tile is computed."""
    strategy, a, chunks, tokens = work.strategy, work.attended, work.chunks, work.rows.tokens
    chunked = strategy.fpdt_chunk > 0
    tiles = (
        chunked_forward(a, strategy, chunks, saving=saving)
        if chunked
        else ring_work(strategy).ring_forward(a, strategy)
    )
    return [*to_heads(a, strategy, tokens, chunks), *([] if kept else tiles), *to_sequence(a, strategy, tokens, chunks)]


def mix_grad(work: LayerWork) -> list[Segment]:
    """The backward pass of :func:`mix`."""
    strategy, a, chunks, tokens = work.strategy, work.attended, work.chunks, work.rows.tokens
    tiles = (
        chunked_backward(a, strategy, chunks) if strategy.fpdt_chunk else ring_work(strategy).ring_backward(a, strategy)
    )
    back = to_sequence(a, strategy, tokens, chunks, backward=True)
    return [*back, *tiles, *to_heads(a, strategy, tokens, chunks, backward=True)]
