# SPDX-License-Identifier: Apache-2.0
"""Which global token positions each rank holds, in local order: the one source of truth for positions.

Tokens, labels, loss mask, position ids, RoPE, the tiles and the data loader all derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.context_parallel.grid import Grid
from megatron.context_parallel.masks import Span

Balance = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class SequenceLayout:
    """How a sequence of ``seq_length`` tokens is dealt over the context-parallel ranks.

    ``zigzag`` (USP paper, algorithm 2): ring rank r of R holds blocks r and 2R-1-r of 2R, so that under a causal mask
    all ring ranks do the same work. ``contiguous``: ring rank r holds the r-th of R blocks. Either way, a ring rank's
    sequence is cut over its Ulysses ranks, so that the all-to-all over heads restores the order.

    Raises:
        ValueError: the length cannot be cut evenly; the message names the next lengths that can.
    """

    seq_length: int
    grid: Grid
    balance: Balance = "zigzag"

    def __post_init__(self) -> None:
        if self.balance not in ("zigzag", "contiguous"):
            raise ValueError(f"balance {self.balance} is unknown: use zigzag or contiguous")
        unit = length_unit(self.grid.ulysses.size, self.grid.ring.size, self.balance)
        if self.seq_length < 1 or self.seq_length % unit:
            below, above = self.seq_length // unit * unit, (self.seq_length // unit + 1) * unit
            raise ValueError(
                f"a sequence of {self.seq_length} tokens cannot be cut over Ulysses {self.grid.ulysses.size} x Ring "
                f"{self.grid.ring.size} ({self.balance}): use a multiple of {unit}, for example "
                f"{below or above} or {above}"
            )

    @property
    def local_length(self) -> int:
        """Tokens this rank holds."""
        return self.seq_length // (self.grid.ulysses.size * self.grid.ring.size)

    def ring_spans(self, ring: int) -> tuple[Span, ...]:
        """Positions that ring rank ``ring`` holds with its Ulysses ranks, in the order after the all-to-all."""
        size = self.grid.ring.size
        if self.balance == "contiguous" or size == 1:
            block = self.seq_length // size
            return ((ring * block, (ring + 1) * block),)
        block = self.seq_length // (2 * size)
        low, high = ring, 2 * size - 1 - ring
        if high == low + 1:  # the two blocks in the middle touch
            return ((low * block, (high + 1) * block),)
        return ((low * block, (low + 1) * block), (high * block, (high + 1) * block))

    def spans(self, *, ulysses: int, ring: int) -> tuple[Span, ...]:
        """Positions that one rank holds, in local order."""
        first, stop = ulysses * self.local_length, (ulysses + 1) * self.local_length
        held, row = [], 0
        for start, end in self.ring_spans(ring):
            low, high = max(first - row, 0), min(stop - row, end - start)
            if low < high:
                held.append((start + low, start + high))
            row += end - start
        return tuple(held)

    @property
    def local_spans(self) -> tuple[Span, ...]:
        """Positions that this rank holds, in local order."""
        return self.spans(ulysses=self.grid.ulysses.rank, ring=self.grid.ring.rank)

    @cached_property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens, int64 [s_local] on the CPU."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.local_spans])

    @cached_property
    def order(self) -> Tensor:
        """Global positions in the order of an all-gather over the context-parallel ranks, int64 [seq_length]."""
        ranks = ((u, r) for r in range(self.grid.ring.size) for u in range(self.grid.ulysses.size))
        spans = [span for u, r in ranks for span in self.spans(ulysses=u, ring=r)]
        return torch.cat([torch.arange(start, stop) for start, stop in spans])

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of ``x``, which holds the whole sequence along ``dim``. Differentiable."""
        if x.size(dim) != self.seq_length:
            raise ValueError(f"dim {dim} has {x.size(dim)} tokens, the layout is for {self.seq_length}")
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.local_spans], dim)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The whole sequence along ``dim``, from every rank's part: ``gather(shard(x)) == x``.

        Differentiable; the gradient of a rank's part is summed over all ranks that used the whole.
        """
        if x.size(dim) != self.local_length:
            raise ValueError(f"dim {dim} has {x.size(dim)} tokens, a rank holds {self.local_length}")
        return _Gather.apply(x, dim, self)


def length_unit(ulysses: int, ring: int, balance: str, tensor: int = 1) -> int:
    """Sequence lengths must be multiples of this. ``tensor`` counts only under TP sequence parallelism."""
    blocks = 2 * ring if balance == "zigzag" and ring > 1 else ring
    return lcm(blocks, ulysses * ring * tensor)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
        ctx.dim, ctx.layout = dim, layout
        order = layout.order.to(x.device)
        x = x.movedim(dim, 0).contiguous()
        parts = x.new_empty((layout.seq_length, *x.shape[1:]))
        if layout.grid.context.size == 1:
            parts = x
        else:
            dist.all_gather_into_tensor(parts, x, group=layout.grid.context.group)
        whole = torch.empty_like(parts)
        whole[order] = parts
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        layout = ctx.layout
        parts = grad.movedim(ctx.dim, 0)[layout.order.to(grad.device)].contiguous()
        mine = parts
        if layout.grid.context.size > 1:
            mine = parts.new_empty((layout.local_length, *parts.shape[1:]))
            dist.reduce_scatter_tensor(mine, parts, group=layout.grid.context.group)
        return mine.movedim(0, ctx.dim), None, None
