# SPDX-License-Identifier: Apache-2.0
"""One pass of a chunked layer over its chunks, and its backward pass (FPDT paper, sections 4.1 and 4.2; see fpdt.py).

Two loop orders. *By queries*: each query chunk meets its key chunks, keys are what moves. *By keys*: each key chunk
meets its query chunks, queries are what moves. By queries is the better one wherever keys are few (GQA), and nothing
but keys has to wait for its turn; by keys is the paper's order for the backward pass, and the one in which key chunks
can travel around a ring while all query chunks meet them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.context_parallel.attention.attend import Accumulator, sum_dtype
from megatron.context_parallel.attention.ring import KeyBlock, RingSource
from megatron.context_parallel.attention.ring_plan import ring_plan
from megatron.context_parallel.attention.tile import TileKernel
from megatron.context_parallel.attention.ulysses import heads_to_sequence, sequence_to_heads, sequence_to_heads_grad
from megatron.context_parallel.fpdt.chunked_ffn import GradientSums, pieces
from megatron.context_parallel.fpdt.offload import Rows, Shelf
from megatron.context_parallel.layout.spans import Span, place
from megatron.context_parallel.layout.tiles import Tile, tiles

if TYPE_CHECKING:
    from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer


def goes_by_keys(heads: int, kv_heads: int, itemsize: int) -> bool:
    """Whether the backward loop by keys moves fewer bytes than the one by queries."""
    return heads * (3 * itemsize + 8) < kv_heads * (2 * itemsize + 16)


class Pass:
    """One forward pass through the layer, and its backward pass. Chunks are numbered in ascending positions."""

    def __init__(self, job: ChunkedLayer, x: Tensor, *, saving: bool) -> None:
        self.job, self.saving = job, saving
        layout, ring = job.layout, job.layout.grid.ring
        self.chunks = layout.chunks
        self.runs = layout.local_chunks
        self.x: Rows | None = Rows(x, job.offload)
        self.dx: Rows | None = None
        # A pass that keeps nothing for a backward pass keeps its chunks on the device: what it does not send to the
        # host need not come back. Streamed hidden states are for those who have no room for that.
        self.shelf = Shelf(job.offload if saving or job.streamed else None)
        self.spans = [layout.chunk_spans(chunk, ring.rank) for chunk in range(layout.chunks)]
        self.sums = GradientSums(job.parameters)
        self.random: dict[int, Callable[[], AbstractContextManager]] = {}
        self.heads: tuple[int, int] | None = None  # of queries and of keys, before the all-to-all
        self.local_heads: tuple[int, int] | None = None  # and after it
        self.head_dim: int | None = None
        self.kernel: TileKernel | None = None

    @property
    def keys_outside(self) -> bool:
        """Whether the backward pass goes by keys: on a ring, or where that moves fewer bytes to and from the host.

        A tile by queries moves k, v and their fp32 gradients, in and out; by keys it moves q, out, dout and dq.
        """
        if self.job.layout.grid.ring.size > 1:
            return True
        return self.job.offload is not None and goes_by_keys(*self.local_heads, self.x.x.element_size())

    # --- one chunk ---

    def project(self, x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """q [c, b, heads, d] and kv [c, 2, b, kv_heads, d] of all the chunk's tokens, for this rank's heads."""
        q, k, v = self.job.project(x, chunk)
        if self.heads is None:
            self.heads, self.head_dim = (q.size(2), k.size(2)), q.size(3)
        layout = self.job.layout
        q, k, v = sequence_to_heads(q, k, v, layout.grid.ulysses)
        if self.kernel is None:
            self.kernel = self.job.rule.tile_kernel(q, layout.grid.ulysses, layout.seq_length)
        self.local_heads = q.size(2), k.size(2)
        return q.contiguous(), torch.stack((k, v), dim=1)  # views would keep all of q, k and v

    def output(self, out: Tensor, x: Tensor, chunk: int, y: Rows) -> None:
        """From a chunk's attention output to the layer's output."""
        if self.job.replay:
            self.random[chunk] = self.job.replay()
        hidden, (first, _) = self._output(out, x, chunk), self.runs[chunk]
        for start, stop in self.pieces_of(hidden):
            y.write((first + start, first + stop), self.job.ffn(hidden[start:stop]) if self.job.ffn else hidden)

    def _output(self, out: Tensor, x: Tensor, chunk: int) -> Tensor:
        return self.job.output(heads_to_sequence(out, self.job.layout.grid.ulysses), x, chunk)

    def pieces_of(self, hidden: Tensor) -> list[Span]:
        return pieces(hidden.size(0), self.job.ffn_pieces if self.job.ffn else 1)

    def output_grad(self, out: Tensor, x: Tensor, dy: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """dout, and the gradient of x that does not go through attention."""
        out, x = out.detach().requires_grad_(), x.detach().requires_grad_()
        with self.random.pop(chunk, nullcontext)():
            with torch.enable_grad():
                hidden = self._output(out, x, chunk)
            if self.job.ffn:
                dy = self.ffn_grad(hidden.detach(), dy)
        dout, dx, *grads = torch.autograd.grad(hidden, [out, x, *self.sums.wanted], dy, allow_unused=True)
        self.sums.add(grads)
        return dout, dx

    def ffn_grad(self, hidden: Tensor, dy: Tensor) -> Tensor:
        dhidden = torch.empty_like(hidden)
        for start, stop in self.pieces_of(hidden):
            piece = hidden[start:stop].requires_grad_()
            with torch.enable_grad():
                y = self.job.ffn(piece)
            dpiece, *grads = torch.autograd.grad(y, [piece, *self.sums.wanted], dy[start:stop], allow_unused=True)
            dhidden[start:stop] = dpiece
            self.sums.add(grads)
        return dhidden

    def project_grad(self, x: Tensor, dq: Tensor, dkv: Tensor, chunk: int) -> Tensor:
        """The gradient of x through q, k and v."""
        heads, kv_heads = self.heads
        dk, dv = dkv.unbind(1)
        sent = sequence_to_heads_grad(
            *(grad.to(x.dtype) for grad in (dq, dk, dv)),
            self.job.layout.grid.ulysses,
            heads=heads,
            kv_heads=kv_heads,
        )
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            qkv = self.job.project(x, chunk)
        dx, *grads = torch.autograd.grad(qkv, [x, *self.sums.wanted], sent, allow_unused=True)
        self.sums.add(grads)
        return dx

    def finish_grad(self, chunk: int, x: Tensor, dq: Tensor | None, dkv: Tensor | None, residual: Tensor) -> None:
        """All of a chunk's gradients are there; None for queries without keys, and for keys without queries."""
        (start, stop), (heads, kv_heads) = self.job.layout.chunk_rows[chunk], self.local_heads
        if dq is None:
            dq = x.new_zeros((stop - start, x.size(1), heads, self.head_dim))
        if dkv is None:
            dkv = x.new_zeros((stop - start, 2, x.size(1), kv_heads, self.head_dim))
        self.dx.write(self.runs[chunk], residual + self.project_grad(x, dq, dkv, chunk))
        self.shelf.drop(("kv", chunk), ("dkv", chunk), ("q", chunk), ("dq", chunk))

    # --- by queries ---

    def keys_of(self, query: int) -> list[int]:
        """The key chunks that a query chunk meets, on a ring of one."""
        return [key for key in range(self.chunks) if tiles(self.spans[query], self.spans[key], self.job.rule.mask)]

    def tiles_here(self, query: int, key: int) -> Iterator[Tile]:
        """The tiles between two chunks of this rank."""
        return self.kernel.parts(tiles(self.spans[query], self.spans[key], self.job.rule.mask))

    def forward(self, y: Rows | None) -> None:
        """The forward pass into ``y``; without ``y``, only what the backward pass needs."""
        if self.job.layout.grid.ring.size == 1:
            self.forward_by_queries(y)
        else:
            self.forward_by_keys(y)

    def forward_by_queries(self, y: Rows | None) -> None:
        needs = [self.keys_of(query) for query in range(self.chunks)]
        ready = [max(query, *needs[query]) for query in range(self.chunks)]  # the chunk after which it can be computed
        for chunk, x in enumerate(self.x.walk(self.runs)):
            q, kv = self.project(x, chunk)
            fresh = {("q", chunk): q, ("kv", chunk): kv}
            queries = [query for query in range(self.chunks) if ready[query] == chunk]
            if chunk + 1 < self.chunks or self.saving:
                self.shelf.put(("kv", chunk), kv)
            if self.saving or queries != [chunk]:
                self.shelf.put(("q", chunk), q)
            del q, kv
            for query in queries:
                keys = sorted(needs[query], key=lambda key: key != chunk)  # what is here first, while others come
                q = self.shelf.load([("q", query)], fresh)[0].wait()
                result = Accumulator(q)
                for key, there in zip(keys, self.shelf.walk([[("kv", key)] for key in keys], fresh)):
                    k, v = there["kv", key].unbind(1)
                    for tile in self.tiles_here(query, key):
                        result.add(tile.q, *self.kernel.forward(tile, q, k, v))
                self.finish(query, result, x if query == chunk else None, y)

    def finish(self, query: int, result: Accumulator, x: Tensor | None, y: Rows | None) -> None:
        """All keys of a query chunk, whose input may be here still, were met."""
        out, lse = result.finish()
        if self.saving:
            self.shelf.put(("out", query), out)
            self.shelf.put(("lse", query), lse)
        if y is not None:
            self.output(out, self.x.read(self.runs[query]) if x is None else x, query, y)

    def backward_by_queries(self, dy: Rows) -> None:
        """Query chunks from last to first: under a causal mask a chunk's keys are done when its queries are."""
        shelf, queries = self.shelf, range(self.chunks - 1, -1, -1)
        needs = [self.keys_of(query) for query in range(self.chunks)]
        done = [min([key, *(query for query in queries if key in needs[query])]) for key in range(self.chunks)]
        runs = [self.runs[query] for query in queries]
        saved = shelf.walk([[("q", query), ("out", query), ("lse", query)] for query in queries])
        for query, x, dy_chunk, there in zip(queries, self.x.walk(runs), dy.walk(runs), saved):
            finished = [chunk for chunk in range(self.chunks) if done[chunk] == query]
            dq, dkv, residual = self.query_grads(query, x, dy_chunk, there, needs[query], last=query in finished)
            if query in finished:
                self.finish_grad(query, x, dq, dkv, residual)
            else:
                shelf.put(("dq", query), dq)
                self.dx.write(self.runs[query], residual)
            del dq, dkv, residual
            self.finish_waiting([chunk for chunk in finished if chunk != query])

    def query_grads(
        self, query: int, x: Tensor, dy: Tensor, there: dict, keys: list[int], *, last: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """dq of a query chunk, and the gradient of x beside attention; dk and dv of its keys are added to the shelf's.

        With ``last``, its own dk and dv, which nobody adds to any more, are returned and not put away.
        """
        keys = sorted(keys, key=lambda key: key == query)  # its own last
        coming = self.shelf.walk([[("kv", key), ("dkv", key)] for key in keys])
        q, out, lse = (there.pop((name, query)) for name in ("q", "out", "lse"))
        dout, residual = self.output_grad(out, x, dy, query)
        dq, own = Sum(q), None
        for key, pair in zip(keys, coming):
            kv = pair.pop(("kv", key))
            dkv = Sum(kv, pair.pop(("dkv", key), None))
            for tile in self.tiles_here(query, key):
                dq_tile, *dkv_tile = self.kernel.backward(tile, q, *kv.unbind(1), dout, out, lse)
                dq.add(tile.q, dq_tile)
                dkv.add(tile.k, torch.stack(dkv_tile, dim=1))
            if last and key == query:
                own = dkv.total
            else:
                self.shelf.put(("dkv", key), dkv.total)
        self.shelf.drop(("out", query), ("lse", query))
        if last and own is None:
            own = self.shelf.pop(("dkv", query))
        return dq.total, own, residual

    def finish_waiting(self, chunks: list[int], fresh: dict[tuple, Tensor] | None = None) -> None:
        """Finish chunks whose gradients wait on the shelf, or are here still (``fresh``)."""
        runs = [self.runs[chunk] for chunk in chunks]
        waiting = self.shelf.walk([[("dq", chunk), ("dkv", chunk)] for chunk in chunks], fresh or {})
        for chunk, x, there in zip(chunks, self.x.walk(runs), waiting):
            dq, dkv = there.pop(("dq", chunk), None), there.pop(("dkv", chunk), None)
            self.finish_grad(chunk, x, dq, dkv, self.dx.read(self.runs[chunk]))

    # --- by keys ---

    def tiles_of(self, query: int, key: int, block: KeyBlock) -> Iterator[Tile]:
        """The tiles between a query chunk and key chunk ``key`` of the ring rank that a block is from."""
        keys = self.job.layout.chunk_spans(key, block.hop.source)
        found = tiles(self.spans[query], keys, self.job.rule.mask)
        return self.kernel.parts(replace(tile, k=place(tile.k, block.hop.held)) for tile in found)

    def queries_of(self, key: int, ring: int) -> list[int]:
        """The query chunks that meet key chunk ``key`` of ring rank ``ring``."""
        keys = self.job.layout.chunk_spans(key, ring)
        return [query for query in range(self.chunks) if tiles(self.spans[query], keys, self.job.rule.mask)]

    def last_keys(self) -> list[int]:
        """For each query chunk the last key chunk, of any ring rank, that it meets."""
        ring = range(self.job.layout.grid.ring.size)
        met = [(query, key) for key in range(self.chunks) for rank in ring for query in self.queries_of(key, rank)]
        return [max((key for query, key in met if query == chunk), default=0) for chunk in range(self.chunks)]

    def source(self, key: int) -> RingSource:
        return RingSource(ring_plan(self.job.layout, self.job.rule.mask, chunk=key), self.job.layout.grid.ring)

    def forward_by_keys(self, y: Rows | None) -> None:
        shelf, last = self.shelf, self.last_keys()
        for chunk, x in enumerate(self.x.walk(self.runs)):
            q, kv = self.project(x, chunk)
            shelf.put(("q", chunk), q)
            shelf.put(("kv", chunk), kv)
        for key, there in zip(range(self.chunks), shelf.walk([[("kv", key)] for key in range(self.chunks)])):
            for block in self.source(key).blocks(*there["kv", key].unbind(1)):
                queries = self.queries_of(key, block.hop.source)
                names = [[("q", query), ("sum", query), ("sum_lse", query)] for query in queries]
                for query, kept in zip(queries, shelf.walk(names)):
                    q = kept["q", query]
                    result = Accumulator(q, kept.get(("sum", query)), kept.get(("sum_lse", query)))
                    for tile in self.tiles_of(query, key, block):
                        result.add(tile.q, *self.kernel.forward(tile, q, block.k, block.v))
                    # Wide from the start: the shelf writes later sums into the first one's place.
                    shelf.put(("sum", query), result.out_SBHD.to(result.sum_dtype))
                    shelf.put(("sum_lse", query), result.lse_SBH)
            if not self.saving:
                shelf.drop(("kv", key))
            finished = [query for query in range(self.chunks) if last[query] == key]
            names = [[("q", query), ("sum", query), ("sum_lse", query)] for query in finished]
            for query, kept in zip(finished, shelf.walk(names)):
                shelf.drop(("sum", query), ("sum_lse", query))
                result = Accumulator(kept["q", query], kept["sum", query], kept["sum_lse", query])
                self.finish(query, result, None, y)
                if not self.saving:
                    shelf.drop(("q", query))

    def backward_by_keys(self, dy: Rows) -> None:
        """Key chunks from first to last: under a causal mask a chunk's queries are done when its keys are."""
        shelf, last, chunks = self.shelf, self.last_keys(), range(self.chunks)
        outs = shelf.walk([[("out", chunk)] for chunk in chunks])
        for chunk, x, dy_chunk, there in zip(chunks, self.x.walk(self.runs), dy.walk(self.runs), outs):
            dout, residual = self.output_grad(there["out", chunk], x, dy_chunk, chunk)
            shelf.put(("dout", chunk), dout)
            self.dx.write(self.runs[chunk], residual)
        for key, there in zip(chunks, shelf.walk([[("kv", key)] for key in chunks])):
            finished = [chunk for chunk in chunks if max(chunk, last[chunk]) == key]
            fresh = {("dkv", key): self.key_grads(key, there.pop(("kv", key)))}
            if key not in finished:
                shelf.put(*fresh.popitem())
            self.finish_waiting(finished, fresh)
            shelf.drop(*((name, chunk) for chunk in chunks if last[chunk] <= key for name in ("dout", "out", "lse")))

    def key_grads(self, key: int, kv: Tensor) -> Tensor:
        """dk and dv of a key chunk; dq of every query chunk that meets it, on any rank, is added to the shelf's."""
        source = self.source(key)
        for block in source.blocks_with_grads(*kv.unbind(1), sum_dtype(kv.dtype)):
            queries = self.queries_of(key, block.hop.source)
            names = [[(name, query) for name in ("q", "dout", "out", "lse", "dq")] for query in queries]
            for query, there in zip(queries, self.shelf.walk(names)):
                self.pair_grads(key, query, block, there)
        return torch.stack(source.take_grads(), dim=1)

    def pair_grads(self, key: int, query: int, block: KeyBlock, there: dict) -> None:
        q, dout, out, lse = (there.pop((name, query)) for name in ("q", "dout", "out", "lse"))
        dq = Sum(q, there.pop(("dq", query), None))
        for tile in self.tiles_of(query, key, block):
            dq_tile, dk, dv = self.kernel.backward(tile, q, block.k, block.v, dout, out, lse)
            dq.add(tile.q, dq_tile)
            block.add_grad(tile, dk, dv)
        self.shelf.put(("dq", query), dq.total)


class Sum:
    """A gradient that tiles add up in, in fp32 (fp64)."""

    def __init__(self, like: Tensor, total: Tensor | None = None) -> None:
        self.like, self._total = like, total

    @property
    def total(self) -> Tensor:
        if self._total is None:
            self._total = torch.zeros_like(self.like, dtype=sum_dtype(self.like.dtype))
        return self._total

    def add(self, rows: Span, part: Tensor) -> None:
        if self._total is None and rows == (0, self.like.size(0)):
            self._total = part.to(sum_dtype(self.like.dtype))  # the first of all: nothing to add to
        else:
            self.total[rows[0] : rows[1]] += part
