# SPDX-License-Identifier: Apache-2.0
"""Which global token positions each rank holds, in local order.

Tokens, labels, loss mask, position ids, RoPE, tiles and the data loader are all derived from the layout.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from megatron.context_parallel.layout.documents import balance_documents
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.spans import Span, Spans, positions, positions_of
from megatron.context_parallel.layout.tree import segment_ends
from megatron.decisions.division import length_unit
from megatron.platform.autograd import once_differentiable, refuse_transforms
from megatron.platform.collectives import gathered, scattered

Balance = Literal["zigzag", "contiguous", "documents"]
KEPT = 64  # layouts of batches of documents that a layout remembers


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence of ``seq_length`` tokens is distributed over the context-parallel ranks.

    ``zigzag`` (USP paper, algorithm 2): ring rank r of R holds blocks r and 2R-1-r of 2R, so that under a causal mask
    all ring ranks do the same work. ``contiguous``: ring rank r holds the r-th of R blocks. ``documents``: packed
    documents are distributed so that the work is even (``balance_documents`` in layout/documents.py).
    In each case a ring rank's part is cut over its Ulysses ranks such that the all-to-all over heads restores the
    order.

    With ``chunks`` above one (FPDT paper, figure 6) a ring rank's part is first cut into chunks, then each chunk over
    the Ulysses ranks, so that the all-to-all of every chunk restores its order. Under TP sequence parallelism each
    Ulysses rank's part of a chunk is cut over the TP ranks, and the local order is TP-rank-major: TP rank t holds the
    t-th part of every chunk, and gathering chunk c over TP gives chunk c in order. For example 16 tokens on one ring
    and Ulysses rank, in chunks 0-7 and 8-15 over 2 TP ranks: TP rank 0 holds 0-3 and 8-11, TP rank 1 4-7 and 12-15.

    Args:
        seq_length: tokens of the complete sequence.
        grid: the process grid.
        balance: zigzag, contiguous or documents.
        chunks: number of parts of a ring rank's sequence; lengths differ by at most Ulysses x tensor_parts tokens.
        tensor_parts: TP size if TP ranks split the tokens between the layers, else 1.
        document_ends: for the balance "documents", one past the last token of each document; () is one document.

    Raises:
        ValueError: the length cannot be cut evenly; the message names the next lengths that can.
    """

    seq_length: int
    grid: Grid
    balance: Balance = "zigzag"
    chunks: int = 1
    tensor_parts: int = 1
    document_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.balance not in ("zigzag", "contiguous", "documents"):
            raise ValueError(f"balance {self.balance} is unknown: use zigzag, contiguous or documents")
        object.__setattr__(self, "document_ends", segment_ends(self.document_ends, "document_ends"))
        if self.document_ends and self.balance != "documents":
            raise ValueError(f"document_ends need balance=documents, not {self.balance}")
        if self.document_ends and self.document_ends[-1] != self.seq_length:
            raise ValueError(
                f"the last of document_ends must be the length of the sequence, {self.seq_length}, not "
                f"{self.document_ends[-1]}"
            )
        unit = length_unit(self.grid.ulysses.size, self.grid.ring.size, self.balance, self.tensor_parts)
        if self.seq_length < 1 or self.seq_length % unit:
            below, above = self.seq_length // unit * unit, (self.seq_length // unit + 1) * unit
            raise ValueError(
                f"a sequence of {self.seq_length} tokens cannot be divided by Ulysses {self.grid.ulysses.size} x Ring "
                f"{self.grid.ring.size} ({self.balance}): use a multiple of {unit}, for example "
                f"{below or above} or {above}"
            )
        most = self.seq_length // (self.grid.ring.size * self.chunk_unit)
        if not 1 <= self.chunks <= most:
            raise ValueError(
                f"a sequence of {self.seq_length} tokens cannot be cut in {self.chunks} chunks over Ulysses "
                f"{self.grid.ulysses.size} x Ring {self.grid.ring.size} x {self.tensor_parts} TP parts: use 1 to {most}"
            )

    @property
    def local_length(self) -> int:
        """Number of tokens that this rank (with all its TP ranks) holds."""
        return self.seq_length // (self.grid.ulysses.size * self.grid.ring.size)

    def ring_spans(self, ring: int) -> Spans:
        """Positions that ring rank ``ring`` (all its Ulysses ranks) holds, in the order after the all-to-all.

        This method defines each balance. decisions/division.py has the unit of lengths that a balance needs, and
        formulas/ring_work.py its work.
        """
        size = self.grid.ring.size
        if self.balance == "contiguous" or size == 1:
            block = self.seq_length // size
            return ((ring * block, (ring + 1) * block),)
        if self.balance == "documents":
            return self.balanced_spans[ring]
        block = self.seq_length // (2 * size)
        low, high = ring, 2 * size - 1 - ring
        if high == low + 1:  # the two blocks in the middle touch
            return ((low * block, (high + 1) * block),)
        return ((low * block, (low + 1) * block), (high * block, (high + 1) * block))

    @cached_property
    def balanced_spans(self) -> tuple[Spans, ...]:
        """For the balance "documents", the positions of each ring rank."""
        return balance_documents(self.document_ends or (self.seq_length,), self.grid.ring.size)

    @property
    def dealt(self) -> tuple[Spans, ...]:
        """The former name of :attr:`balanced_spans`."""
        warnings.warn("SequenceLayout.dealt is now balanced_spans", DeprecationWarning, stacklevel=2)
        return self.balanced_spans

    def of_documents(self, ends: tuple[int, ...], balanced_spans: tuple[Spans, ...] = ()) -> SequenceLayout:
        """The layout for a sequence of packed documents; this layout itself unless the balance depends on documents.

        Args:
            balanced_spans: of the result, if known. Later calls for these documents return the same layout.
        """
        if self.balance != "documents":
            return self
        ends = segment_ends(ends, "the ends of documents")
        if ends not in self._of_documents:
            if len(self._of_documents) == KEPT:
                del self._of_documents[next(iter(self._of_documents))]  # the oldest
            self._of_documents[ends] = replace(self, document_ends=ends)
        if balanced_spans:
            self._of_documents[ends].__dict__["balanced_spans"] = balanced_spans
        return self._of_documents[ends]

    @cached_property
    def _of_documents(self) -> dict[tuple[int, ...], SequenceLayout]:
        return {}

    def without_groups(self) -> SequenceLayout:
        """An equal layout without process groups and without tensors of positions, as a key of caches."""
        grid = self.grid
        return replace(self, grid=grid.at(ulysses=grid.ulysses.rank, ring=grid.ring.rank, tensor=grid.tensor.rank))

    @property
    def chunk_unit(self) -> int:
        """The length of a chunk on a ring rank is a multiple of this."""
        return self.grid.ulysses.size * self.tensor_parts

    @cached_property
    def chunk_rows(self) -> Spans:
        """Each chunk's rows among the rows of a ring rank (all its Ulysses ranks)."""
        units = self.seq_length // (self.grid.ring.size * self.chunk_unit)
        bounds = [units * index // self.chunks * self.chunk_unit for index in range(self.chunks + 1)]
        return tuple(zip(bounds, bounds[1:]))

    @cached_property
    def local_chunks(self) -> Spans:
        """Each chunk's rows among the rows of one rank; under TP sequence parallelism, of one TP rank."""
        return tuple((start // self.chunk_unit, stop // self.chunk_unit) for start, stop in self.chunk_rows)

    def chunk_spans(self, chunk: int, ring: int) -> Spans:
        """Positions of a chunk of ring rank ``ring``, in the order after the chunk's all-to-all."""
        return positions_of((self.chunk_rows[chunk],), self.ring_spans(ring))

    def local_chunk_spans(self, chunk: int) -> Spans:
        """Positions of this rank's part of a chunk (all its TP ranks together), in order."""
        rows = self._ulysses_part(self.chunk_rows[chunk], self.grid.ulysses.rank)
        return positions_of((rows,), self.ring_spans(self.grid.ring.rank))

    def _ulysses_part(self, rows: Span, ulysses: int) -> Span:
        width = (rows[1] - rows[0]) // self.grid.ulysses.size
        return rows[0] + ulysses * width, rows[0] + (ulysses + 1) * width

    def spans(self, *, ulysses: int, ring: int) -> Spans:
        """Positions that one rank (with all its TP ranks) holds, in local order."""
        rows = []
        for part in range(self.tensor_parts):
            for chunk in self.chunk_rows:
                start, stop = self._ulysses_part(chunk, ulysses)
                width = (stop - start) // self.tensor_parts
                rows.append((start + part * width, start + (part + 1) * width))
        return positions_of(rows, self.ring_spans(ring))

    @property
    def local_spans(self) -> Spans:
        """Positions that this rank holds, in local order."""
        return self.spans(ulysses=self.grid.ulysses.rank, ring=self.grid.ring.rank)

    @cached_property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens, int64 [s_local] on the CPU."""
        return positions(self.local_spans, torch.device("cpu"))

    @cached_property
    def order(self) -> Tensor:
        """Global positions in the order of an all-gather over the context-parallel ranks, int64 [seq_length]."""
        ranks = ((u, r) for r in range(self.grid.ring.size) for u in range(self.grid.ulysses.size))
        spans = tuple(span for u, r in ranks for span in self.spans(ulysses=u, ring=r))
        return positions(spans, torch.device("cpu"))

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of ``x``. Differentiable.

        Args:
            x: [.., seq_length at ``dim``, ..] of any dtype, on any device, the same on every rank.

        Returns:
            [.., s_local at ``dim``, ..], a copy.

        Raises:
            ValueError: ``dim`` has another length.
        """
        if x.size(dim) != self.seq_length:
            raise ValueError(f"dim {dim} has {x.size(dim)} tokens, but the layout is for {self.seq_length}")
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.local_spans], dim)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The complete sequence along ``dim``, from every rank's part: ``gather(shard(x)) == x``.

        Differentiable; the gradient of a rank's part is summed over all ranks that used the result. All ranks of
        ``grid.context`` call it together.

        Args:
            x: [.., s_local at ``dim``, ..] of any dtype that the group's backend supports.

        Returns:
            [.., seq_length at ``dim``, ..], the same on every rank.

        Raises:
            ValueError: ``dim`` has another length.
        """
        if x.size(dim) != self.local_length:
            raise ValueError(f"dim {dim} has {x.size(dim)} tokens, but a rank holds {self.local_length}")
        refuse_transforms("layout.gather")
        return _Gather.apply(x, dim, self)

    def sum_parts(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of the sum over all ranks of a complete ``x``: the gradient of :meth:`gather`."""
        parts = x.movedim(dim, 0)[self.order.to(x.device)].contiguous()
        context = self.grid.context
        return (parts if context.size == 1 else scattered(parts, context.group)).movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
        ctx.dim, ctx.layout = dim, layout
        order, context = layout.order.to(x.device), layout.grid.context
        x = x.movedim(dim, 0).contiguous()
        parts = x if context.size == 1 else gathered(x, context.group)
        complete = torch.empty_like(parts)
        complete[order] = parts
        return complete.movedim(0, dim)

    @staticmethod
    @once_differentiable("layout.gather")
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layout.sum_parts(grad, ctx.dim), None, None
