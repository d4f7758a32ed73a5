# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values rotate, queries stay (USP paper, section 2; ring attention, arXiv 2310.01889).

:class:`RingSource` brings key blocks to attend.py. What is sent, and what is computed, was decided in ring_plan.py;
here it is put in order (:func:`schedule`), and each transfer travels beside the tiles of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.kernels.base import accumulation_dtype
from megatron.context_parallel.attention.merge import KeyGradients, packed, unpacked
from megatron.context_parallel.attention.ring_plan import Hop, RingPlan
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, Spans, count, place, positions_of
from megatron.context_parallel.layout.tiles import Tile, tiles


@dataclass(frozen=True)
class Message:
    """Rows of some block, by their numbers at home, that travel between this rank and ``peer``; none: no message."""

    rows: Spans
    peer: int


@dataclass(frozen=True)
class Step:
    """One hop of one rank: its tiles, and the messages around them.

    ``keys_out`` and ``keys_in`` start before the tiles and travel beside them. The other three start once the tiles
    have added to the block's gradients, and travel beside the tiles of the next step.

    Attributes:
        hop: the block that is here, and its tiles.
        keys_out: that block, to the next rank.
        keys_in: the next step's block.
        grads_out: gradients of that block, to the next rank or to the block's home.
        grads_home: gradients of this rank's own block, from the last rank that added to them.
        grads_in: gradients of the next step's block, so far.
    """

    hop: Hop
    keys_out: Message
    keys_in: Message
    grads_out: Message
    grads_home: Message
    grads_in: Message


def schedule(plan: RingPlan, *, grads: bool) -> list[Step]:
    """A plan in the order in which it is carried out; with ``grads``, those travel too."""
    last_rank, own_rows = plan.grads_home
    nothing = Message((), plan.rank)
    return [
        Step(
            hop,
            keys_out=Message(hop.forward, plan.next),
            keys_in=Message(following.held, plan.previous) if following else nothing,
            grads_out=Message(hop.grads_out, hop.grads_to) if grads else nothing,
            grads_home=Message(own_rows, last_rank) if grads and index == plan.home_hop else nothing,
            grads_in=Message(following.grads_in, plan.previous) if grads and following else nothing,
        )
        for index, (hop, following) in enumerate(zip(plan.hops, (*plan.hops[1:], None)))
    ]


@dataclass
class KeyBlock:
    """Keys and values as they come by, with the tiles to compute on them.

    Attributes:
        k, v: [rows, b, heads, d].
        hop: whose rows they are, and the tiles.
        kv: the same packed, of a block that has travelled.
        grads: where gradients of the block add up.
    """

    k: Tensor
    v: Tensor
    hop: Hop
    kv: Tensor | None = None
    grads: KeyGradients | None = None

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return self.hop.tiles

    def add(self, rows: Span, dk_SBHD: Tensor, dv_SBHD: Tensor) -> None:
        """Add gradients of rows that are counted, as those of tiles are, within what is held."""
        first = 0
        for start, stop in positions_of([rows], self.hop.held):
            part = slice(first, first + stop - start)
            self.grads.add((start, stop), dk_SBHD[part], dv_SBHD[part])
            first = part.stop

    def at(self, rows: Span) -> Span:
        """Where gradients of such rows lie in the sums."""
        return self.grads.at(*positions_of([rows], self.hop.held))

    def sums(self) -> tuple[Tensor, Tensor]:
        """dk and dv so far, in fp32 (fp64), to be added to in place."""
        return self.grads.sums()

    def pick(self, wanted: Spans) -> Tensor:
        """Rows of keys and values, packed; where it can be, a view."""
        spans = [slice(*place(span, self.hop.held)) for span in wanted]
        parts = [packed(self.k[at], self.v[at]) if self.kv is None else self.kv[at] for at in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class RingSource:
    """Where key blocks come from and where their gradients go, on a ring (of one rank: this rank's own memory).

    Args:
        plan: what to compute and to send.
        axis: the ring.
    """

    def __init__(self, plan: RingPlan, axis: Axis) -> None:
        self.plan, self.axis = plan, axis

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        """Every block this rank needs, its own first. While the caller computes on one, the next one travels.

        With ``own``, the caller adds the gradients of its tiles to each block before asking for the next. They are
        summed in fp32 (fp64) and travel on with their block; once the last block is done, ``own`` has those of ``k``
        and ``v``, from all ranks.
        """
        kv, row = None, (*k.shape[1:3], k.size(3) + v.size(3))
        coming = home = (), None
        wide, grads_moving = accumulation_dtype(k.dtype), _Transfer(self.axis)
        for step in schedule(self.plan, grads=own is not None):
            if kv is None:
                block = KeyBlock(k, v, step.hop, None, own)
            else:
                block = KeyBlock(*unpacked(kv, k.size(3)), step.hop, kv, KeyGradients(k, v, step.grads_out.rows))
            keys_moving, kv = self._pass_on(block, step, row)
            if block.tiles:
                yield block
            grads_moving.wait()
            _add_rows(block.grads, *coming)
            grads_moving = _Transfer(self.axis)
            if step.grads_out.rows:
                grads_moving.send(block.grads.packed(), step.grads_out)
            if step.grads_home.rows:
                home = step.grads_home.rows, grads_moving.receive(step.grads_home, k, row, wide)
            coming = step.grads_in.rows, grads_moving.receive(step.grads_in, k, row, wide)
            grads_moving.start()
            keys_moving.wait()
        grads_moving.wait()
        _add_rows(own, *home)

    def _pass_on(self, block: KeyBlock, step: Step, row: tuple[int, ...]) -> tuple[_Transfer, Tensor]:
        """Start sending a block to the next rank and receiving the next step's, which is there after the wait."""
        moving = _Transfer(self.axis)
        if step.keys_out.rows:
            moving.send(block.pick(step.keys_out.rows), step.keys_out)
        arriving = moving.receive(step.keys_in, block.k, row, block.k.dtype)
        moving.start()
        return moving, arriving


def _add_rows(grads: KeyGradients | None, rows: Spans, arrived: Tensor | None) -> None:
    """Add gradients of ``rows``, one after another, that have arrived."""
    first = 0
    for start, stop in rows:
        grads.add((start, stop), *unpacked(arrived[first : first + stop - start], grads.key_dim))
        first += stop - start


class _Transfer:
    """Sends and receives that travel together while the caller computes.

    Receives are posted before sends, whatever the order of calls. gloo tells a peer "ready to receive" over the same
    connection that carries our data: posted after a large send, that word waits behind it, and a link between two
    ranks carries one direction at a time. NCCL groups the operations of a batch, so their order does not matter there.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.receives: list[dist.P2POp] = []
        self.sends: list[dist.P2POp] = []
        self.works: list[dist.Work] = []

    def send(self, x: Tensor, message: Message) -> None:
        self.sends.append(self._operation(dist.isend, x.contiguous(), message))

    def receive(self, message: Message, like: Tensor, row: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for packed rows of the shape ``row``, which is filled once :meth:`wait` returns."""
        x = like.new_empty((count(message.rows), *row), dtype=dtype)
        if message.rows:
            self.receives.append(self._operation(dist.irecv, x, message))
        return x

    def _operation(self, kind: Callable, x: Tensor, message: Message) -> dist.P2POp:
        return dist.P2POp(kind, x, self.axis.global_rank(message.peer), self.axis.group)

    def start(self) -> None:
        if self.receives or self.sends:
            self.works = dist.batch_isend_irecv([*self.receives, *self.sends])

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.receives, self.sends, self.works = [], [], []


# All keys at once: every rank of a ring gathers them, and their gradients are reduced and scattered (Llama 3, 3.3.2).
#
# One message a layer each way in place of a ring's many, nothing of it behind computation, and memory for the keys and
# values of all ring ranks. It pays where keys are few (GQA) and hops are slow; tiles, and so results, are the ring's.


class GatherSource:
    """The keys of a whole sequence as one block, the ranks' parts one after the other.

    Args:
        layout: of the queries; its ring is gathered over.
        mask: which keys a query attends to.
        key_layout: of the keys, in cross-attention; default ``layout``.
    """

    def __init__(self, layout: SequenceLayout, mask: Mask, key_layout: SequenceLayout | None = None) -> None:
        self.axis, key_layout = layout.grid.ring, key_layout or layout
        spans = tuple(span for rank in range(self.axis.size) for span in key_layout.ring_spans(rank))
        self.tiles = tiles(layout.ring_spans(self.axis.rank), spans, mask)

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        """The one block; with ``own``, which then gets the gradients of ``k`` and ``v``, summed in fp32 (fp64)."""
        kv, rows = packed(k, v), ((0, self.axis.size * k.size(0)),)
        whole = kv.new_empty((rows[0][1], *kv.shape[1:]))
        dist.all_gather_into_tensor(whole, kv, group=self.axis.group)
        grads = None if own is None else KeyGradients(k, v, rows)
        nothing = {"forward": (), "grads_in": (), "grads_out": (), "grads_to": self.axis.rank}
        hop = Hop(source=self.axis.rank, held=rows, tiles=self.tiles, **nothing)
        yield KeyBlock(*unpacked(whole, k.size(3)), hop, whole, grads)
        if own is not None:
            total = grads.packed()
            mine = total.new_empty((k.size(0), *total.shape[1:]))
            dist.reduce_scatter_tensor(mine, total, group=self.axis.group)
            own.add((0, k.size(0)), *unpacked(mine, k.size(3)))
