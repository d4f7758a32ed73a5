# SPDX-License-Identifier: Apache-2.0
"""FPDT for linear attention: a layer in chunks that hand on a state and the last rows before a convolution.

Forward, the chunks of a rank give their outputs for a state of 0 before its spans, and the maps of these; one exchange
gives the states before the spans, and a second pass over the chunks adds what their tokens read of them. Where no state
comes from another rank, there is no second pass. Backward, the last chunk is first, with gradients of states.

For the backward pass a layer keeps its input, which may be a host buffer, and for each chunk the state before it and a
few rows for the convolution. What waits for an exchange is kept in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.fpdt.chunk_work import ChunkWork, LayerFunctions
from megatron.context_parallel.fpdt.host_store import ChunkStore, HiddenStates
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.spans import Span, Spans, count, positions_of
from megatron.context_parallel.linear_attention.decay_spans import DecaySpans
from megatron.context_parallel.linear_attention.fla_kernels import FlaSpans
from megatron.context_parallel.linear_attention.mixer import StateRoute, route_of
from megatron.context_parallel.linear_attention.rules import GATED_DELTA, LinearRule
from megatron.context_parallel.linear_attention.short_convolution import Halo, convolve, indices
from megatron.context_parallel.linear_attention.span_exchange import (
    checked_ends,
    cut_at_forks,
    entry_states,
    exit_grads,
    rows_of,
)
from megatron.context_parallel.linear_attention.span_maps import (
    BlockSpans,
    add_reads,
    apply_map,
    apply_map_grad,
    empty_state,
    identity,
    reads_grad,
)


@dataclass(frozen=True, kw_only=True)
class ChunkedLinearLayer(LayerFunctions):
    """A layer with linear attention as functions of one chunk; other fields are those of ``ChunkedLayer``.

    Attributes:
        project: (x of some rows of a chunk [c, b, h], chunk) -> (mixed [c, b, channels], others ..): token-wise. The
            convolution is applied to ``mixed``.
        heads: (mixed after the convolution, others ..) -> q, k, v, g, beta and perhaps skip, as linear_attention takes
            them.
        output: (out [c, b, heads, V], x of the chunk, chunk) -> [c, b, h], residual added.
        linear: the rule of the linear attention.
        weight, bias, activation: of the convolution, as in ``short_convolution``; weight=None: none. Those that need
            gradients must be among ``parameters``.
        documents, exchange, kernel: as in ``linear_attention``.
        recompute: keep only x for the backward pass, not the states before the chunks.
    """

    heads: Callable[..., Sequence[Tensor]]
    linear: LinearRule = GATED_DELTA
    weight: Tensor | None = None
    bias: Tensor | None = None
    activation: str | None = None
    documents: Sequence[Sequence[int]] = ()
    exchange: str = "auto"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule != AttentionRule():
            raise ValueError("rule= is for softmax attention: give linear= for a rule of linear attention")
        if self.layout.tensor_parts > 1:
            raise ValueError("linear attention in chunks does not support tensor_parts above 1: make the layout with 1")

    def start(self, x: Tensor, *, saving: bool) -> _Pass:
        return _Pass(self, x)


@dataclass(frozen=True)
class _Piece:
    """The part of a chunk that lies in one span.

    Attributes:
        span: the number of the span among those of the rank.
        rows: of the chunk.
        first, last: whether it begins or ends the span.
    """

    span: int
    rows: Span
    first: bool
    last: bool


def _pieces(spans: Spans, chunks: Spans) -> list[list[_Piece]]:
    """For each chunk, its pieces. ``chunks``: the rows of each chunk among the rows of ``spans``."""
    result = []
    for start, stop in chunks:
        cut = [(max(a, start), min(b, stop), a, b, i) for i, (a, b) in enumerate(rows_of(spans))]
        result.append(
            [_Piece(i, (a - start, b - start), a == first, b == last) for a, b, first, last, i in cut if a < b]
        )
    return result


class _Pass:
    """A forward pass over the chunks, and what its backward pass needs of it."""

    def __init__(self, layer: ChunkedLinearLayer, x: Tensor) -> None:
        self.layer, self.work, self.x = layer, ChunkWork(layer), HiddenStates(x, layer.offload)
        self.dx: HiddenStates | None = None
        self.layout, self.chunks = layer.layout, range(layer.layout.chunks)
        self.rows = self.layout.local_chunks
        self.ends = checked_ends(layer.documents, x.size(1), self.layout)
        self.local_pieces = _pieces(cut_at_forks(self.layout.local_spans, self.ends), self.rows)
        self.store = ChunkStore(layer.offload)
        self.route: StateRoute | None = None
        self.states: dict[tuple[int, int], Tensor] = {}  # by chunk and piece: the state before it
        self.tails: list[Tensor | None] = []  # by chunk: the rows before it, if it continues a span
        self.matrices: dict[int, Tensor] = {}
        self.counts: dict[int, list[int]] = {}  # by chunk: the states that wait, of each piece
        self.halo = self.before = self.distances = None
        if layer.weight is not None and layer.weight.size(1) > 1:
            self.halo = Halo.of(self.layout, self.ends, layer.weight.size(1) - 1)
            self.distances = self.halo.distances(x.device)

    # ---- where a chunk's rows lie

    def _set_route(self, inputs: Sequence[Tensor]) -> None:
        self.route = route_of(inputs, self.layer.linear, self.layout, self.ends, self.layer.exchange, self.layer.kernel)
        self.work.ulysses = self.route.ulysses or Axis()
        self.places = self.route.order.of(self.route.axis.rank)
        self.pieces = _pieces(self.route.spans, self.layout.chunk_rows if self.route.ulysses else self.rows)

    def spans_of(self, chunk: int) -> Spans:
        """The positions of a chunk's rows, after the all-to-all if there is one."""
        rows = self.layout.chunk_rows[chunk] if self.route.ulysses else self.rows[chunk]
        return positions_of((rows,), self.route.spans)

    def local(self, chunk: int) -> FlaSpans | DecaySpans | BlockSpans:
        return self.route.local(self.layer.linear, self.spans_of(chunk))

    # ---- from x to q, k, v, g and beta

    @cached_property
    def _sent(self) -> list[tuple[int, Span]]:
        """Rows that are halos of other spans, as consecutive rows of one chunk each."""
        wanted, runs = sorted(set(self.halo.sent)), []
        for chunk, (start, stop) in enumerate(self.rows):
            for row in (row for row in wanted if start <= row < stop):
                if runs and runs[-1][0] == chunk and runs[-1][1][1] == row:
                    runs[-1] = chunk, (runs[-1][1][0], row + 1)
                else:
                    runs.append((chunk, (row, row + 1)))
        return runs

    def _sent_index(self, like: Tensor) -> Tensor:
        place = {row: i for i, row in enumerate(row for _, span in self._sent for row in range(*span))}
        return indices([place[row] for row in self.halo.sent], like)

    def fetch_halo(self) -> None:
        """The rows before each span."""
        if self.halo is None:
            return
        parts = [self.layer.project(self.x.read(span), chunk)[0] for chunk, span in self._sent]
        if not parts:  # the channels are known from any row
            parts = [self.layer.project(self.x.read((0, 1)), 0)[0][:0]]
        rows = torch.cat(parts)
        self.before = self.halo.fetch(rows[self._sent_index(rows)])

    def inputs(
        self, x: Tensor, chunk: int, tail: Tensor | None, before: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """q, k, v, g and beta of a chunk, and the rows before the next one. Differentiable.

        Args:
            tail: the rows before the chunk, if its first piece continues a span.
            before: the rows before each span that begins in the chunk.
        """
        layer = self.layer
        mixed, *others = layer.project(x, chunk)
        if layer.weight is not None:
            parts, before = [], iter(before)
            for piece in self.local_pieces[chunk]:
                rows = mixed[slice(*piece.rows)]
                if self.halo is not None:
                    rows = torch.cat((next(before) if piece.first else tail, rows))
                    tail = rows[len(rows) - self.halo.width :]
                start = self.rows[chunk][0]
                near = None if self.distances is None else self.distances[start + piece.rows[0] : start + piece.rows[1]]
                parts.append(convolve(rows, layer.weight, layer.bias, layer.activation, near))
            mixed = torch.cat(parts)
        return list(layer.heads(mixed, *others)), tail

    def begun(self, chunk: int) -> list[Tensor]:
        """The rows before each span that begins in a chunk."""
        if self.halo is None:
            return []
        return [self.before[piece.span] for piece in self.local_pieces[chunk] if piece.first]

    def continues(self, chunk: int) -> bool:
        """Whether a chunk begins within a span."""
        return not self.local_pieces[chunk][0].first

    # ---- the two passes of a forward pass

    def forward(self, y: HiddenStates | None) -> None:
        self.fetch_halo()
        rule, tail, maps, waiting = self.layer.linear, None, {}, False
        for chunk, x in zip(self.chunks, self.x.walk(self.rows)):
            self.tails.append(tail if self.continues(chunk) else None)
            inputs, tail = self.inputs(x, chunk, tail, self.begun(chunk))
            tail = None if tail is None else tail.clone()  # a view would keep all rows of the chunk
            if self.route is None:
                self._set_route(inputs)
                waiting = self.route.sends
            inputs, local = self.route.arrange(inputs, self.spans_of(chunk)), self.local(chunk)
            self.empty = empty_state(inputs)
            out = torch.empty_like(inputs[2])
            for index, piece in enumerate(self.pieces[chunk]):
                if piece.first:
                    state = self.empty if self.is_fresh(piece) else identity(rule, inputs)
                self.states[chunk, index] = state
                reads = self.reads_of(piece, out)
                _, state = local.outputs(inputs, piece.rows, state, out, reads)
                maps[piece.span] = state
                if waiting and reads is not None:
                    self.store.put(("reads", chunk, index), reads)
            if waiting:
                self.store.put(("out", chunk), out)
            elif y is not None:
                self.work.output(out, x, chunk, y)
        if waiting:
            self._add_states(maps, y)

    def is_fresh(self, piece: _Piece) -> bool:
        return self.places[piece.span].fresh

    def reads_of(self, piece: _Piece, out: Tensor) -> Tensor | None:
        """Memory for what the tokens of a piece read of the state before its span, or before the piece."""
        if self.is_fresh(piece):
            return None
        return out.new_empty((piece.rows[1] - piece.rows[0], *self.empty.shape[:-1]))

    def _add_states(self, maps: dict[int, Tensor], y: HiddenStates | None) -> None:
        """Exchange states, and add what chunks read of them to their outputs."""
        rule, route, columns = self.layer.linear, self.route, self.empty.size(-1)
        sent = {p.index: maps[p.index] for p in self.places if p.hands_on}
        width = columns + rule.map_columns(self.empty.size(-2))
        sent = {index: F.pad(packed, (width - packed.size(-1), 0)) for index, packed in sent.items()}
        self.matrices = {index: packed[..., :-columns].clone() for index, packed in sent.items()}
        entries = entry_states(rule, route.order, route.axis, sent, self.empty, route.relay)
        for chunk, x in zip(self.chunks, self.x.walk(self.rows)):
            out = self.store.pop(("out", chunk))
            for index, piece in enumerate(self.pieces[chunk]):
                if not self.is_fresh(piece):
                    reads, entry = self.store.pop(("reads", chunk, index)), entries[piece.span]
                    add_reads(out[slice(*piece.rows)], reads, entry)
                    self.states[chunk, index] = apply_map(rule, self.states[chunk, index], entry)
            if y is not None:
                self.work.output(out, x, chunk, y)

    # ---- the backward pass

    def backward(self, dy: HiddenStates) -> None:
        rule, route, maps, dx = self.layer.linear, self.route, {}, self.dx
        self.dtail = None
        self.dbefore = None if self.before is None else torch.zeros_like(self.before)
        backwards = self.chunks[::-1]
        rows = [self.rows[chunk] for chunk in backwards]
        for chunk, x, dy_part in zip(backwards, self.x.walk(rows), dy.walk(rows)):
            inputs, _ = self.inputs(x, chunk, self.tails[chunk], self.begun(chunk))
            inputs = route.arrange(inputs, self.spans_of(chunk))
            out = torch.empty_like(inputs[2])
            entries, read = self._outputs_again(chunk, inputs, out)
            dout, residual = self.work.output_grad(out, x, dy_part, chunk)
            if route.sends:
                for index, piece in reversed(list(enumerate(self.pieces[chunk]))):
                    if not self.is_fresh(piece):
                        matrix, reads = read[index]
                        own = torch.cat((matrix, reads_grad(dout[slice(*piece.rows)], reads, self.empty)), dim=-1)
                        after = self.empty if piece.last else maps[piece.span]
                        maps[piece.span] = apply_map_grad(rule, own, after)
                    for number, state in enumerate(entries[index]):
                        self.store.put(("state", chunk, index, number), state.contiguous())
                self.counts[chunk] = [len(states) for states in entries]
                dx.write(self.rows[chunk], residual)
                self.store.put(("dout", chunk), dout)
            else:
                dx.write_sum(self.rows[chunk], residual, self._input_grad(chunk, x, inputs, dout, entries, {}))
        if route.sends:
            after = exit_grads(rule, route.order, route.axis, self._adjoints(maps), self.empty, route.relay)
            for chunk, x in zip(backwards, self.x.walk(rows)):
                inputs, _ = self.inputs(x, chunk, self.tails[chunk], self.begun(chunk))
                inputs, dout = route.arrange(inputs, self.spans_of(chunk)), self.store.pop(("dout", chunk))
                entries = [
                    [self.store.pop(("state", chunk, index, number)) for number in range(count)]
                    for index, count in enumerate(self.counts[chunk])
                ]
                added = self._input_grad(chunk, x, inputs, dout, entries, after)
                dx.write_sum(self.rows[chunk], dx.read(self.rows[chunk]), added)
        if self.halo is not None:
            self._halo_grad()

    def _outputs_again(
        self, chunk: int, inputs: list[Tensor], out: Tensor
    ) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor] | None]]:
        """Compute the outputs of a chunk again. Returns for each piece the states before its segments and, if another
        rank waits for the gradient of the state before it, (M, R) of the piece."""
        rule, local, entries, read = self.layer.linear, self.local(chunk), [], []
        for index, piece in enumerate(self.pieces[chunk]):
            state, columns, reads = self.states.pop((chunk, index)), 0, None
            if self.route.sends and not self.is_fresh(piece):
                columns, reads = rule.map_columns(state.size(-2)), self.reads_of(piece, out)
                state = torch.cat((identity(rule, inputs)[..., :columns], state), dim=-1)
            before, after = local.outputs(inputs, piece.rows, state, out, reads)
            entries.append([one[..., columns:] for one in before])
            read.append(None if reads is None else (after[..., :columns], reads))
        return entries, read

    def _adjoints(self, maps: dict[int, Tensor]) -> dict[int, Tensor]:
        """M and E of the spans that are not fresh."""
        columns, result = self.layer.linear.map_columns(self.empty.size(-2)), {}
        for place in self.places:
            if not place.fresh:
                E = maps[place.index]
                matrix = self.matrices.get(place.index, E.new_zeros((*E.shape[:-1], columns)))
                result[place.index] = torch.cat((matrix, E), dim=-1)
        return result

    def _input_grad(
        self,
        chunk: int,
        x: Tensor,
        inputs: list[Tensor],
        dout: Tensor,
        entries: list[list[Tensor]],
        after: dict[int, Tensor],
    ) -> Tensor:
        """The gradient of a chunk's x through q, k, v, g and beta; ``entries``: for each piece, before its segments."""
        local, grads = self.local(chunk), [torch.zeros_like(one) for one in inputs]
        for index, piece in reversed(list(enumerate(self.pieces[chunk]))):
            if piece.last:
                self.dstate = after.get(piece.span, self.empty)
            self.dstate = local.grads(inputs, piece.rows, entries[index], dout, self.dstate, grads)
        leaf, tail = x.detach().requires_grad_(), self.tails[chunk]
        tail = None if tail is None else tail.detach().requires_grad_()
        begun = [rows.detach().requires_grad_() for rows in self.begun(chunk)]
        with torch.enable_grad():
            sent, next_tail = self.inputs(leaf, chunk, tail, begun)
        heads = sent[2].size(2), sent[0].size(2)
        grads = self.route.arrange_grad(grads, heads, self.spans_of(chunk))
        results, dresults = [*sent], [*grads]
        if self.dtail is not None:
            results, dresults = [*results, next_tail], [*dresults, self.dtail]
        leaves = [leaf, *begun] if tail is None else [leaf, *begun, tail]
        dx, *others = self.work.parameter_grads.differentiate(results, leaves, dresults)
        self.dtail = None if tail is None else others.pop()
        if self.halo is not None:
            starts = [piece.span for piece in self.local_pieces[chunk] if piece.first]
            for span, grad in zip(starts, others):
                self.dbefore[span] = grad
        return dx

    def _halo_grad(self) -> None:
        """Gradients that other spans send back for the rows before them."""
        arrived = self.halo.fetch_grad(self.dbefore)
        total = arrived.new_zeros((count(tuple(span for _, span in self._sent)), *arrived.shape[1:]))
        total.index_put_((self._sent_index(arrived),), arrived, accumulate=True)
        for (chunk, span), grad in zip(self._sent, total.split([stop - start for _, (start, stop) in self._sent])):
            leaf = self.x.read(span).detach().requires_grad_()
            with torch.enable_grad():
                mixed = self.layer.project(leaf, chunk)[0]
            (added,) = self.work.parameter_grads.differentiate(mixed, [leaf], grad)
            self.dx.write_sum(span, self.dx.read(span), added)
