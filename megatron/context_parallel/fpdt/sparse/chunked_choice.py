# SPDX-License-Identifier: Apache-2.0
"""FPDT for learned sparsity: a layer in chunks whose queries choose their keys.

The indexer's keys of the sequence stay on the device; the keys of attention (the latents) go to host memory, a chunk of
all ranks at a time, and come back for each chunk of queries. Latents are so much shorter than all heads' queries that
keys travel, not queries. A chunk is loaded whole: to load only the chosen keys, which may be nearly all
(benchmarks/sparse_counts.py), the host would have to wait for the choice and copy rows one by one.

Device memory: the indexer's keys, 4 bytes a token for their places, and a few chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.fpdt.chunk_work import ChunkWork, LayerFunctions
from megatron.context_parallel.fpdt.host_store import ChunkStore, HiddenStates
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.masks import Causal, Mask
from megatron.context_parallel.layout.spans import positions, split, union
from megatron.context_parallel.layout.tiles import reach
from megatron.context_parallel.sparse_attention.blocks_of_scores import one_by_one
from megatron.context_parallel.sparse_attention.choice import choose_among
from megatron.context_parallel.sparse_attention.chosen_attention import (
    delta,
    mean_over_heads,
    queries_at_a_time,
    select,
)
from megatron.context_parallel.sparse_attention.chosen_math import ENTRIES, Choice, Form
from megatron.context_parallel.sparse_attention.index_loss import Indexer, index_loss, index_loss_grads
from megatron.platform.collectives import gathered, scattered
from megatron.platform.streams import to_device


class Lesson(NamedTuple):
    """How an indexer learns from the attention of its layer (index_loss.py).

    Attributes:
        report: (losses of a chunk's queries [c, b], chunk); called once for each chunk, in the forward pass.
        factor: chunk -> the gradient of the model's loss with respect to these losses [c, b].
        heads: the process group over which heads are distributed (TP); None: this rank has all.
    """

    report: Callable[[Tensor, int], None]
    factor: Callable[[int], Tensor]
    heads: Any = None


@dataclass(frozen=True, kw_only=True)
class ChunkedChoiceLayer(LayerFunctions):
    """A layer of sparse attention as functions of one chunk; other fields are those of ``ChunkedLayer``.

    Attributes:
        project: (x of a chunk [c, b, h], chunk) -> q [c, b, heads, d], kv [c, b, key heads, D] as ``sparse_attention``
            takes them, and an :class:`Indexer`, which gets gradients from its lesson alone; None if the layer does not
            choose.
        output: (attention output [c, b, heads, value size], x of the chunk, chunk) -> [c, b, h], residual added.
        top_k: keys that a query chooses.
        masks: which keys may be chosen; one for each sample, or one for all.
        form: the scale of scores, and the entries of a value.
        kernel: as in ``sparse_attention``.
        lesson: of the indexer; None: it does not learn.
        choosers: process group of ranks with the same queries (TP), each of which chooses for a part of them.
        chooses: whether the layer chooses keys; otherwise it takes the choice in ``choices``.
        choices: of layers that share one, by ("chosen", chunk); None: no other layer uses this one's choice.
    """

    project: Callable[[Tensor, int], tuple[Tensor, Tensor, Indexer | None]]
    top_k: int
    form: Form
    masks: Sequence[Mask] = (Causal(),)
    kernel: str = "auto"
    lesson: Lesson | None = None
    choosers: Any = None
    chooses: bool = True
    choices: ChunkStore | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule != AttentionRule():
            raise ValueError("rule= is for attention to all keys: give masks=, form= and kernel= for chosen ones")

    def start(self, x: Tensor, *, saving: bool) -> _Pass:
        return _Pass(self, x, saving)

    @cached_property
    def needs(self) -> list[list[int]]:
        """For each chunk of queries, the chunks of keys that queries of any rank reach."""
        layout, result = self.layout, []
        rings = range(layout.grid.ring.size)
        held = [[span for ring in rings for span in layout.chunk_spans(chunk, ring)] for chunk in range(layout.chunks)]
        for spans in held:
            met = union(*(reach(spans, mask, layout.seq_length) for mask in self.masks))
            found = [any(a < d and c < b for a, b in keys for c, d in met) for keys in held]
            result.append([chunk for chunk in range(layout.chunks) if found[chunk]])
        return result


class _Pass:
    """One forward pass through the layer, and its backward pass.

    Names in the store: ("q", "index", "weights", "out", "lse", "dq", chunk) of this rank's queries; ("own",
    "own index", chunk) are this rank's keys, ("kv", "dkv", chunk) those of all ranks. ("chosen", chunk) is in the store
    of choices, which later layers may use.
    """

    def __init__(self, layer: ChunkedChoiceLayer, x: Tensor, saving: bool) -> None:
        self.layer, self.layout, self.saving = layer, layer.layout, saving
        self.work, self.x = ChunkWork(layer), HiddenStates(x, layer.offload)
        self.work.ulysses = Axis()  # Ulysses ranks take queries, as ring ranks do: heads stay together
        self.dx: HiddenStates | None = None
        self.store = ChunkStore(layer.offload)
        self.choices = self.store if layer.choices is None else layer.choices
        self.chunks, self.rows = range(self.layout.chunks), self.layout.local_chunks
        self.masks = list(layer.masks) * (x.size(1) // len(layer.masks))
        # Keys in the order of chunks; chunk n has those from edges[n] to edges[n + 1].
        ring, device = self.layout.grid.ring.size, x.device if layer.offload is None else layer.offload.streams.device
        spans = [[s for r in range(ring) for s in self.layout.chunk_spans(chunk, r)] for chunk in self.chunks]
        self.order = [positions(each, device) for each in spans]
        self.first = [ring * start for start, _ in self.layout.chunk_rows] + [self.layout.seq_length]
        self.edges = to_device(torch.tensor(self.first, dtype=torch.int32), device)
        self.places = torch.empty(self.layout.seq_length, dtype=torch.int32, device=device)
        for chunk, at in enumerate(self.order):
            self.places[at] = torch.arange(*self.first[chunk : chunk + 2], dtype=torch.int32, device=device)

    # ---- keys of all ranks

    def _gathered(self, x: Tensor) -> Tensor:
        """A chunk of all ranks."""
        axis = self.layout.grid.context
        return x.contiguous() if axis.size == 1 else gathered(x, axis.group)

    def _own_sum(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks of a chunk of all ranks."""
        axis = self.layout.grid.context
        return x if axis.size == 1 else scattered(x, axis.group)

    def _pieces(self, chosen: Tensor, keys: Sequence[int]) -> list[Choice]:
        """A choice (places, ascending) among the keys of each of these chunks."""
        found = torch.searchsorted(chosen, self.edges.expand(*chosen.shape[:2], -1).contiguous(), out_int32=True)
        return [Choice(chosen - self.first[key], found[..., key], found[..., key + 1], part=True) for key in keys]

    def _positions(self, chosen: Tensor) -> Tensor:
        """The reverse of :meth:`_in_places`: -1 where there is no key."""
        order = torch.cat((*self.order, self.order[0].new_full((1,), -1)))
        return order[chosen.long()]

    def _taught(self, chosen: Tensor, weights: Tensor, heads: int, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For some queries at a time: their rows, the positions that they chose, and the mean weight of these keys.

        ``size``: of a key of the indexer, which is gathered for each of them.
        """
        target = mean_over_heads(weights, heads, self.layer.lesson.heads)
        for start, stop in one_by_one(split((0, len(chosen)), max(1, ENTRIES // max(1, chosen[0].numel() * size)))):
            yield slice(start, stop), self._positions(chosen[start:stop]), target[start:stop]

    def _in_places(self, chosen: Tensor) -> Tensor:
        """Positions as places; after the last key where there is none."""
        places = self.places[chosen.clamp(min=0).long()]
        return places.masked_fill_(chosen < 0, self.layout.seq_length).sort(-1).values

    # ---- the two passes

    def forward(self, y: HiddenStates | None) -> None:
        needs, index = self.layer.needs, None
        ready = [max([query, *needs[query]]) for query in self.chunks]
        for chunk, x in zip(self.chunks, self.x.walk(self.rows)):
            q, own, made = self.layer.project(x, chunk)
            kv, fresh = self._gathered(own), {("q", chunk): q}
            if made is not None:
                own_index = made.k.detach().contiguous()
                index_k = self._gathered(own_index)
                if index is None:
                    index = index_k.new_zeros((self.layout.seq_length, *index_k.shape[1:]))
                index[self.order[chunk]] = index_k
                fresh |= {("index", chunk): made.q.detach(), ("weights", chunk): made.weights.detach()}
                del index_k
            queries = [query for query in self.chunks if ready[query] == chunk]
            if queries != [chunk]:
                for name, part in fresh.items():
                    self.store.put(name, part.contiguous())
            elif self.saving:
                self.store.put(("q", chunk), q.contiguous())
            self.store.put(("kv", chunk), kv)
            if self.saving:
                self.store.put(("own", chunk), own.contiguous())
                if self.layer.lesson is not None:
                    self.store.put(("own index", chunk), own_index)
            fresh[("kv", chunk)] = kv
            del q, own, made, kv
            for query in queries:
                out = self._attend(query, chunk, index, fresh, reports=y is not None)
                if y is not None:
                    self.work.output(out, x if query == chunk else self.x.read(self.rows[query]), query, y)
        self.store.drop(*(("kv", chunk) for chunk in self.chunks))

    def _attend(self, query: int, chunk: int, index: Tensor, fresh: dict[tuple, Tensor], reports: bool) -> Tensor:
        layer, store, choice = self.layer, self.store, ("chosen", query)
        names = [(name, query) for name in (("q", "index", "weights") if layer.chooses else ("q",))]
        q, *index_parts = (loading.wait() for loading in store.load(names, fresh))
        if layer.chooses:
            index_q, weights = index_parts
            spans = self.layout.local_chunk_spans(query)
            how = {"top_k": layer.top_k, "masks": self.masks, "kernel": layer.kernel, "group": layer.choosers}
            chosen = choose_among(index_q, index, weights, spans=spans, **how)
            chosen = self._in_places(chosen)
        else:
            chosen = self.choices.load([choice])[0].wait()
        keys = sorted(layer.needs[query], key=lambda key: key != chunk)  # first this chunk, which is on the device
        sums = accumulation_dtype(q.dtype)
        out = q.new_zeros((*q.shape[:3], layer.form.value_size), dtype=sums)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=sums)
        pieces, coming = self._pieces(chosen, keys), store.walk([[("kv", key)] for key in keys], fresh)
        for key, piece, loaded in zip(keys, pieces, coming):
            kv = loaded["kv", key]
            kernel = select(layer.kernel, q, kv, layer.form.value_size)
            for start, stop in one_by_one(queries_at_a_time(q, kv, chosen, kernel)):
                rows = slice(start, stop)
                kernel.forward(q[rows], kv, piece.rows(start, stop), layer.form, out[rows], lse[rows], first=False)
        out = out.to(q.dtype)
        if layer.lesson is not None and reports:
            given, loss = torch.zeros(chosen.shape, dtype=sums, device=q.device), lse.new_empty(lse.shape[:2])
            for key, piece, loaded in zip(keys, pieces, store.walk([[("kv", key)] for key in keys], fresh)):
                self._add_weights(given, q, loaded["kv", key], piece, lse)
            for rows, at, target in self._taught(chosen, given, q.size(2), index.size(-1)):
                loss[rows] = index_loss(Indexer(index_q[rows], index, weights[rows]), at, target)
            layer.lesson.report(loss, query)
        if layer.chooses and (self.saving or layer.choices is not None):
            self.choices.put(choice, chosen)
        if not self.saving:
            store.drop(*names)
            return out
        kept = {"out": out, "lse": lse}
        if layer.lesson is None:
            store.drop(*names[1:])
        else:
            kept |= {"index": index_q.contiguous(), "weights": weights.contiguous()}
        for name, x in kept.items():
            store.put((name, query), x)
        return out

    def _add_weights(self, given: Tensor, q: Tensor, kv: Tensor, piece: Choice, lse: Tensor) -> None:
        """Add the softmax weights of the keys of a chunk, summed over this rank's heads."""
        kernel = select(self.layer.kernel, q, kv, self.layer.form.value_size)
        for rows in (slice(*span) for span in one_by_one(queries_at_a_time(q, kv, given, kernel))):
            own = piece.rows(rows.start, rows.stop)
            given[rows] += kernel.mean_weights(q[rows], kv, own, self.layer.form, lse[rows])

    def backward(self, dy: HiddenStates) -> None:
        """All queries, whose gradients wait in the store, as those of keys do; then the projections."""
        store, reverse, lesson = self.store, self.chunks[::-1], self.layer.lesson
        index = dindex = None
        for chunk in self.chunks:
            store.put(("kv", chunk), self._gathered(store.pop(("own", chunk))))
            if lesson is not None:
                part = self._gathered(store.pop(("own index", chunk)))
                if index is None:
                    index = part.new_empty((self.layout.seq_length, *part.shape[1:]))
                    dindex = torch.zeros(index.shape, dtype=accumulation_dtype(index.dtype), device=index.device)
                index[self.order[chunk]] = part
        spans = [self.rows[query] for query in reverse]
        saved = store.walk([[(name, query) for name in ("q", "out", "lse")] for query in reverse])
        choices = self.choices.walk([[("chosen", query)] for query in reverse])
        for query, x, dy_part, loaded, choice in zip(reverse, self.x.walk(spans), dy.walk(spans), saved, choices):
            q, out, lse = (loaded.pop((name, query)) for name in ("q", "out", "lse"))
            chosen = choice.pop(("chosen", query))
            dout, residual = self.work.output_grad(out, x, dy_part, query)
            self.dx.write(self.rows[query], residual)
            given = None if lesson is None else torch.zeros(chosen.shape, dtype=lse.dtype, device=q.device)
            store.put(("dq", query), self._query_grads(query, q, chosen, dout, lse, delta(out, dout), given))
            if lesson is not None:
                self._teach(query, chosen, given, q.size(2), index, dindex)
            store.drop(*((name, query) for name in ("q", "out", "lse")))
            if self.layer.choices is None:
                store.drop(("chosen", query))
            del q, chosen, out, lse, dout, residual
        for chunk in self.chunks:
            store.drop(("kv", chunk))
        names = ("dq", "dkv", "dindex", "dweights")
        grads = store.walk([[(name, chunk) for name in names] for chunk in self.chunks])
        for chunk, x, loaded in zip(self.chunks, self.x.walk(self.rows), grads):
            dq, dkv = loaded.pop(("dq", chunk)), loaded.pop(("dkv", chunk), None)
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                q, own, made = self.layer.project(leaf, chunk)
            if dkv is None:  # no query of this rank met this chunk
                dkv = own.new_zeros((len(own) * self.layout.grid.context.size, *own.shape[1:]), dtype=dq.dtype)
                dkv = dkv.to(accumulation_dtype(own.dtype))
            own_sum = self._own_sum(dkv).to(own.dtype)
            results, dresults = [q, own], [dq.to(q.dtype), own_sum]
            if lesson is not None:
                dkeys = self._own_sum(dindex[self.order[chunk]]).to(made.k.dtype)
                results += made
                dresults += [loaded.pop(("dindex", chunk)), dkeys, loaded.pop(("dweights", chunk))]
            (dx,) = self.work.parameter_grads.differentiate(results, [leaf], dresults)
            self.dx.write_sum(self.rows[chunk], self.dx.read(self.rows[chunk]), dx)
            store.drop(*((name, chunk) for name in names))

    def _teach(self, query: int, chosen: Tensor, given: Tensor, heads: int, index: Tensor, dindex: Tensor) -> None:
        """The gradients of the indexer from a chunk of queries; ``given``: softmax weights, summed over heads."""
        index_q, weights = (self.store.pop((name, query)) for name in ("index", "weights"))
        dq, dweights, factor = torch.empty_like(index_q), torch.empty_like(weights), self.layer.lesson.factor(query)
        for rows, at, target in self._taught(chosen, given, heads, index.size(-1)):
            taught = Indexer(index_q[rows], index, weights[rows])
            dq[rows], dweights[rows] = index_loss_grads(taught, at, target, factor[rows], dindex)
        self.store.put(("dindex", query), dq)
        self.store.put(("dweights", query), dweights)

    def _query_grads(
        self,
        query: int,
        q: Tensor,
        chosen: Tensor,
        dout: Tensor,
        lse: Tensor,
        of_rows: Tensor,
        given: Tensor | None,
    ) -> Tensor:
        """dq of a chunk. The gradients of keys are added to the sums in the store, softmax weights to ``given``."""
        store, layer, keys = self.store, self.layer, self.layer.needs[query]
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        pieces, coming = self._pieces(chosen, keys), store.walk([[("kv", key), ("dkv", key)] for key in keys])
        for key, piece, loaded in zip(keys, pieces, coming):
            kv, dkv = loaded.pop(("kv", key)), loaded.pop(("dkv", key), None)
            dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device) if dkv is None else dkv
            kernel = select(layer.kernel, q, kv, layer.form.value_size)
            for rows in (slice(*span) for span in one_by_one(queries_at_a_time(q, kv, chosen, kernel))):
                final = dout[rows], lse[rows], of_rows[rows], dq[rows], dkv
                kernel.grads(q[rows], kv, piece.rows(rows.start, rows.stop), layer.form, *final, first=False)
            store.put(("dkv", key), dkv)
            if given is not None:
                self._add_weights(given, q, kv, piece, lse)
        return dq.to(q.dtype)
