# SPDX-License-Identifier: Apache-2.0
"""What was changed in runs of the test half after their figures had been committed, and what errors are without it.

``published/edits.json`` lists every such change. A checksum of the test half with all of them undone stands there too:
a change that is not listed alters it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

from examples.reproduce.open_records import FILE, Record, records
from examples.reproduce.record_fit import (
    Constants,
    mean_of_rates,
    mean_of_records,
    mean_of_sources,
    predictions,
)


@dataclass(frozen=True)
class Edit:
    """One change of a field of some runs.

    Attributes:
        source, only: which runs: those of the source that have these values today.
        runs: how many they are.
        before, after: the value of ``field``.
        seen: whether the runs' errors were known when it was made.
    """

    source: str
    only: dict[str, Any]
    runs: int
    field: str
    before: Any
    after: Any
    when: str
    seen: bool
    why: str

    def concerns(self, record: Record) -> bool:
        return record.source == self.source and all(getattr(record, key) == value for key, value in self.only.items())


@lru_cache
def edits() -> tuple[Edit, ...]:
    raw = json.loads((FILE.parent / "edits.json").read_text(encoding="utf-8"))["edits"]
    return tuple(Edit(before=one.pop("from"), after=one.pop("to"), **one) for one in raw)


def as_committed() -> str:
    """The checksum of the test half as its runs were first committed."""
    return json.loads((FILE.parent / "edits.json").read_text(encoding="utf-8"))["as_committed"]


def undone(record: Record, which: Sequence[Edit] | None = None) -> Record:
    """The run without some changes, or without any."""
    mine = [edit for edit in (edits() if which is None else which) if edit.concerns(record)]
    return replace(record, **{edit.field: edit.before for edit in mine})


def test_half() -> list[Record]:
    return [record for record in records() if not record.fitted]


def checksum(runs: Sequence[Record]) -> str:
    """Of all fields of all runs, in whatever order the file has them."""
    lines = sorted(json.dumps(asdict(run), sort_keys=True) for run in runs)
    return sha256("\n".join(lines).encode()).hexdigest()


def told(constants: Constants) -> list[str]:
    """Markdown: the error of the test half as it first was, then its changes, with alike ones in one row."""
    now, first = test_half(), [undone(record) for record in test_half()]
    found = predictions(constants, [run for run in first if not run.unpriced])
    lines = [
        f"With all changes undone, and without {len(first) - len(found)} runs unpriced at once, the error of "
        f"the {len(found)} runs left is {mean_of_records(found):.1f} %, of sources {mean_of_sources(found):.1f} %, "
        f"and in tokens a second {mean_of_rates(found):.1f} %.",
        "",
        "| source | runs | change | their error without it, with it, % | why |",
        "|---" * 5 + "|",
    ]
    groups: dict[str, list[Edit]] = {}
    for edit in edits():
        change = "marked not priced" if edit.field == "unpriced" else f"`{edit.field}` {_word(edit)}"
        groups.setdefault(change, []).append(edit)
    for change, alike in groups.items():
        errors = []
        for edit in alike:
            mine = [run for run in now if edit.concerns(run)]
            both = ([undone(run, [edit]) for run in mine], mine)
            errors.append(", ".join(f"{mean_of_records(predictions(constants, runs)):.1f}" for runs in both))
        sources = ", ".join(edit.source for edit in alike)
        why = "; ".join(edit.why for edit in alike if "as above" not in edit.why)
        counts = ", ".join(str(edit.runs) for edit in alike)
        lines.append(f"| {sources} | {counts} | {change} | {'; '.join(errors)} | {why} |")
    return lines


def _word(edit: Edit) -> str:
    if edit.field == "link":
        return f"{edit.after / 1e9:g} GB/s"
    return f"{edit.before} to {edit.after}" if isinstance(edit.before, str) else str(edit.after).lower()
