# SPDX-License-Identifier: Apache-2.0
"""One pass of a chunked layer over its chunks: what both loop orders share (FPDT paper, sections 4.1 and 4.2).

*By queries* (by_queries.py): each query chunk meets its key chunks, keys are what moves. *By keys* (by_keys.py): each
key chunk meets its query chunks, queries are what moves. By queries is the better one wherever keys are few (GQA), and
nothing but keys has to wait for its turn; by keys is the paper's order for the backward pass, and the one in which key
chunks can travel around a ring while all query chunks meet them.
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
from megatron.context_parallel.fpdt.host_store import HiddenStates, Shelf
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import place
from megatron.context_parallel.layout.tiles import Tile, tiles
from megatron.platform.hooks import replaceable

# What a query chunk and a key chunk do when they meet. A dry run replays it for pairs of chunks that are alike.
attend_chunks, attend_chunks_grad = replaceable(attend), replaceable(attend_grad)

# Which chunks meet, and in which tiles: the one place where FPDT asks the mask (layout/tiles.py).


@dataclass(frozen=True)
class ChunkTiles:
    """Query chunks are this ring rank's; key chunks are of any rank, ``ring``."""

    layout: SequenceLayout
    mask: Mask

    def between(self, query: int, key: int, ring: int) -> tuple[Tile, ...]:
        """The tiles between two chunks, none where they do not meet."""
        spans = self.layout.chunk_spans
        return tiles(spans(query, self.layout.grid.ring.rank), spans(key, ring), self.mask)

    def of_block(self, query: int, key: int, block: KeyBlock) -> list[Tile]:
        """The tiles between a query chunk and what is held of key chunk ``key`` of the rank that a block is from."""
        found = self.between(query, key, block.hop.source)
        return [replace(tile, k=place(tile.k, block.hop.held)) for tile in found]

    def source(self, key: int, query: int | None = None) -> RingSource:
        """Key chunk ``key`` of every rank, around the ring; for all query chunks, or every rank's chunk ``query``."""
        plan = ring_plan(self.layout, self.mask, chunk=key, query_chunk=query)
        return RingSource(plan, self.layout.grid.ring)

    def keys_of(self, query: int) -> list[int]:
        """The key chunks that a query chunk meets; on a ring, that this chunk of any rank meets on any rank."""
        chunks, ring = range(self.layout.chunks), self.layout.grid.ring
        if ring.size == 1:
            return [key for key in chunks if self.between(query, key, ring.rank)]
        return [key for key in chunks if self.source(key, query).plan.needed]

    def queries_of(self, key: int, ring: int) -> list[int]:
        """The query chunks that meet key chunk ``key`` of ring rank ``ring``."""
        return [query for query in range(self.layout.chunks) if self.between(query, key, ring)]

    def last_keys(self) -> list[int]:
        """For each query chunk the last key chunk, of any ring rank, that it meets; 0 where it meets none."""
        last = [0] * self.layout.chunks
        for key in range(self.layout.chunks):
            for ring in range(self.layout.grid.ring.size):
                for query in self.queries_of(key, ring):
                    last[query] = key
        return last


class ChunkPass:
    """One forward pass through the layer, and its backward pass. Chunks are numbered in ascending positions.

    Attributes:
        work: on one chunk, beside attention.
        tiles: which chunks meet.
        shelf: chunks and sums that wait, by name: ("q", "kv", "out", "lse", "dout", "delta", "dq", "dkv" or "sum",
            chunk).
        x, dx: the layer's input and its gradient; ``spans``: each chunk's rows of them.
        saving: whether a backward pass follows.
    """

    def __init__(self, layer: LayerFunctions, x: Tensor, *, saving: bool) -> None:
        self.layer, self.saving = layer, saving
        self.work = ChunkWork(layer)
        self.tiles = ChunkTiles(layer.layout, layer.rule.mask)
        self.chunks, self.spans = range(layer.layout.chunks), layer.layout.local_chunks
        self.x: HiddenStates | None = HiddenStates(x, layer.offload)
        self.dx: HiddenStates | None = None
        # A pass that keeps nothing for a backward pass keeps its chunks on the device: what it does not send to the
        # host need not come back. Streamed hidden states are for those who have no room for that.
        self.shelf = Shelf(layer.offload if saving or layer.streamed else None)

    def finish(self, query: int, result: Accumulator, x: Tensor | None, y: HiddenStates | None) -> None:
        """All keys of a query chunk were met; ``x``, its input, if it is here still."""
        out, lse = result.finish(self.work.sinks)
        if self.saving:
            self.shelf.put(("out", query), out)
            self.shelf.put(("lse", query), lse)
        if y is not None:
            self.work.output(out, self.x.read(self.spans[query]) if x is None else x, query, y)

    def finish_grad(self, chunk: int, x: Tensor, dq: Tensor | None, dkv: Tensor | None, residual: Tensor) -> None:
        """All of a chunk's gradients are there; None for queries without keys, and for keys without queries."""
        self.dx.write(self.spans[chunk], residual + self.work.project_grad(x, dq, dkv, chunk))
        self.shelf.drop(*((name, chunk) for name in ("kv", "dkv", "q", "dq")))

    def finish_waiting(self, chunks: list[int], fresh: Mapping[tuple, Tensor] = {}) -> None:
        """Finish chunks whose gradients wait on the shelf, or are here still (``fresh``)."""
        spans = [self.spans[chunk] for chunk in chunks]
        waiting = self.shelf.walk([[("dq", chunk), ("dkv", chunk)] for chunk in chunks], fresh)
        for chunk, x, there in zip(chunks, self.x.walk(spans), waiting):
            dq, dkv = there.pop(("dq", chunk), None), there.pop(("dkv", chunk), None)
            self.finish_grad(chunk, x, dq, dkv, self.dx.read(self.spans[chunk]))
