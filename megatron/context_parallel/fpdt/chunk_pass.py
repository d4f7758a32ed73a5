# SPDX-License-Identifier: Apache-2.0
"""One pass of a chunked layer over its chunks: the parts that both loop orders share (FPDT paper, 4.1 and 4.2).

*By queries* (by_queries.py): the outer loop is over query chunks, and keys are loaded. *By keys* (by_keys.py): the
outer loop is over key chunks, and queries are loaded; it is the paper's order for the backward pass. Neither order is
always best (`benchmarks/host_time.py`). With 16 chunks and as many key heads as query heads, a backward pass by queries
makes the layer copy 18 % more bytes than one by keys. With a fourth of the key heads, a layer by keys alone copies four
times as many bytes as one by queries. On a ring of 4, sending keys around for each query chunk moves 11 times as many
rows as sending them once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import Accumulator
from megatron.context_parallel.attention.ring import RingSource
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.attention.rule import TileKernel
from megatron.context_parallel.fpdt.chunk_work import ChunkWork, LayerFunctions
from megatron.context_parallel.fpdt.host_store import ChunkStore, HiddenStates
from megatron.platform.hooks import replaceable

# Attention between a query chunk and a key chunk. A dry run replays it for pairs of chunks with the same tiles.
attend_chunks, attend_chunks_grad = replaceable(TileKernel.attend), replaceable(TileKernel.attend_grad)


class ChunkPass:
    """One forward pass through the layer, and its backward pass. Chunks are numbered in the order of positions.

    Attributes:
        work: the functions of one chunk, without attention.
        plan: which chunks meet, and the tiles between them.
        store: chunks and sums by name: ("q", "kv", "out", "lse", "dout", "delta", "dq", "dkv" or "sum", chunk).
        x, dx: the layer's input and its gradient; ``spans``: each chunk's rows in both.
        saving: whether a backward pass follows.
    """

    def __init__(self, layer: LayerFunctions, x: Tensor, *, saving: bool) -> None:
        self.layer, self.saving = layer, saving
        self.work = ChunkWork(layer)
        self.plan = layer.plan or attention_plan(layer.layout, layer.rule.mask)
        self.chunks, self.spans = range(layer.layout.chunks), layer.layout.local_chunks
        self.x: HiddenStates | None = HiddenStates(x, layer.offload)
        self.dx: HiddenStates | None = None
        # Without a backward pass chunks stay on the device, which avoids copies. With streamed hidden states device
        # memory is scarce, and chunks are offloaded.
        self.store = ChunkStore(layer.offload if saving or layer.streamed else None)

    def ring(self, key: int, query: int | None = None) -> RingSource:
        """Key chunk ``key`` of every rank, as it travels around the ring; for one or all query chunks."""
        return RingSource(self.plan.ring(chunk=key, query_chunk=query), self.layer.layout.grid.ring)

    def finish(self, query: int, result: Accumulator, x: Tensor | None, y: HiddenStates | None) -> None:
        """Finish a query chunk after its last key chunk. ``x``: its input, if it is still on the device."""
        out, lse = result.finish(self.work.sinks)
        if self.saving:
            self.store.put(("out", query), out)
            self.store.put(("lse", query), lse)
        if y is not None:
            self.work.output(out, self.x.read(self.spans[query]) if x is None else x, query, y)

    def finish_grad(self, chunk: int, x: Tensor, dq: Tensor | None, dkv: Tensor | None, residual: Tensor) -> None:
        """Finish a chunk with complete gradients. dq is None for queries without keys, dkv for keys without queries."""
        self.dx.write_sum(self.spans[chunk], residual, self.work.project_grad(x, dq, dkv, chunk))
        self.store.drop(*((name, chunk) for name in ("kv", "dkv", "q", "dq")))

    def finish_waiting(self, chunks: list[int], fresh: Mapping[tuple, Tensor] = {}) -> None:
        """Finish chunks whose gradients are in the store or still on the device (``fresh``)."""
        spans = [self.spans[chunk] for chunk in chunks]
        waiting = self.store.walk([[("dq", chunk), ("dkv", chunk)] for chunk in chunks], fresh)
        for chunk, x, grads in zip(chunks, self.x.walk(spans), waiting):
            dq, dkv = grads.pop(("dq", chunk), None), grads.pop(("dkv", chunk), None)
            self.finish_grad(chunk, x, dq, dkv, self.dx.read(self.spans[chunk]))
