# SPDX-License-Identifier: Apache-2.0
"""Results as tables in a terminal, as JSON and as pictures; and as lines of a training run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training.evaluation.pictures import draw
from megatron.training.evaluation.tasks import Result
from megatron.training.refusal import Refusal, reason

FILE = "evaluation.json"


def write(folder: str, about: dict[str, Any], found: dict[str, Result]) -> list[str]:
    """Write evaluation.json and the pictures; their paths.

    Raises:
        Refusal: the folder cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**about, "tasks": found}, indent=1) + "\n")
        os.replace(partial, path)
        return [str(path), *draw(found, Path(folder))]
    except OSError as error:
        raise Refusal(f"--eval-output {folder} cannot be written: {reason(error)}") from None


def lines(found: dict[str, Result]) -> Iterator[str]:
    """A line a task."""
    for task, result in found.items():
        if task == "loss-by-position":
            parts = [f"{bucket['from']}-{bucket['to']}: {bucket['loss']:.4f}" for bucket in result["buckets"]]
        elif task == "perplexity":
            parts = [f"{file['file']}: {file['perplexity']:.4f}" for file in result["files"]]
        else:
            parts = [f"answer tokens right {100 * result['hits']:.1f} %, answers {100 * result['exact']:.1f} %"]
            parts.append(f"loss {result['loss']:.4f}")
        yield f"{task}: {' | '.join(parts)}"


def tables(found: dict[str, Result]) -> Iterator[Any]:
    """A table of rich a task, of needles one by length and depth."""
    from rich.table import Table

    for task, result in found.items():
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
            yield _table(Table(title=task), ("file", "perplexity", "loss", "bits a byte", "tokens"), rows)
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
