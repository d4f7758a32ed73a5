# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values rotate, queries stay (USP paper, section 2; ring attention, arXiv 2310.01889).

:func:`ring_plan` derives every transfer from the tiles: a block carries on only the rows that some later rank on its
way needs, its gradient only the rows that some rank has touched, and what nobody needs is never sent.
:class:`RingSource` carries the plan out and overlaps each transfer with the tiles of the block before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span
from megatron.context_parallel.layout.tiles import Rows, Tile, count, key_rows, packed, tiles, union


@dataclass(frozen=True)
class Hop:
    """What one rank does at one hop of the ring. Rows are row numbers of the block's home rank."""

    source: int
    held: Rows  # rows of the block that arrive here
    tiles: tuple[Tile, ...]  # what this rank computes with them; key rows count within ``held``
    forward: Rows  # rows that go on to the next rank
    grads_in: Rows  # rows whose gradients arrive from the rank before
    grads_out: Rows  # rows whose gradients leave ...
    grads_to: int  # ... for this rank: the next one, or the block's home


@dataclass(frozen=True)
class RingPlan:
    """All hops of one rank. ``hops[0]`` is its own block."""

    rank: int
    next: int
    previous: int
    hops: tuple[Hop, ...]
    grads_home: tuple[int, Rows]  # rank and rows of the gradients that return to this rank at the end
    home_hop: int  # the hop after which that rank sends them

    @property
    def pairs(self) -> int:
        """(query, key) pairs this rank attends to: its share of the work."""
        return sum(tile.pairs for hop in self.hops for tile in hop.tiles)


def ring_plan(
    layout: SequenceLayout,
    mask: Mask,
    rank: int | None = None,
    chunk: int | None = None,
    key_layout: SequenceLayout | None = None,
) -> RingPlan:
    """The plan of ring rank ``rank`` (default: this one): its queries against everybody's keys.

    Keys go round in the direction that sends fewer rows: upwards for a contiguous causal ring, which then never wraps
    around; downwards for zigzag, where after the wrap only half a block is needed.

    Args:
        chunk: only the keys of this chunk of every rank travel (FPDT); default the whole blocks.
        key_layout: of the keys, in cross-attention; default ``layout``.
    """
    ring, key_layout = layout.grid.ring, key_layout or layout
    queries = tuple(layout.ring_spans(r) for r in range(ring.size))
    if chunk is None:
        keys = tuple(key_layout.ring_spans(r) for r in range(ring.size))
    else:
        keys = tuple(key_layout.chunk_spans(chunk, r) for r in range(ring.size))
    return _plan(queries, keys, mask, ring.rank if rank is None else rank)


Blocks = tuple[tuple[Span, ...], ...]
"""Positions of every ring rank's block."""


@lru_cache(maxsize=256)  # with packed documents, each batch has plans of its own
def _plan(queries: Blocks, keys: Blocks, mask: Mask, rank: int) -> RingPlan:
    directions = (_plan_in_direction(queries, keys, mask, rank, step) for step in (1, -1))
    return min(directions, key=lambda plan: plan[0])[1]


def _plan_in_direction(queries: Blocks, keys: Blocks, mask: Mask, rank: int, step: int) -> tuple[int, RingPlan]:
    """The plan for one direction, and the rows that all ranks together send in it."""
    size = len(keys)
    needs = {
        (home, hop): tiles(queries[(home + step * hop) % size], keys[home], mask)
        for home in range(size)
        for hop in range(size)
    }
    rows = {key: key_rows(found) for key, found in needs.items()}
    length = sum(stop - start for start, stop in keys[0])

    def carried(home: int, hop: int) -> Rows:
        """Rows of ``home``'s block that arrive at its hop-th stop: all that is needed there or later."""
        return union(*(rows[home, later] for later in range(hop, size))) if hop < size else ()

    def touched(home: int, hop: int) -> Rows:
        """Rows whose gradients leave the hop-th stop: all that was needed there or before, home excepted."""
        return union(*(rows[home, before] for before in range(1, hop + 1)))

    def last_stop(home: int) -> int:
        return max((hop for hop in range(1, size) if rows[home, hop]), default=0)

    hops = []
    for hop in range(size):
        home = (rank - step * hop) % size
        held = carried(home, hop) if hop else ((0, length),)
        last = last_stop(home)
        active = 0 < hop <= last
        hops.append(
            Hop(
                source=home,
                held=held,
                tiles=tuple(replace(tile, k=packed(tile.k, held)) for tile in needs[home, hop]),
                forward=carried(home, hop + 1),
                grads_in=touched(home, hop - 1) if active and hop > 1 else (),
                grads_out=touched(home, hop) if active else (),
                grads_to=(rank + step) % size if hop < last else home,
            )
        )
    last = last_stop(rank)
    sent = sum(count(carried(home, hop)) for home in range(size) for hop in range(1, size))
    plan = RingPlan(
        rank=rank,
        next=(rank + step) % size,
        previous=(rank - step) % size,
        hops=tuple(hops),
        grads_home=((rank + step * last) % size, touched(rank, last)),
        home_hop=last,
    )
    return sent, plan


@dataclass
class KeyBlock:
    """Keys and values as they come by, with the tiles to compute on them.

    ``k, v`` are [rows, b, heads, d]; gradients of tiles are added with :meth:`add_grad`.
    """

    k: Tensor
    v: Tensor
    hop: Hop
    grad_S2BHD: Tensor | None = None

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return self.hop.tiles

    def add_grad(self, tile: Tile, dk_SBHD: Tensor, dv_SBHD: Tensor) -> None:
        rows = self.grad_S2BHD[tile.k[0] : tile.k[1]]
        rows[:, 0] += dk_SBHD
        rows[:, 1] += dv_SBHD


class RingSource:
    """Where key blocks come from and where their gradients go, on a ring (of one rank: this rank's own memory).

    Args:
        plan: what to compute and to send.
        axis: the ring.
    """

    def __init__(self, plan: RingPlan, axis: Axis) -> None:
        self.plan, self.axis = plan, axis
        self._grads: tuple[Tensor, Tensor] | None = None

    def single_tile(self, queries: int, keys: int) -> Tile | None:
        """The tile that is all there is, if one covers all queries and keys: its results need no merging."""
        whole = (0, queries), (0, keys)
        computed = [tile for hop in self.plan.hops for tile in hop.tiles]
        if len(self.plan.hops) == 1 and len(computed) == 1 and (computed[0].q, computed[0].k) == whole:
            return computed[0]
        return None

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[KeyBlock]:
        """Every block this rank needs, its own first. While the caller computes on one, the next one travels."""
        hops = self.plan.hops
        if len(hops) == 1:
            yield KeyBlock(k, v, hops[0])
            return
        kv = torch.stack((k, v), dim=1)
        for hop, following in zip(hops, (*hops[1:], None)):
            arriving, transfer = self._pass_on(kv, hop, following)
            if hop.tiles:
                yield KeyBlock(kv[:, 0], kv[:, 1], hop)
            transfer.wait()
            kv = arriving

    def blocks_with_grads(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Iterator[KeyBlock]:
        """As :meth:`blocks`; the caller adds the gradients of its tiles to each block before asking for the next.

        Gradients are summed in ``dtype`` and travel on with their block; after the last block :meth:`take_grads` has
        ours.
        """
        hops = self.plan.hops
        kv = torch.stack((k, v), dim=1) if len(hops) > 1 else None
        own = k.new_zeros((k.size(0), 2, *k.shape[1:]), dtype=dtype)
        grads_transfer = _Transfer()
        coming_home = None
        incoming: Tensor | None = None
        for index, (hop, following) in enumerate(zip(hops, (*hops[1:], None))):
            arriving, transfer = self._pass_on(kv, hop, following) if kv is not None else (None, _Transfer())
            grad = own if index == 0 else None
            if index and hop.grads_out:
                grad = own.new_zeros((count(hop.grads_out), *own.shape[1:]))
            if hop.tiles:
                yield self._with_grads(k, v, kv, hop, grad, index)
            grads_transfer.wait()
            if index and hop.grads_in:
                _add_rows(grad, hop.grads_out, incoming, hop.grads_in)
            # Gradients leave; those that this rank receives now are for its next hop, or its own come home.
            grads_transfer = _Transfer()
            if index and hop.grads_out:
                grads_transfer.send(grad, hop.grads_to, self.axis)
            if index and index == self.plan.home_hop:
                rank, rows = self.plan.grads_home
                coming_home = own.new_empty((count(rows), *own.shape[1:]))
                grads_transfer.receive(coming_home, rank, self.axis)
            if following is not None and following.grads_in:
                incoming = own.new_empty((count(following.grads_in), *own.shape[1:]))
                grads_transfer.receive(incoming, self.plan.previous, self.axis)
            grads_transfer.start()
            transfer.wait()
            kv = arriving
        grads_transfer.wait()
        if coming_home is not None:
            _add_rows(own, ((0, own.size(0)),), coming_home, self.plan.grads_home[1])
        self._grads = own[:, 0], own[:, 1]

    def take_grads(self) -> tuple[Tensor, Tensor]:
        """dk, dv of this rank's own block, once the last block is done. The source lets go of them."""
        if self._grads is None:
            raise RuntimeError("gradients are there only after the last block of blocks_with_grads")
        grads, self._grads = self._grads, None
        return grads

    def _with_grads(self, k: Tensor, v: Tensor, kv: Tensor | None, hop: Hop, grad: Tensor, index: int) -> KeyBlock:
        """The block of a hop, with the rows of ``grad`` that its tiles may touch."""
        if index == 0:
            return KeyBlock(k, v, hop, grad)
        # Tiles count key rows within what is held; gradients are kept for the rows that were touched so far.
        return _MappedKeyBlock(kv[:, 0], kv[:, 1], hop, grad)

    def _pass_on(self, kv: Tensor, hop: Hop, following: Hop | None) -> tuple[Tensor | None, _Transfer]:
        """Start sending ``hop``'s block to the next rank, and receiving the following hop's."""
        transfer = _Transfer()
        if hop.forward:
            transfer.send(_pick_rows(kv, hop.held, hop.forward), self.plan.next, self.axis)
        arriving = None
        if following is not None:
            arriving = kv.new_empty((count(following.held), *kv.shape[1:]))
            if following.held:
                transfer.receive(arriving, self.plan.previous, self.axis)
        transfer.start()
        return arriving, transfer


@dataclass
class _MappedKeyBlock(KeyBlock):
    """A block whose gradient buffer keeps other rows than the block itself."""

    def add_grad(self, tile: Tile, dk_SBHD: Tensor, dv_SBHD: Tensor) -> None:
        span = packed(unpacked(tile.k, self.hop.held), self.hop.grads_out)
        super().add_grad(replace(tile, k=span), dk_SBHD, dv_SBHD)


def unpacked(span: tuple[int, int], rows: Rows) -> tuple[int, int]:
    """The inverse of :func:`packed`: original row numbers of packed rows."""
    offset = 0
    for start, stop in rows:
        if offset <= span[0] and span[1] <= offset + stop - start:
            return start + span[0] - offset, start + span[1] - offset
        offset += stop - start
    raise ValueError(f"packed rows {span} are not within one run of {rows}")


def _pick_rows(kv: Tensor, held: Rows, wanted: Rows) -> Tensor:
    """The rows ``wanted`` of a buffer that keeps the rows ``held``; a view where they are one run."""
    spans = [packed(span, held) for span in wanted]
    if len(spans) == 1:
        return kv[spans[0][0] : spans[0][1]]
    return torch.cat([kv[start:stop] for start, stop in spans])


def _add_rows(total: Tensor, kept: Rows, part: Tensor, part_rows: Rows) -> None:
    """Add a buffer of ``part_rows`` to a buffer of ``kept`` rows."""
    first = 0
    for start, stop in part_rows:
        low, high = packed((start, stop), kept)
        total[low:high] += part[first : first + stop - start]
        first += stop - start


class _Transfer:
    """Sends and receives that travel together while the caller computes."""

    def __init__(self) -> None:
        self.operations: list[dist.P2POp] = []
        self.works: list[dist.Work] = []

    def send(self, x: Tensor, rank: int, axis: Axis) -> None:
        self.operations.append(dist.P2POp(dist.isend, x.contiguous(), axis.global_rank(rank), axis.group))

    def receive(self, x: Tensor, rank: int, axis: Axis) -> None:
        self.operations.append(dist.P2POp(dist.irecv, x, axis.global_rank(rank), axis.group))

    def start(self) -> None:
        if self.operations:
            self.works = dist.batch_isend_irecv(self.operations)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.operations, self.works = [], []
