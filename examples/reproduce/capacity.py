# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that fits, and how many rows of a table agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from examples.reproduce.report import FORMULAS, PaperTable, Row

Fits = Callable[[int], bool]
AT_LEAST = "not tested beyond"  # beginning of a row's note if the paper tested no longer sequences
LONGEST = 2**40


def longest_power(fits: Fits, start: int = 4096) -> int:
    """The longest of ``start`` times a power of two that fits; 0 if ``start`` does not."""
    length = 0
    while fits(max(2 * length, start)) and length < LONGEST:
        length = max(2 * length, start)
    return length


def longest_multiple(fits: Fits, step: int) -> int:
    """The longest multiple of ``step`` that fits; 0 if none. All shorter ones are assumed to fit."""
    above = step
    while fits(above) and above < LONGEST:
        above *= 2
    low, high = 0, above // step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def within_a_doubling(rows: Sequence[Row]) -> tuple[int, int]:
    """(number of rows with half to twice the published length, number of rows with a published length).

    If the paper tested no longer sequences, a row agrees if ours is at least as long.
    """
    compared = [row for row in rows if row.unit == "tokens" and row.published is not None]
    return sum(_agrees(row) for row in compared), len(compared)


def equal(rows: Sequence[Row]) -> int:
    """The number of rows with exactly the published length, without rows where the paper tested no longer sequences."""
    return sum(row.doublings == 0 and not row.note.startswith(AT_LEAST) for row in rows)


def _agrees(row: Row) -> bool:
    if row.doublings is None:  # ours is 0: nothing fits
        return False
    return row.doublings >= 0 if row.note.startswith(AT_LEAST) else abs(row.doublings) <= 1


def print_agreement(rows: Sequence[Row]) -> None:
    """Print how many rows agree, and how many are equal."""
    within, compared = within_a_doubling(rows)
    print(f"within one doubling: {within} of {compared} rows ({100 * within / compared:.0f} %); equal: {equal(rows)}")


def context_table(title: str, about: str, rows: Callable[[], Sequence[Row]], **drawn: Any) -> PaperTable:
    """A table of longest sequences, which formulas compute."""
    return PaperTable(title, about, lambda _: rows(), drawn, not_measured=FORMULAS, then=print_agreement)
