# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values rotate, queries stay (USP paper, section 2; ring attention, arXiv 2310.01889).

:class:`RingSource` carries a plan out (ring_plan.py) and overlaps each transfer with the tiles of the block before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.ring_plan import Hop, RingPlan
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.spans import Spans, count, place, positions_of
from megatron.context_parallel.layout.tiles import Tile


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
        span = place(*positions_of([tile.k], self.hop.held), self.hop.grads_out)
        super().add_grad(replace(tile, k=span), dk_SBHD, dv_SBHD)


def _pick_rows(kv: Tensor, held: Spans, wanted: Spans) -> Tensor:
    """The rows ``wanted`` of a buffer that keeps the rows ``held``; a view where they are one run."""
    spans = [place(span, held) for span in wanted]
    if len(spans) == 1:
        return kv[spans[0][0] : spans[0][1]]
    return torch.cat([kv[start:stop] for start, stop in spans])


def _add_rows(total: Tensor, kept: Spans, part: Tensor, part_rows: Spans) -> None:
    """Add a buffer of ``part_rows`` to a buffer of ``kept`` rows."""
    first = 0
    for start, stop in part_rows:
        low, high = place((start, stop), kept)
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
