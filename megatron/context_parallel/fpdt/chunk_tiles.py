# SPDX-License-Identifier: Apache-2.0
"""Which chunks meet, and in which tiles: the one place where FPDT asks the mask (layout/tiles.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.context_parallel.attention.ring import KeyBlock, RingSource
from megatron.context_parallel.attention.ring_plan import ring_plan
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import place
from megatron.context_parallel.layout.tiles import Tile, tiles


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
