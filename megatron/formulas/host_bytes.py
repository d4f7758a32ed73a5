# SPDX-License-Identifier: Apache-2.0
"""Host memory that a rank needs for offloading, and how many chunks it loads from there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from megatron.decisions.division import goes_by_keys
from megatron.formulas.sizes import WIDE, chunks_of, heads_of
from megatron.formulas.strategy import Shape, Strategy, Workload


@dataclass(frozen=True)
class Loads:
    """Chunks of a rank's keys and of its queries that a forward pass by queries loads from the host."""

    keys: int
    queries: int


def forward_loads(chunks: int, ring: int = 1, *, causal: bool = True, early_half: bool = True) -> Loads:
    """Loads with chunks of equal size. On a ring a key chunk is sent to all query chunks of any rank that need it.

    Args:
        early_half: True for a zigzag ring under a causal mask: no query of the first half of any rank's chunks sees
            keys of a second half. False: each query chunk needs all key chunks.
    """
    if ring == 1:
        return Loads(chunks * (chunks - 1) // 2, 0) if causal else Loads(chunks * (chunks - 1), chunks - 1)
    early = chunks // 2 if early_half else 0
    # Each query chunk meets one key chunk that has just been projected and is still on the device. The queries that
    # were projected last before a half is computed are on the device too: the last chunk and, if the number of
    # chunks is even, the last of the early half.
    keys = early * (chunks - chunks // 2) + (chunks - early) * chunks - chunks
    return Loads(keys, chunks - 1 - (early > 0 and chunks % 2 == 0))


def waiting_chunks(chunks: int, *, balanced: bool) -> int:
    """Largest number of a ring rank's key chunks whose gradients wait for the same chunk's query gradients.

    In a backward pass by keys, a query chunk is complete after the last key chunk of any rank that it sees. On a
    contiguous ring that is the last chunk of all. On a zigzag ring early queries see early halves only, and late
    queries see late halves on the first rank only. Therefore half of the chunks wait, except the last of them.
    """
    return (chunks - 1) // 2 if balanced else chunks - 1


@dataclass(frozen=True)
class HostBytes:
    """Bytes of one rank at the peak of a step.

    Attributes:
        chunks: q, k, v, out and lse of FPDT's chunks, of all layers that keep them at the same time.
        sums: partial sums of one layer's gradients.
        hidden: layer inputs, streamed hidden states and their gradients.
    """

    chunks: int
    sums: int
    hidden: int

    @property
    def total(self) -> int:
        return self.chunks + self.sums + self.hidden


@lru_cache(maxsize=8192)
def host_memory(workload: Workload, strategy: Strategy, itemsize: int, fused: bool = True) -> HostBytes:
    """Bytes that a rank of the first pipeline stage offloads; that stage has the most micro-batches in flight.

    Args:
        itemsize: bytes of a number in the compute dtype.
        fused: with kernels of a GPU.
    """
    shape, batch = workload.shape, strategy.micro_batch
    ring_tokens = workload.seq_length // strategy.ring * batch
    tokens = ring_tokens // strategy.ulysses // (strategy.tensor if strategy.sequence_parallel else 1)
    recomputed, streamed = strategy.recompute == "full", strategy.stream_hidden
    block = strategy.recompute_method == "block"
    layers = strategy.most_layers(shape.layers)
    keeping, saved, passing = _layers(layers, strategy, block)
    in_flight = strategy.pipeline + (strategy.pipeline - 1 if strategy.virtual > 1 else 0)
    in_flight = min(in_flight, max(1, strategy.micro_batches(workload)))

    chunk_bytes = sums = 0
    if strategy.fpdt_chunk and strategy.fpdt_offload:
        heads = heads_of(shape.heads, shape.kv_heads, strategy.tensor, strategy.ulysses)
        query = ring_tokens * heads.local_q * shape.head_dim
        out = ring_tokens * heads.local_q * shape.value_dim
        key = ring_tokens * heads.local_kv * (shape.head_dim + shape.value_dim)
        layer_bytes = (query + out + key) * itemsize + ring_tokens * heads.local_q * WIDE
        chunk_bytes = layer_bytes * keeping * (1 if recomputed else in_flight)
        if chunk_bytes and recomputed and block:
            chunk_bytes = layer_bytes * (keeping * in_flight if layers > strategy.recompute_layers else 1)
        on_ring, count = strategy.ring > 1, chunks_of(workload, strategy).attention
        # dk and dv of chunks that wait (`waiting_chunks`); under other masks all may wait.
        share = waiting_chunks(count, balanced=on_ring and strategy.balance == "zigzag")
        if on_ring or goes_by_keys(heads.local_q, heads.local_kv, itemsize):
            sums = out * itemsize + query * WIDE  # dout and dq
            if replaces_out(shape, fused):
                sums += ring_tokens * heads.local_q * WIDE - out * itemsize
            share = share if on_ring else 0
        sums += WIDE * key * (share if workload.causal else count) // count
    hidden = tokens * shape.hidden * itemsize
    if strategy.fpdt_chunk and shape.mixture:  # a layer with experts also saves their input, if it outlives the layer
        units = recomputed and strategy.recompute_layers > 1 and not block
        most = strategy.recompute_layers * streamed if units else layers
        saved += min(most, sum(shape.mixture.layers))
    states = 0
    if streamed:
        states = (saved + passing) * hidden
        if not recomputed:  # after the loss: all saved states, the loss's input, its gradient and the next state's
            states = max(states, (saved + 3) * hidden - sums)
    elif strategy.offload_checkpoints:
        states = saved * hidden * in_flight
    return HostBytes(chunk_bytes, sums, states)


def replaces_out(shape: Shape, fused: bool) -> bool:
    """Whether a backward pass by keys needs no outputs, but only a number for each token and head, the row's delta.

    On GPUs only the kernel for values of another size than keys is so (attention/kernels/triton).
    """
    return fused and shape.value_dim != shape.head_dim


def _layers(layers: int, strategy: Strategy, block: bool) -> tuple[int, int, int]:
    """(layers that keep chunks at the same time, hidden states saved for backward, further streamed states)."""
    passing = 2  # the gradients of output and input
    if strategy.recompute != "full":
        return layers, layers, passing
    unit = strategy.recompute_layers
    if not block:
        return unit, ceil(layers / unit), passing + (unit if unit > 1 else 0)
    return max(layers - unit, 1), layers, passing
