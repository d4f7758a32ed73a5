# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values rotate, queries stay (USP paper, section 2; ring attention, arXiv 2310.01889).

:class:`RingSource` gives key blocks to attend.py. ring_plan.py decides what is sent and computed, and in which order.
Each transfer overlaps with the computation of a block's tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.kernels.sums import KeyGradients, accumulation_dtype, packed, unpacked
from megatron.context_parallel.attention.ring_plan import AttentionPlan, Hop, Message, RingPlan
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.spans import Spans, count, place
from megatron.decisions.key_exchange import KEY_EXCHANGES, PASSED_ON
from megatron.platform.collectives import gathered, scattered


@dataclass
class KeyBlock:
    """The keys and values of one hop, with the tiles to compute on them.

    Attributes:
        k, v: [rows, b, heads, d].
        hop: which rows they are, and the tiles.
        kv: k and v packed in one tensor, if the block was received.
        grads: sums of the gradients of these rows, from this rank's tiles.
    """

    k: Tensor
    v: Tensor
    hop: Hop
    kv: Tensor | None = None
    grads: KeyGradients | None = None

    def pick(self, wanted: Spans) -> Tensor:
        """Rows of keys and values, packed; a view where possible."""
        spans = [slice(*place(span, self.hop.held)) for span in wanted]
        parts = [packed(self.k[at], self.v[at]) if self.kv is None else self.kv[at] for at in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def grads_of(self, rows: Spans, before: Spans, arrived: Tensor | None) -> Tensor:
        """The gradients of ``rows``, packed: those that ``arrived`` for the rows ``before``, and this rank's own."""
        held, needed = self.hop.held, self.hop.needed
        if not before and rows == held:
            return self.grads.packed()
        total = arrived
        if rows != before:
            total = arrived.new_zeros((count(rows), *arrived.shape[1:]))
            for span in before:
                total[slice(*place(span, rows))] = arrived[slice(*place(span, before))]
        for span in needed:
            total[slice(*place(span, rows))] += self.grads.packed()[slice(*place(span, held))]
        return total


class KeySource(Protocol):
    """Gives the blocks of keys and values that a rank's queries meet, and sends back their gradients.

    Attributes:
        hops: the blocks, with their tiles.
        single: there is one block, and it has all the tiles of these queries.
    """

    hops: tuple[Hop, ...]
    single: bool

    @classmethod
    def of(cls, plan: AttentionPlan, axis: Axis, rank: int | None = None) -> KeySource:
        """The source of ring rank ``rank`` (default: this one), without chunks."""

    @property
    def sent(self) -> int:
        """Rows of keys and values that the rank sends in a forward pass."""

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        """See :meth:`RingSource.blocks`."""


def key_source(exchange: str, plan: AttentionPlan, axis: Axis, rank: int | None = None) -> KeySource:
    """The source that a name of decisions/key_exchange.py stands for; on a ring of one rank all do the same."""
    module, _, name = KEY_EXCHANGES[exchange if axis.size > 1 else PASSED_ON].source.partition(":")
    return getattr(import_module(f"megatron.context_parallel.attention.{module}"), name).of(plan, axis, rank)


class RingSource:
    """Gives the key blocks of a ring and sends back their gradients. On a ring of one rank nothing is sent.

    Args:
        plan: what to compute and to send.
        axis: the ring.

    Attributes:
        single: there is one block, and it has all the tiles of these queries.
    """

    def __init__(self, plan: RingPlan, axis: Axis) -> None:
        self.plan, self.axis, self.hops = plan, axis, plan.hops
        self.single = len(plan.hops) == 1

    @classmethod
    def of(cls, plan: AttentionPlan, axis: Axis, rank: int | None = None) -> RingSource:
        return cls(plan.ring(rank=rank), axis)

    @property
    def sent(self) -> int:
        return sum(count(hop.keys_out.rows) for hop in self.hops)

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        """Every block that this rank needs, its own first. While the caller computes on a block, the next is received.

        With ``own``, the caller adds the gradients of its tiles to each block before it asks for the next. They are
        summed in fp32 (fp64) and sent on with their block. After the last block, ``own`` has the gradients of ``k`` and
        ``v`` from all ranks.
        """
        kv, row = None, (*k.shape[1:3], k.size(3) + v.size(3))
        coming, home = ((), None), []
        wide, grads_moving = accumulation_dtype(k.dtype), _Transfer(self.axis)
        for hop in self.plan.hops:
            if kv is None:
                block = mine = KeyBlock(k, v, hop, None, own)
            else:
                keys = unpacked(kv, k.size(3))
                block = KeyBlock(*keys, hop, kv, KeyGradients(*keys))
            keys_moving, kv = self._pass_on(mine if self.plan.direct else block, hop, row)
            if hop.tiles:
                yield block
            if own is not None:
                grads_moving.wait()
                grads_moving = _Transfer(self.axis)
                if hop.grads_out.rows:
                    grads_moving.send(block.grads_of(hop.grads_out.rows, *coming), hop.grads_out)
                if hop.grads_home.rows:
                    home.append((hop.grads_home.rows, grads_moving.receive(hop.grads_home, k, row, wide)))
                coming = hop.grads_in.rows, grads_moving.receive(hop.grads_in, k, row, wide)
                grads_moving.start()
            keys_moving.wait()
        grads_moving.wait()
        for rows, total in home:
            first = 0
            for start, stop in rows:  # rows of this rank's block, one after another
                own.add((start, stop), *unpacked(total[first : first + stop - start], k.size(3)))
                first += stop - start

    def _pass_on(self, block: KeyBlock, hop: Hop, row: tuple[int, ...]) -> tuple[_Transfer, Tensor]:
        """Start to send rows of a block and to receive the next hop's block, which is complete after wait."""
        moving = _Transfer(self.axis)
        if hop.keys_out.rows:
            moving.send(block.pick(hop.keys_out.rows), hop.keys_out)
        arriving = moving.receive(hop.keys_in, block.k, row, block.k.dtype)
        moving.start()
        return moving, arriving


class _Transfer:
    """Sends and receives that run together while the caller computes.

    Receives are posted before sends, whatever the order of calls. gloo sends its "ready to receive" message over the
    same connection as the data. If it were posted after a large send, it would wait behind the data, and a link between
    two ranks would carry one direction at a time. NCCL groups the operations of a batch; their order does not matter.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.receives: list[dist.P2POp] = []
        self.sends: list[dist.P2POp] = []
        self.works: list[dist.Work] = []

    def send(self, x: Tensor, message: Message) -> None:
        self.sends.append(self._operation(dist.isend, x.contiguous(), message))

    def receive(self, message: Message, like: Tensor, row: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor for packed rows of the shape ``row``; filled when :meth:`wait` returns."""
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


class GatherSource:
    """All keys at once: an all-gather over the ring, and a reduce-scatter of their gradients (Llama 3, section 3.3.2).

    Each layer needs one message in each direction. None overlaps with computation, and each rank needs memory for the
    keys and values of all ring ranks. This pays off where keys are few (GQA) and hops are slow.

    Args:
        hop: the gathered block and its tiles (:meth:`AttentionPlan.gathered`).
        axis: the ring.
    """

    single = True

    def __init__(self, hop: Hop, axis: Axis) -> None:
        self.hops, self.axis = (hop,), axis

    @classmethod
    def of(cls, plan: AttentionPlan, axis: Axis, rank: int | None = None) -> GatherSource:
        return cls(plan.gathered(rank=rank), axis)

    @property
    def sent(self) -> int:
        """Around a ring of an all-gather, each rank passes on all blocks but one."""
        return count(self.hops[0].held) * (self.axis.size - 1) // self.axis.size

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        """The only block. ``own`` then gets the gradients of ``k`` and ``v``, summed in fp32 (fp64)."""
        kv = packed(k, v)
        every = gathered(kv, self.axis.group)
        keys = unpacked(every, k.size(3))
        grads = None if own is None else KeyGradients(*keys)
        yield KeyBlock(*keys, self.hops[0], every, grads)
        if own is not None:
            mine = scattered(grads.packed(), self.axis.group)
            own.add((0, k.size(0)), *unpacked(mine, k.size(3)))
