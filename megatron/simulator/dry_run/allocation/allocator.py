# SPDX-License-Identifier: Apache-2.0
"""PyTorch's caching allocator on a GPU: how much memory it takes from the driver for what a program asks it for.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and of PyTorch's notes on CUDA memory management. Sizes are
rounded to 512 bytes. Requests of at most 1 MiB are cut from segments of 2 MiB; larger ones, below 10 MiB, from segments
of 20 MiB; others get a segment of their own, rounded to 2 MiB. A freed block waits in its pool for the next request of
its size, the best fit first, and grows together with free neighbours of its segment. What waits counts as reserved.

Under ``expandable_segments`` each pool is one range of addresses, of which memory is mapped page by page (2 or 20 MiB)
where the range's end is not enough: holes then are all that is lost.

One stream is modelled, where PyTorch has pools for each: blocks that another stream still reads are given back at once.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.training.refusal import Refusal

# Blocks of the caching allocator's segments, and the pools in which free ones wait (allocator.py).


MIB = 2**20
SMALLEST = 512  # bytes of a block, and what sizes are rounded to
SMALL = MIB  # largest request of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB  # requests from which on a segment is made for them
ROUNDED = 2 * MIB  # what such a segment is rounded to


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a segment, side by side with the blocks before and after it."""

    segment: int
    begin: int
    size: int
    small: bool
    used: bool = False
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.before is None and self.after is None


def growable_size(block: Block) -> int:
    """Bytes of a free block with the unmapped ones behind it."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


@dataclass
class Pool:
    """Free blocks, the smallest first, of equal ones the lowest; and the address ranges that can grow.

    Entries of ``free`` begin with (size, segment, begin), which no two have in common.
    """

    small: bool
    free: list[tuple[int, int, int, Block]] = field(default_factory=list)
    ranges: list[Block] = field(default_factory=list)

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def add(self, block: Block) -> None:
        insort(self.free, self._entry(block))

    def take(self, block: Block) -> None:
        at = bisect_left(self.free, self._entry(block)[:3])
        assert self.free[at][3] is block
        del self.free[at]

    @staticmethod
    def _entry(block: Block) -> tuple[int, int, int, Block]:
        return block.size, block.segment, block.begin, block


def rounded(size: int, divisions: Sequence[int] = ()) -> int:
    """Bytes of the block for a request; ``divisions``: parts between powers of two, by interval, from 1 MiB on."""
    size = max(size, 1)
    if divisions and size >= SMALLEST:
        floor = 1 << (size.bit_length() - 1)
        parts = divisions[min(max(floor.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)]
        if parts > 1 and size > SMALLEST * parts:
            part = floor // parts
            return -(-size // part) * part
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_size(size: int) -> int:
    """Bytes taken from the driver for a block that no free one fits."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUNDED) * ROUNDED


# What PYTORCH_ALLOC_CONF, or PYTORCH_CUDA_ALLOC_CONF as it was called, says to PyTorch's allocator.
#
# Names and meanings are those of PyTorch's notes on CUDA memory management and of c10/core/AllocatorConfig.cpp.


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one counts, as in PyTorch
INTERVALS = 16  # of sizes, 1 MiB to 64 GiB by powers of two, that roundup_power2_divisions is told by
NOT_DEVICE_MEMORY = (  # they change host memory, locks or graphs
    "pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        max_split_size: bytes; larger blocks are not cut; None: all may be.
        max_non_split_rounding: bytes that such a block may be larger than what it is taken for.
        divisions: parts between two powers of two that sizes are rounded up to, by interval; 0 and 1: none.
        fraction: of the device's memory that the process may have.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    divisions: tuple[int, ...] = ()
    fraction: float = 1.0


def from_environment(environment: Mapping[str, str]) -> tuple[str, Settings, list[str]] | None:
    """Name of the variable that is set, what it says, and a line for each thing of it that is not modelled.

    Raises:
        Refusal: PyTorch would refuse it too.
    """
    name = next((name for name in VARIABLES if environment.get(name)), None)
    if name is None:
        return None
    found, notes = {}, []
    for key, value in _pairs(name, environment[name]):
        if key == "expandable_segments":
            found[key] = _boolean(name, key, value)
        elif key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            found[key.removesuffix("_mb")] = _mebibytes(name, key, value)
        elif key == "roundup_power2_divisions":
            found["divisions"] = _divisions(name, value)
        elif key == "per_process_memory_fraction":
            found["fraction"] = _share(name, key, value)
        elif key == "garbage_collection_threshold":
            _share(name, key, value)
            notes.append(
                f"{name}: {key} is not modelled: PyTorch obeys it only where a program limits its share of the memory"
            )
        elif key == "backend" and value in ("native", "cudaMallocAsync"):
            if value != "native":
                notes.append(f"{name}: backend {value} is not modelled: what is told is PyTorch's own allocator")
        elif key not in NOT_DEVICE_MEMORY:
            raise Refusal(f"{name}: {key}:{value} is no option of PyTorch's allocator")
    return name, Settings(**found), notes


def _pairs(name: str, text: str) -> list[tuple[str, str]]:
    parts = re.split(r",(?![^\[]*\])", text.replace(" ", ""))
    pairs = [part.split(":", 1) for part in parts if part]
    if any(len(pair) != 2 for pair in pairs):
        raise Refusal(f"{name}={text}: give option:value, with commas between them")
    return [(key, value) for key, value in pairs]


def _boolean(name: str, key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise Refusal(f"{name}: {key} is True or False, not {value}")
    return value == "True"


def _mebibytes(name: str, key: str, value: str) -> int:
    if not value.isdigit() or int(value) < LARGE_SEGMENT // MIB:
        raise Refusal(f"{name}: {key} is a number of MiB, {LARGE_SEGMENT // MIB} or more, not {value}")
    return int(value) * MIB


def _share(name: str, key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise Refusal(f"{name}: {key} is a share above 0 and at most 1, not {value}")
    return share


def _divisions(name: str, text: str) -> tuple[int, ...]:
    """``4`` for all sizes, or ``[256:1,512:2,>:8]``: from 256 MiB on 1, from 512 on 2, above 8; below 256 as there."""

    def power(value: str, least: int) -> int:
        if not value.isdigit() or int(value) & (int(value) - 1) or int(value) < least:
            raise Refusal(f"{name}: roundup_power2_divisions:{text}: {value} is no power of two")
        return int(value)

    if not text.startswith("["):
        return (power(text, 1),) * INTERVALS
    found, last = [0] * INTERVALS, None
    for part in text.strip("[]").split(","):
        size, _, value = part.partition(":")
        parts = power(value, 0)
        if size == ">":
            begin = 0 if last is None else last + 1
            found[begin:] = [parts] * (INTERVALS - begin)
            continue
        at = min(power(size, 1).bit_length() - 1, INTERVALS - 1)
        if last is None:
            found[:at] = [parts] * at
        found[at] = parts
        last = at
    return tuple(found)


class OutOfMemory(MemoryError):
    """The device has not enough memory, also when all that is cached is given back to it."""


class CachingAllocator:
    """
    Attributes:
        allocated, reserved: bytes of blocks in use, and of all segments; ``peak_...``: at most.
        retries: how often everything cached was given back because the device was full.

    Args:
        capacity: bytes that the device has for it; of them it takes at most the settings' ``fraction``.
    """

    def __init__(self, settings: Settings = Settings(), capacity: float = float("inf")) -> None:
        self.settings, self.capacity = settings, settings.fraction * capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._pools = {small: Pool(small) for small in (True, False)}
        self._segments = 0

    def malloc(self, request: int) -> Block:
        """
        Raises:
            OutOfMemory: ``capacity`` is not enough. Blocks in use are as before, and what is free is not lost.
        """
        size = rounded(request, self.settings.divisions)
        pool = self._pools[size <= SMALL]
        block = self._best_fit(pool, size) or self._new(pool, size)
        if block is None and self._give_large_back(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes beside {self.reserved} of {self.capacity:.0f}")
        if self._splits(block, size):
            self._split(pool, block, size)
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def free(self, block: Block) -> None:
        if not block.used:
            raise ValueError("the block is free already")
        pool = self._pools[block.small]
        block.used = False
        self.allocated -= block.size
        self._join(pool, block)

    def empty_cache(self) -> None:
        """Give segments without a block in use back, and the pages of ranges that no block in use lies on."""
        for pool in self._pools.values():
            for *_, block in list(pool.free):
                if block.whole and not self.settings.expandable_segments:
                    pool.take(block)
                    self.reserved -= block.size
                elif self.settings.expandable_segments:
                    self._unmap(pool, block)

    def snapshot(self) -> list[dict[str, int | list[tuple[int, bool]]]]:
        """Segments with something in them: bytes, and their free blocks' sizes; for tests and for the curious."""
        found = {}
        for pool in self._pools.values():
            for size, segment, begin, _ in pool.free:
                found.setdefault(segment, []).append((begin, size))
        return [{"segment": segment, "free": blocks} for segment, blocks in sorted(found.items())]

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        at = bisect_left(pool.free, (size, -1, -1))
        if at == len(pool.free):
            return None
        limit, rounding = self.settings.max_split_size, self.settings.max_non_split_rounding
        found = pool.free[at][3]
        if self.settings.expandable_segments:  # the end of the range, which can grow, is for what fits nowhere else
            while at + 1 < len(pool.free) and growable_size(pool.free[at + 1][3]) < growable_size(found):
                at, found = at + 1, pool.free[at + 1][3]
        if limit is not None:
            if size < limit <= found.size:  # large blocks are kept for large requests ...
                return None
            if size >= limit and found.size >= size + rounding:  # ... that need nearly all of them
                return None
        pool.take(found)
        return found

    def _splits(self, block: Block, size: int) -> bool:
        left = block.size - size
        if block.small or self.settings.expandable_segments:
            return left >= SMALLEST
        limit = self.settings.max_split_size
        return left > SMALL and (limit is None or size < limit)

    def _split(self, pool: Pool, block: Block, size: int) -> None:
        rest = Block(block.segment, block.begin + size, block.size - size, block.small, before=block, after=block.after)
        if rest.after:
            rest.after.before = rest
        block.after, block.size = rest, size
        pool.add(rest)

    def _join(self, pool: Pool, block: Block) -> None:
        """Into the pool, in one with free neighbours."""
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped:
            pool.take(before)
            block.begin, block.size, block.before = before.begin, block.size + before.size, before.before
            if block.before:
                block.before.after = block
            self._moved(pool, before, block)
        if after is not None and not after.used and after.mapped:
            pool.take(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after:
                block.after.before = block
        pool.add(block)

    @staticmethod
    def _moved(pool: Pool, old: Block, new: Block) -> None:
        pool.ranges = [new if head is old else head for head in pool.ranges]

    def _give_large_back(self, pool: Pool, size: int) -> bool:
        """Under ``max_split_size``: the smallest block above it that frees enough, or the largest ones in turn."""
        limit = self.settings.max_split_size
        if limit is None or self.settings.expandable_segments:
            return False
        wanted, given = max(size, limit), 0
        at = bisect_left(pool.free, (wanted, -1, -1))
        if at == len(pool.free):
            at -= 1
        while given < wanted and at >= 0 and pool.free[at][0] >= limit:
            block = pool.free[at][3]
            pool.take(block)
            self.reserved -= block.size
            given += block.size
            at -= 1
        return given >= wanted

    def _new(self, pool: Pool, size: int) -> Block | None:
        """None: the device is full."""
        if self.settings.expandable_segments:
            return self._grow_range(pool, size)
        wanted = segment_size(size)
        if self.reserved + wanted > self.capacity:
            return None
        self.reserved += wanted
        self._segments += 1
        return Block(self._segments, 0, wanted, pool.small)

    def _grow_range(self, pool: Pool, size: int) -> Block | None:
        """The first place in the pool's range where free and unmapped bytes, side by side, are enough. None: the device
        is full; what has been mapped until then is free."""
        if not pool.ranges:
            self._segments += 1
            pool.ranges.append(Block(self._segments, 0, 2**62, pool.small, mapped=False))
        place = next(start for start in self._unmapped(pool) if self._free_run(start) >= size)
        start = place.before if place.before is not None and not place.before.used else place
        if start is not place:
            pool.take(start)
        while start.size < size or not start.mapped:
            gap = start if not start.mapped else start.after
            if gap.mapped:  # free bytes beyond the gap
                pool.take(gap)
                self._absorb(start, gap)
                continue
            have = start.size if start.mapped else 0
            pages = min(-(-(size - have) // pool.page) * pool.page, gap.size)
            if self.reserved + pages > self.capacity:
                if start.mapped:
                    pool.add(start)
                return None
            self.reserved += pages
            self._map(pool, start, gap, pages)
        return start

    def _map(self, pool: Pool, start: Block, gap: Block, pages: int) -> None:
        """The first ``pages`` bytes of ``gap`` become part of ``start``, which is the gap or the block before it."""
        if start is gap:
            rest = Block(gap.segment, gap.begin + pages, gap.size - pages, gap.small, mapped=False, before=gap)
            rest.after = gap.after
            if rest.after:
                rest.after.before = rest
            gap.size, gap.mapped, gap.after = pages, True, rest if rest.size else rest.after
            if not rest.size and rest.after:
                rest.after.before = gap
            return
        start.size += pages
        gap.begin, gap.size = gap.begin + pages, gap.size - pages
        if not gap.size:
            start.after = gap.after
            if gap.after:
                gap.after.before = start

    @staticmethod
    def _absorb(block: Block, after: Block) -> None:
        block.size, block.after = block.size + after.size, after.after
        if block.after:
            block.after.before = block

    def _unmapped(self, pool: Pool) -> list[Block]:
        found = []
        for block in pool.ranges:
            while block is not None:
                if not block.mapped:
                    found.append(block)
                block = block.after
        return found

    @staticmethod
    def _free_run(block: Block) -> int:
        """Free bytes from here on, mapped or not, with those just before."""
        size = block.before.size if block.before is not None and not block.before.used else 0
        while block is not None and not block.used:
            size, block = size + block.size, block.after
        return size

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Whole pages of a free block go back to the device."""
        begin = -(-block.begin // pool.page) * pool.page
        end = (block.begin + block.size) // pool.page * pool.page
        if end <= begin:
            return
        pool.take(block)
        self.reserved -= end - begin
        pieces = [(block.begin, begin, True), (begin, end, False), (end, block.begin + block.size, True)]
        before, after, last = block.before, block.after, block.before
        for start, stop, mapped in pieces:
            if stop > start:
                piece = Block(block.segment, start, stop - start, block.small, mapped=mapped, before=last)
                if last is not None:
                    last.after = piece
                if before is None and start == block.begin:
                    self._moved(pool, block, piece)
                if mapped:
                    pool.add(piece)
                last = piece
        last.after = after
        if after is not None:
            after.before = last


def replayed(changes: list[tuple[int, int]], settings: Settings, capacity: float = float("inf")) -> CachingAllocator:
    """An allocator after (block, change of its bytes) in their order, as a dry run records them.

    Raises:
        OutOfMemory: ``capacity`` is not enough.
    """
    allocator, held = CachingAllocator(settings, capacity), {}
    for number, change in changes:
        if number in held:
            block, size = held.pop(number)
            allocator.free(block)
            change += size
        if change > 0:
            held[number] = allocator.malloc(change), change
    return allocator
