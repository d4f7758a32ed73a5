#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the loss by position of several checkpoints in one picture, and print it as a table.

    python examples/extend/picture.py "before=out/a" "after=out/b" --trained 512 --output out/extension.png

Each folder is an output of tools/evaluate.py with --eval-tasks loss-by-position.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

Bucket = dict[str, float]


def read(folder: str) -> list[Bucket]:
    """The buckets of a folder's evaluation.json."""
    return json.loads((Path(folder) / "evaluation.json").read_text())["tasks"]["loss-by-position"]["buckets"]


def table(curves: dict[str, list[Bucket]]) -> str:
    width = max(map(len, curves))
    lines = [" " * width + "".join(f"{int(b['to']) + 1:>9,}" for b in next(iter(curves.values())))]
    lines += [f"{name:{width}}" + "".join(f"{b['loss']:9.3f}" for b in buckets) for name, buckets in curves.items()]
    return "\n".join(lines)


def draw(curves: dict[str, list[Bucket]], trained: int, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120, layout="constrained")
    for name, buckets in curves.items():
        ends = [bucket["to"] + 1 for bucket in buckets]
        axes.plot(ends, [bucket["loss"] for bucket in buckets], marker="o", label=name)
    axes.axvline(trained, color="grey", linestyle=":", label=f"{trained:,} tokens, the length of the first training")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ends, [f"{int(end):,}" for end in ends])
    axes.minorticks_off()
    axes.set(xlabel="positions up to", ylabel="loss, nats per token", title="Loss by position, on long held-out files")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(output)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--trained", type=int, required=True, metavar="N", help="length of the first training")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    curves = {name: read(folder) for name, _, folder in (curve.rpartition("=") for curve in args.curves)}
    print(table(curves))
    draw(curves, args.trained, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
