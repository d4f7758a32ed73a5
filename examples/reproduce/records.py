# SPDX-License-Identifier: Apache-2.0
"""Published training runs compared with our cost model, on every machine that has a file.

    python examples/reproduce/records.py [OUT_DIR]
    python examples/reproduce/records.py --fit        # fit again, also with halves swapped and without each source
    python examples/reproduce/records.py --page       # writes the tables of docs/inside/published-runs.md
    python examples/reproduce/records.py --predict    # predicts new runs of published/after_freeze.json, once

Prints every record in seconds a step, published and simulated, then sources and totals. Four constants are fitted to
one half of the sources; the other half tests them. They are the constants of the shipped machines, which tools/plan.py
uses. Runs whose sources do not say enough are marked, and counted separately. The command writes the rows as CSV and a
picture.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.reproduce import mixtures, record_checks  # noqa: E402
from examples.reproduce.open_records import Record, left_out, records  # noqa: E402
from examples.reproduce.picture import COLOURS, GREY, INK  # noqa: E402
from examples.reproduce.record_fit import (  # noqa: E402
    BY_HAND,
    FREE,
    Constants,
    fit,
    fitted,
    left_out_one_by_one,
    mean,
    mean_of_rates,
    mean_of_records,
    mean_of_sources,
    of_priced,
    predictions,
    priced,
    summary,
    totals,
    uncertain,
    unfitted,
)
from examples.reproduce.record_price import Predicted, family  # noqa: E402
from examples.reproduce.report import Row, command, write  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inside" / "published-runs.md"
AGREED = 0.05  # largest relative difference of constants that agree
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MOST = 1.6  # upper end of the picture, in times the published speed


def row(one: Predicted) -> Row:
    """Seconds per step; the published ones follow from the figure in the record."""
    r = one.record
    tokens = r.global_batch * r.seq_length / r.gpus
    again = "" if r.recompute == "none" else f", again {r.recompute}"
    label = {
        "half": "fitted" if r.fitted else "test",
        "source": r.source.split("-20")[0],
        "machine": r.machine,
        "run": f"{r.model} {r.seq_length / 1024:g}K, {r.gpus}: {grid(r)}",
        "how": f"{r.precision} {r.runs} {r.kernel}{again}",
    }
    note = f"not priced: {r.unpriced}" if r.unpriced else ""
    return Row(label, tokens / one.published, tokens / one.ours, "simulated", "s/step", note)


def grid(r: Record) -> str:
    """The sizes above 1 of TP, Ulysses, Ring, DP and PP."""
    axes = (("TP", r.tp), ("U", r.ulysses), ("R", r.ring), ("DP", r.dp), ("PP", r.pp))
    return " ".join(f"{name}{size}" for name, size in axes if size > 1) or "one GPU"


def draw(figure: Any, result: list[Predicted]) -> None:
    """Simulated over published speed, a panel for each architecture; triangles at the top edge are higher values."""
    figure.set_size_inches(13, 6.2)
    for place, name in enumerate(FREE, 1):
        axes = figure.add_subplot(1, len(FREE), place)
        mine = [one for one in result if family(one.record.machine) == name]
        axes.axhspan(1 / 1.12, 1.12, color=GREY, alpha=0.2, linewidth=0, label="within 12 %")
        axes.axhline(1, color=INK, linewidth=0.8)
        priced_runs = [one for one in mine if not one.record.unpriced]
        groups = (
            ("fitted to", [one for one in priced_runs if one.record.fitted], COLOURS["published"], "o"),
            ("test", [one for one in priced_runs if not one.record.fitted], COLOURS["simulated"], "s"),
            ("not priced", [one for one in mine if one.record.unpriced], "none", "D"),
        )
        for what, these, colour, marker in groups:
            inside = [one for one in these if one.ours / one.published <= MOST]
            beyond = [one for one in these if one.ours / one.published > MOST]
            style = {"color": colour, "edgecolors": INK, "linewidths": 0.4}
            if these:
                label = f"{what}: {len(these)}, mean error {mean_of_records(these):.1f} %"
                axes.scatter([one.published for one in inside], [one.ours / one.published for one in inside],
                             s=22, marker=marker, label=label, **style)  # fmt: skip
            if beyond:
                label = f"{what}, beyond: {len(beyond)}, up to {max(one.ours / one.published for one in beyond):.1f}"
                axes.scatter([one.published for one in beyond], [0.99 * MOST] * len(beyond),
                             s=50, marker="^", label=label, **style)  # fmt: skip
        axes.set(xscale="log", ylim=(0.6, MOST), title=name, xlabel="published tokens per second and GPU")
        axes.set_ylabel("simulated over published" if place == 1 else None)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def errors(runs: list[Predicted]) -> str:
    means = (mean_of_records(runs), mean_of_sources(runs), mean_of_rates(runs))
    return "records {:.1f} %, sources {:.1f} %, sources' rates {:.1f} %".format(*means)


def show(title: str, constants: Constants) -> None:
    shares = "; ".join(
        f"{name} " + ", ".join(f"{key} {constants[name][key]:.3f}" for key in free) for name, free in FREE.items()
    )
    print(f"{title}: {shares}")


def fit_again() -> None:
    """Fit to each half, and predict each source with constants fitted to all others."""
    runs = priced(records())
    for title, half in (("fitted to the even half", True), ("the other way round, fitted to the odd half", False)):
        mine = [record for record in runs if record.fitted == half]
        others = [record for record in runs if record.fitted != half]
        constants = fit(mine)
        show(title, constants)
        for name, rows in (("  these", mine), ("  the other half", others)):
            print(f"{name}: {errors(predictions(constants, rows))}", flush=True)
    print("each source by constants fitted to all others:")
    every = left_out_one_by_one(runs)
    for source, result in sorted(every.items()):
        print(f"  {source}: {mean_of_records(result):.1f} %", flush=True)
    print(f"  {errors([one for rows in every.values() for one in rows])}")


# The tables of docs/inside/published-runs.md, which --page writes between their marks.


def page_totals() -> list[str]:
    """Errors of both halves, and of the test half with unpriced runs or with the records as they were first entered."""
    head = "| | runs | nothing fitted | with the constants | mean over sources | mean over sources, tokens per second |"
    result = predictions(fitted())
    test = [one for one in result if not one.record.fitted]
    originals = predictions(fitted(), [record_checks.undone(one.record) for one in test])
    groups = {
        "fitted half": of_priced([one for one in result if one.record.fitted]),
        "test half, without runs not priced": of_priced(test),
        "test half, all runs": test,
        "test half, all runs, changes undone": originals,
    }
    return [head, "|---" * 6 + "|", *(_page_line(name, rows) for name, rows in groups.items())]


def page_machines() -> list[str]:
    """The error of planner and dry run for each machine: for both halves together, and separately."""
    lines = ["| machine | runs | error | signed mean | fitted half | test half |", "|---" * 6 + "|"]
    result = of_priced(predictions({}))
    for machine in sorted({one.record.machine for one in result}):
        mine = [one for one in result if one.record.machine == machine]
        halves = [[one for one in mine if one.record.fitted == half] for half in (True, False)]
        each = " | ".join(f"{mean_of_records(rows):.1f} % of {len(rows)}" if rows else "none" for rows in halves)
        sign = mean([one.error for one in mine])
        lines.append(f"| {machine} | {len(mine)} | {mean_of_records(mine):.1f} % | {sign:+.1f} % | {each} |")
    return lines


def page_constants() -> list[str]:
    """Each constant, and its value fitted to the other half."""
    lines = ["| architecture | constant | shipped | fitted to the other half | |", "|---" * 5 + "|"]
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
    "totals": page_totals,
    "machines": page_machines,
    "constants": page_constants,
    "frozen": record_checks.after_freeze_table,
    "mixtures": mixtures.table,
}


def filled(text: str) -> str:
    """A page with its tables as they are today.

    Raises:
        KeyError: a mark names no table.
    """
    return MARKED.sub(
        lambda mark: "\n".join([mark[1].rstrip(), "", *map(compact, TABLES[mark[2]]()), "", mark[3]]), text
    )


def compact(line: str) -> str:
    """A line of a table without the spaces around its bars; other lines are unchanged."""
    return re.sub(r" *\| *", "|", line) if line.startswith("|") else line


def _page_line(name: str, rows: list[Predicted]) -> str:
    before = mean_of_records(predictions(unfitted(), [one.record for one in rows]))
    return (
        f"| {name} | {len(rows)} | {before:.1f} % | {mean_of_records(rows):.1f} % | {mean_of_sources(rows):.1f} % | "
        f"{mean_of_rates(rows):.1f} % |"
    )


def main() -> None:
    parser = command(__file__, __doc__)
    parser.set_defaults(out_dir=Path("out/reproduce/records"))
    parser.add_argument("--fit", action="store_true", help="fit the constants again; takes a minute")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/inside/published-runs.md")
    parser.add_argument("--predict", action="store_true", help="predict the runs that came after the freeze, once")
    args = parser.parse_args()
    if args.predict:
        print(f"{record_checks.predict_new()} predicted")
    if args.fit:
        fit_again()
    if args.page:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(filled(text), encoding="utf-8")
    if args.fit or args.page or args.predict:
        return
    result = predictions(fitted())
    order = sorted(result, key=lambda one: (one.record.machine, one.record.fitted, one.record.source))
    write(args.out_dir, "records", "Published training runs", [row(one) for one in order],
          draw=lambda figure: draw(figure, result))  # fmt: skip
    print()
    show("constants", fitted())
    print(*summary(fitted()), "", *totals(fitted()), "", "Set by hand:", *(f"- {line}" for line in BY_HAND), sep="\n")
    print("", "Changes to runs of the test half:", *record_checks.edits_table(fitted()), sep="\n")
    print("", "After the freeze:", *record_checks.after_freeze_table(), sep="\n")
    print("", "Left out:", sep="\n")
    for why, run in left_out():
        ours = f"; simulated {row(predictions(fitted(), [run])[0]).ours:,.0f} s per step" if run else ""
        print(f"- {why}{ours}")


if __name__ == "__main__":
    main()
