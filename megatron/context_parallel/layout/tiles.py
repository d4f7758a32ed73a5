# SPDX-License-Identifier: Apache-2.0
"""Which (query block, key block) pairs are computed, and how each is masked.

Ring steps, zigzag balance, chunk loops, windows, documents and sparse blocks are all handled in the same way: a mask's
bands between the positions of two blocks are cut into squares and rectangles. There are no empty tiles, so only needed
pairs are computed and sent, and the tiles' pairs give the FLOPs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from megatron.context_parallel.layout.masks import Band, Mask
from megatron.context_parallel.layout.spans import Span, Spans, numbered, place, positions_of, split, union
from megatron.decisions.division import NARROW

Kind = Literal["full", "causal", "anticausal"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Tile(NamedTuple):
    """Rows ``q`` of the query block against rows ``k`` of the key block (local row numbers).

    Attributes:
        kind: full, or for a square with query row i and key row j: causal, j <= i; anticausal, j >= i.
        masked: the mask must also be evaluated for each pair.
    """

    q: Span
    k: Span
    kind: Kind
    masked: bool = False

    @property
    def pairs(self) -> int:
        """(query, key) pairs this tile computes."""
        rows, columns = self.q[1] - self.q[0], self.k[1] - self.k[0]
        return rows * columns if self.kind == "full" else rows * (rows + 1) // 2


class Tiles(Sequence[Tile]):
    """The tiles between two blocks, and what was derived from them, such as a kernel's tables on the device.

    Pickled tiles are an array, which other processes read without making an object for each tile.

    Attributes:
        q_spans, k_spans: the global positions of each block's rows.
        shared: what was derived from :attr:`table` alone. All tiles of a plan share it: chunks and hops often have
            equal rows.
    """

    def __init__(
        self,
        each: Iterable[Tile] = (),
        q_spans: Spans = (),
        k_spans: Spans = (),
        shared: dict[Hashable, Any] | None = None,
    ) -> None:
        self._each, self.q_spans, self.k_spans = tuple(each), q_spans, k_spans
        self.shared = {} if shared is None else shared

    @cached_property
    def _each(self) -> tuple[Tile, ...]:
        rows = self.table.tolist()
        return tuple(Tile((a, b), (c, d), KINDS[kind], bool(masked)) for a, b, c, d, kind, masked in rows)

    @cached_property
    def table(self) -> np.ndarray:
        """int64 [tiles, 6]: both ends of the queries, both ends of the keys, index of the kind in KINDS, masked."""
        each = (n for tile in self._each for n in (*tile.q, *tile.k, KINDS.index(tile.kind), tile.masked))
        return np.fromiter(each, np.int64).reshape(-1, 6)

    @cached_property
    def geometry(self) -> bytes:
        """:attr:`table` as a key."""
        return self.table.tobytes()

    def __len__(self) -> int:
        return len(self._each) if "_each" in self.__dict__ else len(self.table)

    def __getitem__(self, index: int) -> Tile:
        return self._each[index]

    def __iter__(self) -> Iterator[Tile]:
        return iter(self._each)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._each == tuple(other)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("table", "q_spans", "k_spans", "shared")}

    def q_at(self, tile: Tile) -> Spans:
        """The global positions of a tile's query rows."""
        return positions_of([tile.q], self.q_spans)

    def k_at(self, tile: Tile) -> Spans:
        """The global positions of a tile's key rows."""
        return positions_of([tile.k], self.k_spans)

    @cached_property
    def masked(self) -> bool:
        """Whether some tile is masked."""
        return bool(self.table[:, 5].any())

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs of all tiles."""
        q0, q1, k0, k1, kind, _ = self.table.T
        rows = q1 - q0
        return int(np.where(kind == KINDS.index("full"), rows * (k1 - k0), rows * (rows + 1) // 2).sum())

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, which is called once for each ``key``."""
        if key not in self.__dict__:
            self.__dict__[key] = make()
        return self.__dict__[key]

    def within(self, held: Spans) -> Tiles:
        """The same tiles with key rows numbered within ``held``, the rows of the key block that are kept."""
        if not self or (len(held) == 1 and held[0][0] == 0):
            return self
        moved = (tile._replace(k=place(tile.k, held)) for tile in self)
        return Tiles(moved, self.q_spans, positions_of(held, self.k_spans), self.shared)


def tiles(q_spans: Spans, k_spans: Spans, mask: Mask, shared: dict[Hashable, Any] | None = None) -> Tiles:
    """The tiles between a query block and a key block.

    Args:
        q_spans, k_spans: the global positions of each block's rows, in local order.
        mask: the attention mask.
        shared: :attr:`Tiles.shared` of other tiles of a plan.
    """
    keys = sorted(numbered(k_spans), key=lambda item: item[1])
    starts, stops = [span[0] for _, span in keys], [span[1] for _, span in keys]
    if not keys:
        return Tiles((), q_spans, k_spans, shared)
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
                        rows = (q_at[0] + down, q_at[1] + down) if down else q_at
                        columns = (k_at[0] + right, k_at[1] + right) if right else k_at
                        pieces.append(Tile(rows, columns, kind, masked or pairwise))
    return Tiles(_merge(pieces), q_spans, k_spans, shared)


def _cut(band: Band) -> list[tuple[Span, Span, Kind, bool]]:
    """The rectangles and triangles (half squares) of a band: (queries, keys, kind, masked)."""
    (start, stop), first, end = band.q, band.first, band.end
    rows = stop - start
    if rows == 1 or not (band.first_step or band.end_step):
        return [(band.q, (first, end), "full", False)]
    if not band.first_step:
        return [*_full(band.q, (first, end - 1)), (band.q, (end - 1, end - 1 + rows), "causal", False)]
    if not band.end_step:
        return [(band.q, (first, first + rows), "anticausal", False), *_full(band.q, (first + rows, end))]
    if end - first < NARROW:
        cuts = ((low, min(low + 4 * NARROW, rows)) for low in range(0, rows, 4 * NARROW))
        return [((start + low, start + high), (first + low, end + high - 1), "full", True) for low, high in cuts]
    # Take so few queries at a time that the two triangles do not overlap; the part between them is full.
    pieces: list[tuple[Span, Span, Kind, bool]] = []
    parts = -(-rows // (end - first - 1))
    for index in range(parts):
        low, high = rows * index // parts, rows * (index + 1) // parts
        q = (start + low, start + high)
        pieces.append((q, (first + low, first + high), "anticausal", False))
        pieces += _full(q, (first + high, end - 1 + low))
        pieces.append((q, (end - 1 + low, end - 1 + high), "causal", False))
    return pieces


def _full(q: Span, k: Span) -> list[tuple[Span, Span, Kind, bool]]:
    return [(q, k, "full", False)] if k[0] < k[1] else []


def parts(tile: Tile, size: int) -> Iterator[Tile]:
    """A tile in parts of at most ``size`` queries and keys."""
    for i, q in enumerate(split(tile.q, size)):
        for j, k in enumerate(split(tile.k, size)):
            kind = tile.kind if i == j else "full"
            if (tile.kind == "causal" and j > i) or (tile.kind == "anticausal" and j < i):
                continue
            yield Tile(q, k, kind, tile.masked)


def reach(q_spans: Spans, mask: Mask, keys: int) -> Spans:
    """The positions, among the first ``keys``, to which queries at ``q_spans`` attend."""
    bands = (band for q in q_spans for band in mask.bands(q, (0, keys)))
    spans = ((max(start, 0), min(stop, keys)) for start, stop in (band.keys for band in bands))
    return union(span for span in spans if span[0] < span[1])


def _merge(pieces: list[Tile]) -> list[Tile]:
    """Join tiles, for fewer kernel calls: full ones in a row, triangles on a diagonal, and full ones in a column."""
    wide: list[Tile] = []
    for tile in sorted(pieces):  # by rows, then columns
        last = wide[-1] if wide else None
        if last and last.k[1] == tile.k[0] and last.q == tile.q and _both_full(last, tile):
            wide[-1] = Tile(last.q, (last.k[0], tile.k[1]), "full", last.masked)
        else:
            wide.append(tile)
    by_columns = _join_triangles(wide)
    for field in ("k", "masked", "kind"):  # sorting is stable: tiles of a kind stay ordered by the other two
        by_columns.sort(key=attrgetter(field))
    tall: list[Tile] = []
    for tile in by_columns:
        last = tall[-1] if tall else None
        if last and last.k == tile.k and last.q[1] == tile.q[0] and _both_full(last, tile):
            tall[-1] = Tile((last.q[0], tile.q[1]), last.k, "full", last.masked)
        else:
            tall.append(tile)
    return tall


def _join_triangles(pieces: list[Tile]) -> list[Tile]:
    """Join two consecutive causal squares on a diagonal, and the full tile below the first, to one causal square.

    A rank's own block is then one causal tile even if its positions have gaps.

    Args:
        pieces: ordered by rows, then columns.
    """
    result: list[Tile] = []
    square = None  # the index of the last causal square
    for tile in pieces:
        if tile.kind == "causal":
            if square is not None and _is_below(result[-1], result[square], tile):
                last, below = result[square], result.pop()
                if below.k[0] < last.k[0]:
                    result.append(below._replace(k=(below.k[0], last.k[0])))
                result[square] = Tile((last.q[0], tile.q[1]), (last.k[0], tile.k[1]), "causal", tile.masked)
                continue
            square = len(result)
        result.append(tile)
    return result


def _is_below(tile: Tile, first: Tile, second: Tile) -> bool:
    """Whether a full tile lies below a causal square and beside the next one, so that the three are one triangle."""
    return (
        tile.kind == "full"
        and first.masked == tile.masked == second.masked
        and (first.q[1], first.k[1]) == (second.q[0], second.k[0])
        and tile.q == second.q
        and tile.k[1] == second.k[0]
        and tile.k[0] <= first.k[0]
    )


def _both_full(a: Tile, b: Tile) -> bool:
    return a.kind == b.kind == "full" and a.masked == b.masked
