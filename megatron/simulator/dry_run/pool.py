# SPDX-License-Identifier: Apache-2.0
"""Blocks of the caching allocator's segments, and the pools in which free ones wait (allocator.py)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

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


def could_be(block: Block) -> int:
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
