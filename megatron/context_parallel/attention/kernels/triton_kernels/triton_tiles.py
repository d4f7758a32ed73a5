# SPDX-License-Identifier: Apache-2.0
"""Tiles as the Triton kernels read them: for each block of rows, the ranges of the other side's rows that it meets.

A tile is a rectangle, perhaps cut by a diagonal: rows a and b of its sides meet if ``low <= b - a <= high``. Each block
of one side therefore meets consecutive rows of the other. Ranges that all rows of the block meet are *plain*: the
kernel computes them without checks. The others, at both ends and along a diagonal, are *edges*, where the kernel
compares each pair. In *masked* tiles it also reads a bit for each pair.

All of this is arithmetic on a few small arrays in host memory. The results are kept with the plan, which all layers
share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron.context_parallel.layout.masks import PAIR_BYTES, ROW_MASK_BYTES, Mask
from megatron.context_parallel.layout.spans import count, numbered, positions
from megatron.context_parallel.layout.tiles import KINDS, Tile, Tiles, parts
from megatron.context_parallel.positions.position_dropout import LANES
from megatron.decisions.block_sizes import Blocks, BlockTable, Pass, blocks
from megatron.platform.streams import to_device

Side = Literal["q", "k"]

FAR = 2**30  # more than the distance of any two rows
WORD = 32  # pairs in a word of bits
BITS_AT_ONCE = 2**28  # limit for the masks of one launch, in bytes
MASKED_ROWS = 2**14  # a masked tile above that limit is cut into parts of this many queries and keys (32 MiB)


@dataclass(frozen=True)
class Walk:
    """The ranges of one side that each block of the other side meets; blocks with the most work come first.

    Attributes:
        blocks: int32 [blocks, 5]: the block's number; its first range; one past its last plain, edge and masked range.
        ranges: int32 [ranges, 9]: first row and one past the last of the range; then of the tile: first row and one
            past the last of the block's side, low, high, the first word of its bits (-1: not masked), words per row,
            and the first row of the range's side.
        pairs: number of computed pairs, including those that edges discard.
    """

    blocks: Tensor
    ranges: Tensor
    pairs: int


Sizes = tuple[Side, int, int, int, bool]
"""A side, the number of its rows, rows of a block, rows of the other side that a kernel takes at a time, and whether
plain ranges become edges, so that a kernel has one loop."""

SIDES: dict[Pass, Side] = {"forward": "q", "queries": "q", "keys": "k", "backward": "k", "plain": "q"}


def chosen(
    which: Pass,
    tiles: Tiles,
    itemsize: int,
    head: int,
    capability: int | None,
    features: Sequence[str] = (),
    measured: BlockTable | None = None,
) -> Blocks:
    """The block sizes of a kernel for these tiles; ``features`` of the call, masks apart."""
    features = [*(["mask"] if tiles.masked else []), *features]
    return blocks(which, itemsize, head, capability, features, measured, tiles.pairs / count(tiles.q_spans))


def walk_sizes(which: Pass, sizes: Blocks, queries: int, keys: int) -> Sizes:
    """How a kernel walks over the tiles of so many queries and keys."""
    side = SIDES[which]
    return side, queries if side == "q" else keys, sizes.block, sizes.step, sizes.one_loop


def walk(tiles: Tiles, sizes: Sizes, device: torch.device) -> Walk:
    """The ranges of each block of one side, on the device."""
    key = tiles.geometry, sizes, device
    if key not in tiles.shared:
        *numbers, pairs = walk_numbers(tiles, sizes)
        tiles.shared[key] = Walk(*(to_device(torch.from_numpy(part), device) for part in numbers), pairs)
    return tiles.shared[key]


def walk_numbers(tiles: Tiles, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, int]:
    """Blocks, ranges and pairs of a :class:`Walk`, in host memory."""
    key = tiles.geometry, sizes
    if key not in tiles.shared:
        tiles.shared[key] = _walk(tiles.table, *sizes)
    return tiles.shared[key]


def plain_steps(tiles: Tiles, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The plain ranges of each block of queries as steps, on the device; None if there are none.

    Returns blocks, int32 [blocks, 3]: the block's number, the first and one past the last of its steps, the block with
    the most steps first; and steps, int32: the first row of each.
    """
    key = "plain steps", tiles.geometry, sizes, device

    def made() -> tuple[Tensor, Tensor] | None:
        blocks, ranges, _ = walk_numbers(tiles, sizes)
        step, held = sizes[3], blocks[:, 2] - blocks[:, 1]
        index = np.concatenate([np.arange(first, last) for first, last in blocks[:, 1:3]])
        count_of = (ranges[index, 1] - ranges[index, 0]) // step
        place = np.arange(count_of.sum()) - np.repeat(np.cumsum(count_of) - count_of, count_of)
        steps = np.repeat(ranges[index, 0], count_of) + step * place
        of_block = np.bincount(np.repeat(np.arange(len(blocks)), held), count_of, len(blocks)).astype(np.int64)
        ends = np.cumsum(of_block)
        table = np.stack((blocks[:, 0], ends - of_block, ends), axis=1)[np.argsort(-of_block, kind="stable")]
        table = table[: np.count_nonzero(of_block)]
        parts = (table.astype(np.int32), steps.astype(np.int32))
        return tuple(to_device(torch.from_numpy(part), device) for part in parts) if len(table) else None

    if key not in tiles.shared:
        tiles.shared[key] = made()
    return tiles.shared[key]


def in_groups(tiles: Tiles, sizes: Sizes) -> bool:
    """Whether the keys of each block, or of each step of a range, are complete groups of ``LANES`` that share dropout's
    hashes."""

    def found() -> bool:
        begins = [n for row, (start, _) in numbered(tiles.k_spans) for n in (row, start)]
        steps = walk_numbers(tiles, sizes)[1][:, 0] if sizes[0] == "q" else ()
        return not any(n % LANES for n in (*begins, *steps))

    return tiles.derived(("in groups", sizes), found)


def _walk(
    numbers: np.ndarray, side: Side, rows: int, block: int, step: int, one_loop: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    t = _table(numbers, side)
    first = t["a0"] // block
    met = (t["a1"] - 1) // block - first + 1
    tile = np.repeat(np.arange(len(met)), met)
    number = first[tile] + np.arange(len(tile)) - np.repeat(np.cumsum(met) - met, met)
    a0, a1, b0, b1, low, high = (t[name][tile] for name in ("a0", "a1", "b0", "b1", "low", "high"))
    masked = t["bits"][tile] >= 0
    begin, end = number * block, np.minimum((number + 1) * block, rows)
    start = np.maximum(b0, np.maximum(begin, a0) + low)
    stop = np.minimum(b1, np.minimum(end, a1) + high)
    start = np.where(masked, b0 + np.maximum(start - b0, 0) // WORD * WORD, start)  # so that steps begin with a word
    # The plain range, which all rows of the block meet, in complete steps from the start.
    plain = start + -(-np.maximum(np.maximum(b0, end - 1 + low) - start, 0) // step) * step
    steps = (np.minimum(b1, begin + high + 1) - plain) // step
    steps = np.where((a0 <= begin) & (end <= a1) & ~masked & (start < stop), np.maximum(steps, 0), 0) * (not one_loop)
    plain = np.where(steps, plain, start)
    after = plain + steps * step

    tile3, number3 = np.tile(tile, 3), np.tile(number, 3)
    kind = np.concatenate((np.zeros_like(tile), np.where(masked, 2, 1), np.where(masked, 2, 1)))
    from_, to = np.concatenate((plain, start, after)), np.concatenate((after, plain, stop))
    kept = np.nonzero(from_ < to)[0]
    kept = kept[np.lexsort((from_[kept], kind[kept], number3[kept]))]
    tile3, number3, kind, from_, to = tile3[kept], number3[kept], kind[kept], from_[kept], to[kept]
    fields = ("a0", "a1", "low", "high", "bits", "words", "b0")
    ranges = np.stack((from_, to, *(t[name][tile3] for name in fields)), axis=1)

    numbers, place = np.unique(number3, return_inverse=True)
    work = np.bincount(place, -(-(to - from_) // step), len(numbers)).astype(np.int64)
    counts = np.stack([np.bincount(place[kind == which], minlength=len(numbers)) for which in range(3)], axis=1)
    ends = np.cumsum(counts.ravel()).reshape(counts.shape)
    blocks = np.concatenate((numbers[:, None], ends[:, :1] - counts[:, :1], ends), axis=1)
    blocks = blocks[np.argsort(-work, kind="stable")]
    return blocks.astype(np.int32), ranges.astype(np.int32), int(work.sum()) * block * step


def _table(numbers: np.ndarray, side: Side) -> dict[str, np.ndarray]:
    """The tiles as columns: a is the block's side, b the other side."""
    q0, q1, k0, k1, kind, masked = numbers.T
    low = np.where(kind == KINDS.index("anticausal"), k0 - q0, -FAR)  # bounds of key - query
    high = np.where(kind == KINDS.index("causal"), k0 - q0, FAR)
    (a0, a1), (b0, b1) = ((q0, q1), (k0, k1)) if side == "q" else ((k0, k1), (q0, q1))
    if side == "k":
        low, high = -high, -low
    words = -(-(b1 - b0) // WORD)
    sizes = np.where(masked, words * (a1 - a0), 0)
    bits = np.where(masked, np.cumsum(sizes) - sizes, -1)
    return {"a0": a0, "a1": a1, "b0": b0, "b1": b1, "low": low, "high": high, "bits": bits, "words": words}


def places(tiles: Tiles, side: Side, rows: int, device: torch.device) -> Tensor:
    """The global position of each row of a side, int32 [rows]; 0 for further rows, which are in no tile."""

    def made() -> Tensor:
        at = positions(tiles.q_spans if side == "q" else tiles.k_spans, torch.device("cpu"))[:rows]
        return torch.cat((at, at.new_zeros(rows - len(at)))).to(torch.int32).to(device)

    return tiles.derived(("places", side, rows, device), made)


def groups(tiles: Tiles) -> Sequence[Tiles]:
    """The tiles of each launch: all in one, unless their bits need more than `BITS_AT_ONCE` bytes."""

    def made() -> Sequence[Tiles]:
        return [*_groups(tiles)] if sum(map(_bit_bytes, tiles)) > BITS_AT_ONCE else []

    return (tiles.masked and tiles.derived("groups", made)) or (tiles,)


def _groups(tiles: Tiles) -> Iterator[Tiles]:
    group, held = [], 0
    for whole in tiles:
        for tile in parts(whole, MASKED_ROWS) if _bit_bytes(whole) > BITS_AT_ONCE else (whole,):
            if group and held + _bit_bytes(tile) > BITS_AT_ONCE:
                yield Tiles(group, tiles.q_spans, tiles.k_spans)
                group, held = [], 0
            group.append(tile)
            held += _bit_bytes(tile)
    yield Tiles(group, tiles.q_spans, tiles.k_spans)


def _bit_bytes(tile: Tile) -> int:
    """Bytes of a tile's bits, for the side that needs more."""
    queries, keys = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    return tile.masked * 4 * max(queries * -(-keys // WORD), keys * -(-queries // WORD))


def pack(tiles: Tiles, mask: Mask, device: torch.device, sides: Sequence[Side]) -> list[Tensor]:
    """The mask of all pairs of the masked tiles as bits, one tile after another, int32 [words], for each side.

    A word has 32 keys of a query (for side "k": queries of a key), the first in its lowest bit. Each query (key) of a
    tile begins a new word.
    """
    words: dict[Side, list[Tensor]] = {side: [] for side in sides}
    for tile in tiles:
        if not tile.masked:
            continue
        q_at, k_at = positions(tiles.q_at(tile), device)[:, None], positions(tiles.k_at(tile), device)[None]
        step = max(WORD, ROW_MASK_BYTES // (PAIR_BYTES * k_at.size(1)) // WORD * WORD)  # complete words of queries
        blocks = [mask.allowed(q_at[i : i + step], k_at) for i in range(0, len(q_at), step)]
        if "q" in words:
            words["q"] += [_packed(allowed).flatten() for allowed in blocks]
        if "k" in words:
            words["k"].append(torch.cat([_packed(allowed.t()) for allowed in blocks], dim=1).flatten())
    return [torch.cat(words[side]) for side in sides]


def _packed(allowed: Tensor) -> Tensor:
    """Booleans [rows, columns] as int32 [rows, words]."""
    rows, columns = allowed.shape
    padded = torch.zeros(rows, -(-columns // WORD) * WORD, dtype=torch.uint8, device=allowed.device)
    padded[:, :columns] = allowed
    # Pack eight bytes of 0 or 1, read as one number, into one byte: the product has the bits in its highest byte.
    return (padded.view(torch.int64) * 0x0102040810204080).bitwise_right_shift_(56).to(torch.uint8).view(torch.int32)
