# SPDX-License-Identifier: Apache-2.0
"""A model of PyTorch's caching allocator on a GPU: the memory that it takes from the driver for a program's requests.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and of PyTorch's notes on CUDA memory management. Sizes are
rounded to 512 bytes. Requests of at most 1 MiB are cut from segments of 2 MiB, larger ones below 10 MiB from segments
of 20 MiB; others get a separate segment, rounded to 2 MiB. A freed block is merged with free neighbours of its segment
and kept in its pool for later requests, which take the best fit. Blocks in a pool count as reserved.

Under ``expandable_segments`` each pool is one range of addresses, to which memory is mapped page by page (2 or 20 MiB)
when needed, so that only holes in it are lost.

Only one stream is modelled, although PyTorch has pools for each stream. Therefore a block that another stream still
reads counts as free immediately.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.training.refusal import Refusal

MIB = 2**20
SMALLEST = 512  # least bytes of a block; sizes are multiples of it
SMALL = MIB  # largest request of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB  # least request that gets a separate segment
ROUNDED = 2 * MIB  # the size of such a segment is a multiple of this


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a segment, with links to the neighbouring blocks."""

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
        """Whether it is a complete segment."""
        return self.before is None and self.after is None


def growable_size(block: Block) -> int:
    """Bytes of a free block and of the unmapped block after it."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


@dataclass
class Pool:
    """Free blocks by size, then by address, and the address ranges that can grow.

    Entries of ``free`` begin with (size, segment, begin), which is unique.
    """

    small: bool
    free: list[tuple[int, int, int, Block]] = field(default_factory=list)
    ranges: list[Block] = field(default_factory=list)

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.segment, block.begin, block))

    def take(self, block: Block) -> None:
        at = bisect_left(self.free, (block.size, block.segment, block.begin))
        assert self.free[at][3] is block
        del self.free[at]


def rounded(size: int, divisions: Sequence[int] = ()) -> int:
    """Bytes of the block for a request; ``divisions``: see :class:`Settings`."""
    size = max(size, 1)
    if divisions and size >= SMALLEST:
        floor = 1 << (size.bit_length() - 1)
        parts = divisions[min(max(floor.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)]
        if parts > 1 and size > SMALLEST * parts:
            part = floor // parts
            return -(-size // part) * part
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_size(size: int) -> int:
    """Bytes of a new segment for a block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUNDED) * ROUNDED


# --- settings, as in PyTorch's notes on CUDA memory management and c10/core/AllocatorConfig.cpp ---

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # new and old name; the first that is set counts
INTERVALS = 16  # intervals of sizes in roundup_power2_divisions: powers of two from 1 MiB to 64 GiB
NOT_DEVICE_MEMORY = (  # options that affect host memory, locks or graphs only
    "pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The allocator's settings."""

    expandable_segments: bool = False
    max_split_size: int | None = None  # bytes; larger blocks are not split; None: no limit
    max_non_split_rounding: int = LARGE_SEGMENT  # bytes by which such a block may exceed the request
    # by interval of sizes from 1 MiB on: number of steps between two powers of two, to which sizes are rounded up; 0
    # and 1: none
    divisions: tuple[int, ...] = ()
    fraction: float = 1.0  # share of the device's memory that the process may use


def from_environment(environment: Mapping[str, str]) -> tuple[str, Settings, list[str]] | None:
    """(name of the variable that is set, its settings, a line for each option that is not modelled); None: none is set.

    Raises:
        Refusal: PyTorch would refuse the settings, too.
    """
    name = next((name for name in VARIABLES if environment.get(name)), None)
    if name is None:
        return None
    settings, notes = {}, []
    for key, value in _pairs(name, environment[name]):
        if key == "expandable_segments":
            if value not in ("True", "False"):
                raise Refusal(f"{name}: {key} must be True or False, not {value}")
            settings[key] = value == "True"
        elif key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            settings[key.removesuffix("_mb")] = _mebibytes(name, key, value)
        elif key == "roundup_power2_divisions":
            settings["divisions"] = _divisions(name, value)
        elif key == "per_process_memory_fraction":
            settings["fraction"] = _share(name, key, value)
        elif key == "garbage_collection_threshold":
            _share(name, key, value)
            notes.append(
                f"{name}: {key} is not modelled: PyTorch uses it only if a program limits its share of the memory"
            )
        elif key == "backend" and value in ("native", "cudaMallocAsync"):
            if value != "native":
                notes.append(f"{name}: backend {value} is not modelled: the figures are those of PyTorch's allocator")
        elif key not in NOT_DEVICE_MEMORY:
            raise Refusal(f"{name}: {key}:{value} is not an option of PyTorch's allocator: remove it")
    return name, Settings(**settings), notes


def _pairs(name: str, text: str) -> list[tuple[str, str]]:
    parts = re.split(r",(?![^\[]*\])", text.replace(" ", ""))
    pairs = [part.split(":", 1) for part in parts if part]
    if any(len(pair) != 2 for pair in pairs):
        raise Refusal(f"{name}={text}: give option:value, separated by commas")
    return [(key, value) for key, value in pairs]


def _mebibytes(name: str, key: str, value: str) -> int:
    if not value.isdigit() or int(value) < LARGE_SEGMENT // MIB:
        raise Refusal(f"{name}: {key} must be a number of MiB, {LARGE_SEGMENT // MIB} or more, not {value}")
    return int(value) * MIB


def _share(name: str, key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise Refusal(f"{name}: {key} must be above 0 and at most 1, not {value}")
    return share


def _divisions(name: str, text: str) -> tuple[int, ...]:
    """Steps by interval, from ``4`` for all or ``[256:1,512:2,>:8]``: 1 up to 511 MiB, 2 up to 1023 MiB, 8 above."""

    def power(value: str, least: int) -> int:
        if not value.isdigit() or int(value) & (int(value) - 1) or int(value) < least:
            raise Refusal(f"{name}: roundup_power2_divisions:{text}: {value} is not a power of two")
        return int(value)

    if not text.startswith("["):
        return (power(text, 1),) * INTERVALS
    divisions, last = [0] * INTERVALS, None
    for part in text.strip("[]").split(","):
        size, _, value = part.partition(":")
        parts = power(value, 0)
        if size == ">":
            begin = 0 if last is None else last + 1
            divisions[begin:] = [parts] * (INTERVALS - begin)
            continue
        at = min(power(size, 1).bit_length() - 1, INTERVALS - 1)
        if last is None:
            divisions[:at] = [parts] * at
        divisions[at] = parts
        last = at
    return tuple(divisions)


class OutOfMemory(MemoryError):
    """The device has too little memory, even after the cache has been freed."""


class CachingAllocator:
    """The allocator.

    Attributes:
        allocated, reserved: bytes of blocks in use, and of all segments; ``peak_...``: their peaks.
        retries: how often the cache was freed because the device was full.

    Args:
        capacity: bytes of the device for the allocator, which uses at most the settings' ``fraction`` of this.
    """

    def __init__(self, settings: Settings = Settings(), capacity: float = float("inf")) -> None:
        self.settings, self.capacity = settings, settings.fraction * capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._pools = {small: Pool(small) for small in (True, False)}
        self._segments = 0
        self._sizes: dict[int, int] = {}  # of the blocks for requests so far

    def malloc(self, request: int) -> Block:
        """Allocate a block.

        Raises:
            OutOfMemory: ``capacity`` is too small. Blocks in use and free blocks stay valid.
        """
        size = self._sizes.get(request)
        if size is None:
            size = self._sizes[request] = rounded(request, self.settings.divisions)
        pool = self._pools[size <= SMALL]
        block = self._best_fit(pool, size) or self._new(pool, size)
        if block is None and self._free_large(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemory(f"{size} bytes in addition to {self.reserved} of {self.capacity:.0f}")
        if self._splits(block, size):
            self._split(pool, block, size)
        block.used = True
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool. Raises ValueError if it is already free."""
        if not block.used:
            raise ValueError("the block is already free")
        block.used = False
        self.allocated -= block.size
        self._join(self._pools[block.small], block)

    def empty_cache(self) -> None:
        """Free segments without blocks in use, and pages of address ranges that overlap no block in use."""
        for pool in self._pools.values():
            for *_, block in list(pool.free):
                if block.whole and not self.settings.expandable_segments:
                    pool.take(block)
                    self.reserved -= block.size
                elif self.settings.expandable_segments:
                    self._unmap(pool, block)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        at = bisect_left(pool.free, (size, -1, -1))
        if at == len(pool.free):
            return None
        limit, rounding = self.settings.max_split_size, self.settings.max_non_split_rounding
        best = pool.free[at][3]
        if self.settings.expandable_segments:  # prefer others to the block at the end of the range, which can grow
            while at + 1 < len(pool.free) and growable_size(pool.free[at + 1][3]) < growable_size(best):
                at, best = at + 1, pool.free[at + 1][3]
        if limit is not None:
            if size < limit <= best.size:  # a large block is only for large requests
                return None
            if size >= limit and best.size >= size + rounding:  # that leave little of it unused
                return None
        del pool.free[at]
        return best

    def _splits(self, block: Block, size: int) -> bool:
        unused = block.size - size
        if block.small or self.settings.expandable_segments:
            return unused >= SMALLEST
        limit = self.settings.max_split_size
        return unused > SMALL and (limit is None or size < limit)

    def _split(self, pool: Pool, block: Block, size: int) -> None:
        remainder = Block(
            block.segment, block.begin + size, block.size - size, block.small, before=block, after=block.after
        )
        if remainder.after:
            remainder.after.before = remainder
        block.after, block.size = remainder, size
        pool.add(remainder)

    def _join(self, pool: Pool, block: Block) -> None:
        """Add a block to the pool, merged with its free neighbours."""
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped:
            pool.take(before)
            block.begin, block.size, block.before = before.begin, block.size + before.size, before.before
            if block.before:
                block.before.after = block
            else:
                self._replace_head(pool, before, block)
        if after is not None and not after.used and after.mapped:
            pool.take(after)
            self._absorb(block, after)
        pool.add(block)

    @staticmethod
    def _replace_head(pool: Pool, old: Block, new: Block) -> None:
        """If ``old`` was the first block of an address range, ``new`` is now."""
        pool.ranges = [new if head is old else head for head in pool.ranges]

    def _free_large(self, pool: Pool, size: int) -> bool:
        """Under ``max_split_size``, free the smallest cached block that suffices, or the largest ones in turn."""
        limit = self.settings.max_split_size
        if limit is None or self.settings.expandable_segments:
            return False
        wanted, freed = max(size, limit), 0
        at = bisect_left(pool.free, (wanted, -1, -1))
        if at == len(pool.free):
            at -= 1
        while freed < wanted and at >= 0 and pool.free[at][0] >= limit:
            block = pool.free[at][3]
            pool.take(block)
            self.reserved -= block.size
            freed += block.size
            at -= 1
        return freed >= wanted

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block from new memory; None: the device is full."""
        if self.settings.expandable_segments:
            return self._grow_range(pool, size)
        wanted = segment_size(size)
        if self.reserved + wanted > self.capacity:
            return None
        self.reserved += wanted
        self._segments += 1
        return Block(self._segments, 0, wanted, pool.small)

    def _grow_range(self, pool: Pool, size: int) -> Block | None:
        """Map memory at the first place in the pool's range with enough adjacent free and unmapped bytes.

        None: the device is full; memory that has been mapped by then is free.
        """
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
            self._map(start, gap, pages)
        return start

    @staticmethod
    def _map(start: Block, gap: Block, pages: int) -> None:
        """Add the first ``pages`` bytes of ``gap`` to ``start``, which is the gap or the block before it."""
        if start is gap:
            remainder = Block(gap.segment, gap.begin + pages, gap.size - pages, gap.small, mapped=False, before=gap)
            remainder.after = gap.after
            if remainder.after:
                remainder.after.before = remainder
            gap.size, gap.mapped, gap.after = pages, True, remainder if remainder.size else remainder.after
            if not remainder.size and remainder.after:
                remainder.after.before = gap
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
        blocks = []
        for block in pool.ranges:
            while block is not None:
                if not block.mapped:
                    blocks.append(block)
                block = block.after
        return blocks

    @staticmethod
    def _free_run(block: Block) -> int:
        """Number of adjacent free bytes, mapped or not, that begin at the block or at a free block just before it."""
        size = block.before.size if block.before is not None and not block.before.used else 0
        while block is not None and not block.used:
            size, block = size + block.size, block.after
        return size

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Return the complete pages of a free block to the device."""
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
                    self._replace_head(pool, block, piece)
                if mapped:
                    pool.add(piece)
                last = piece
        last.after = after
        if after is not None:
            after.before = last


def replayed(changes: list[tuple[int, int]], settings: Settings, capacity: float = float("inf")) -> CachingAllocator:
    """An allocator after a dry run's list of (block, change of its bytes).

    Raises:
        OutOfMemory: ``capacity`` is too small.
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
