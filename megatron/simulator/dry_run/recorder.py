# SPDX-License-Identifier: Apache-2.0
"""Watches a step of the real program and writes down its trace: kernels, transfers, host copies, waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.formulas.strategy import Group
from megatron.platform.remembered import UNKNOWN
from megatron.platform.simulation import Answer
from megatron.simulator.cost.trace import HostCopy, Kernel, Phase, Trace, Transfer, Wait
from megatron.simulator.dry_run.kernels import bytes_of, host_copy, kernel, moves_nothing
from megatron.simulator.dry_run.transfers import STAGES, communicates, received, sent, transfer
from megatron.training.report.memory import TensorMeter

WHERE = torch.ops.prim.device.default


@dataclass
class _Hop:
    """Messages of one hop of a ring so far.

    Attributes:
        receives: numbers of the receives that are not in the trace yet.
        bytes: what these receives bring.
        sends: the transfer whose excess covers receives that are in the trace.
    """

    axis: str = ""
    group: Group = Group(1)
    receives: list[int] = field(default_factory=list)
    bytes: float = 0.0
    sends: Transfer | None = None


class Recorder(TensorMeter):
    """A :class:`TensorMeter` that also keeps the trace of what runs while it is active.

    It works on real tensors and process groups, where it only watches, and on fake ones.

    Args:
        axes: name of the axis and ranks of each process group, by the group's name; see :func:`axes_of`.
        resized, before: see :class:`TensorMeter`.
    """

    def __init__(
        self,
        axes: dict[str, tuple[str, Group]],
        *,
        resized: bool = False,
        history: bool = True,
        before: type[Tensor] = Tensor,
    ) -> None:
        super().__init__("cpu", record=history, resized=resized, before=before)
        self.axes, self.trace = axes, Trace()
        self.tickets = 0
        self._of_collective: dict[int, int] = {}  # tickets, by the number of the collective
        self._collectives = 0
        self._hop = _Hop()
        self._deferred: list[int] | None = None
        self.attention = ""  # what attention kernels are called, in place of the operation that stands for them
        self.answer: Answer | None = None  # asked before an operation is called
        self.quiet = 0  # depth of regions whose operations are recorded as one, or by somebody else

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is WHERE:  # half of all that fake tensors ask
            return self._call(func, args, kwargs)
        self.settle()
        out = self._call(func, args, kwargs)
        self.see_all(out)
        if not self.quiet:
            self.note(func, args, kwargs, out)
        return out

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        out = UNKNOWN if self.answer is None else self.answer(func, args, kwargs)
        return func(*args, **kwargs) if out is UNKNOWN else out

    def note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Write down one operation."""
        if communicates(func):
            self._note_transfer(func, args, out)
        elif not moves_nothing(func):
            event = host_copy(func, args, out) or kernel(func, args, kwargs, out)
            if event is not None:
                self.end_hop()
                if self.attention and getattr(event, "kind", "") == "attention":
                    event.name = self.attention
                self.trace.events.append(event)

    def written(self, to: Tensor) -> None:
        """An operation would write into ``to``, and is somebody else's to record: it need not be called."""
        self.settle()
        self.see(to)

    def price(self, kernel: Kernel) -> None:
        """Write down a kernel that does not run."""
        if not self.quiet:
            self.trace.events.append(kernel)

    def mark(self, phase: str) -> None:
        """A phase begins."""
        self.trace.events.append(Phase(phase))

    @property
    def plain(self) -> bool:
        """Whether operations are recorded as they are, each for itself."""
        return self.history is not None and not self.quiet and not self.attention and self._deferred is None

    @property
    def under_way(self) -> dict[int, int]:
        """Tickets of collectives that nobody has waited for."""
        return dict(self._of_collective)

    def counts(self) -> tuple[int, int, int, int]:
        """Storages, events, changes of memory and tickets so far."""
        return self._count, len(self.trace.events), len(self.history.events), self.tickets

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def wait(self, ticket: int) -> None:
        self.trace.events.append(Wait((ticket,)))

    def waited(self, collective: int) -> None:
        """The collective of this number (1, 2, ... in the order of their starts) is waited for."""
        self.end_hop()
        ticket = self._of_collective.pop(collective, None)
        if ticket is None:
            return
        if self._deferred is not None:
            self._deferred.append(ticket)
        else:
            self.wait(ticket)

    @contextmanager
    def deferring(self) -> Iterator[list[int]]:
        """Tickets that are waited for within are collected; whoever asks for them waits later."""
        before, self._deferred = self._deferred, []
        try:
            yield self._deferred
        finally:
            self._deferred = before

    def copy(self, direction: str, size: int) -> int:
        """A host copy begins on a stream of its own; returns its ticket."""
        ticket = self.ticket()
        self.trace.events.append(HostCopy(direction, size, ticket))
        return ticket

    @contextmanager
    def calling(self, attention: str) -> Iterator[None]:
        """Attention kernels within are called so."""
        before, self.attention = self.attention, attention
        try:
            yield
        finally:
            self.attention = before

    @contextmanager
    def hushed(self) -> Iterator[None]:
        """Operations within are somebody else's to record; their memory counts."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def fused(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Run ``function`` as the one kernel that it is on a GPU: what it makes on its way takes no memory."""
        self.settle()
        device = self._levels["device"]
        high, peak, begin = device.high, device.peak, len(self.history.events) if self.history else 0
        with self.hushed():
            out = function(*args, **kwargs)
        if not self.quiet:
            self.settle()
            device.peak, device.high = peak, max(high, device.now)
            self._forget_passing(begin)
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            size = bytes_of([getattr(x, "_local_tensor", x) for x in tensors])
            self.trace.events.append(Kernel(function.__name__, "memory", 0.0, size))
        return out

    def _forget_passing(self, begin: int) -> None:
        """Take out of the history what came and went since its event ``begin``."""
        if self.history is None:
            return
        since, change = self.history.events[begin:], Counter()
        for _, number, size in since:
            change[number] += size
        self.history.events[begin:] = [event for event in since if change[event[1]]]

    def _note_transfer(self, func: Any, args: tuple, out: Any) -> None:
        functional = func.namespace == "_c10d_functional"
        self._collectives += not functional
        arriving = received(func, args)
        if arriving is not None:
            group, size = arriving
            axis, placement = self.axes.get(group.group_name, ("", None))
            if axis == "ring":
                self._hop.receives.append(self._collectives)
                self._hop.axis, self._hop.group, self._hop.bytes = axis, placement, self._hop.bytes + size
            return
        found = transfer(func, args, out)
        if found is None:
            return
        kind, group, size = found
        # Between two stages core sends some messages over the group of the whole world.
        known = self.axes.get(group.group_name) or (self.axes.get(STAGES) if kind == "p2p" else None)
        axis, placement = known or ("other", Group(group.size()))
        if placement.size == 1:
            return
        ticket = None if functional else self.ticket()
        self._of_collective[self._collectives] = ticket
        moved = Transfer(kind, axis, placement, sent(kind, size, placement.size), ticket)
        self.trace.events.append(moved)
        if kind == "p2p" and axis == self._hop.axis:
            self._send_beside_receives(moved)

    def _send_beside_receives(self, moved: Transfer) -> None:
        """A hop's receives come before its sends, and travel at the same time: only what exceeds these takes longer."""
        hop = self._hop
        if hop.receives:
            moved.excess = max(0.0, hop.bytes - moved.bytes)
            self._of_collective |= dict.fromkeys(hop.receives, moved.ticket)
            self._hop = _Hop(moved.axis, moved.group, sends=moved)
        elif hop.sends is not None:
            hop.sends.excess = max(0.0, hop.sends.excess - moved.bytes)

    def end_hop(self) -> None:
        """Receives of a hop in which nothing was sent are a transfer of their own."""
        if not self._hop.axis:
            return
        hop, self._hop = self._hop, _Hop()
        if hop.receives:
            ticket = self.ticket()
            self._of_collective |= dict.fromkeys(hop.receives, ticket)
            self.trace.events.append(Transfer("p2p", hop.axis, hop.group, 0.0, ticket, excess=hop.bytes))
