# SPDX-License-Identifier: Apache-2.0
"""Pictures of published numbers and ours: bars for tables, lines over a length for figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.reproduce.report import Row

COLOURS = {"published": "#b3b3ad", "measured": "#0072b2", "simulated": "#e69f00"}
SERIES = ("#0072b2", "#e69f00", "#009e73", "#cc6677", "#56b4e9", "#aa4499", "#999933", "#661100")
STYLES = {
    "published": {"linestyle": "--", "marker": "o", "markersize": 8, "markerfacecolor": "none"},
    "measured": {"linestyle": "-", "marker": "o", "markersize": 4},
    "simulated": {"linestyle": "-", "marker": "s", "markersize": 4},
}
INK, GREY = "#222222", "#8a8a8a"


def text(value: float | int | str | None) -> str:
    """A value as the table shows it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) or value == int(value) and abs(value) >= 1000 else f"{value:,.4g}"


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def draw_rows(
    file: Path,
    title: str,
    rows: Sequence[Row],
    over: str | None,
    panel: str | None,
    log: bool | str,
    draw: Callable | None,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.label.get(panel) if panel else row.unit, []).append(row)
    labels = {column for row in rows for column in row.label} - {over, panel}
    # A label that is the same in a whole panel does not distinguish its series.
    varying = {column for column in labels
            if any(len({row.label.get(column) for row in members}) > 1 for members in groups.values())}  # fmt: skip
    names = list(dict.fromkeys(_series(row, varying) for row in rows))
    across = len(groups) if not over else 2 if len(groups) in (2, 4) else min(len(groups), 3)
    down = math.ceil(len(groups) / across)
    tallest = max(map(len, groups.values()))
    size = (max(8.0, 5.2 * across), 4.4 * down if over or draw else down * (1.4 + 0.42 * tallest))
    figure = pyplot.figure(figsize=size, dpi=110, layout="constrained")
    figure.suptitle(textwrap.fill(title, int(8.5 * size[0])), fontsize=13, color=INK)
    if draw:
        draw(figure)
    else:
        panels = figure.subplots(down, across, squeeze=False).flat
        for axes, (name, members) in zip(panels, groups.items()):
            _lines(axes, members, over, varying, names) if over else _bars(axes, members, panel)
            title = f"{panel.replace('_', ' ')} {text(name)}" if panel and is_number(name) else name
            axes.set_title(title if panel else "", fontsize=11, color=INK)
            logarithmic = log is True or log == members[0].unit
            (axes.set_yscale if over else axes.set_xscale)("log" if logarithmic else "linear")
            if not logarithmic:
                low, high = (axes.get_ylim if over else axes.get_xlim)()
                low = min(0, low)
                (axes.set_ylim if over else axes.set_xlim)(low, low + 1.04 * (high - low))
            axes.spines[["top", "right"]].set_visible(False)
        for axes in list(panels):
            axes.axis("off")
        if not over:  # the legend goes below the panels, because bars fill them
            from matplotlib.patches import Patch

            marks = [Patch(color=COLOURS[name], label=name) for name in _sources(rows)]
            figure.legend(handles=marks, frameon=False, fontsize=8, loc="outside lower center", ncols=len(marks))
    figure.savefig(file)
    pyplot.close(figure)


def _bars(axes: Any, rows: list[Row], panel: str | None) -> None:
    """Two bars for each row, from the top; a word is written where its bar would begin."""
    for place, row in enumerate(rows):
        for shift, name, value in ((-0.2, "published", row.published), (0.2, row.marked, row.ours)):
            if is_number(value):
                axes.barh(place + shift, value, height=0.38, color=COLOURS[name])
            if value is not None:
                axes.annotate(
                    text(value), (value if is_number(value) else 0, place + shift), (3, 0), va="center",
                    textcoords="offset points", fontsize=8, color=INK if is_number(value) else COLOURS[name],
                )  # fmt: skip
    names = [", ".join(f"{k.replace('_', ' ')} {text(v)}" if is_number(v) else str(v)
                       for k, v in row.label.items() if k != panel) for row in rows]  # fmt: skip
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=rows[0].unit)
    axes.margins(x=0.12)


def _lines(axes: Any, rows: list[Row], over: str, varying: set[str], names: list[str]) -> None:
    """A colour for each series; published lines are dashed and hollow. A line ends at a word such as OOM."""
    for number, name in enumerate(names):
        members = [row for row in rows if _series(row, varying) == name]
        if not members:
            continue
        for mark, style in STYLES.items():
            values = [(row, row.published if mark == "published" else row.ours) for row in members]
            points = [(row.label[over], value) for row, value in values
                      if is_number(value) and mark in ("published", row.marked)]  # fmt: skip
            if points:
                axes.plot(*zip(*points), color=SERIES[number % len(SERIES)], **style)
        axes.plot([], [], color=SERIES[number % len(SERIES)], linewidth=4, label=name or None)
    places = sorted({row.label[over] for row in rows})
    if all(is_number(place) and place > 0 for place in places) and places[-1] >= 8 * places[0]:
        axes.set_xscale("log", base=2)
    names = [f"{place // 1024}K" if is_number(place) and place % 1024 == 0 else str(place) for place in places]
    axes.set_xticks(places, names, rotation=30 if len(places) > 6 else 0)
    axes.minorticks_off()
    axes.set(xlabel=over.replace("_", " "), ylabel=rows[0].unit)
    _legend(axes, rows)


def _series(row: Row, varying: set[str]) -> str:
    """Which line a row belongs to: the values of its labels that are in ``varying``."""
    labels = {column: v for column, v in row.label.items() if column in varying}
    names = (f"{column.replace('_', ' ')} {text(v)}" if is_number(v) else str(v) for column, v in labels.items())
    return ", ".join(names)


def _sources(rows: Sequence[Row]) -> list[str]:
    """Those of published, measured and simulated that occur in the rows."""
    published = ["published"] * any(row.published is not None for row in rows)
    return published + list(dict.fromkeys(row.marked for row in rows if row.ours is not None))


def _legend(axes: Any, rows: list[Row]) -> None:
    """The series, and below them what is published, measured, simulated."""
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=GREY, label=name, **STYLES[name]) for name in _sources(rows)]
    marks = axes.get_legend_handles_labels()[0] + marks
    outside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(handles=marks, frameon=False, fontsize=8, **({"loc": "best"} if len(marks) < 8 else outside))
