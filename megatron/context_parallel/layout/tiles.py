# SPDX-License-Identifier: Apache-2.0
"""Which (query block, key block) pairs are computed, and how each is masked.

Ring steps, zigzag balance, chunk loops, windows, documents and sparse blocks are all handled in the same way: a mask's
bands between the positions of two blocks are cut into squares and rectangles. There are no empty tiles, so only needed
pairs are computed and sent, and the tiles' pairs give the FLOPs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, NamedTuple

from megatron.context_parallel.layout.masks import Band, Mask
from megatron.context_parallel.layout.spans import Span, Spans, joined, numbered, place, positions_of, split, union
from megatron.decisions.division import NARROW

Kind = Literal["full", "causal", "anticausal"]


class Tile(NamedTuple):
    """Rows ``q`` of the query block against rows ``k`` of the key block (local row numbers).

    Attributes:
        kind: full, or for a square with query row i and key row j: causal, j <= i; anticausal, j >= i.
        masked: the mask must also be evaluated for each pair.
        q_at, k_at: the global positions of the rows.
    """

    q: Span
    k: Span
    kind: Kind
    masked: bool = False
    q_at: Spans = ()
    k_at: Spans = ()

    @property
    def pairs(self) -> int:
        """(query, key) pairs this tile computes."""
        rows, columns = self.q[1] - self.q[0], self.k[1] - self.k[0]
        return rows * columns if self.kind == "full" else rows * (rows + 1) // 2


class Tiles(tuple[Tile, ...]):
    """The tiles between two blocks, and what was derived from them, such as a kernel's tables on the device."""

    @property
    def masked(self) -> bool:
        """Whether some tile is masked."""
        return self.derived("masked", lambda: any(tile.masked for tile in self))

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, which is called once for each ``key``."""
        if key not in self.__dict__:
            self.__dict__[key] = make()
        return self.__dict__[key]

    @property
    def shared(self) -> dict[Hashable, Any]:
        """What was derived from rows alone. All tiles of a plan share it: chunks and hops often have equal rows."""
        return self.derived("shared", dict)

    def within(self, held: Spans) -> Tiles:
        """The same tiles with key rows numbered within ``held``, the rows of the key block that are kept."""
        if len(held) == 1 and held[0][0] == 0:
            return self
        moved = (tile._replace(k=place(tile.k, held)) for tile in self)
        return self.derived(held, lambda: Tiles(moved).sharing(self.shared))

    def sharing(self, shared: dict[Hashable, Any]) -> Tiles:
        """These tiles, after their :attr:`shared` is replaced by ``shared``, that of other tiles."""
        self.__dict__["shared"] = shared
        return self

    def __reduce__(self) -> tuple:  # without what was derived
        return Tiles, (tuple(self),)


def tiles(q_spans: Spans, k_spans: Spans, mask: Mask) -> Tiles:
    """The tiles between a query block and a key block.

    Args:
        q_spans, k_spans: the global positions of each block's rows, in local order.
        mask: the attention mask.
    """
    keys = sorted(numbered(k_spans), key=lambda item: item[1])
    starts, stops = [span[0] for _, span in keys], [span[1] for _, span in keys]
    if not keys:
        return Tiles()
    all_keys = (starts[0], max(stops))
    pieces, pairwise = [], mask.pairwise
    for q_row, q in numbered(q_spans):
        down = q_row - q[0]
        for band in mask.bands(q, all_keys):
            first, stop = band.keys
            for k_row, k in keys[bisect_right(stops, first) : bisect_left(starts, stop)]:
                right = k_row - k[0]
                for part in band.clip(k):
                    for q_at, k_at, kind, masked in _cut(part):
                        rows = (q_at[0] + down, q_at[1] + down), (k_at[0] + right, k_at[1] + right)
                        pieces.append(Tile(*rows, kind, masked or pairwise, (q_at,), (k_at,)))
    return Tiles(_merge(pieces))


def _cut(band: Band) -> Iterator[tuple[Span, Span, Kind, bool]]:
    """The rectangles and triangles (half squares) of a band: (queries, keys, kind, masked)."""
    (start, stop), first, end = band.q, band.first, band.end
    rows = stop - start
    if rows == 1 or not (band.first_step or band.end_step):
        yield band.q, (first, end), "full", False
    elif not band.first_step:
        yield from _full(band.q, (first, end - 1))
        yield band.q, (end - 1, end - 1 + rows), "causal", False
    elif not band.end_step:
        yield band.q, (first, first + rows), "anticausal", False
        yield from _full(band.q, (first + rows, end))
    elif end - first < NARROW:
        for low in range(0, rows, 4 * NARROW):
            high = min(low + 4 * NARROW, rows)
            yield (start + low, start + high), (first + low, end + high - 1), "full", True
    else:
        # Take so few queries at a time that the two triangles do not overlap; the part between them is full.
        parts = -(-rows // (end - first - 1))
        for index in range(parts):
            low, high = rows * index // parts, rows * (index + 1) // parts
            q = (start + low, start + high)
            yield q, (first + low, first + high), "anticausal", False
            yield from _full(q, (first + high, end - 1 + low))
            yield q, (end - 1 + low, end - 1 + high), "causal", False


def _full(q: Span, k: Span) -> Iterator[tuple[Span, Span, Kind, bool]]:
    if k[0] < k[1]:
        yield q, k, "full", False


def parts(tile: Tile, size: int) -> Iterator[Tile]:
    """A tile in parts of at most ``size`` queries and keys."""
    for i, q in enumerate(split(tile.q, size)):
        for j, k in enumerate(split(tile.k, size)):
            kind = tile.kind if i == j else "full"
            if (tile.kind == "causal" and j > i) or (tile.kind == "anticausal" and j < i):
                continue
            yield Tile(q, k, kind, tile.masked, _at(tile.q_at, q, tile.q), _at(tile.k_at, k, tile.k))


def _at(spans: Spans, rows: Span, whole: Span) -> Spans:
    """Positions of some of a tile's rows; ``spans`` are the positions of the rows ``whole``."""
    return positions_of([(rows[0] - whole[0], rows[1] - whole[0])], spans)


def reach(q_spans: Spans, mask: Mask, keys: int) -> Spans:
    """The positions, among the first ``keys``, to which queries at ``q_spans`` attend."""
    bands = (band for q in q_spans for band in mask.bands(q, (0, keys)))
    spans = ((max(start, 0), min(stop, keys)) for start, stop in (band.keys for band in bands))
    return union(span for span in spans if span[0] < span[1])


def _merge(pieces: list[Tile]) -> list[Tile]:
    """Join tiles, for fewer kernel calls: full ones in a row, triangles on a diagonal, and full ones in a column."""
    wide: list[Tile] = []
    for tile in sorted(pieces, key=lambda t: (t.q, t.masked, t.k)):
        last = wide[-1] if wide else None
        if last and last.q == tile.q and last.k[1] == tile.k[0] and _both_full(last, tile):
            wide[-1] = last._replace(k=(last.k[0], tile.k[1]), k_at=joined(last.k_at + tile.k_at))
        else:
            wide.append(tile)
    tall: list[Tile] = []
    for tile in sorted(_join_triangles(wide), key=lambda t: (t.kind, t.masked, t.k, t.q)):
        last = tall[-1] if tall else None
        if last and last.k == tile.k and last.q[1] == tile.q[0] and _both_full(last, tile):
            tall[-1] = last._replace(q=(last.q[0], tile.q[1]), q_at=joined(last.q_at + tile.q_at))
        else:
            tall.append(tile)
    return tall


def _join_triangles(pieces: list[Tile]) -> list[Tile]:
    """Join two consecutive causal squares on a diagonal, and the full tile below the first, to one causal square.

    A rank's own block is then one causal tile even if its positions have gaps.
    """
    full = {(tile.q, tile.k[1], tile.masked): tile for tile in pieces if tile.kind == "full"}
    squares: list[Tile] = []
    for tile in sorted((t for t in pieces if t.kind == "causal"), key=lambda t: (t.q, t.k)):
        last = squares[-1] if squares else None
        below = full.get((tile.q, last.k[1], tile.masked)) if last else None
        fits = last and last.masked == tile.masked and (last.q[1], last.k[1]) == (tile.q[0], tile.k[0])
        if not (fits and below and below.k[0] <= last.k[0]):
            squares.append(tile)
            continue
        del full[below.q, below.k[1], below.masked]
        if below.k[0] < last.k[0]:
            rest = below._replace(k=(below.k[0], last.k[0]), k_at=_at(below.k_at, (below.k[0], last.k[0]), below.k))
            full[rest.q, rest.k[1], rest.masked] = rest
        squares[-1] = Tile(
            (last.q[0], tile.q[1]),
            (last.k[0], tile.k[1]),
            "causal",
            tile.masked,
            joined(last.q_at + tile.q_at),
            joined(last.k_at + tile.k_at),
        )
    return [*squares, *full.values(), *(tile for tile in pieces if tile.kind == "anticausal")]


def _both_full(a: Tile, b: Tile) -> bool:
    return a.kind == b.kind == "full" and a.masked == b.masked
