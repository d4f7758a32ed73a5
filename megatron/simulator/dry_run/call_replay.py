# SPDX-License-Identifier: Apache-2.0
"""Replays repeated calls: when two consecutive calls had the same effect, later ones are recorded without running them.

A long sequence in chunks calls the same functions on tensors of the same shapes a thousand times. The effect of such a
call is a list of events and of storages that it allocates and frees (:class:`Effect`). If it is known, the events are
appended to the trace, and tensors like those that the call returned are made.

Calls are taken to be the same if they have the same key and tensors with the same properties. The effect must occur
twice in a row, because a first call may fill a cache or begin a sum. If a replay does not free the tensors that the
recorded call freed, the complete step is run again without replay (:class:`ReplayMismatch`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron.context_parallel.attention.kernels.base import Final
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.rule import TileKernel
from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.fpdt.chunk_pass import attend_chunks, attend_chunks_grad
from megatron.context_parallel.fpdt.chunk_work import ChunkWork
from megatron.context_parallel.layout.tiles import Tiles
from megatron.platform.hooks import Replaceable, replaced
from megatron.platform.simulated_cluster import New
from megatron.simulator.cost.trace import Event, HostCopy, Phase, Transfer, Wait
from megatron.simulator.dry_run.recording.recorder import Recorder
from megatron.training.report.tensor_memory import Block


class ReplayMismatch(ValueError):
    """A replayed call freed other tensors than the recorded one."""


class Out(NamedTuple):
    """A tensor that a call returned."""

    # its index among the call's arguments, if it is one of them; None: a new tensor, which the other attributes
    # describe
    given: int | None
    # index of its storage among those that the call made, or `~index` of the argument whose storage it shares
    storage: int = 0
    bytes: int = 0  # of the storage
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0  # in the storage; in an argument's storage, relative to the argument
    dtype: torch.dtype | None = None
    keys: Any = None  # PyTorch's dispatch keys


@dataclass
class Effect:
    """The effect of a call.

    Attributes:
        events: of the trace; tickets are relative to those issued before the call.
        tickets: number of tickets that it issued.
        blocks: number of storages that it made.
        changes: (index of a storage that it made, or ``~index`` of an argument; change of the storage's bytes).
        gone: indices of arguments whose storages it freed.
        outs: returned tensors.
        high: peak bytes during the call minus those at its start.
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
        """Tensors like those that it returned, and their new storages by index."""
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
    """Records one call.

    Args:
        given, blocks: the call's tensors, and their storages' blocks. Neither is kept alive.
    """

    def __init__(self, recorder: Recorder, given: Sequence[Tensor | None], blocks: Sequence[Block | None]) -> None:
        self.recorder = recorder
        self.given = [None if x is None else weakref.ref(x) for x in given]
        self.offsets = [None if x is None else x.storage_offset() for x in given]
        self.places: dict[int, int] = {}  # ~index of the argument, by number of the block
        for place, block in enumerate(blocks):
            if block is not None:
                self.places.setdefault(block.number, ~place)
        recorder.settle()
        self.before, self.unfinished = recorder.counts(), recorder.unfinished

    def effect(self, outs: Sequence[Tensor | None]) -> Effect | None:
        """The effect of the call, which returned ``outs``; None if it cannot be replayed."""
        recorder = self.recorder
        recorder.settle()
        first, events, changes, tickets = self.before
        _, _, _, now = recorder.counts()
        blocks = recorder.history.blocks
        new_events = [_relative(event, tickets) for event in recorder.trace.events[events:]]
        if None in new_events or recorder.unfinished != self.unfinished:
            return None
        memory: list[tuple[int, int]] = []
        for _, number, change in recorder.history.events[changes:]:
            place = number - first if number >= first else self.places.get(number)
            if place is None or blocks[number].place != "device":
                return None
            memory.append((place, change))
        gone = sorted({~place for place, _ in memory if place < 0})
        ended = {~place: blocks[number] for number, place in self.places.items()}
        if any(ended[place].storage() is not None for place in gone):  # resized
            return None
        described = [None if x is None else self._out(x, first) for x in outs]
        if False in described:
            return None
        returned = {out.storage for out in described if out is not None and out.given is None}
        if any(block.size and block.number - first not in returned for block in blocks[first:]):
            return None  # the call has made a tensor that stays and is not returned
        makers = [
            New(x.fake_mode, x, None) if out is not None and out.given is None else None
            for x, out in zip(outs, described)
        ]
        return Effect(new_events, now - tickets, len(blocks) - first, memory, gone, described, makers)

    def _out(self, x: Tensor, first: int) -> Out | bool:
        """A description of a returned tensor; False if no such tensor can be made."""
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


def _relative(event: Event, tickets: int) -> Event | None:
    """The event with tickets relative to ``tickets``; None for a phase, and for a wait for an older ticket."""
    if isinstance(event, Transfer | HostCopy):
        return event if event.ticket is None else replace(event, ticket=event.ticket - tickets)
    if isinstance(event, Wait):
        return Wait(tuple(x - tickets for x in event.tickets)) if min(event.tickets) > tickets else None
    return None if isinstance(event, Phase) else event


def _absolute(event: Event, tickets: int) -> Event:
    """The inverse of :func:`_relative`."""
    if isinstance(event, Transfer | HostCopy):
        return event if event.ticket is None else replace(event, ticket=event.ticket + tickets)
    return Wait(tuple(x + tickets for x in event.tickets)) if isinstance(event, Wait) else event


class CallCache:
    """Effects of calls.

    Args:
        recorder: the recorder of the step, which keeps a history.
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
        """``run()``, or tensors like those that it would return.

        Args:
            owner: an object; calls with different owners are different.
            key: everything else that the call depends on, except ``given``.
            given: the tensors that it reads and writes. The list is cleared, so that ``run`` can free them.
            put: stores the returned tensors as ``run`` does, if ``run`` replaces some of ``given``.

        Raises:
            ReplayMismatch: a replay frees other tensors than the recorded call did.
        """
        recorder = self.recorder
        recorder.end_hop()
        blocks = [None if x is None else recorder.live.get(x.untyped_storage()._cdata) for x in given]
        if not recorder.plain or any(x is not None and block is None for x, block in zip(given, blocks)):
            given.clear()
            return run()
        known = self._effects_of(owner)
        key = (key, *(_signature(x, block, blocks, given) for x, block in zip(given, blocks)))
        effect, steady = known.get(key, (None, False))
        if steady:
            return self._replay(effect, given, blocks, put)
        recording = Recording(recorder, given, blocks)
        given.clear()
        del blocks
        outs = run()
        new = recording.effect(outs)
        if new is not None and new.gone and put is None:
            new = None
        known[key] = new, new is not None and new == effect
        return outs

    def _effects_of(self, owner: Any) -> dict[tuple, tuple[Effect | None, bool]]:
        ref, known = self._known.get(id(owner), (None, None))
        if ref is None or ref() is not owner:  # the id belonged to an object that no longer exists
            known = {}
            self._known[id(owner)] = weakref.ref(owner), known
        return known

    def _replay(
        self, effect: Effect, given: list[Tensor | None], blocks: Sequence[Block | None], put: Callable | None
    ) -> Sequence[Tensor | None]:
        recorder = self.recorder
        outs, made = effect.make(given)
        given.clear()
        tickets = recorder.tickets
        recorder.tickets += effect.tickets
        events = effect.events
        recorder.trace.events += [_absolute(event, tickets) for event in events] if effect.tickets else events
        ended = [blocks[place].storage for place in effect.gone]
        recorder.count(effect.changes, blocks, effect.blocks, made, effect.high)
        changes = recorder.counts()[2]
        if put is not None:
            put(outs)
        if recorder.counts()[2] != changes or any(storage() is not None for storage in ended):
            raise ReplayMismatch("a replayed call freed other tensors than the recorded call")
        return outs


def _signature(
    x: Tensor | None, block: Block | None, blocks: Sequence[Block | None], given: Sequence[Tensor | None]
) -> tuple | None:
    """The properties of a tensor that identify a call.

    They include the first tensor with the same storage and the distance from it, but not the offset in the storage.
    """
    if x is None:
        return None
    first = blocks.index(block)
    apart = x.storage_offset() - given[first].storage_offset()
    return x.shape, x.stride(), x.dtype, x.requires_grad, block.size, first, apart


# --- the calls of FPDT that repeat ---
#
# Chunks run through the same projections, and pairs of chunks through the same tiles. Host copies and ring transfers
# are recorded each time, because the loops over chunks order them.


@contextmanager
def replayed_chunks(recorder: Recorder) -> Iterator[None]:
    """Inside this context, the calls for a chunk or a pair of chunks run a few times and are then replayed."""
    cache = CallCache(recorder)
    with ExitStack() as stack:
        stack.enter_context(replaced(attend_chunks, partial(_attend, cache)))
        stack.enter_context(replaced(attend_chunks_grad, partial(_attend_grad, cache)))
        for call in CHUNK_CALLS:
            stack.enter_context(replaced(call.function, partial(call.replayable, cache)))
        stack.enter_context(replaced(chunked_loss.loss_and_gradient, partial(_loss, cache)))
        yield


def _attend(cache: CallCache, attend: Callable) -> Callable:
    @wraps(attend)
    def run(kernel: TileKernel, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, result: Accumulator) -> None:
        if _needs_pair_mask(kernel, tiles):
            attend(kernel, tiles, q, k, v, result)
            return

        def run_call() -> tuple[Tensor | None, Tensor | None]:
            attend(kernel, tiles, q, k, v, result)
            return result.out_SBHD, result.lse_SBH

        def put(outs: Sequence[Tensor | None]) -> None:
            result.out_SBHD, result.lse_SBH = outs

        key = "attend", _shapes(tiles), result.shape
        cache.call(kernel, key, [q, k, v, result.out_SBHD, result.lse_SBH], run_call, put)

    return run


def _attend_grad(cache: CallCache, attend_grad: Callable) -> Callable:
    @wraps(attend_grad)
    def run(
        kernel: TileKernel,
        tiles: Tiles,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        final: Final,
        dq: GradientSum,
        dkv: KeyGradients,
    ) -> None:
        if _needs_pair_mask(kernel, tiles):
            attend_grad(kernel, tiles, q, k, v, final, dq, dkv)
            return

        def run_call() -> tuple[Tensor | None, ...]:
            attend_grad(kernel, tiles, q, k, v, final, dq, dkv)
            return dq.total, dkv.total, dkv.dk.total, dkv.dv.total

        def put(outs: Sequence[Tensor | None]) -> None:
            dq.total, dkv.total, dkv.dk.total, dkv.dv.total = outs

        given = [q, k, v, *final, dq.total, dkv.total, dkv.dk.total, dkv.dv.total]
        cache.call(kernel, ("attend_grad", _shapes(tiles)), given, run_call, put)

    return run


def _needs_pair_mask(kernel: TileKernel, tiles: Tiles) -> bool:
    """Whether the work of pairs depends on their positions."""
    return kernel.scores.slopes is not None or kernel.scores.dropout is not None or tiles.masked


def _shapes(tiles: Tiles) -> tuple:
    return tuple((tile.q, tile.k, tile.kind) for tile in tiles)


class ChunkCall(NamedTuple):
    """A method of :class:`ChunkWork`, whose arguments are tensors, the number of a chunk, and other numbers."""

    function: Replaceable  # the method
    tensors: int  # how many of its first arguments are tensors
    single: bool  # whether it returns one tensor instead of a tuple
    not_replayed: Callable[[ChunkWork], bool]  # whether a call cannot be replayed

    def replayable(self, cache: CallCache, call: Callable) -> Callable:
        """``call``, the method, with results from ``cache`` where its calls can be replayed."""

        @wraps(call)
        def run(work: ChunkWork, *args: Any) -> Any:
            if self.not_replayed(work):
                return call(work, *args)
            chunk, *others = args[self.tensors :]
            key = (self.function.__name__, _spans(work, chunk), *others)
            given = list(args[: self.tensors])
            if self.single:
                return cache.call(work, key, given, lambda: (call(work, *args),))[0]
            return tuple(cache.call(work, key, given, lambda: call(work, *args)))

        return run


CHUNK_CALLS = (
    # The first call of project chooses the kernel.
    ChunkCall(ChunkWork.project, 1, False, lambda work: work.kernel is None or torch.is_grad_enabled()),
    ChunkCall(ChunkWork.project_grad, 3, True, lambda work: False),
    ChunkCall(ChunkWork.output_of, 2, True, lambda work: work.layer.replay or torch.is_grad_enabled()),
    ChunkCall(ChunkWork.output_grad, 3, False, lambda work: work.layer.replay),
    ChunkCall(ChunkWork.ffn_of, 1, True, lambda work: work.layer.replay or torch.is_grad_enabled()),
)


def _loss(cache: CallCache, loss: Callable) -> Callable:
    """Replays the loss in chunks, which FPDT uses."""

    @wraps(loss)
    def run(tokens: Tensor, weight: Tensor, bias: None, targets: Tensor, scale: Tensor, *others: Any) -> tuple:
        _, rule, spans, needs_grad = others
        key = "loss", rule.vocab_size, tuple(spans), needs_grad, rule.softcap, rule.temperature
        given = [tokens, weight, targets, scale]
        return tuple(cache.call(weight, key, given, lambda: loss(tokens, weight, bias, targets, scale, *others)))

    return run


def _spans(work: ChunkWork, chunk: int) -> tuple[Any, ...]:
    """The length of each span of positions of a chunk."""
    return tuple(stop - start for start, stop in work.layer.layout.local_chunk_spans(chunk))
