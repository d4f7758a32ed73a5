# SPDX-License-Identifier: Apache-2.0
"""The memory timeline of --profile-memory: reads its JSON file and draws it (also for tools/plot_memory.py)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron.system.whole_file import save_figure
from megatron.training.json_file import parse_json, read_bytes

Profile = dict[str, Any]

MOST_BYTES = 1 << 29  # limit of a file; the file of a large step has several hundred million bytes

DEVICE_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
KINDS = (*DEVICE_KINDS, "host")
COLOURS = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#009e73", "activations": "#e69f00",
    "temporary": "#cc6677", "host": "#8a8a8a",
}  # fmt: skip
LABELS = {"temporary": "temporary, and others", "optimizer": "optimizer states", "host": "host memory"}
PHASES = {"forward": "#dde6ee", "backward": "#f3e3d3", "optimizer": "#dcebdf"}
INK, GREY = "#222222", "#8a8a8a"
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
COLUMNS = 600  # each shows the largest value in its time, because peaks of a few microseconds would be invisible


def read(path: Path) -> Profile:
    """A file of --profile-memory.

    Raises:
        OSError: it cannot be read. ValueError: it is not a memory profile.
    """
    try:
        profile = parse_json(read_bytes(path, MOST_BYTES))
        series(profile)
        seconds, phases = profile["seconds"], profile["phases"]
        times = [begin for _, begin in phases] + [seconds]
        integers = all(type(profile[name]) is int for name in ("iteration", "rank"))
        valid = integers and {name for name, _ in phases} <= set(PHASES) and all(type(x) in (int, float) for x in times)
        if not valid or not 0 <= times[0] <= seconds < math.inf or times != sorted(times):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
        raise ValueError(f"{path} is not a memory profile: give a file that --profile-memory wrote") from None
    return profile


def series(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Times [T] in seconds, from the start of the step, and the bytes [T, kind] from each time to the next."""
    events = np.array(profile["events"], dtype=float).reshape(-1, 3)
    if not np.isfinite(events).all() or (np.abs(events) > MOST_BYTES**2).any():
        raise ValueError("an event has an invalid number")
    changes = np.zeros((len(events) + 1, len(KINDS)), dtype=np.int64)
    changes[0] = [profile["start"][kind] for kind in KINDS]
    columns = np.array([KINDS.index(kind) for kind in profile["kinds"]])
    changes[np.arange(1, len(events) + 1), columns[events[:, 1].astype(int)]] = events[:, 2]
    return np.concatenate(([0.0], events[:, 0])), changes.cumsum(axis=0)


def peak_of(profile: Profile) -> tuple[int, dict[str, int]]:
    """The peak bytes on the device, and the bytes of each kind at that time."""
    _, sizes = series(profile)
    device = sizes[:, : len(DEVICE_KINDS)]
    fullest = device[device.sum(axis=1).argmax()]
    return int(fullest.sum()), {kind: int(size) for kind, size in zip(DEVICE_KINDS, fullest)}


def readable(size: float) -> str:
    """Bytes with a unit."""
    unit = unit_of(size)
    return f"{size / UNITS[unit]:.{0 if unit == 'B' else 1}f} {unit}"


def unit_of(size: float) -> str:
    return next((unit for unit in ("GiB", "MiB", "KiB") if size >= UNITS[unit]), "B")


def pyplot_for_files() -> Any:
    """matplotlib.pyplot, which draws to files only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(profiles: list[Profile], titles: list[str], output: str | Path, by: str = "time") -> None:
    """Draw stacked areas over the step: one panel per profile, all to the same scale, with host memory below.

    Args:
        by: the x axis, "time" or "events".
    """
    pyplot = pyplot_for_files()
    data = [series(profile) for profile in profiles]
    device = max(sizes[:, :-1].sum(axis=1).max() for _, sizes in data)
    host = max(sizes[:, -1].max() for _, sizes in data)
    rows = 2 if host else 1
    size = (max(8.0, 5.6 * len(profiles)), 4.8 + 1.3 * (rows - 1))
    figure = pyplot.figure(figsize=size, dpi=110, layout="constrained")
    ratios = [3.2, 1][:rows]
    panels = figure.subplots(rows, len(profiles), squeeze=False, sharex="col", sharey="row", height_ratios=ratios)
    for column, (profile, title, (seconds, sizes)) in enumerate(zip(profiles, titles, data)):
        x, ends = _positions(profile, seconds, by)
        top = panels[0][column]
        _areas(top, x, ends[-1], sizes[:, :-1], DEVICE_KINDS, device)
        _phases(top, profile, ends, device, len(profiles))
        most, _ = peak_of(profile)
        top.set_title(f"{title}: at most {readable(most)}", fontsize=12, color=INK, pad=8)
        if host:
            _areas(panels[1][column], x, ends[-1], sizes[:, -1:], ("host",), host)
            panels[1][column].set_ylim(0, 1.15 * host / UNITS[unit_of(host)])
        panels[-1][column].set_xlabel("time in the step (ms)" if by == "time" else "changes in the step", color=INK)
    for row, (name, most) in enumerate((("device memory", device), ("host", host))[:rows]):
        panels[row][0].set_ylabel(f"{name} ({unit_of(most)})", color=INK)
    _legend(figure, data)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, output)
    pyplot.close(figure)


def _positions(profile: Profile, seconds: np.ndarray, by: str) -> tuple[np.ndarray, list[float]]:
    """(x of each event, [x of the beginning of each phase, x of the end of the step])."""
    begins = [begin for _, begin in profile["phases"]]
    if by == "time":
        return 1000 * seconds, [1000 * begin for begin in (*begins, profile["seconds"])]
    return np.arange(len(seconds)), [*np.searchsorted(seconds, begins).tolist(), len(seconds)]


def _areas(axes: Any, x: np.ndarray, end: float, sizes: np.ndarray, kinds: tuple[str, ...], most: float) -> None:
    edges, total = np.linspace(0, end, COLUMNS + 1), sizes.sum(axis=1)
    firsts = np.searchsorted(x, edges, side="right") - 1  # the last event before each column
    fullest = [low + int(total[low : high + 1].argmax()) for low, high in zip(firsts, firsts[1:])]
    x, sizes = edges, sizes[[*fullest, fullest[-1]]]
    axes.stackplot(
        x, *(sizes / UNITS[unit_of(most)]).T, step="post", colors=[COLOURS[kind] for kind in kinds], linewidth=0
    )
    axes.set_xlim(0, end)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9, length=3, labelleft=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _phases(axes: Any, profile: Profile, ends: list[float], most: float, panels: int) -> None:
    """Draw a strip with the phases above the areas, and light lines where phases begin, if there are few."""
    scale = most / UNITS[unit_of(most)]
    low, height, width = 1.06 * scale, 0.075 * scale, ends[-1]
    axes.set_ylim(0, low + height)
    for (name, _), begin, end in zip(profile["phases"], ends, ends[1:]):
        axes.broken_barh([(begin, end - begin)], (low, height), facecolor=PHASES[name], edgecolor="white")
        middle, text = low + height / 2, {"va": "center", "fontsize": 9, "color": INK}
        if end - begin > (0.1 if panels == 1 else 0.15) * width:
            axes.text((begin + end) / 2, middle, name, ha="center", **text)
        elif end == width:  # the optimizer's strip is short, so its name is next to it
            axes.text(1.01 * width, middle, name, ha="left", **text)
        if len(ends) < 30 and begin > 0.005 * width:
            axes.plot([begin, begin], [0, low], color=INK, alpha=0.35, linewidth=0.7, linestyle=(0, (4, 3)))


def _legend(figure: Any, data: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """The kinds that occur, in the order in which they are stacked."""
    from matplotlib.patches import Patch

    present = [kind for index, kind in enumerate(KINDS) if any(sizes[:, index].any() for _, sizes in data)]
    handles = [Patch(color=COLOURS[kind], label=LABELS.get(kind, kind)) for kind in present]
    columns = min(len(handles), 4 * len(data))  # five do not fit under one panel
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
