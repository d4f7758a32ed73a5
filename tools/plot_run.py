#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the loss of one or several runs from their --log-jsonl files, and print a summary.

python tools/plot_run.py out/quickstart/log.jsonl --output out/quickstart/loss.png
python tools/plot_run.py out/mixtral/log.jsonl --experts out/mixtral/experts.png
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.system.whole_file import save_figure
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import printable
from tools.option_parser import OptionParser, in_one_line

Row = dict[str, Any]
MOST_BYTES, LARGEST = 1 << 29, 1e18  # limits of a log's size, and of a number in it
REQUIRED = {"iteration", "tokens", "iteration_ms", "tokens_per_second", "mfu", "device_peak_bytes"}


def read_rows(path: Path) -> list[Row]:
    """The steps of a log, without incomplete lines (of a run that was killed) and steps whose batch was skipped."""
    rows = []
    for line in read_bytes(path, MOST_BYTES).decode("utf-8", "replace").splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not _is_row(row):
            raise ValueError(f"{path} is not a log of --log-jsonl: it has the line {printable(line[:60])}")
        if row.get("lm_loss") is not None:
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no training step")
    return rows


def _is_row(row: Row) -> bool:
    """Whether a step has all required numbers, and its losses are numbers (NaN is permitted, infinity is not)."""
    losses = [name for name in row if name.endswith("_loss") and row[name] is not None]
    numbers = [row.get(name) for name in (*sorted(REQUIRED), *losses)]
    if not all(isinstance(number, (int, float)) and not abs(number) > LARGEST for number in numbers):
        return False
    return all(math.isfinite(row[name]) for name in REQUIRED)


def _is_share(row: Row) -> bool:
    """Whether the time of waiting for data is a part of the step's; logs of versions before 0.3 have none."""
    wait = row.get("data_wait_ms")
    return isinstance(wait, (int, float)) and 0 <= wait <= LARGEST and row["iteration_ms"] > 0


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Means over the last ``window`` values."""
    return [statistics.fmean(values[max(0, index + 1 - window) : index + 1]) for index in range(len(values))]


def draw(logs: dict[str, list[Row]], output: Path, resumed: Sequence[int] = ()) -> None:
    """Loss over training tokens, one line per run, with points for evaluations and vertical lines for resumes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    marks: set[int] = set()
    for index, (name, rows) in enumerate(logs.items()):
        width = 1.6 * (len(logs) - index)  # so that curves that coincide are all visible
        tokens = dict(zip((row["iteration"] for row in rows), accumulate(row["tokens"] for row in rows)))
        losses = [row["lm_loss"] for row in rows]
        (line,) = axes.plot(list(tokens.values()), smooth(losses), label=f"{name}, mean of 5 steps", linewidth=width)
        axes.plot(list(tokens.values()), losses, color=line.get_color(), alpha=0.35, linewidth=0.8)
        evaluated = [row for row in rows if row.get("validation_loss") is not None]
        points = [(tokens[row["iteration"]], row["validation_loss"]) for row in evaluated]
        if points:
            how = {"color": line.get_color(), "edgecolor": "black", "label": f"{name}, validation"}
            axes.scatter(*zip(*points), zorder=3, **how)
        marks |= {tokens[iteration] for iteration in resumed if iteration in tokens}
    for index, mark in enumerate(sorted(marks)):
        label = None if index else "resumed from the checkpoint"
        axes.axvline(mark, color="grey", linestyle="--", linewidth=0.8, label=label)
    axes.set(xlabel="training tokens", ylabel="loss (nats a token)", title="Training loss")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, output)
    pyplot.close(figure)


def loads(rows: list[Row]) -> list[list[list[float]]]:
    """The tokens of each expert over the mean of its layer, by step, layer with experts and expert.

    Raises:
        ValueError: the steps have no counts of tokens, or these are not numbers of layers and experts.
    """
    counts = [row.get("tokens_per_expert") for row in rows]
    if not any(counts):
        raise ValueError("--experts: the log has no tokens_per_expert, which only runs with experts write")
    result = []
    for step in counts:
        layers = step if isinstance(step, list) else []
        if not layers or not all(
            isinstance(layer, list) and layer and len(layer) == len(layers[0]) for layer in layers
        ):
            raise ValueError("--experts: a step of the log has no tokens_per_expert by layer and expert")
        if result and (len(layers), len(layers[0])) != (len(result[0]), len(result[0][0])):
            raise ValueError("--experts: the steps of the log have different numbers of layers or experts")
        if not all(isinstance(number, (int, float)) and 0 <= number <= LARGEST for layer in layers for number in layer):
            raise ValueError("--experts: tokens_per_expert of a step are not numbers from 0 on")
        result.append([[number * len(layer) / max(sum(layer), 1) for number in layer] for layer in layers])
    return result


def draw_experts(rows: list[Row], output: Path, steps: int = 20) -> None:
    """Left: the load of each expert, mean of the last ``steps`` steps. Right: each layer's busiest expert over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = loads(rows)
    last = every[-steps:]
    layers, experts = len(every[0]), len(every[0][0])
    means = [[statistics.fmean(step[at][e] for step in last) for e in range(experts)] for at in range(layers)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), dpi=120, layout="constrained")
    image = left.imshow(means, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    figure.colorbar(image, ax=left, label="tokens over the mean of the layer (red: 2 or more)")
    left.set(xlabel="expert", ylabel="layer with experts", title=f"Load, mean of the last {len(last)} steps")
    left.set_xticks(range(0, experts, max(1, experts // 8)))
    left.set_yticks(range(0, layers, max(1, layers // 8)))
    if layers * experts <= 128:
        for at, layer in enumerate(means):
            for e, number in enumerate(layer):
                colour = "white" if abs(number - 1) > 0.6 else "black"
                left.text(e, at, f"{number:.2f}", ha="center", va="center", fontsize=7, color=colour)
    tokens = list(accumulate(row["tokens"] for row in rows))
    colours = matplotlib.colormaps["viridis"]
    for at in range(layers):
        busiest = smooth([max(step[at]) for step in every])
        shown = at in (0, layers - 1) or layers <= 8
        colour = colours(at / max(layers - 1, 1))
        right.plot(tokens, busiest, color=colour, linewidth=1.2, label=f"layer {at}" if shown else None)
    right.axhline(1, color="grey", linestyle="--", linewidth=0.8)
    right.set(xlabel="training tokens", ylabel="busiest expert over the mean (mean of 5 steps)")
    right.set_title("The busiest expert of each layer")
    right.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k")
    right.grid(alpha=0.3)
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, output)
    pyplot.close(figure)


def first_and_last(training: list[Row]) -> tuple[float, float]:
    """(loss of the first step, mean loss of the last five)."""
    last = [row["lm_loss"] for row in training[-5:]]
    return training[0]["lm_loss"], sum(last) / len(last)


def summary(training: list[Row]) -> list[tuple[str, str]]:
    """A run's results as (name, value)."""
    first, last = first_and_last(training)
    rest = training[2:] or training  # the first two steps are slower, because they are measured
    values = [
        ("iterations", str(training[-1]["iteration"])),
        ("training tokens", f"{sum(row['tokens'] for row in training):,}"),
        ("loss", f"{first:.3f} at first, {last:.3f} at last: {first - last:.3f} lower"),
    ]
    for name in ("validation", "test"):
        losses = [row[f"{name}_loss"] for row in training if row.get(f"{name}_loss") is not None]
        if losses:
            values.append((f"{name} loss", f"{losses[-1]:.3f}"))
    waits = [row["data_wait_ms"] / row["iteration_ms"] for row in rest if _is_share(row)]
    return [
        *values,
        ("time per step (median)", f"{statistics.median(row['iteration_ms'] for row in rest):.0f} ms"),
        *([("waiting for data (median)", f"{100 * statistics.median(waits):.1f} % of it")] if waits else []),
        ("tokens per second (median)", f"{statistics.median(row['tokens_per_second'] for row in rest):,.0f}"),
        ("MFU (median)", f"{100 * statistics.median(row['mfu'] for row in rest):.0f} %"),
        ("peak memory per rank", f"{max(row['device_peak_bytes'] for row in training) / 2**20:.0f} MiB of tensors"),
    ]


@in_one_line(OSError, ValueError)
def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(__doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="--log-jsonl files")
    parser.add_argument("--output", type=Path, help="picture to write (default: loss.png next to the first log)")
    parser.add_argument("--resumed", type=int, nargs="*", default=[], help="iterations to mark as resumed from")
    parser.add_argument("--experts", type=Path, metavar="PNG", help="picture of the first log's load of experts")
    parser.add_argument("--fell-by", type=float, help="fail unless every loss fell by this many nats")
    options = parser.parse_args(argv)
    output = options.output or options.logs[0].with_name("loss.png")
    names = ["loss" if len(options.logs) == 1 else str(path.with_suffix("")) for path in options.logs]
    logs = {name: read_rows(path) for name, path in zip(names, options.logs)}
    output.parent.mkdir(parents=True, exist_ok=True)
    draw(logs, output, options.resumed)
    if options.experts:
        options.experts.parent.mkdir(parents=True, exist_ok=True)
        draw_experts(logs[names[0]], options.experts)

    from rich.console import Console
    from rich.table import Table

    for name, rows in logs.items():
        table = Table(title=name if len(logs) > 1 else None, show_header=False)
        for name_and_value in summary(rows):
            table.add_row(*name_and_value)
        table.add_row("picture", str(output))
        Console(markup=False).print(table)
    least = min(first - last for first, last in map(first_and_last, logs.values()))
    if options.fell_by is not None and least < options.fell_by:
        print(f"error: the loss fell by {least:.3f} nats, less than --fell-by {options.fell_by}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
