# SPDX-License-Identifier: Apache-2.0
"""Calls that are cache: what two in a row did to trace and memory, the next ones are written down to do as well.

A long sequence in chunks calls the same functions on tensors of the same shapes a thousand times. What such a call does
is a list of events and of storages that come and go (:class:`Effect`); where it is known, the call is left out, and
tensors like those that it returned are made.

Whether a call is like another is told by a key, by the tensors that it is given, and by the two in a row: a cache that
the first one fills, or a sum that it begins, is not there the second time. And a tensor that a call has let go of must
end again: where one does not, the whole step is run once more without this (:class:`ReplayMismatch`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron.context_parallel.attention.merge import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.ring import KeyBlock
from megatron.context_parallel.attention.tile import TileKernel
from megatron.context_parallel.fpdt import chunked_loss
from megatron.context_parallel.fpdt.chunk_pass import attend_chunks, attend_chunks_grad
from megatron.context_parallel.fpdt.chunk_work import ChunkWork
from megatron.context_parallel.layout.tiles import Tile
from megatron.platform.hooks import replaced
from megatron.platform.simulated_cluster import New
from megatron.simulator.cost.trace import Event, HostCopy, Phase, Transfer, Wait
from megatron.simulator.dry_run.recording.recorder import Recorder
from megatron.training.report.tensor_memory import Block


class ReplayMismatch(ValueError):
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
        self.before, self.unfinished = recorder.counts(), recorder.unfinished

    def effect(self, outs: Sequence[Tensor | None]) -> Effect | None:
        """What the call did, which returned ``outs``; None where that cannot be written down again."""
        recorder = self.recorder
        recorder.settle()
        first, events, changes, tickets = self.before
        _, _, _, now = recorder.counts()
        blocks = recorder.history.blocks
        noted = [_relative(event, tickets) for event in recorder.trace.events[events:]]
        if None in noted or recorder.unfinished != self.unfinished:
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


def _relative(event: Event, tickets: int) -> Event | None:
    """With tickets counted from ``tickets`` on; None where it waits for what is older, or is a phase."""
    if isinstance(event, Transfer | HostCopy):
        return event if event.ticket is None else replace(event, ticket=event.ticket - tickets)
    if isinstance(event, Wait):
        return Wait(tuple(x - tickets for x in event.tickets)) if min(event.tickets) > tickets else None
    return None if isinstance(event, Phase) else event


def _absolute(event: Event, tickets: int) -> Event:
    """The way back of :func:`_relative`."""
    if isinstance(event, Transfer | HostCopy):
        return event if event.ticket is None else replace(event, ticket=event.ticket + tickets)
    return Wait(tuple(x + tickets for x in event.tickets)) if isinstance(event, Wait) else event


class CallCache:
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
            owner: calls of different owners are not cache.
            key: all that the call depends on beside ``owner`` and what it is given.
            given: the tensors that it reads and writes. The list is emptied: ``run`` may let go of them.
            put: what ``run`` does with the tensors before it returns them, where it replaces those it was given.

        Raises:
            ReplayMismatch: what had ended in the calls before has not ended now, or something else has.
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
        found = recording.effect(outs)
        if found is not None and found.gone and put is None:
            found = None
        known[key] = found, found is not None and found == effect
        return outs

    def _effects_of(self, owner: Any) -> dict[tuple, tuple[Effect | None, bool]]:
        ref, known = self._known.get(id(owner), (None, None))
        if ref is None or ref() is not owner:  # another that lay in its place
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
            raise ReplayMismatch("a call let go of other tensors than those whose like it was")
        return outs


def _signature(
    x: Tensor | None, block: Block | None, blocks: Sequence[Block | None], given: Sequence[Tensor | None]
) -> tuple | None:
    """All that matters of a tensor, and which of the others lies in the same storage, how far before it. Where in its
    storage it lies besides does not."""
    if x is None:
        return None
    first = blocks.index(block)
    apart = x.storage_offset() - given[first].storage_offset()
    return x.shape, x.stride(), x.dtype, x.requires_grad, block.size, first, apart


# A few chunks for all: under FPDT, chunks go through the same projections, and pairs of chunks meet in the same tiles.
#
# What follows says which calls are cache, and by what; the code above does the rest. What waits in host memory, comes
# back and is sent on a ring is recorded each time: its order is what the loops over chunks are about.


@contextmanager
def replayed_chunks(recorder: Recorder) -> Iterator[None]:
    """Within, what a chunk or a pair of chunks does is run a few times, and written down from then on."""
    cache = CallCache(recorder)
    with ExitStack() as stack:
        stack.enter_context(replaced(attend_chunks, partial(_attend, cache)))
        stack.enter_context(replaced(attend_chunks_grad, partial(_attend_grad, cache)))
        for function, work in WORK:
            stack.enter_context(replaced(function, partial(work, cache)))
        stack.enter_context(replaced(chunked_loss.loss_and_gradient, partial(_loss, cache)))
        yield


def _attend(cache: CallCache, attend: Callable) -> Callable:
    @wraps(attend)
    def run(tiles: Iterable[Tile], q: Tensor, k: Tensor, v: Tensor, *, kernel: TileKernel, result: Accumulator) -> None:
        tiles = tuple(tiles)
        if _needs_pair_mask(kernel, tiles):
            attend(tiles, q, k, v, kernel=kernel, result=result)
            return

        def run_call() -> tuple[Tensor | None, Tensor | None]:
            attend(tiles, q, k, v, kernel=kernel, result=result)
            return result.out_SBHD, result.lse_SBH

        def put(outs: Sequence[Tensor | None]) -> None:
            result.out_SBHD, result.lse_SBH = outs

        key = "attend", _shapes(tiles), result.shape
        cache.call(kernel, key, [q, k, v, result.out_SBHD, result.lse_SBH], run_call, put)

    return run


def _attend_grad(cache: CallCache, attend_grad: Callable) -> Callable:
    @wraps(attend_grad)
    def run(
        tiles: Iterable[Tile],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        kernel: TileKernel,
        dq: GradientSum,
        dkv: KeyGradients | KeyBlock,
        **final: Tensor | None,
    ) -> None:
        tiles = tuple(tiles)
        sums = dkv.grads if isinstance(dkv, KeyBlock) else dkv
        if _needs_pair_mask(kernel, tiles):
            attend_grad(tiles, q, k, v, kernel=kernel, dq=dq, dkv=dkv, **final)
            return

        def run_call() -> tuple[Tensor | None, ...]:
            attend_grad(tiles, q, k, v, kernel=kernel, dq=dq, dkv=dkv, **final)
            return dq.total, sums.total, sums.dk.total, sums.dv.total

        def put(outs: Sequence[Tensor | None]) -> None:
            dq.total, sums.total, sums.dk.total, sums.dv.total = outs

        held = dkv.hop.held if isinstance(dkv, KeyBlock) else None
        key = "attend_grad", _shapes(tiles), dq.rows, sums.rows, held, *final
        given = [q, k, v, *final.values(), dq.total, sums.total, sums.dk.total, sums.dv.total]
        cache.call(kernel, key, given, run_call, put)

    return run


def _needs_pair_mask(kernel: TileKernel, tiles: Sequence[Tile]) -> bool:
    """Whether pairs have something of their own, which depends on where they are."""
    return kernel.slopes is not None or kernel.dropout is not None or any(tile.masked for tile in tiles)


def _shapes(tiles: Sequence[Tile]) -> tuple:
    return tuple((tile.q, tile.k, tile.kind) for tile in tiles)


def _project(cache: CallCache, project: Callable) -> Callable:
    @wraps(project)
    def run(work: ChunkWork, x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        if work.kernel is None or torch.is_grad_enabled():  # the first one learns the shapes
            return project(work, x, chunk)
        return tuple(cache.call(work, ("project", _spans(work, chunk)), [x], lambda: project(work, x, chunk)))

    return run


def _project_grad(cache: CallCache, project_grad: Callable) -> Callable:
    @wraps(project_grad)
    def run(work: ChunkWork, x: Tensor, dq: Tensor | None, dkv: Tensor | None, chunk: int) -> Tensor:
        key = "project_grad", _spans(work, chunk)
        return cache.call(work, key, [x, dq, dkv], lambda: (project_grad(work, x, dq, dkv, chunk),))[0]

    return run


def _output(cache: CallCache, output: Callable) -> Callable:
    @wraps(output)
    def run(work: ChunkWork, out: Tensor, x: Tensor, chunk: int) -> Tensor:
        if work.layer.replay or torch.is_grad_enabled():
            return output(work, out, x, chunk)
        key = "output", _spans(work, chunk)
        return cache.call(work, key, [out, x], lambda: (output(work, out, x, chunk),))[0]

    return run


def _output_grad(cache: CallCache, output_grad: Callable) -> Callable:
    @wraps(output_grad)
    def run(work: ChunkWork, out: Tensor, x: Tensor, dy: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        if work.layer.replay:
            return output_grad(work, out, x, dy, chunk)
        key = "output_grad", _spans(work, chunk)
        return tuple(cache.call(work, key, [out, x, dy], lambda: output_grad(work, out, x, dy, chunk)))

    return run


def _ffn(cache: CallCache, ffn: Callable) -> Callable:
    @wraps(ffn)
    def run(work: ChunkWork, hidden: Tensor, chunk: int, start: int) -> Tensor:
        if work.layer.replay or torch.is_grad_enabled():
            return ffn(work, hidden, chunk, start)
        key = "ffn", _spans(work, chunk), start
        return cache.call(work, key, [hidden], lambda: (ffn(work, hidden, chunk, start),))[0]

    return run


def _loss(cache: CallCache, loss: Callable) -> Callable:
    """Of the loss in chunks, which goes with FPDT."""

    @wraps(loss)
    def run(tokens: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, *others: Any) -> tuple[Tensor, ...]:
        vocab_size, _, spans, needs_grad = others
        key = "loss", vocab_size, tuple(spans), needs_grad
        given = [tokens, weight, targets, scale]
        return tuple(cache.call(weight, key, given, lambda: loss(tokens, weight, targets, scale, *others)))

    return run


def _spans(work: ChunkWork, chunk: int) -> tuple[Any, ...]:
    """How many rows, and in how many stretches of positions, a chunk has."""
    return tuple(stop - start for start, stop in work.layer.layout.local_chunk_spans(chunk))


WORK = (
    (ChunkWork.project, _project),
    (ChunkWork.project_grad, _project_grad),
    (ChunkWork.output_of, _output),
    (ChunkWork.output_grad, _output_grad),
    (ChunkWork.ffn_of, _ffn),
)
