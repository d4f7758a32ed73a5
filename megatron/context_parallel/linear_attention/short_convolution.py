# SPDX-License-Identifier: Apache-2.0
"""A causal depthwise convolution over the complete sequence; a span hands its last rows to the next ones.

Each rank gets the few rows before each of its spans from the ranks that hold them, however short their spans are. No
row passes from a document to another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.attention.ulysses import all_to_all
from megatron.context_parallel.layout.documents import restart
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Spans, numbered, positions
from megatron.context_parallel.linear_attention.span_exchange import (
    Ends,
    begins,
    checked_ends,
    cut_at_forks,
    forks,
    rows_of,
    trees_differ,
)
from megatron.platform.autograd import once_differentiable, refuse_transforms, without_autocast
from megatron.platform.streams import to_device

ACTIVATIONS = {None: (lambda x: x, lambda dy, x: dy), "silu": (F.silu, torch.ops.aten.silu_backward)}


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    layout: SequenceLayout,
    activation: str | None = None,
    documents: Sequence[Sequence[int]] = (),
) -> Tensor:
    """``out[t] = activation(bias + sum over j of weight[:, width - 1 - j] * x[t - j])``, for each channel.

    Args:
        x: [s_local, b, channels], the tokens of ``layout.positions``.
        weight: [channels, width], as in a ``torch.nn.Conv1d`` with ``groups=channels``, without its middle dim.
        bias: [channels].
        layout: which rank holds which tokens.
        activation: None or ``silu``.
        documents: as in ``linear_attention``; what is before a document's first token counts as 0.

    Returns:
        Like x; sums are fp32, or fp64 for fp64. A rank's gradients of weight and bias are from its own tokens; their
        sum over ``grid.context`` is complete.

    Raises:
        ValueError: shapes do not fit, or the activation is unknown.
    """
    refuse_transforms("short_convolution")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown: use one of {list(ACTIVATIONS)}")
    if layout.chunks > 1:
        raise ValueError(f"the layout has {layout.chunks} chunks: make the layout with chunks=1")
    if x.dim() != 3 or len(x) != layout.local_length:
        raise ValueError(f"x has shape {list(x.shape)}, but must be [{layout.local_length}, b, channels]")
    if weight.dim() != 2 or len(weight) != x.size(2) or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"weight must be [{x.size(2)}, width] and bias [{x.size(2)}] for x {list(x.shape)}")
    if trees_differ(documents):
        how = {"layout": layout, "activation": activation}
        samples = zip(x.split(1, dim=1), documents, strict=True)
        return torch.cat([short_convolution(one, weight, bias, documents=[tree], **how) for one, tree in samples], 1)
    ends = checked_ends(documents, x.size(1), layout)
    return _ShortConvolution.apply(x, weight, bias, Halo.of(layout, ends, weight.size(1) - 1), activation)


@dataclass(frozen=True)
class Halo:
    """The rows before each span of this rank, and where they come from.

    Attributes:
        axis: the context ranks.
        spans: this rank's.
        ends: of documents.
        width: rows before each span, in a tree on its path; those before the sequence or, for all samples, before a
            document are 0.
        send: for each rank, the rows of this rank that it needs.
        receive: for each rank, the places among all halo rows of this rank for the rows that it sends.
    """

    axis: Axis
    spans: Spans
    ends: Ends
    width: int
    send: tuple[tuple[int, ...], ...]
    receive: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: SequenceLayout, ends: Ends, width: int) -> Halo:
        send, receive = _messages(layout.without_groups(), ends, width)
        spans = cut_at_forks(layout.local_spans, ends)
        return cls(layout.grid.context, spans, ends, width, send, receive)

    @property
    def sent(self) -> list[int]:
        """The rows of this rank that it sends, also to itself; one may occur more than once."""
        return [row for rows in self.send for row in rows]

    def fetch(self, rows: Tensor) -> Tensor:
        """The rows before each span [spans, width, b, channels], from the rows ``sent`` of all ranks."""
        halo = rows.new_zeros((len(self.spans) * self.width, *rows.shape[1:]))
        halo[self._received(rows)] = self._swap(rows, self.send, self.receive)
        return halo.view(len(self.spans), self.width, *rows.shape[1:])

    def fetch_grad(self, dhalo: Tensor) -> Tensor:
        """The backward pass of :meth:`fetch`: the gradients of the rows ``sent``."""
        return self._swap(dhalo.flatten(0, 1)[self._received(dhalo)], self.receive, self.send)

    def _swap(self, rows: Tensor, send: Sequence[Sequence[int]], receive: Sequence[Sequence[int]]) -> Tensor:
        if self.axis.size == 1:
            return rows
        sizes = [[len(one) for one in places] for places in (receive, send)]
        result = rows.new_empty((sum(sizes[0]), *rows.shape[1:]))
        all_to_all(result, rows.contiguous(), self.axis.group, *sizes)
        return result

    def _received(self, like: Tensor) -> Tensor:
        return indices([row for rows in self.receive for row in rows], like)

    def distances(self, device: torch.device) -> Tensor | None:
        """How many tokens of its document are before each token, int64 [rows, samples or 1, 1]; None: one document."""
        if not self.ends:
            return None
        at = positions(self.spans, torch.device("cpu"))
        return to_device(torch.stack([restart(at, one) for one in self.ends], dim=1).unsqueeze(2), device)


def indices(rows: Sequence[int], like: Tensor) -> Tensor:
    """Row numbers as an index into tensors on the device of ``like``."""
    return to_device(torch.tensor(rows, dtype=torch.int64), like.device)


@lru_cache(maxsize=64)
def _messages(layout: SequenceLayout, ends: Ends, width: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """``send`` and ``receive`` of :class:`Halo`, for the rank of ``layout``, which has no groups."""
    grid, fresh, parents = layout.grid, begins(ends), forks(ends)
    held = [layout.spans(ulysses=u, ring=r) for r in range(grid.ring.size) for u in range(grid.ulysses.size)]
    places = sorted((span, rank, row) for rank, spans in enumerate(held) for row, span in numbered(spans))
    send: list[list[int]] = [[] for _ in held]
    receive: list[list[int]] = [[] for _ in held]
    for needing, spans in enumerate(held):
        for index, (start, _) in enumerate(cut_at_forks(spans, ends)):
            for back, at in enumerate(_before(start, fresh, parents, width), 1):
                (begin, _), rank, row = places[bisect_right(places, at, key=lambda place: place[0][0]) - 1]
                if rank == grid.context.rank:
                    send[needing].append(row + at - begin)
                if needing == grid.context.rank:
                    receive[rank].append((index + 1) * width - back)
    return tuple(map(tuple, send)), tuple(map(tuple, receive))


def _before(start: int, fresh: set[int], parents: dict[int, int], width: int) -> list[int]:
    """The positions of the last tokens before ``start``, the nearest first, in a tree on its path."""
    found: list[int] = []
    while len(found) < width and start not in fresh:
        start = parents.get(start, start) - 1
        found.append(start)
    return found


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, distances: Tensor | None = None
) -> Tensor:
    """The convolution of rows that follow width - 1 rows before them: [width - 1 + s, b, channels] -> [s, b, channels].

    Differentiable. Sums are fp32 (fp64 for fp64).

    Args:
        distances: int64 [s, samples or 1, 1], how many earlier tokens of a document each token sees; None: all.
    """
    total = _sums(x, weight, bias, distances)
    return ACTIVATIONS[activation][0](total).to(x.dtype)


def _taps(x: Tensor, width: int, distances: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """For each column of the weight, the rows that it multiplies; with None for tokens of other documents."""
    count = len(x) - width + 1
    for column in range(width):
        rows = x[column : column + count]
        back = width - 1 - column
        yield column, rows if distances is None or not back else rows.masked_fill(distances < back, 0.0)


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, distances: Tensor | None) -> Tensor:
    wide = accumulation_dtype(x.dtype)
    total = None
    for column, rows in _taps(x, weight.size(1), distances):
        part = rows * weight[:, column].to(wide)
        total = part if total is None else total + part
    return total if bias is None else total + bias.to(wide)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, halo: Halo, activation: str | None) -> Tensor:
        out, before, distances = torch.empty_like(x), halo.fetch(x[indices(halo.sent, x)]), halo.distances(x.device)
        for index, rows in enumerate(rows_of(halo.spans)):
            at = slice(*rows)
            whole = torch.cat((before[index], x[at]))
            out[at] = convolve(whole, weight, bias, activation, None if distances is None else distances[at])
        ctx.save_for_backward(x, before, weight, bias)
        ctx.halo, ctx.activation = halo, activation
        return out

    @staticmethod
    @once_differentiable("a short convolution")
    @without_autocast
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, before, weight, bias = ctx.saved_tensors
        halo, wide, width = ctx.halo, accumulation_dtype(x.dtype), weight.size(1)
        dx, dbefore = torch.zeros_like(x, dtype=wide), torch.zeros_like(before, dtype=wide)
        dweight, dbias = torch.zeros_like(weight, dtype=wide), torch.zeros_like(weight[:, 0], dtype=wide)
        every = halo.distances(x.device)
        for index, rows in enumerate(rows_of(halo.spans)):
            at = slice(*rows)
            distances = None if every is None else every[at]
            whole = torch.cat((before[index], x[at]))
            total = _sums(whole, weight, bias, distances)
            dtotal = ACTIVATIONS[ctx.activation][1](dout[at].to(wide), total)
            dwhole = torch.zeros_like(whole, dtype=wide)
            for column, used in _taps(whole, width, distances):
                dweight[:, column] += (dtotal * used).sum((0, 1))
                drows = dtotal * weight[:, column].to(wide)
                if distances is not None:
                    drows = drows.masked_fill(distances < width - 1 - column, 0.0)
                dwhole[column : column + len(dtotal)] += drows
            dbias += dtotal.sum((0, 1))
            dbefore[index], part = dwhole.split((width - 1, len(dtotal)))
            dx[at] += part
        # A row may have been sent more than once; unlike index_add_ this sum has always the same order.
        dx.index_put_((indices(halo.sent, dx),), halo.fetch_grad(dbefore), accumulate=True)
        dbias = None if bias is None else dbias.to(bias.dtype)
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias, None, None
