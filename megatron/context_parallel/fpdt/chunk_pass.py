# SPDX-License-Identifier: Apache-2.0
"""One pass of a chunked layer over its chunks: the parts that both loop orders share (FPDT paper, 4.1 and 4.2).

*By queries* (by_queries.py): the outer loop is over query chunks, and keys are loaded. *By keys* (by_keys.py): the
outer loop is over key chunks, and queries are loaded. By queries is better if there are few key heads (GQA). By keys is
the paper's order for the backward pass; in it a key chunk goes around a ring once for all query chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.context_parallel.attention.attend import attend, attend_grad
from megatron.context_parallel.attention.merge import Accumulator
from megatron.context_parallel.attention.ring import KeyBlock, RingSource
from megatron.context_parallel.attention.ring_plan import ring_plan
from megatron.context_parallel.fpdt.chunk_work import ChunkWork, LayerFunctions
from megatron.context_parallel.fpdt.host_store import ChunkStore, HiddenStates
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import place
from megatron.context_parallel.layout.tiles import Tile, tiles
from megatron.platform.hooks import replaceable

# Attention between a query chunk and a key chunk. A dry run replays it for pairs of chunks with the same tiles.
attend_chunks, attend_chunks_grad = replaceable(attend), replaceable(attend_grad)


@dataclass(frozen=True)
class ChunkTiles:
    """The tiles between this ring rank's query chunks and any ring rank's key chunks; chunks with tiles *meet*."""

    layout: SequenceLayout
    mask: Mask

    def between(self, query: int, key: int, ring: int) -> tuple[Tile, ...]:
        """The tiles between a query chunk and key chunk ``key`` of rank ``ring``; none if they do not meet."""
        spans = self.layout.chunk_spans
        return tiles(spans(query, self.layout.grid.ring.rank), spans(key, ring), self.mask)

    def of_block(self, query: int, key: int, block: KeyBlock) -> list[Tile]:
        """The tiles between a query chunk and a block, which holds rows of key chunk ``key`` of some rank."""
        between = self.between(query, key, block.hop.source)
        return [replace(tile, k=place(tile.k, block.hop.held)) for tile in between]

    def source(self, key: int, query: int | None = None) -> RingSource:
        """Key chunk ``key`` of every rank, as it travels around the ring; for one query chunk, or for all."""
        plan = ring_plan(self.layout, self.mask, chunk=key, query_chunk=query)
        return RingSource(plan, self.layout.grid.ring)

    def keys_of(self, query: int) -> list[int]:
        """The key chunks that a query chunk meets; on a ring, those that it meets on any pair of ranks."""
        chunks, ring = range(self.layout.chunks), self.layout.grid.ring
        if ring.size == 1:
            return [key for key in chunks if self.between(query, key, ring.rank)]
        return [key for key in chunks if self.source(key, query).plan.needed]

    def queries_of(self, key: int, ring: int) -> list[int]:
        """The query chunks that meet key chunk ``key`` of ring rank ``ring``."""
        return [query for query in range(self.layout.chunks) if self.between(query, key, ring)]

    def last_keys(self) -> list[int]:
        """For each query chunk the last key chunk, of any ring rank, that it meets; 0 if it meets none."""
        last = [0] * self.layout.chunks
        for key in range(self.layout.chunks):
            for ring in range(self.layout.grid.ring.size):
                for query in self.queries_of(key, ring):
                    last[query] = key
        return last


class ChunkPass:
    """One forward pass through the layer, and its backward pass. Chunks are numbered in ascending positions.

    Attributes:
        work: the functions of one chunk, without attention.
        tiles: which chunks meet.
        store: chunks and sums by name: ("q", "kv", "out", "lse", "dout", "delta", "dq", "dkv" or "sum", chunk).
        x, dx: the layer's input and its gradient; ``spans``: each chunk's rows in both.
        saving: whether a backward pass follows.
    """

    def __init__(self, layer: LayerFunctions, x: Tensor, *, saving: bool) -> None:
        self.layer, self.saving = layer, saving
        self.work = ChunkWork(layer)
        self.tiles = ChunkTiles(layer.layout, layer.rule.mask)
        self.chunks, self.spans = range(layer.layout.chunks), layer.layout.local_chunks
        self.x: HiddenStates | None = HiddenStates(x, layer.offload)
        self.dx: HiddenStates | None = None
        # Without a backward pass chunks stay on the device, which avoids copies. With streamed hidden states device
        # memory is scarce, and chunks are offloaded.
        self.store = ChunkStore(layer.offload if saving or layer.streamed else None)

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
        self.dx.write(self.spans[chunk], residual + self.work.project_grad(x, dq, dkv, chunk))
        self.store.drop(*((name, chunk) for name in ("kv", "dkv", "q", "dq")))

    def finish_waiting(self, chunks: list[int], fresh: Mapping[tuple, Tensor] = {}) -> None:
        """Finish chunks whose gradients are in the store or still on the device (``fresh``)."""
        spans = [self.spans[chunk] for chunk in chunks]
        waiting = self.store.walk([[("dq", chunk), ("dkv", chunk)] for chunk in chunks], fresh)
        for chunk, x, grads in zip(chunks, self.x.walk(spans), waiting):
            dq, dkv = grads.pop(("dq", chunk), None), grads.pop(("dkv", chunk), None)
            self.finish_grad(chunk, x, dq, dkv, self.dx.read(self.spans[chunk]))
