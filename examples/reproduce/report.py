# SPDX-License-Identifier: Apache-2.0
"""Published numbers and ours: a table in the terminal, a CSV, and a picture.

Every command of this folder makes rows and passes them to :func:`write`. The papers' numbers are in ``published/``, as
CSV; :func:`published` reads them.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from examples.reproduce.picture import draw_rows, is_number, text  # noqa: E402

PUBLISHED = Path(__file__).parent / "published"
MARKS = ("measured", "simulated")
OUT = "where the table and the picture go (default: "

Value = float | int | str | None


@dataclass(frozen=True)
class Row:
    """One line of a table: the published number and ours.

    Attributes:
        label: the subject of the line, by column: {"model": "llama3-8b", "seq_length": 65536, "ulysses": 4}.
        published: a number, a word such as "OOM", or None if the paper has nothing.
        ours: the same.
        marked: where ours comes from: "measured" on this machine (timed, metered, or counted in what really ran or was
            sent) or "simulated" (by a model of other machines).
        unit: of both numbers. "tokens" are compared in doublings too.
        note: an assumption, or why the published number cannot be right.
    """

    label: dict[str, str | int]
    published: Value
    ours: Value
    marked: Literal["measured", "simulated"]
    unit: str
    note: str = field(default="")

    def __post_init__(self) -> None:
        if self.marked not in MARKS:
            raise ValueError(f"a row is marked {' or '.join(MARKS)}, not {self.marked!r}")

    @property
    def error(self) -> float | None:
        """Ours over published, minus one, in percent; None unless both are numbers and the published one is not 0."""
        if not (is_number(self.published) and is_number(self.ours)) or not self.published:
            return None
        return 100 * (self.ours / self.published - 1)

    @property
    def doublings(self) -> float | None:
        """log2 of ours over published, for context lengths: 1 is twice as long."""
        if self.unit != "tokens" or self.error is None or self.ours <= 0 or self.published <= 0:
            return None
        return math.log2(self.ours / self.published)

    @property
    def agrees(self) -> bool | None:
        """Whether both are the same word, if at least one is a word; otherwise None."""
        if self.published is None or self.ours is None or (is_number(self.published) and is_number(self.ours)):
            return None
        return self.published == self.ours


def published(name: str) -> list[dict[str, Value]]:
    """The rows of ``published/NAME.csv``, by column; numeric cells are numbers.

    Raises:
        FileNotFoundError: there is no such file; the message lists the existing ones.
    """
    file = PUBLISHED / f"{name}.csv"
    if not file.exists():
        existing = ", ".join(sorted(path.stem for path in PUBLISHED.glob("*.csv")))
        raise FileNotFoundError(f"nothing was published as {name}: there are {existing}")
    with file.open(newline="") as lines:
        return [{column: _read(text) for column, text in row.items()} for row in csv.DictReader(lines)]


def command(file: str, about: str) -> argparse.ArgumentParser:
    """The parser of a command, ``FILE [OUT_DIR]``; OUT_DIR is ``out/reproduce/PAPER/NAME``, from the file's path."""
    path = Path(file).resolve()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("out/reproduce", path.parent.name, path.stem)
    parser.add_argument("out_dir", nargs="?", type=Path, default=default, metavar="OUT_DIR", help=f"{OUT}{default})")
    return parser


def run_figure(file: str, about: str, title: str, rows: Callable[[], Sequence[Row]], **drawn: Any) -> None:
    """The command ``FILE [OUT_DIR]`` of one figure, which has the name of its file; ``drawn``: as of :func:`write`."""
    out_dir = command(file, about).parse_args().out_dir
    write(out_dir, Path(file).stem, title, rows(), **drawn)


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper, as ``PAPER/tables.py NAME`` makes it.

    Attributes:
        title: over the table and the picture, with paper and number: "USP, table 5".
        about: description for ``--help``.
        rows: makes the rows, from runs on this machine's GPUs if its argument (``--measure``) is true.
        drawn: further arguments of :func:`write`.
        not_measured: why ``--measure`` is refused; empty if it is not.
        then: is called with the rows after they are written.
    """

    title: str
    about: str
    rows: Callable[[bool], Sequence[Row]]
    drawn: dict[str, Any] = field(default_factory=dict)
    not_measured: str = ""
    then: Callable[[Sequence[Row]], None] | None = None


FORMULAS = "the lengths are computed by a formula, without a run"  # why a PaperTable is not measured


def run_tables(file: str, about: str, tables: dict[str, PaperTable], argv: Sequence[str] | None = None) -> None:
    """The command ``FILE NAME [OUT_DIR] [--measure]`` of a paper; ``FILE --names`` prints the names for run_folder.sh.

    Raises:
        SystemExit: with code 2 and one line, where ``--measure`` is not possible.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words == ["--names"]:
        print(*tables, sep="\n")
        return
    names = "\n".join(f"  {name}: {table.about}" for name, table in tables.items())
    raw, about = argparse.RawDescriptionHelpFormatter, f"{about}\nNAME is one of these:\n\n{names}"
    parser = argparse.ArgumentParser(description=about, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("name", choices=tables, metavar="NAME", help="the table or figure: see above")
    default = Path("out/reproduce", Path(file).resolve().parent.name)
    parser.add_argument("out_dir", nargs="?", type=Path, metavar="OUT_DIR", help=f"{OUT}{default}/NAME)")
    measure = "run the training programs on this machine's GPUs in place of simulating; rows that need more GPUs say so"
    parser.add_argument("--measure", action="store_true", help=measure)
    args = parser.parse_args(words)
    table = tables[args.name]
    if args.measure and table.not_measured:
        print(f"error: --measure: {args.name}: {table.not_measured}: leave --measure out", file=sys.stderr)
        sys.exit(2)
    rows = table.rows(args.measure)
    write(args.out_dir or default / args.name, args.name, table.title, rows, **table.drawn)
    if table.then:
        table.then(rows)


def write(
    out_dir: str | Path,
    name: str,
    title: str,
    rows: Sequence[Row],
    *,
    over: str | None = None,
    panel: str | None = None,
    log: bool | str = False,
    draw: Callable[[Any], None] | None = None,
) -> float | None:
    """Print the table, write NAME.csv and draw NAME.png in ``out_dir``.

    Args:
        title: of the table and the picture, with paper and number: "USP, table 5".
        over: the label on the x axis of a line chart, such as "seq_length"; without it, bars.
        panel: a label whose values get separate panels; default: a panel for each unit.
        log: a logarithmic y axis; if it is a unit, only in panels of that unit.
        draw: draws on a given figure instead. Its legend must distinguish measured, simulated and published.

    Returns:
        The mean of all errors without their signs, in percent, over rows with two numbers; None if there are none.
    """
    if not rows:
        raise ValueError(f"{title}: no rows to write")
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_csv(out_dir / f"{name}.csv", rows)
    draw_rows(out_dir / f"{name}.png", title, rows, over, panel, log, draw)
    return _show(title, rows, out_dir / name)


def _read(cell: str) -> Value:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell or None


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row.label))


def _write_csv(file: Path, rows: Sequence[Row]) -> None:
    columns = _columns(rows)
    with file.open("w", newline="") as lines:
        table = csv.writer(lines)
        table.writerow([*columns, "unit", "published", "ours", "marked", "error_percent", "doublings", "same", "note"])
        for row in rows:
            result = [*(row.label.get(column) for column in columns), row.unit, row.published, row.ours, row.marked]
            table.writerow([*result, row.error, row.doublings, row.agrees, row.note])


def _show(title: str, rows: Sequence[Row], prefix: Path) -> float | None:
    from rich.console import Console
    from rich.table import Table

    columns, console = _columns(rows), Console(width=None if sys.stdout.isatty() else 160)
    marks = " and ".join(dict.fromkeys(row.marked for row in rows))
    lengths, notes = any(row.doublings is not None for row in rows), any(row.note for row in rows)
    table = Table(title=f"{title}; ours: {marks}", title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "))
    for column in ("unit", "published", "ours", "error", *["doublings"] * lengths, *["note"] * notes):
        table.add_column(column, justify="left" if column in ("unit", "note") else "right")
    for row in rows:
        error = {None: "", True: "same", False: "different"}[row.agrees]
        if row.error is not None:
            error = f"{row.error:+.1f} %"
        cells = [text(row.label.get(column)) for column in columns]
        cells += [row.unit, text(row.published), text(row.ours), error]
        cells += ["" if row.doublings is None else f"{row.doublings:+.2f}"] * lengths + [row.note] * notes
        table.add_row(*cells)
    console.print(table)
    compared, mean = [row for row in rows if row.error is not None], mean_error(rows)
    if mean is not None:
        units = dict.fromkeys(row.unit for row in compared)
        by_unit = [f"{unit} {mean_error(row for row in compared if row.unit == unit):.1f} %" for unit in units]
        each = ": " + ", ".join(by_unit) if len(by_unit) > 1 else ""
        line = f"mean absolute error {mean:.1f} % over {len(compared)} of {len(rows)} rows{each}"
        console.print(line, highlight=False)
    words = [row for row in rows if row.agrees is not None]
    if words:
        console.print(f"words: {sum(row.agrees for row in words)} of {len(words)} the same", highlight=False)
    console.print(f"written: {prefix}.csv, {prefix}.png", highlight=False, soft_wrap=True)
    return mean


def mean_error(rows: Iterable[Row]) -> float | None:
    """The mean absolute error in percent over rows with two numbers; None if there are none."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    return sum(errors) / len(errors) if errors else None
