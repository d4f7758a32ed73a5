# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/inside/published-runs.md, as ``records.py --page`` writes them between their marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from examples.reproduce import after_freeze, record_edits
from examples.reproduce.record_fit import (
    FREE,
    Predicted,
    fitted,
    mean_of_rates,
    mean_of_records,
    mean_of_sources,
    predictions,
    summary,
    uncertain,
    unfitted,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inside" / "published-runs.md"
AGREED = 0.05  # halves whose constants differ by no more of the smaller one
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def totals() -> list[str]:
    """Both halves, and the test half counted in other ways."""
    lines = [
        "| | runs | nothing fitted | with the constants | each source once | its tokens a second |",
        "|---" * 6 + "|",
    ]
    found = predictions(fitted())
    told = [one for one in found if not one.record.unpriced]
    test = [one for one in found if not one.record.fitted]
    rest = [one for one in test if not one.record.unpriced]
    for name, rows in (
        ("half that they were fitted to", [one for one in told if one.record.fitted]),
        ("the other half, without its unpriced runs", rest),
        ("the other half, unpriced runs counted", test),
        ("the same, all changes undone", predictions(fitted(), [record_edits.undone(one.record) for one in test])),
    ):
        lines.append(_line(name, rows))
    return lines


def machines() -> list[str]:
    """What planner and dry run have for each machine: both halves together, and apart."""
    lines = ["| machine | runs | error | mean with signs | fitted half | other half |", "|---" * 6 + "|"]
    found = [one for one in predictions({}) if not one.record.unpriced]
    for machine in sorted({one.record.machine for one in found}):
        mine = [one for one in found if one.record.machine == machine]
        halves = [[one for one in mine if one.record.fitted == half] for half in (True, False)]
        each = " | ".join(f"{mean_of_records(rows):.1f} % of {len(rows)}" if rows else "none" for rows in halves)
        sign = sum(one.error for one in mine) / len(mine)
        lines.append(f"| {machine} | {len(mine)} | {mean_of_records(mine):.1f} % | {sign:+.1f} % | {each} |")
    return lines


def constants() -> list[str]:
    """Each with what the other half makes of it."""
    lines = ["| architecture | constant | shipped | by the other half | |", "|---" * 5 + "|"]
    shares, ends = fitted(), uncertain()
    for name, free in FREE.items():
        for key in free:
            low, high = ends[name][key]
            own = shares[name][key]
            other = high if abs(own - low) < abs(own - high) else low
            doubt = f"**uncertain**: {100 * (high / low - 1):.0f} % apart" if high / low - 1 > AGREED else "they agree"
            lines.append(f"| {name} | `{key}` | {own:.3f} | {other:.3f} | {doubt} |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "totals": totals,
    "machines": machines,
    "constants": constants,
    "sources": lambda: summary(fitted()),
    "edits": lambda: record_edits.told(fitted()),
    "frozen": after_freeze.told,
}


def filled(text: str) -> str:
    """A page with its tables as they are today.

    Raises:
        KeyError: a mark names no table.
    """
    return MARKED.sub(lambda mark: "\n".join([mark[1].rstrip(), "", *TABLES[mark[2]](), "", mark[3]]), text)


def _line(name: str, rows: list[Predicted]) -> str:
    before = mean_of_records(predictions(unfitted(), [one.record for one in rows]))
    return (
        f"| {name} | {len(rows)} | {before:.1f} % | {mean_of_records(rows):.1f} % | {mean_of_sources(rows):.1f} % | "
        f"{mean_of_rates(rows):.1f} % |"
    )
