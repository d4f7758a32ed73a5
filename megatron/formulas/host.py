# SPDX-License-Identifier: Apache-2.0
"""Host memory of a rank for what it offloads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from megatron.decisions.chunks import goes_by_keys
from megatron.formulas.chunks import chunks_of
from megatron.formulas.copies import waiting_chunks
from megatron.formulas.sizes import WIDE, heads_of
from megatron.formulas.strategy import Strategy, Workload


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
