# SPDX-License-Identifier: Apache-2.0
"""Results as tables in a terminal, log lines, JSON, and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.system.whole_file import replace_file, save_figure
from megatron.training.evaluation.tasks import Result
from megatron.training.refusal import refusing
from megatron.training.report.memory_picture import pyplot_for_files


def draw(results: dict[str, Result], folder: Path) -> list[str]:
    """Draw the pictures of the results; returns their paths."""
    pictures = {}
    if "loss-by-position" in results:
        pictures["loss-by-position.png"] = (draw_losses, results["loss-by-position"])
    if "needle" in results:
        pictures["needle.png"] = (draw_needles, results["needle"])
    ruler = {task: result for task, result in results.items() if task.startswith("ruler-")}
    if ruler:
        pictures["ruler.png"] = (draw_ruler, ruler)
    for name, (function, result) in pictures.items():
        figure = function(result)
        figure.tight_layout()
        save_figure(figure, folder / name)
        pyplot_for_files().close(figure)
    return [str(folder / name) for name in pictures]


def draw_losses(result: Result) -> Any:
    """Loss by position: one step per bucket, on a logarithmic axis."""
    figure, axes = pyplot_for_files().subplots(figsize=(8, 4.5), dpi=120)
    buckets = result["buckets"]
    edges = [max(bucket["from"], buckets[0]["to"] // 2 + 1) for bucket in buckets] + [buckets[-1]["to"] + 1]
    axes.stairs([bucket["loss"] for bucket in buckets], edges, baseline=None, linewidth=2)
    axes.axhline(result["loss"], color="grey", linestyle="--", linewidth=0.8, label=f"all tokens: {result['loss']:.3f}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges, [_short(0 if n == 0 else edge) for n, edge in enumerate(edges)])
    axes.minorticks_off()
    axes.set(xlabel="position in the document", ylabel="loss (nats per token)", title="Loss by position")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_needles(result: Result) -> Any:
    """Heat map of depth over length, green where the answer's tokens are right."""
    cells = result["cells"]
    lengths = list(dict.fromkeys(cell["length"] for cell in cells))
    depths = list(dict.fromkeys(cell["depth"] for cell in cells))
    by_place = {(cell["depth"], cell["length"]): cell["hits"] for cell in cells}
    shares = [[by_place[depth, length] for length in lengths] for depth in depths]
    figure, axes = pyplot_for_files().subplots(figsize=(1.5 + 1.1 * len(lengths), 1.6 + 0.38 * len(depths)), dpi=120)
    image = axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), map(_short, lengths))
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axes.set(xlabel="length (tokens)", ylabel="depth", title=f"Needle: {100 * result['hits']:.1f} % right")
    figure.colorbar(image, ax=axes, label="share of answer tokens right")
    return figure


def draw_ruler(results: dict[str, Result]) -> Any:
    """Share of right answer tokens over length, one line per task."""
    figure, axes = pyplot_for_files().subplots(figsize=(8, 4.5), dpi=120)
    for task, result in results.items():
        cells = result["cells"]
        axes.plot([cell["length"] for cell in cells], [cell["hits"] for cell in cells], marker="o", label=task)
    ticks = sorted({cell["length"] for result in results.values() for cell in result["cells"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(_short, ticks))
    axes.minorticks_off()
    axes.set(
        xlabel="length (tokens)", ylabel="share of answer tokens right", title="Tasks like RULER's", ylim=(0, 1.05)
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _short(tokens: int) -> str:
    return f"{tokens >> 10}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


FILE, ROWS = "evaluation.json", "scores.jsonl"


def write(folder: str, about: dict[str, Any], results: dict[str, Result]) -> list[str]:
    """Write evaluation.json and the pictures; returns their paths. Raises Refusal if the folder cannot be written."""
    with refusing(f"--eval-output {folder} cannot be written", OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
        path, rows = Path(folder) / FILE, Path(folder) / ROWS
        means = {
            task: {key: value for key, value in result.items() if key != "rows"} for task, result in results.items()
        }
        replace_file(path, json.dumps({**about, "tasks": means}, indent=1) + "\n")
        if "scores" in results:
            replace_file(rows, "".join(json.dumps(row) + "\n" for row in results["scores"]["rows"]))
        return [str(path), *([str(rows)] if "scores" in results else []), *draw(results, Path(folder))]


def lines(results: dict[str, Result]) -> Iterator[str]:
    """One line per task."""
    for task, result in results.items():
        if task == "loss-by-position":
            parts = [f"{bucket['from']}-{bucket['to']}: {bucket['loss']:.4f}" for bucket in result["buckets"]]
        elif task == "perplexity":
            parts = [f"{file['file']}: {file['perplexity']:.4f}" for file in result["files"]]
        elif task == "scores":
            parts = [f"{key} {value:.4f}" for key, value in result["means"].items()]
        else:
            parts = [f"answer tokens right {100 * result['hits']:.1f} %, answers {100 * result['exact']:.1f} %"]
            parts.append(f"loss {result['loss']:.4f}")
        yield f"{task}: {' | '.join(parts)}"


def tables(results: dict[str, Result]) -> Iterator[Any]:
    """One table of the package rich per task; for needles by length and depth."""
    from rich.table import Table

    for task, result in results.items():
        if task == "loss-by-position":
            rows = [
                (f"{bucket['from']} - {bucket['to']}", f"{bucket['loss']:.4f}", f"{100 * bucket['hits']:.1f} %",
                 f"{bucket['tokens']:,}") for bucket in result["buckets"]
            ]  # fmt: skip
            yield _table(Table(title=task), ("position", "loss", "right", "tokens"), rows)
        elif task == "perplexity":
            rows = [
                (file["file"], f"{file['perplexity']:.4f}", f"{file['loss']:.4f}", f"{file['bits_per_byte']:.4f}",
                 f"{file['tokens']:,}") for file in result["files"]
            ]  # fmt: skip
            yield _table(Table(title=task), ("file", "perplexity", "loss", "bits per byte", "tokens"), rows)
        elif task == "scores":
            rows = [(key, f"{value:.4f}") for key, value in result["means"].items()]
            yield _table(Table(title=f"scores of {len(result['rows'])} answers"), ("mean", "value"), rows)
        elif task == "needle":
            lengths = list(dict.fromkeys(cell["length"] for cell in result["cells"]))
            by_place = {(cell["length"], cell["depth"]): cell for cell in result["cells"]}
            rows = [
                (f"{100 * depth:.0f} %", *(_coloured(by_place[length, depth]["hits"]) for length in lengths))
                for depth in dict.fromkeys(cell["depth"] for cell in result["cells"])
            ]
            title = f"needle: answer tokens right, in all {100 * result['hits']:.1f} %"
            yield _table(Table(title=title), ("depth", *map(str, lengths)), rows)
        else:
            rows = [
                (str(cell["length"]), _coloured(cell["hits"]), f"{100 * cell['exact']:.0f} %", f"{cell['loss']:.4f}",
                 str(cell["samples"])) for cell in result["cells"]
            ]  # fmt: skip
            yield _table(Table(title=task), ("length", "tokens right", "answers right", "loss", "samples"), rows)


def _table(table: Any, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Any:
    for head in heads:
        table.add_column(head, justify="left" if head == "file" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _coloured(share: float) -> str:
    colour = "green" if share >= 0.9 else "yellow" if share >= 0.5 else "red"
    return f"[{colour}]{100 * share:.0f} %[/{colour}]"
