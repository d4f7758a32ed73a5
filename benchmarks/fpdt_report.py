# SPDX-License-Identifier: Apache-2.0
"""The figures of benchmarks/fpdt.py: files, a table, and a picture like figure 12 of the FPDT paper."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path

SAYS = {
    "plain": "no recompute",
    "recompute": "full recompute",
    "fpdt": "FPDT, chunks in host memory",
    "fpdt-device": "FPDT, chunks on the device",
    "fpdt-inputs": "FPDT, chunks and layer inputs in host memory",
    "fpdt-recompute": "FPDT and full recompute",
    "fpdt-stream": "FPDT, hidden states streamed",
}
REFERENCE = "recompute"
GOALS = {1: 0.97, 8: 0.92}  # FPDT's share of the reference's speed, by number of chunks
GIB = 2**30


def write(report: dict, prefix: Path) -> None:
    """Write all figures so far to PREFIX.json, .csv and .png, so that an interrupted run keeps its results."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".json").write_text(json.dumps(report, indent=2) + "\n")
    columns = [name for name in dict.fromkeys(name for row in report["rows"] for name in row) if name != "steps"]
    with prefix.with_name(prefix.name + ".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(report["rows"])
    if any(row["chunks"] for row in report["rows"]):
        draw(report, prefix.with_name(prefix.name + ".png"))


def merged(report: dict) -> list[dict]:
    """One row for each configuration. The reference, measured with every chunk size, has the median of its rows."""
    reference = [row for row in report["rows"] if row["mode"] == REFERENCE]
    median = dict(reference[0])
    for name in ("seconds", "tokens_per_second", "mfu"):
        values = [row[name] for row in reference if name in row]
        median |= {name: statistics.median(values)} if values else {}
    return [median] + [row for row in report["rows"] if row["mode"] != REFERENCE]


def show(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    problem, console = report["problem"], Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"{describe(problem)}; load at start {report['load_at_start']:.2f}")
    for mode in dict.fromkeys(row["mode"] for row in report["rows"]):
        console.print(f"  {mode}: {SAYS[mode]}")
    table = Table(
        "", "chunk", "step, s", "tokens/s", "MFU", "of recompute", "by CPU time", "activations", "states", "host",
        "to host", "to device",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for row in merged(report):
        cells = [row["mode"], _size(row["chunk_size"])]
        if row["failed"]:
            table.add_row(*cells, row["failed"])
            continue
        cells += [f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.0f}", f"{row['mfu']:.1%}"]
        goal = GOALS.get(row["chunks"]) if row["mode"] == "fpdt" else None
        share, by_cpu_time = row.get("of_reference"), row.get("of_reference_by_cpu_time")
        cells += [f"{share:.1%}" + (f" (goal {goal:.0%})" if goal else "") if share else ""]
        cells += [f"{by_cpu_time:.1%}" if by_cpu_time and problem["device"] == "cpu" else ""]
        cells += [_bytes(row.get(name)) for name in ("activations", "states", "host", "to_host", "to_device")]
        table.add_row(*cells)
    console.print(table)
    if not all(row.get("undisturbed", True) for row in report["rows"]):
        console.print("Other programs ran during the steps of some rows: use the ratios by CPU time there.")


def describe(problem: dict) -> str:
    size = problem["model"] or f"{problem['num_layers']} layers of {problem['hidden_size']}"
    return (
        f"Llama, {size}, {problem['seq_length']:,} tokens, vocabulary {problem['vocab_size']:,}, {problem['dtype']}, "
        + (
            f"CPU, {problem['threads']} thread{'s' * (problem['threads'] > 1)}"
            if problem["device"] == "cpu"
            else "one GPU"
        )
    )


def _size(tokens: int | None) -> str:
    if tokens is None:
        return ""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.2f} GiB"


def draw(report: dict, file: Path) -> None:
    """Two panels over the chunk size: speed, and device memory in activations and model states."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ink, grey, states_colour = "#222222", "#8a8a8a", "#d9d9d4"
    colours = {"plain": "#999933", "recompute": "#222222", "fpdt": "#0072b2", "fpdt-device": "#e69f00",
               "fpdt-stream": "#009e73", "fpdt-inputs": "#cc6677", "fpdt-recompute": "#aa4499"}  # fmt: skip
    problem, rows = report["problem"], merged(report)
    sizes = sorted({row["chunk_size"] for row in rows if row["chunk_size"]}, reverse=True)
    chunked = [mode for mode in SAYS if any(row["mode"] == mode and row["chunks"] for row in rows)]
    whole = [row for row in rows if not row["chunks"] and "seconds" in row]
    at = {size: place for place, size in enumerate(sizes)}
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    reference = next((row for row in whole if row["mode"] == REFERENCE), None)
    for row in whole:
        speed.axhline(row["tokens_per_second"], color=colours[row["mode"]], linestyle="--", linewidth=1.2,
                      label=SAYS[row["mode"]])  # fmt: skip
    for mode in chunked:
        points = [row for row in rows if row["mode"] == mode and "seconds" in row]
        # Relative to the reference of the same rounds, so that the machine's load has less effect.
        levels = [row["of_reference"] * reference["tokens_per_second"] if reference and "of_reference" in row
                  else row["tokens_per_second"] for row in points]  # fmt: skip
        speed.plot([at[row["chunk_size"]] for row in points], levels, "o-", color=colours[mode], label=SAYS[mode])
    speed.set(ylabel="tokens per second", ylim=(0, 1.08 * speed.dataLim.ymax))
    per_token = next((row["mfu"] / row["tokens_per_second"] for row in rows if "mfu" in row), None)
    if per_token:
        second = speed.secondary_yaxis("right", functions=(lambda y: y * per_token, lambda y: y / per_token))
        second.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
        second.set_ylabel("MFU")
        second.spines["right"].set_visible(False)
    speed.set_title("Speed, compared with full recompute" if reference else "Speed", color=ink)
    speed.legend(frameon=False, fontsize=9, loc="lower left")

    bars = 0.8 / max(len(chunked), 1)
    tallest = max((row["states"] + row["activations"] for row in rows if "states" in row), default=0) / GIB
    for number, mode in enumerate(chunked):
        for row in rows:
            if row["mode"] != mode or not row["chunks"]:
                continue
            x = at[row["chunk_size"]] + (number - (len(chunked) - 1) / 2) * bars
            if row["failed"]:
                memory.text(
                    x, 0.02 * tallest, row["failed"], rotation=90, ha="center", va="bottom", fontsize=8, color=grey
                )
            elif "states" in row:
                memory.bar(x, row["states"] / GIB, bars * 0.92, color=states_colour)
                memory.bar(x, row["activations"] / GIB, bars * 0.92, bottom=row["states"] / GIB, color=colours[mode])
    for row in whole:
        if "states" in row:
            memory.axhline((row["states"] + row["activations"]) / GIB, color=colours[row["mode"]], linestyle="--",
                           linewidth=1.2)  # fmt: skip
    memory.bar(0, 0, color=states_colour, label="weights, gradients, optimizer")
    memory.set(ylabel="device memory at the peak, GiB", ylim=(0, 1.18 * tallest or None))
    memory.set_title("Device memory: activations in colour, on top of the model states", color=ink)
    memory.legend(frameon=False, fontsize=9, loc="upper right")
    for axes in (speed, memory):
        axes.set_xticks(range(len(sizes)), [f"{_size(size)}\n{problem['seq_length'] // size}" for size in sizes])
        axes.set_xlim(-0.6, len(sizes) - 0.4)
        axes.set_xlabel("chunk size in tokens, and number of chunks", color=ink)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink, length=0)
        axes.grid(axis="y", color="#ececea")
        axes.set_axisbelow(True)
    figure.suptitle(describe(problem), color=ink, fontsize=13)
    figure.savefig(file, dpi=120)
    plt.close(figure)
