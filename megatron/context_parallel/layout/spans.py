# SPDX-License-Identifier: Apache-2.0
"""Spans: consecutive positions or rows, as (start, stop); and the relation of a block's rows to its positions.

A block holds the positions of its spans one after another; its rows are numbered from 0 in this order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from operator import index

import torch
from torch import Tensor

Span = tuple[int, int]
"""Consecutive positions, or row numbers, ``start .. stop - 1``, ascending."""

Spans = tuple[Span, ...]
"""Disjoint spans; ascending unless stated otherwise."""


def whole_numbers(values: Iterable[int], what: str) -> tuple[int, ...]:
    """The values as a tuple, which can be a key: from a list, an array or a tensor of whole numbers.

    Raises:
        ValueError: they are something else; the message begins with ``what``.
    """
    try:
        return tuple(map(index, values))
    except TypeError:
        raise ValueError(f"{what} must be a list of whole numbers, not {values!r}") from None


def count(spans: Spans) -> int:
    """Number of rows or positions in ``spans``."""
    return sum(stop - start for start, stop in spans)


def joined(spans: Iterable[Span]) -> Spans:
    """Spans in the given order; a span that touches or overlaps the previous one is joined to it."""
    result: list[Span] = []
    for start, stop in spans:
        if result and result[-1][0] <= start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return tuple(result)


def union(*spans: Iterable[Span]) -> Spans:
    """The union of all arguments, ascending."""
    return joined(sorted(chain.from_iterable(spans)))


def split(span: Span, size: int) -> list[Span]:
    """A span in parts of ``size``; the last one may be shorter."""
    return [(start, min(start + size, span[1])) for start in range(span[0], span[1], size)]


def numbered(spans: Spans) -> Iterator[tuple[int, Span]]:
    """Each span of a block with the number of its first row."""
    row = 0
    for start, stop in spans:
        yield row, (start, stop)
        row += stop - start


def positions_of(rows: Iterable[Span], spans: Spans) -> Spans:
    """The positions of some rows of a block that holds ``spans``, in the order of the rows."""
    firsts = list(accumulate((stop - start for start, stop in spans), initial=0))
    return joined(
        (spans[i][0] + max(first - firsts[i], 0), spans[i][0] + min(stop, firsts[i + 1]) - firsts[i])
        for first, stop in rows
        if first < stop
        for i in range(bisect_right(firsts, first) - 1, bisect_left(firsts, stop))
    )


def place(span: Span, kept: Spans) -> Span:
    """The rows of ``span`` in a block that holds only ``kept``; the inverse of :func:`positions_of`.

    Raises:
        ValueError: ``span`` is not within one of ``kept``.
    """
    index = bisect_right(kept, span[0], key=lambda other: other[0]) - 1
    if index < 0 or span[1] > kept[index][1]:
        raise ValueError(f"rows {span} are not among {kept}")
    first = count(kept[:index]) - kept[index][0]
    return first + span[0], first + span[1]


def positions(spans: Spans, device: torch.device, flip: bool = False) -> Tensor:
    """The positions in ``spans``, which may have any order, as an int64 tensor [s]; reversed with ``flip``."""
    parts = [torch.arange(start, stop, device=device) for start, stop in spans]
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result.flip(0) if flip else result
