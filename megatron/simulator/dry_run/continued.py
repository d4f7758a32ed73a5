# SPDX-License-Identifier: Apache-2.0
"""A step's list of allocations, continued to more layers and micro-batches than ran.

What one more layer, or one more micro-batch, allocates and frees is a few stretches of the list; written down as often
as there are more of them, they make the list of the whole step. Stretches of a layer are what the list of five layers
has that the list of four has not; those of a micro-batch are known (steady.py). Which block a repeated stretch frees
is told by those that were made at the same place of the loop, one period after another (a chain): the newest of them
where the recorded stretch does so, as backward passes do, else the oldest.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence

from megatron.simulator.dry_run.pool import rounded

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
        skipped = _next_alike(a, b, whole, i, j) if i < len(a) else len(b)
        if skipped is not None and j < len(b):
            # in the middle of its loop, whose ends are not quite regular
            before = _alike(b, b, j - 1, skipped - 1, -1) // 2
            stretches.append((j - before, skipped - before))
            j = skipped
        elif i < len(a) and j < len(b) and 0 < FEWER * (b[j] - a[i]) <= a[i]:
            larger[more[j][0]] = b[j] - a[i]
            i, j = i + 1, j + 1
        else:
            raise NoPattern("the lists of fewer and of more layers differ in more than layers")
    return stretches, larger


def _alike(a: Sequence[int], b: Sequence[int], i: int, j: int, step: int) -> int:
    """How many elements are the same from ``a[i]`` and ``b[j]`` on."""
    count = 0
    while 0 <= i < len(a) and 0 <= j < len(b) and a[i] == b[j]:
        i, j, count = i + step, j + step, count + 1
    return count


def _next_alike(a: array, b: array, whole: bytes, i: int, j: int) -> int | None:
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
            found = _alike(a, b, i, at // width, 1)
            if found > length:
                best, length = at // width, found
            at += width
        if best is not None:
            break
    return best


def continued(
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
        before, behind = _alike(sizes, sizes, begin - 1, end - 1, -1), _alike(sizes, sizes, begin, end, 1)
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
