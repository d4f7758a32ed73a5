# SPDX-License-Identifier: Apache-2.0
"""Memory that PyTorch's allocator reserves for a complete step, from the allocations of the layers that ran.

A layer or a micro-batch allocates and frees in a few stretches of the list of allocations. Repeating these stretches
extrapolates the list to the complete step. The stretches of a layer are the difference between the lists of five and of
four layers; for a micro-batch they are known (replay.py). Blocks that are made at the same place of a loop, one period
after another, form a chain. A repeated stretch frees the newest block of a chain if the recorded stretch does so, as in
backward passes, otherwise the oldest.
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
from megatron.training.arguments.stages import strategy_of
from megatron.training.settings.config import Config

Changes = list[tuple[int, int]]  # (block, change of its bytes)
WINDOWS = (16, 4, 2)  # numbers of equal changes by which places in two lists are matched, tried in turn
PLACES = 64  # limit of the places to try
FEWER = 4  # units of layers in the shorter list; a size that grows with layers is at least this multiple of its growth


class NoPattern(ValueError):
    """The list cannot be extrapolated."""


def lifetimes(changes: Changes) -> tuple[Changes, list[int]]:
    """(changes with the allocator's rounded sizes and a new block for each resize, index of each old change)."""
    held: dict[int, tuple[int, int]] = {}
    given: dict[int, int] = {}
    result: Changes = []
    places, count = [], 0
    for number, change in changes:
        places.append(len(result))
        if number in held:
            block, size = held.pop(number)
            result.append((block, -size))
            change += given[number]
        if change > 0:
            given[number], change = change, rounded(change)
            held[number] = count, change
            result.append((count, change))
            count += 1
    return result, [*places, len(result)]


def added(few: Changes, more: Changes) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """(stretches (begin, end) of ``more`` that ``few`` lacks, growth in bytes of blocks that both have).

    Raises:
        NoPattern: the lists differ in anything else.
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
            # take the stretch from the middle of its loop, because the loop's ends are irregular
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
    """Number of equal elements from ``a[i]`` and ``b[j]`` on."""
    count = 0
    while 0 <= i < len(a) and 0 <= j < len(b) and a[i] == b[j]:
        i, j, count = i + step, j + step, count + 1
    return count


def _next_match(a: array, b: array, whole: bytes, i: int, j: int) -> int | None:
    """The index in ``b`` after ``j`` with the longest match of ``a`` from ``i`` on; ``whole``: bytes of ``b``."""
    width, best, length = a.itemsize, None, 0
    last = (len(b) - (len(a) - i)) * width  # the rest of ``a`` must fit after the match
    for window in WINDOWS:
        wanted, at = a[i : i + window].tobytes(), (j + 1) * width
        for _ in range(PLACES):
            at = whole.find(wanted, at)
            while at >= 0 and at % width:
                at = whole.find(wanted, at + 1)
            if at < 0 or at > last:
                break
            match = _matching(a, b, i, at // width, 1)
            if match > length:
                best, length = at // width, match
            at += width
        if best is not None:
            break
    return best


def extrapolated(
    changes: Changes, stretches: Sequence[tuple[int, int]], times: int, larger: dict[int, int] | None = None
) -> tuple[Changes, list[int]]:
    """(``changes`` with ``times`` repetitions after each stretch, index of each old change).

    Args:
        larger: growth of blocks with each repetition; None: the stretches are of micro-batches, not of layers.

    Raises:
        NoPattern: a stretch frees a block that no repeated one makes.
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
                queue = live[chain]
                number = (queue.pop() if newest_first[chain] else queue.popleft()) if queue else None
            if number is None:
                raise NoPattern("a repeated stretch frees a block that it did not make")
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
    """Number of the chain by block.

    A block of a stretch is in one chain with the blocks at the same place in other rounds of the loop. Older blocks
    that a stretch frees join a chain of blocks of the same size that the stretch makes. ``whole``: only complete rounds
    count, for micro-batches.
    """
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
    """Add older blocks to chains, by size.

    The first older block that a stretch frees joins the chain of the first block that the stretch makes and that is
    freed later. Other blocks that were made before, and are freed in between, join the chains in turn.
    """
    begin, end = stretches[0][0], stretches[-1][1]
    made_at = {block: at for at, (block, change) in enumerate(changes) if change > 0}
    freed_at = {block: at for at, (block, change) in enumerate(changes) if change < 0}
    later: dict[int, list[int]] = defaultdict(list)  # by size, in the order in which they are freed
    for block in sorted(made_at, key=lambda block: freed_at.get(block, len(changes) + block)):
        if made_at[block] < end <= freed_at.get(block, end):
            later[changes[made_at[block]][1]].append(block)
    inside = {made_at[block] for at, to in stretches for block, change in changes[at:to] if change > 0}
    of_size: dict[int, list[int]] = defaultdict(list)
    for block in older:
        of_size[changes[made_at[block]][1]].append(block)
    for size, freed in of_size.items():
        made = [block for block in later[size] if made_at[block] in inside][: len(freed)]
        if len(made) < len(freed):
            raise NoPattern("a stretch frees blocks that no other makes")
        waits = [block for block in later[size] if made_at[block] < begin and block not in chain_of]
        between = [block for block in waits if freed_at.get(block, len(changes)) < freed_at.get(made[0], len(changes))]
        for number, block in enumerate([*freed, *between]):
            chain_of[block] = chain_of[made[number % len(made)]]


def _newest_first(changes: Changes, chain_of: dict[int, int]) -> dict[int, bool]:
    """By chain, whether its newest blocks are freed first."""
    made, freed = defaultdict(list), defaultdict(list)
    for block, change in changes:
        if block in chain_of:
            (made if change > 0 else freed)[chain_of[block]].append(block)
    return {
        chain: len(freed[chain]) > 1 and blocks.index(freed[chain][0]) > blocks.index(freed[chain][-1])
        for chain, blocks in made.items()
    }


# --- the reserved memory: the extrapolated list, replayed by the model of the allocator ---

MOST = 60_000  # limit of the changes of repeated micro-batches to replay; further ones reserve no more
LONGEST = 2_500_000  # limit of the changes of missing layers to replay; further layers count as one block without gaps
CHEAP = 20_000  # if the list cannot be extrapolated, missing layers with at most this many changes are run
WORKSPACE, BEYOND = -1, -2  # numbers of the blocks of cuBLAS' workspace, and of layers beyond LONGEST


@dataclass(frozen=True)
class Allocations:
    """Allocations of what ran; the changes ``begin`` to ``end`` are followed by ``times`` repetitions."""

    changes: Changes
    begin: int = 0
    end: int = 0
    times: int = 0


@dataclass(frozen=True)
class Reserved:
    """Memory that the allocator reserves."""

    # peak, by setting; if the device is too small, the peak on a device that is large enough
    bytes: dict[str, float] = field(default_factory=dict)
    # how often the cache was freed because the device was full, by setting; None: the device is too small
    retries: dict[str, int | None] = field(default_factory=dict)
    # the part of a step from which the peak was scaled, if the list could not be extrapolated; else empty
    scaled: str = ""
    # options of PYTORCH_ALLOC_CONF that are not modelled, and layers that were not replayed
    notes: tuple[str, ...] = ()


def settings() -> tuple[dict[str, Settings], tuple[str, ...]]:
    """(settings by name: PyTorch's default, expandable segments, the environment's settings; notes)."""
    by_name = {"default": Settings(), "expandable_segments": Settings(expandable_segments=True)}
    given = from_environment(os.environ)
    if given is None:
        return by_name, ()
    name, own, notes = given
    return by_name | {name: own}, tuple(notes)


def reserved(
    ran: list[Allocations],
    counts: list[int],
    layers: int,
    capacity: float,
    workspace: int,
    run_all: Callable[[], Allocations] | None = None,
) -> Reserved:
    """Memory that the allocator reserves for a rank's step.

    Args:
        ran: allocations of runs with ``counts`` layers each; the stage has ``layers``.
        capacity: bytes that the device has for PyTorch's allocator.
        workspace: bytes of cuBLAS' workspace, which the allocator provides.
        run_all: runs all layers.

    Raises:
        Refusal: PyTorch would refuse PYTORCH_ALLOC_CONF.
    """
    last, scale, scaled, beyond, notes = ran[-1], 1.0, "", 0, ()
    changes, places = lifetimes(last.changes)
    begin, end = places[last.begin], places[last.end]
    if len(counts) > 1:
        few = lifetimes(ran[0].changes)[0]
        units = (layers - counts[1]) // (counts[1] - counts[0])  # missing ones
        unit_bytes, unit_changes = peak(changes) - peak(few), len(changes) - len(few)
        whole_peak, missing = peak(changes) + units * unit_bytes, units * unit_changes
        if missing > LONGEST:
            replays = min(max(LONGEST // unit_changes, 2), units)
            beyond, units = (units - replays) * unit_bytes, replays
            shown = f"{counts[1] + replays * (counts[1] - counts[0])} of {layers} layers"
            notes = (f"reserved: {shown} were replayed; memory of the others is counted without gaps",)
        try:
            stretches, larger = added(few, changes)
            if larger and run_all is not None and missing <= CHEAP:
                raise NoPattern("shards of a distributed optimizer do not end where layers end")
            changes, places = checked(*extrapolated(changes, stretches, units, larger), whole_peak - beyond)
            begin, end = places[begin], places[end]
        except NoPattern:
            if run_all is not None and missing <= CHEAP:
                return reserved([run_all()], [layers], layers, capacity, workspace)
            scale, scaled, beyond, notes = whole_peak / peak(changes), f"{counts[1]} of {layers} layers", 0, ()
    times = min(last.times, max(MOST // max(end - begin, 1), 4))
    if times:
        try:
            kept = times * sum(change for _, change in changes[begin:end])  # bytes that repetitions do not free
            changes, _ = checked(*extrapolated(changes, [(begin, end)], times), peak(changes) + kept)
        except NoPattern:
            scaled = ", ".join(filter(None, (scaled, f"the micro-batches that ran, without {last.times} repetitions")))
    held = [(WORKSPACE, workspace), *[(BEYOND, beyond)] * (beyond > 0)]
    result = by_setting([*held, *changes], capacity, scale, scaled)
    return replace(result, notes=result.notes + notes)


def by_setting(changes: Changes, capacity: float, scale: float = 1.0, scaled: str = "") -> Reserved:
    """The changes replayed under each setting; if the device is too small, on one that is large enough."""
    names, notes = settings()
    sizes, retries = {}, {}
    for name, setting in names.items():
        try:
            allocator = replayed(changes, setting, capacity / scale)
            retries[name] = allocator.retries
        except OutOfMemory:
            allocator, retries[name] = replayed(changes, setting), None
        sizes[name] = scale * allocator.peak_reserved
    return Reserved(sizes, retries, scaled, notes)


def peak(changes: Changes) -> int:
    """Peak bytes."""
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def checked(changes: Changes, places: list[int], wanted: float) -> tuple[Changes, list[int]]:
    """An extrapolated list, if its peak is ``wanted``.

    Raises:
        NoPattern: the list has another peak.
    """
    if abs(peak(changes) - wanted) > 0.005 * wanted + MIB:
        raise NoPattern("the peak of the extrapolated list is not the sum over layers and micro-batches")
    return changes, places


# --- device memory outside of tensors: the CUDA context, cuBLAS' workspace, NCCL's buffers ---
#
# A machine's file gives them under ``runtime``, measured by tools/measure_hardware.py on a GPU or assumed, as its
# sources state. Defaults for what a file does not give:
#
# - a context with PyTorch's kernels, which are loaded when used: 0.5 GiB;
# - cuBLAS' workspace, which PyTorch takes from its allocator and which is therefore reserved memory: 32 MiB on Hopper
#   and later, otherwise two of 4 MiB and eight of 16 KiB (PyTorch's notes on CUDA, CUBLAS_WORKSPACE_CONFIG);
# - NCCL's buffers of a communicator: NCCL_BUFFSIZE, 4 MiB, for each channel's two directions, with 16 channels over a
#   node's links and 2 per neighbour over the network (NCCL's documentation of its environment variables).

CONTEXT = 512 * MIB
NCCL_BUFFER = 4 * MIB
CHANNELS, NETWORK_CHANNELS = 16, 2
ASSUMED = "assumed, not measured"


@dataclass(frozen=True)
class RuntimeMemory:
    """Bytes of one process."""

    context: int
    cublas: int
    nccl: int
    communicators: int  # number of groups of more than one rank
    source: str = ASSUMED  # of the figures

    @property
    def outside_allocator(self) -> int:
        """Bytes outside of PyTorch's allocator."""
        return self.context + self.nccl


def runtime_memory(config: Config, world_size: int, machine: Machine) -> RuntimeMemory:
    """The memory of a rank of ``config``'s grid."""
    strategy, given = strategy_of(config), machine.runtime
    strategy = strategy.but(data=world_size // strategy.ranks)
    used = [group for group in map(strategy.group, ("tp", "ulysses", "ring", "dp", "pp")) if group.size > 1]
    hopper = machine.capability >= (9, 0)
    near, far = (2 * NCCL_BUFFER * channels for channels in (CHANNELS, 2 * NETWORK_CHANNELS))
    near, far = _or(given.nccl, near), _or(given.nccl_network, far)
    nccl = sum(near if group.size * group.stride <= machine.gpus else far for group in used)
    cublas = _or(given.cublas, 32 * MIB if hopper else 8 * MIB + 128 * 1024)
    source = machine.sources.get("runtime", ASSUMED)
    return RuntimeMemory(_or(given.context, CONTEXT), cublas, nccl, len(used), source)


def _or(given: float | None, assumed: int) -> int:
    return assumed if given is None else int(given)


def needed_by_setting(
    reserved: dict[str, float], config: Config, world_size: int, machine: Machine
) -> dict[str, float]:
    """Device bytes that a rank's process needs, by the allocator's setting; empty if it was not replayed."""
    if not reserved or not machine.is_gpu:
        return {}
    own = runtime_memory(config, world_size, machine).outside_allocator
    return {setting: size + own for setting, size in reserved.items()}
