# SPDX-License-Identifier: Apache-2.0
"""Calls that are alike: what two in a row did to trace and memory, the next ones are written down to do as well.

A long sequence in chunks calls the same functions on tensors of the same shapes a thousand times. What such a call does
is a list of events and of storages that come and go (:class:`Effect`); where it is known, the call is left out, and
tensors like those that it returned are made.

Whether a call is like another is told by a key, by the tensors that it is given, and by the two in a row: a cache that
the first one fills, or a sum that it begins, is not there the second time. And a tensor that a call has let go of must
end again: where one does not, the whole step is run once more without this (:class:`Unlike`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron.platform.remembered import New
from megatron.simulator.cost.trace import Event, HostCopy, Phase, Transfer, Wait
from megatron.simulator.dry_run.recorder import Recorder
from megatron.training.report.memory import Block


class Unlike(ValueError):
    """A call did something else than those whose like it was."""


class Out(NamedTuple):
    """A tensor that a call returned.

    Attributes:
        given: the place of the tensor that it is, among those that the call was given; None: a new one.
        storage: of a new one: the number of the block among those that the call made, or ``~place`` of what it was
            given; ``bytes`` of it.
        shape, stride, dtype, keys: of a new one; the last are PyTorch's dispatch keys.
        offset: where in its storage it begins; in one that was given, beyond where what was given begins.
    """

    given: int | None
    storage: int = 0
    bytes: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    keys: Any = None


@dataclass
class Effect:
    """What a call did.

    Attributes:
        events: of the trace; tickets are counted from the call's first.
        tickets: how many it issued.
        blocks: storages that it made.
        changes: (number of a block that it made, or ``~place`` of what it was given; change of its bytes).
        gone: places of what it was given that ended in it.
        outs: what it returned.
        high: most bytes during it, beyond those at its start.
    """

    events: list[Event]
    tickets: int
    blocks: int
    changes: list[tuple[int, int]]
    gone: list[int]
    outs: list[Out | None]
    makers: list[New | None] = field(compare=False)

    def __post_init__(self) -> None:
        self.high = max(accumulate((change for _, change in self.changes), initial=0))

    def make(self, given: Sequence[Tensor | None]) -> tuple[list[Tensor | None], dict[int, torch.UntypedStorage]]:
        """Tensors like those that it returned, and their storages by number of the block."""
        made: dict[int, torch.UntypedStorage] = {}
        outs: list[Tensor | None] = []
        for out, maker in zip(self.outs, self.makers):
            if out is None:
                outs.append(None)
            elif out.given is not None:
                outs.append(given[out.given])
            elif out.storage < 0:
                of = given[~out.storage]
                outs.append(maker.over(of.untyped_storage(), of.storage_offset() + out.offset))
            else:
                if out.storage not in made:
                    made[out.storage] = torch.UntypedStorage(out.bytes, device="meta")
                outs.append(maker.over(made[out.storage], out.offset))
        return outs, made


class Recording:
    """Watches one call.

    Args:
        given, blocks: the tensors that it is given, and their storages' blocks. Neither is kept alive.
    """

    def __init__(self, recorder: Recorder, given: Sequence[Tensor | None], blocks: Sequence[Block | None]) -> None:
        self.recorder = recorder
        self.given = [None if x is None else weakref.ref(x) for x in given]
        self.offsets = [None if x is None else x.storage_offset() for x in given]
        self.places: dict[int, int] = {}  # by number of the block
        for place, block in enumerate(blocks):
            if block is not None:
                self.places.setdefault(block.number, ~place)
        recorder.settle()
        self.before, self.under_way = recorder.counts(), recorder.under_way

    def effect(self, outs: Sequence[Tensor | None]) -> Effect | None:
        """What the call did, which returned ``outs``; None where that cannot be written down again."""
        recorder = self.recorder
        recorder.settle()
        first, events, changes, tickets = self.before
        _, _, _, now = recorder.counts()
        blocks = recorder.history.blocks
        noted = [_counted(event, tickets) for event in recorder.trace.events[events:]]
        if None in noted or recorder.under_way != self.under_way:
            return None
        found: list[tuple[int, int]] = []
        for _, number, change in recorder.history.events[changes:]:
            place = number - first if number >= first else self.places.get(number)
            if place is None or blocks[number].place != "device":
                return None
            found.append((place, change))
        gone = sorted({~place for place, _ in found if place < 0})
        ended = {~place: blocks[number] for number, place in self.places.items()}
        if any(ended[place].storage() is not None for place in gone):  # resized
            return None
        described = [None if x is None else self._out(x, first) for x in outs]
        if False in described:
            return None
        returned = {out.storage for out in described if out is not None and out.given is None}
        if any(block.size and block.number - first not in returned for block in blocks[first:]):
            return None  # something that stays has been made beside
        makers = [
            New(x.fake_mode, x, None) if out is not None and out.given is None else None
            for x, out in zip(outs, described)
        ]
        return Effect(noted, now - tickets, len(blocks) - first, found, gone, described, makers)

    def _out(self, x: Tensor, first: int) -> Out | bool:
        """False for a tensor of which no other like it can be made."""
        for place, ref in enumerate(self.given):
            if ref is not None and ref() is x:
                return Out(place)
        if type(x) is not FakeTensor or x.constant is not None or x.requires_grad or x.layout is not torch.strided:
            return False
        block = self.recorder.live.get(x.untyped_storage()._cdata)
        if block is None:
            return False
        storage = block.number - first if block.number >= first else self.places.get(block.number)
        if storage is None:
            return False
        offset = x.storage_offset() - (self.offsets[~storage] if storage < 0 else 0)
        return Out(
            None, storage, block.size, tuple(x.shape), x.stride(), offset, x.dtype, torch._C._dispatch_key_set(x)
        )


def _counted(event: Event, tickets: int) -> Event | None:
    """With tickets counted from ``tickets`` on; None where it waits for what is older, or is a phase."""
    if isinstance(event, Transfer | HostCopy):
        return event if event.ticket is None else replace(event, ticket=event.ticket - tickets)
    if isinstance(event, Wait):
        return Wait(tuple(x - tickets for x in event.tickets)) if min(event.tickets) > tickets else None
    return None if isinstance(event, Phase) else event


def _ticketed(event: Event, tickets: int) -> Event:
    """The way back of :func:`_counted`."""
    if isinstance(event, Transfer | HostCopy):
        return event if event.ticket is None else replace(event, ticket=event.ticket + tickets)
    return Wait(tuple(x + tickets for x in event.tickets)) if isinstance(event, Wait) else event


class Alike:
    """
    Args:
        recorder: of the step; it keeps a history.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._known: dict[int, tuple[weakref.ref, dict[tuple, tuple[Effect | None, bool]]]] = {}

    def call(
        self,
        owner: Any,
        key: tuple,
        given: list[Tensor | None],
        run: Callable[[], Sequence[Tensor | None]],
        put: Callable[[Sequence[Tensor | None]], None] | None = None,
    ) -> Sequence[Tensor | None]:
        """``run()``, or what it would return.

        Args:
            owner: calls of different owners are not alike.
            key: all that the call depends on beside ``owner`` and what it is given.
            given: the tensors that it reads and writes. The list is emptied: ``run`` may let go of them.
            put: what ``run`` does with the tensors before it returns them, where it replaces those it was given.

        Raises:
            Unlike: what had ended in the calls before has not ended now, or something else has.
        """
        recorder = self.recorder
        recorder.end_hop()
        blocks = [None if x is None else recorder.live.get(x.untyped_storage()._cdata) for x in given]
        if not recorder.plain or any(x is not None and block is None for x, block in zip(given, blocks)):
            given.clear()
            return run()
        known = self._of(owner)
        key = (key, *(_described(x, block, blocks, given) for x, block in zip(given, blocks)))
        effect, steady = known.get(key, (None, False))
        if steady:
            return self._again(effect, given, blocks, put)
        recording = Recording(recorder, given, blocks)
        given.clear()
        del blocks
        outs = run()
        found = recording.effect(outs)
        if found is not None and found.gone and put is None:
            found = None
        known[key] = found, found is not None and found == effect
        return outs

    def _of(self, owner: Any) -> dict[tuple, tuple[Effect | None, bool]]:
        ref, known = self._known.get(id(owner), (None, None))
        if ref is None or ref() is not owner:  # another that lay in its place
            known = {}
            self._known[id(owner)] = weakref.ref(owner), known
        return known

    def _again(
        self, effect: Effect, given: list[Tensor | None], blocks: Sequence[Block | None], put: Callable | None
    ) -> Sequence[Tensor | None]:
        recorder = self.recorder
        outs, made = effect.make(given)
        given.clear()
        tickets = recorder.tickets
        recorder.tickets += effect.tickets
        events = effect.events
        recorder.trace.events += [_ticketed(event, tickets) for event in events] if effect.tickets else events
        ended = [blocks[place].storage for place in effect.gone]
        recorder.count(effect.changes, blocks, effect.blocks, made, effect.high)
        changes = recorder.counts()[2]
        if put is not None:
            put(outs)
        if recorder.counts()[2] != changes or any(storage() is not None for storage in ended):
            raise Unlike("a call let go of other tensors than those whose like it was")
        return outs


def _described(
    x: Tensor | None, block: Block | None, blocks: Sequence[Block | None], given: Sequence[Tensor | None]
) -> tuple | None:
    """All that matters of a tensor, and which of the others lies in the same storage, how far before it. Where in its
    storage it lies besides does not."""
    if x is None:
        return None
    first = blocks.index(block)
    apart = x.storage_offset() - given[first].storage_offset()
    return x.shape, x.stride(), x.dtype, x.requires_grad, block.size, first, apart
