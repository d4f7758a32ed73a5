# SPDX-License-Identifier: Apache-2.0
"""Two checks that the test half of the records was not fitted in secret.

Edits: ``published/edits.json`` lists what was changed in runs of the test half after their figures had been committed,
with a checksum of the test half in which all changes are undone. A change that is not listed alters the checksum.

Runs after the freeze: ``published/after_freeze.json`` holds runs that were read after constants and model had been
frozen, each with the tokens per second and GPU that were predicted when it was entered. They are never fitted. Enter a
run without ``predicted``; then ``python examples/reproduce/records.py --predict`` adds the prediction. It never
changes an existing prediction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from examples.reproduce.open_records import AFTER_FREEZE, FILE, Record, records
from examples.reproduce.record_fit import (
    Constants,
    by_source,
    fitted,
    mean_of_rates,
    mean_of_records,
    mean_of_sources,
    predictions,
)
from examples.reproduce.record_price import Predicted, predict, published_rate


@dataclass(frozen=True)
class Edit:
    """One change of a field of some runs.

    Attributes:
        source, only: select the source's runs that have these values today.
        runs: their number.
        before, after: the value of ``field``.
        seen: whether the runs' errors were known at that time.
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
    """The run without some or all of the changes."""
    mine = [edit for edit in (edits() if which is None else which) if edit.concerns(record)]
    return replace(record, **{edit.field: edit.before for edit in mine})


def test_half() -> list[Record]:
    return [record for record in records() if not record.fitted]


def checksum(runs: Sequence[Record]) -> str:
    """A checksum of all fields of all runs, independent of their order. FPDT is a field that came later."""
    every = [{name: value for name, value in asdict(run).items() if name != "fpdt_chunk" or value} for run in runs]
    lines = sorted(json.dumps(fields, sort_keys=True) for fields in every)
    return sha256("\n".join(lines).encode()).hexdigest()


def edits_table(constants: Constants) -> list[str]:
    """Markdown: the error of the original test half, then its changes; equal changes share a row."""
    now, first = test_half(), [undone(record) for record in test_half()]
    result = predictions(constants, [run for run in first if not run.unpriced])
    lines = [
        f"With all changes undone, {len(first) - len(result)} of the test half's {len(first)} runs are not priced. "
        f"The error of the other {len(result)} is {mean_of_records(result):.1f} % over runs, "
        f"{mean_of_sources(result):.1f} % over sources and {mean_of_rates(result):.1f} % in tokens per second.",
        "",
        "| source | runs | change | their error without it, with it, % | why |",
        "|---" * 5 + "|",
    ]
    groups: dict[str, list[Edit]] = {}
    for edit in edits():
        change = "marked not priced" if edit.field == "unpriced" else f"`{edit.field}` {_word(edit)}"
        groups.setdefault(change, []).append(edit)
    for change, members in groups.items():
        errors = []
        for edit in members:
            mine = [run for run in now if edit.concerns(run)]
            both = ([undone(run, [edit]) for run in mine], mine)
            errors.append(", ".join(f"{mean_of_records(predictions(constants, runs)):.1f}" for runs in both))
        sources = ", ".join(edit.source for edit in members)
        why = "; ".join(edit.why for edit in members if "as above" not in edit.why)
        counts = ", ".join(str(edit.runs) for edit in members)
        lines.append(f"| {sources} | {counts} | {change} | {'; '.join(errors)} | {why} |")
    return lines


def _word(edit: Edit) -> str:
    if edit.field == "link":
        return f"{edit.after / 1e9:g} GB/s"
    return f"{edit.before} to {edit.after}" if isinstance(edit.before, str) else str(edit.after).lower()


def read_after_freeze(path: Path = AFTER_FREEZE) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def predicted_runs(path: Path = AFTER_FREEZE) -> list[Predicted]:
    """The runs with what was predicted when they were entered.

    Raises:
        KeyError: a run has no prediction yet.
    """
    result = []
    for raw in read_after_freeze(path)["records"]:
        predicted = raw.pop("predicted")
        record = Record(**raw)
        result.append(Predicted(record, published_rate(record), predicted, {}))
    return result


def predict_new(path: Path = AFTER_FREEZE) -> int:
    """Predict the runs of the file that have no prediction; returns their number."""
    file = read_after_freeze(path)
    new = [raw for raw in file["records"] if "predicted" not in raw]
    for raw in new:
        raw["predicted"] = round(predict(Record(**raw), fitted()).ours, 1)
    if new:
        write_after_freeze(path, file)
    return len(new)


def write_after_freeze(path: Path, file: dict[str, Any]) -> None:
    """One run a line, as in records.json."""
    inner = {key: json.dumps(value, indent=1, ensure_ascii=False) for key, value in file.items() if key != "records"}
    runs = ",\n".join("  " + json.dumps(raw, ensure_ascii=False) for raw in file["records"])
    inner["records"] = f"[\n{runs}\n]"
    path.write_text("{\n" + ",\n".join(f'"{key}": {text}' for key, text in inner.items()) + "\n}\n", encoding="utf-8")


def after_freeze_table(path: Path = AFTER_FREEZE) -> list[str]:
    """Markdown: a row for each source, and one for all."""
    every = predicted_runs(path)
    lines = ["| source | machines | runs | error of what was predicted | worst |", "|---" * 5 + "|"]
    for source, rows in sorted(by_source(every).items()):
        machines = ", ".join(dict.fromkeys(one.record.machine for one in rows))
        worst = max((one.error for one in rows), key=abs)
        lines.append(f"| {source} | {machines} | {len(rows)} | {mean_of_records(rows):.1f} % | {worst:+.0f} % |")
    if every:
        mean, each = mean_of_records(every), mean_of_sources(every)
        lines.append(f"| **all** | | {len(every)} | {mean:.1f} %; each source once {each:.1f} % | |")
    return lines
