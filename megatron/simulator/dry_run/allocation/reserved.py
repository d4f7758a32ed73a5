# SPDX-License-Identifier: Apache-2.0
"""A step's list of allocations, continued to more layers and micro-batches than ran.

What one more layer, or one more micro-batch, allocates and frees is a few stretches of the list; written down as often
as there are more of them, they make the list of the whole step. Stretches of a layer are what the list of five layers
has that the list of four has not; those of a micro-batch are known (replay.py). Which block a repeated stretch frees
is told by those that were made at the same place of the loop, one period after another (a chain): the newest of them
where the recorded stretch does so, as backward passes do, else the oldest.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron.simulator.dry_run.allocation.allocator import (
    MIB,
    OutOfMemory,
    Settings,
    from_environment,
    replayed,
    rounded,
)
from megatron.simulator.machines.machine import Machine
from megatron.training.arguments.config import Config

Changes = list[tuple[int, int]]  # (block, change of its bytes)
WINDOWS = (16, 4, 2)  # changes that must be alike for two places of lists to be the same, tried in turn
PLACES = 64  # that are looked at
FEWER = 4  # layers of the shorter list, in units: what grows with layers has at least so many times what one adds


class NoPattern(ValueError):
    """The list cannot be continued."""


def lifetimes(changes: Changes) -> tuple[Changes, list[int]]:
    """The same in sizes that the allocator rounds to, with a new block for each time that one is resized; and where
    each of the given changes begins."""
    held: dict[int, tuple[int, int]] = {}
    given: dict[int, int] = {}
    found: Changes = []
    places, count = [], 0
    for number, change in changes:
        places.append(len(found))
        if number in held:
            block, size = held.pop(number)
            found.append((block, -size))
            change += given[number]
        if change > 0:
            given[number], change = change, rounded(change)
            held[number] = count, change
            found.append((count, change))
            count += 1
    return found, [*places, len(found)]


def added(few: Changes, more: Changes) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Stretches (begin, end) of ``more`` that ``few`` lacks; and by how much larger a block of ``more`` is than the
    same one of ``few``, where it is.

    Raises:
        NoPattern: they differ in something else.
    """
    a, b = (array("q", [size for _, size in changes]) for changes in (few, more))
    whole = b.tobytes()
    stretches, larger, i, j = [], {}, 0, 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and (a[i] == b[j] or (a[i] < 0 and a[i] == b[j] + larger.get(more[j][0], 0))):
            i, j = i + 1, j + 1
            continue
        skipped = _next_match(a, b, whole, i, j) if i < len(a) else len(b)
        if skipped is not None and j < len(b):
            # in the middle of its loop, whose ends are not quite regular
            before = _matching(b, b, j - 1, skipped - 1, -1) // 2
            stretches.append((j - before, skipped - before))
            j = skipped
        elif i < len(a) and j < len(b) and 0 < FEWER * (b[j] - a[i]) <= a[i]:
            larger[more[j][0]] = b[j] - a[i]
            i, j = i + 1, j + 1
        else:
            raise NoPattern("the lists of fewer and of more layers differ in more than layers")
    return stretches, larger


def _matching(a: Sequence[int], b: Sequence[int], i: int, j: int, step: int) -> int:
    """How many elements are the same from ``a[i]`` and ``b[j]`` on."""
    count = 0
    while 0 <= i < len(a) and 0 <= j < len(b) and a[i] == b[j]:
        i, j, count = i + step, j + step, count + 1
    return count


def _next_match(a: array, b: array, whole: bytes, i: int, j: int) -> int | None:
    """The place of ``b`` behind ``j`` from which on it is longest as ``a`` from ``i`` on; ``whole``: bytes of ``b``."""
    width, best, length = a.itemsize, None, 0
    last = (len(b) - (len(a) - i)) * width  # what is left of ``a`` must fit behind
    for window in WINDOWS:
        wanted, at = a[i : i + window].tobytes(), (j + 1) * width
        for _ in range(PLACES):
            at = whole.find(wanted, at)
            while at >= 0 and at % width:
                at = whole.find(wanted, at + 1)
            if at < 0 or at > last:
                break
            found = _matching(a, b, i, at // width, 1)
            if found > length:
                best, length = at // width, found
            at += width
        if best is not None:
            break
    return best


def extrapolated(
    changes: Changes, stretches: Sequence[tuple[int, int]], times: int, larger: dict[int, int] | None = None
) -> tuple[Changes, list[int]]:
    """``changes`` with each of the stretches ``times`` times more, right after itself, and blocks as much ``larger``
    each time (None: the stretches are of micro-batches, not layers); and where each of ``changes`` is now.

    Raises:
        NoPattern: a stretch frees what no repeated one makes.
    """
    chain_of = _chains(changes, stretches, whole=larger is None)
    larger = larger or {}
    newest_first = _newest_first(changes, chain_of)
    live: dict[int, deque[int]] = defaultdict(deque)
    held: dict[int, int] = {}
    out: Changes = []
    sizes: list[int] = []

    def emit(begin: int, end: int) -> None:
        for at in range(begin, end):
            block, change = changes[at]
            chain = chain_of.get(block)
            if change > 0:
                number = len(sizes)
                sizes.append(change + times * larger.get(block, 0))
                out.append((number, sizes[-1]))
                if chain is None:
                    held[block] = number
                else:
                    live[chain].append(number)
                continue
            if chain is None:
                number = held.pop(block, None)
            else:
                there = live[chain]
                number = (there.pop() if newest_first[chain] else there.popleft()) if there else None
            if number is None:
                raise NoPattern("a repeated stretch frees what it did not make")
            out.append((number, -sizes[number]))

    places, done = [], 0
    for begin, end in [*stretches, (len(changes), len(changes))]:
        places += range(len(out), len(out) + end - done)
        emit(done, end)
        for _ in range(times if end > begin else 0):
            emit(begin, end)
        done = end
    return out, [*places, len(out)]


def _chains(changes: Changes, stretches: Sequence[tuple[int, int]], whole: bool) -> dict[int, int]:
    """Number of the chain, by block. A stretch's block is of one chain with those at its place in the loop's other
    rounds; where a stretch frees older blocks still, they are of the chain of the like that it makes. ``whole``: only
    whole rounds count, as of micro-batches."""
    chain_of: dict[int, int] = {}
    sizes = [size for _, size in changes]
    for begin, end in stretches:
        period = end - begin
        before, behind = _matching(sizes, sizes, begin - 1, end - 1, -1), _matching(sizes, sizes, begin, end, 1)
        first = begin - (before // period * period if whole else before)
        last = end + (behind // period * period if whole else behind)
        for at in range(begin, end):
            block, size = changes[at]
            for like in range(at - (at - first) // period * period, last, period) if size > 0 else ():
                chain_of.setdefault(changes[like][0], block)
    older = [block for at, end in stretches for block, size in changes[at:end] if size < 0 and block not in chain_of]
    if older:
        _add_older(changes, stretches, chain_of, older)
    return chain_of


def _add_older(
    changes: Changes, stretches: Sequence[tuple[int, int]], chain_of: dict[int, int], older: list[int]
) -> None:
    """Of each size, the first that a stretch frees is like the first of those that it makes to be freed later; and what
    is freed between them, made before, comes in turn."""
    begin, end = stretches[0][0], stretches[-1][1]
    made_at = {block: at for at, (block, change) in enumerate(changes) if change > 0}
    freed_at = {block: at for at, (block, change) in enumerate(changes) if change < 0}
    later: dict[int, list[int]] = defaultdict(list)  # by size, in the order in which they are freed
    for block in sorted(made_at, key=lambda block: freed_at.get(block, len(changes) + block)):
        if made_at[block] < end <= freed_at.get(block, end):
            later[changes[made_at[block]][1]].append(block)
    inside = {made_at[block] for at, to in stretches for block, change in changes[at:to] if change > 0}
    for size, freed in _by_size(changes, made_at, older).items():
        made = [block for block in later[size] if made_at[block] in inside][: len(freed)]
        if len(made) < len(freed):
            raise NoPattern("a stretch frees what no other makes")
        waits = [block for block in later[size] if made_at[block] < begin and block not in chain_of]
        between = [block for block in waits if freed_at.get(block, len(changes)) < freed_at.get(made[0], len(changes))]
        for number, block in enumerate([*freed, *between]):
            chain_of[block] = chain_of[made[number % len(made)]]


def _by_size(changes: Changes, made_at: dict[int, int], blocks: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for block in blocks:
        found[changes[made_at[block]][1]].append(block)
    return found


def _newest_first(changes: Changes, chain_of: dict[int, int]) -> dict[int, bool]:
    """By chain, whether its blocks are freed in the opposite order."""
    made, freed = defaultdict(list), defaultdict(list)
    for block, change in changes:
        if block in chain_of:
            (made if change > 0 else freed)[chain_of[block]].append(block)
    return {
        chain: len(freed[chain]) > 1 and blocks.index(freed[chain][0]) > blocks.index(freed[chain][-1])
        for chain, blocks in made.items()
    }


# What PyTorch's allocator reserves in a whole step: its list of allocations, continued to all layers and micro-batches
# (reserved.py), goes through the model of the allocator (allocator.py).


MOST = 60_000  # changes of repeated micro-batches; more of them reserve what these do
LONGEST = 2_500_000  # changes of layers that did not run; what more of them hold is one block, without gaps
CHEAP = 20_000  # changes of the layers that did not run: below, they are run where the list cannot be continued
WORKSPACE, BEYOND = -1, -2  # numbers of the blocks that are cuBLAS' workspace, and layers beyond LONGEST


@dataclass(frozen=True)
class Allocations:
    """(block, change of its bytes) of what ran; of these, the changes ``begin`` to ``end`` happen ``times`` more."""

    changes: Changes
    begin: int = 0
    end: int = 0
    times: int = 0


@dataclass(frozen=True)
class Reserved:
    """
    Attributes:
        bytes: most that is reserved, by setting; more than there is where that is not enough.
        retries: how often everything cached was given back meanwhile, by setting; None: it was not enough.
        scaled: what was multiplied, where the list could not be continued; empty: all was replayed.
        notes: what PYTORCH_ALLOC_CONF says and is not modelled, and which layers were not replayed.
    """

    bytes: dict[str, float] = field(default_factory=dict)
    retries: dict[str, int | None] = field(default_factory=dict)
    scaled: str = ""
    notes: tuple[str, ...] = ()


def settings() -> tuple[dict[str, Settings], tuple[str, ...]]:
    """Of the allocator, by name: PyTorch's own, expandable segments, and what the environment says."""
    found = {"default": Settings(), "expandable_segments": Settings(expandable_segments=True)}
    said = from_environment(os.environ)
    if said is None:
        return found, ()
    name, own, notes = said
    return found | {name: own}, tuple(notes)


def reserved(
    ran: list[Allocations],
    counts: list[int],
    layers: int,
    capacity: float,
    workspace: int,
    run_all: Callable[[], Allocations] | None = None,
) -> Reserved:
    """
    Args:
        ran: of a rank, with ``counts`` layers each, of all ``layers`` in the end.
        capacity: bytes that the device has for PyTorch's allocator. workspace: of these, cuBLAS'.
        run_all: runs all layers.

    Raises:
        Refusal: PYTORCH_ALLOC_CONF is not what PyTorch takes.
    """
    last, scale, scaled, beyond, notes = ran[-1], 1.0, "", 0, ()
    changes, places = lifetimes(last.changes)
    begin, end = places[last.begin], places[last.end]
    if len(counts) > 1:
        few = lifetimes(ran[0].changes)[0]
        more = (layers - counts[1]) // (counts[1] - counts[0])
        each, longer = peak(changes) - peak(few), len(changes) - len(few)
        grown, missing = peak(changes) + more * each, more * longer
        if missing > LONGEST:
            replays = min(max(LONGEST // longer, 2), more)
            beyond, more = (more - replays) * each, replays
            shown = f"{counts[1] + replays * (counts[1] - counts[0])} of {layers} layers"
            notes = (f"reserved: {shown} replayed; what the others hold is counted without gaps",)
        try:
            stretches, larger = added(few, changes)
            if larger and run_all is not None and missing <= CHEAP:
                raise NoPattern("shards of a distributed optimizer are not cut where layers end")
            changes, places = checked(*extrapolated(changes, stretches, more, larger), grown - beyond)
            begin, end = places[begin], places[end]
        except NoPattern:
            if run_all is not None and missing <= CHEAP:
                return reserved([run_all()], [layers], layers, capacity, workspace)
            scale, scaled, beyond, notes = grown / peak(changes), f"{counts[1]} of {layers} layers", 0, ()
    times = min(last.times, max(MOST // max(end - begin, 1), 4))
    if times:
        try:
            left = times * sum(change for _, change in changes[begin:end])
            changes, _ = checked(*extrapolated(changes, [(begin, end)], times), peak(changes) + left)
        except NoPattern:
            scaled = ", ".join(filter(None, (scaled, f"the micro-batches that ran, {last.times} being left out")))
    held = [(WORKSPACE, workspace), *[(BEYOND, beyond)] * (beyond > 0)]
    found = by_setting([*held, *changes], capacity, scale, scaled)
    return replace(found, notes=found.notes + notes)


def by_setting(changes: Changes, capacity: float, scale: float = 1.0, scaled: str = "") -> Reserved:
    """Replayed under each setting; what does not fit, on a device that is large enough."""
    names, notes = settings()
    sizes, retries = {}, {}
    for name, setting in names.items():
        try:
            found = replayed(changes, setting, capacity / scale)
            retries[name] = found.retries
        except OutOfMemory:
            found, retries[name] = replayed(changes, setting), None
        sizes[name] = scale * found.peak_reserved
    return Reserved(sizes, retries, scaled, notes)


def peak(changes: Changes) -> int:
    """Most bytes at any time."""
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def checked(changes: Changes, places: list[int], wanted: float) -> tuple[Changes, list[int]]:
    """A continued list, if its peak is what it should be.

    Raises:
        NoPattern: it is not.
    """
    if abs(peak(changes) - wanted) > 0.005 * wanted + MIB:
        raise NoPattern("the peak of the continued list is not what layers and micro-batches add up to")
    return changes, places


# Device memory that no tensor of the program holds: the CUDA context, cuBLAS' workspace, NCCL's buffers.
#
# A machine's file gives them under ``runtime``: measured by tools/measure_hardware.py on a GPU, or assumed, as the
# file's sources say. What a file leaves open is assumed here:
#
# - a context with PyTorch's kernels, loaded as they are used: 0.5 GiB;
# - cuBLAS' workspace, which PyTorch takes from its own allocator, so that it is part of what that reserves: 32 MiB on
#   Hopper and later, else two of 4 MiB and eight of 16 KiB (PyTorch's notes on CUDA, CUBLAS_WORKSPACE_CONFIG);
# - NCCL's buffers of a communicator: NCCL_BUFFSIZE, 4 MiB, for each channel's two directions, with 16 channels over a
#   node's links and 2 a neighbour over the network (NCCL's documentation of its environment variables).


CONTEXT = 512 * MIB
NCCL_BUFFER = 4 * MIB
CHANNELS, NETWORK_CHANNELS = 16, 2
ASSUMED = "assumed, not measured"


@dataclass(frozen=True)
class RuntimeMemory:
    """Bytes of one process; ``communicators``: groups of more than one rank that NCCL has buffers for; ``source``:
    where the figures come from."""

    context: int
    cublas: int
    nccl: int
    communicators: int
    source: str = ASSUMED

    @property
    def outside_allocator(self) -> int:
        """Bytes that PyTorch's allocator does not have."""
        return self.context + self.nccl


def runtime_memory(config: Config, world_size: int, machine: Machine) -> RuntimeMemory:
    """Of a rank of ``config``'s grid."""
    p = config.parallel
    tensor, ulysses, ring = p.tensor_model_parallel_size, p.ulysses_parallel_size, p.ring_parallel_size
    inner = tensor * ulysses * ring
    data = world_size // (inner * p.pipeline_model_parallel_size)
    groups = [(tensor, tensor), (ulysses, tensor * ulysses), (ring, inner), (data * ulysses * ring, inner * data)]
    groups += [(p.pipeline_model_parallel_size, world_size)]
    used = [(size, span) for size, span in groups if size > 1]
    given = machine.runtime
    hopper = machine.capability >= (9, 0)
    near, far = (2 * NCCL_BUFFER * channels for channels in (CHANNELS, 2 * NETWORK_CHANNELS))
    near, far = _or(given.nccl, near), _or(given.nccl_network, far)
    nccl = sum(near if span <= machine.gpus else far for _, span in used)
    cublas = _or(given.cublas, 32 * MIB if hopper else 8 * MIB + 128 * 1024)
    source = machine.sources.get("runtime", ASSUMED)
    return RuntimeMemory(_or(given.context, CONTEXT), cublas, nccl, len(used), source)


def _or(given: float | None, assumed: int) -> int:
    return assumed if given is None else int(given)


def needed_by_setting(
    reserved: dict[str, float], config: Config, world_size: int, machine: Machine
) -> dict[str, float]:
    """Bytes of a device that a rank's process takes, by the allocator's setting; empty where it was not replayed."""
    if not reserved or not machine.is_gpu:
        return {}
    own = runtime_memory(config, world_size, machine).outside_allocator
    return {setting: size + own for setting, size in reserved.items()}
