# SPDX-License-Identifier: Apache-2.0
"""Runs that were read after constants and model had been frozen: predicted once, when they are entered, never fitted.

``published/after_freeze.json`` holds them, each with the tokens a second and GPU that we said then. Enter a run without
``predicted``, then ``python examples/reproduce/records.py --predict`` adds it, and never touches one that is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.reproduce.open_records import AFTER_FREEZE, Record
from examples.reproduce.record_fit import fitted, mean
from examples.reproduce.record_price import predict, published_rate


@dataclass(frozen=True)
class Foretold:
    """A run, and the tokens a second and GPU that were predicted when it was entered."""

    record: Record
    predicted: float

    @property
    def error(self) -> float:
        """Of a step's seconds, in percent of the published."""
        return 100 * (published_rate(self.record) / self.predicted - 1)


def read(path: Path = AFTER_FREEZE) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def foretold(path: Path = AFTER_FREEZE) -> list[Foretold]:
    """
    Raises:
        KeyError: a run has no prediction yet.
    """
    found = []
    for raw in read(path)["records"]:
        predicted = raw.pop("predicted")
        found.append(Foretold(Record(**raw), predicted))
    return found


def predict_new(path: Path = AFTER_FREEZE) -> int:
    """Predict the runs of the file that have no prediction; how many these were."""
    file = read(path)
    new = [raw for raw in file["records"] if "predicted" not in raw]
    for raw in new:
        raw["predicted"] = round(predict(Record(**raw), fitted()).ours, 1)
    if new:
        write(path, file)
    return len(new)


def write(path: Path, file: dict[str, Any]) -> None:
    """One run a line, as in records.json."""
    inner = {key: json.dumps(value, indent=1, ensure_ascii=False) for key, value in file.items() if key != "records"}
    runs = ",\n".join("  " + json.dumps(raw, ensure_ascii=False) for raw in file["records"])
    inner["records"] = f"[\n{runs}\n]"
    path.write_text("{\n" + ",\n".join(f'"{key}": {text}' for key, text in inner.items()) + "\n}\n", encoding="utf-8")


def told(path: Path = AFTER_FREEZE) -> list[str]:
    """Markdown: each source, and all of them."""
    groups: dict[str, list[Foretold]] = {}
    for one in foretold(path):
        groups.setdefault(one.record.source, []).append(one)
    lines = ["| source | machines | runs | error of what was predicted | worst |", "|---" * 5 + "|"]
    for source, rows in sorted(groups.items()):
        machines = ", ".join(dict.fromkeys(one.record.machine for one in rows))
        worst = max((one.error for one in rows), key=abs)
        lines.append(f"| {source} | {machines} | {len(rows)} | {_error(rows):.1f} % | {worst:+.0f} % |")
    every = [one for rows in groups.values() for one in rows]
    if every:
        each = mean([_error(rows) for rows in groups.values()])
        lines.append(f"| **all** | | {len(every)} | {_error(every):.1f} %; each source once {each:.1f} % | |")
    return lines


def _error(rows: list[Foretold]) -> float:
    return mean([abs(one.error) for one in rows])
