#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare loss curves that should coincide: a table, a CSV and a picture of their differences.

    python examples/reproduce/convergence.py OUT_DIR NAME TITLE BASELINE RUN...

The command reads ``OUT_DIR/RUN.jsonl`` (``--log-jsonl`` of a training run) of each run, and compares it with the
baseline.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.reproduce.picture import GREY, INK, SERIES  # noqa: E402
from examples.reproduce.report import Row, write  # noqa: E402

COINCIDE = 1e-4
"""Curves coincide if they never differ by more than this share of the loss, a tenth of a drawn line's width."""


def losses(log: Path) -> list[float]:
    """``lm_loss`` of each step of a ``--log-jsonl`` file."""
    return [json.loads(line)["lm_loss"] for line in log.read_text().splitlines()]


def compare(curves: dict[str, list[float]]) -> list[Row]:
    """Rows that compare each curve with the first one.

    Raises:
        ValueError: the curves do not have the same steps.
    """
    (baseline, reference), *others = curves.items()
    rows = [Row({"run": baseline, "against": "its first step"}, None, reference[0] - reference[-1], "measured", "nats",
                "how far the loss falls")]  # fmt: skip
    for name, curve in others:
        if len(curve) != len(reference):
            raise ValueError(f"{name} has {len(curve)} steps, {baseline} {len(reference)}: train both again")
        label = {"run": name, "against": baseline}
        pairs = list(zip(curve, reference))
        same = all(abs(a - b) <= COINCIDE * b for a, b in pairs)
        note = f"nowhere more than {COINCIDE:g} of the loss apart" if same else ""
        rows.append(Row(label, "coincide", "coincide" if same else "differ", "measured", "curves", note))
        rows.append(Row(label, None, max(abs(a - b) for a, b in pairs), "measured", "nats", "largest difference"))
    return rows


def draw(figure: Any, curves: dict[str, list[float]]) -> None:
    """The curves, lower ones drawn wider; and below them their distance from the first one."""
    above, below = figure.subplots(2, 1, height_ratios=[2, 1], sharex=True)
    reference = next(iter(curves.values()))
    for number, (name, curve) in enumerate(curves.items()):
        style = {"color": SERIES[number], "linewidth": 2.0 + 1.8 * (len(curves) - 1 - number)}
        above.plot(range(1, len(curve) + 1), curve, label=f"{name} (measured)", **style)
        if number:
            apart = [abs(a - b) or float("nan") for a, b in zip(curve, reference)]
            below.plot(range(1, len(curve) + 1), apart, ".", color=SERIES[number], markersize=4)
    above.set_ylabel("loss (nats)", color=INK)
    above.legend(frameon=False, fontsize=9)
    below.axhline(COINCIDE * reference[-1], color=GREY, linestyle=":", linewidth=1)
    below.text(1, COINCIDE * reference[-1], " counts as apart", color=GREY, fontsize=8, va="bottom")
    below.set(yscale="log", xlabel="iteration", ylabel=f"|difference|\nto {next(iter(curves))}")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str]) -> int:
    if len(argv) < 5:
        print(f"error: OUT_DIR NAME TITLE BASELINE RUN... are needed, not {argv}", file=sys.stderr)
        return 2
    out_dir, name, title, *runs = argv
    curves = {run: losses(Path(out_dir, f"{run}.jsonl")) for run in runs}
    rows = compare(curves)
    write(out_dir, name, title, rows, draw=lambda figure: draw(figure, curves))
    return 0 if all(row.agrees is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
