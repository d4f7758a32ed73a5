# SPDX-License-Identifier: Apache-2.0
"""Spans: consecutive positions or rows, as (start, stop); and what a block of rows has to do with its positions.

A block holds the positions of its spans one after another: its rows count from 0 in their order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain

import torch
from torch import Tensor

Span = tuple[int, int]
"""Consecutive positions, or row numbers, ``start .. stop - 1``, ascending."""

Spans = tuple[Span, ...]
"""Disjoint spans; ascending unless it says otherwise."""


def count(spans: Spans) -> int:
    """How many rows or positions there are."""
    return sum(stop - start for start, stop in spans)


def joined(spans: Iterable[Span]) -> Spans:
    """Spans in the order given, those that touch the one before made one with it."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][0] <= start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def union(*spans: Iterable[Span]) -> Spans:
    """What is in any of the arguments, ascending."""
    return joined(sorted(chain.from_iterable(spans)))


def split(span: Span, size: int) -> list[Span]:
    """A span in parts of ``size``, the last one perhaps shorter."""
    return [(start, min(start + size, span[1])) for start in range(span[0], span[1], size)]


def numbered(spans: Spans) -> Iterator[tuple[int, Span]]:
    """Each span of a block with the number of its first row."""
    row = 0
    for start, stop in spans:
        yield row, (start, stop)
        row += stop - start


def positions_of(rows: Iterable[Span], spans: Spans) -> Spans:
    """The positions behind some rows of a block that holds ``spans``, in the order of the rows."""
    firsts = list(accumulate((stop - start for start, stop in spans), initial=0))
    return joined(
        (spans[i][0] + max(first - firsts[i], 0), spans[i][0] + min(stop, firsts[i + 1]) - firsts[i])
        for first, stop in rows
        if first < stop
        for i in range(bisect_right(firsts, first) - 1, bisect_left(firsts, stop))
    )


def place(span: Span, kept: Spans) -> Span:
    """Where ``span`` lies once only ``kept`` is left, one after another; :func:`positions_of` is the way back.

    Raises:
        ValueError: ``span`` is not within one of ``kept``.
    """
    index = bisect_right(kept, span[0], key=lambda other: other[0]) - 1
    if index < 0 or span[1] > kept[index][1]:
        raise ValueError(f"rows {span} are not among {kept}")
    first = count(kept[:index]) - kept[index][0]
    return first + span[0], first + span[1]


def positions(spans: Spans, device: torch.device, flip: bool = False) -> Tensor:
    """Global positions of spans, in any order, as a tensor int64 [s]; last first with ``flip``."""
    parts = [torch.arange(start, stop, device=device) for start, stop in spans]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found.flip(0) if flip else found
