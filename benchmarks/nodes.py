#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares measured training steps over links of limited rate with the dry run's prediction for the same links.

    python benchmarks/nodes.py --json out/nodes.json --picture out/nodes.png

The nodes are network namespaces of this machine (tests/faults/network.py), so this needs root and an idle machine. For
each rate, tools/measure_hardware.py measures the links under torchrun and writes a machine file. Then the real program
runs on each grid, and a dry run predicts the time of the same command with that file. No constant is fitted. Losses are
compared with those of one process. It takes about ten minutes.

    python benchmarks/nodes.py --from out/nodes.json --picture out/nodes.png    draws again without measuring
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.machine import environment  # noqa: E402
from tests.faults.network import Network, why_not  # noqa: E402

PROGRAM = str(ROOT / "pretrain_llama.py")
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --num-workers 0 --device cpu --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --log-interval 1 --eval-iters 0"
)
NOT_COUNTED = 2  # steps in which the program meters its memory
GOAL = 0.25


class Grid(NamedTuple):
    """Processes on nodes, and the flags that place them."""

    name: str
    nodes: int
    per_node: int
    flags: str


GRIDS = (
    Grid("Ring 2", 2, 1, "--ring-parallel-size 2 --global-batch-size 1"),
    Grid("Ulysses 2", 2, 1, "--ulysses-parallel-size 2 --global-batch-size 1"),
    Grid("DP 2", 2, 1, "--global-batch-size 2"),
    Grid("DP 2, ZeRO 1", 2, 1, "--zero-stage 1 --global-batch-size 2"),
    Grid("Ulysses 2 inside, Ring 2", 2, 2, "--ulysses-parallel-size 2 --ring-parallel-size 2 --global-batch-size 1"),
    Grid("Ring 4", 2, 2, "--ring-parallel-size 4 --global-batch-size 1"),
    Grid("Ulysses 4", 2, 2, "--ulysses-parallel-size 4 --global-batch-size 1"),
    Grid("Ulysses 2 inside, DP 2", 2, 2, "--ulysses-parallel-size 2 --global-batch-size 2"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[50, 20], help="rates of the links (50 and 20)")
    parser.add_argument(
        "--steps", type=int, default=5, help=f"steps of each grid; the first {NOT_COUNTED} do not count (5)"
    )
    parser.add_argument("--only", metavar="WORD", default="", help="grids with this word in their name")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--picture", metavar="FILE", help="draw the figures here")
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="use the figures of an earlier run instead of measuring"
    )
    args = parser.parse_args()
    if args.steps <= NOT_COUNTED:
        parser.error(f"--steps {args.steps}: give more than {NOT_COUNTED}")
    if args.source:
        report = json.loads(Path(args.source).read_text())
    elif reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    else:
        report = measured(args)
    print("\n".join(table(report["rows"])))
    print(f"load of the machine: {report['load_before']:.1f} before, {report['load_after']:.1f} after")
    if args.json and not args.source:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    if args.picture:
        draw(report["rows"], Path(args.picture))
    return 0


def measured(args: argparse.Namespace) -> dict[str, Any]:
    grids = [grid for grid in GRIDS if args.only in grid.name]
    report: dict[str, Any] = {"load_before": os.getloadavg()[0], "model": MODEL, "rows": [], "machines": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = {flags: alone(flags, args.steps, folder) for flags in {batch_flags(grid) for grid in grids}}
        for mbit in args.mbit:
            for nodes, per_node in dict.fromkeys((grid.nodes, grid.per_node) for grid in grids):
                where = f"{nodes}x{per_node}_{mbit:g}"
                with Network(nodes, mbit) as network:
                    file = measure_links(network, per_node, folder / where)
                    report["machines"][where] = json.loads(file.read_text())
                    for grid in grids:
                        if (grid.nodes, grid.per_node) == (nodes, per_node):
                            row = {"grid": grid.name, "nodes": nodes, "per_node": per_node, "mbit": mbit}
                            row |= step(network, grid, args.steps, folder / f"{where}_{len(report['rows'])}")
                            row["predicted_ms"] = predicted(grid, file)
                            row["loss_error"] = max(
                                abs(a / b - 1) for a, b in zip(row["losses"], losses[batch_flags(grid)], strict=True)
                            )
                            report["rows"].append(row)
                            print(table([row])[-1], file=sys.stderr, flush=True)
    report["load_after"] = os.getloadavg()[0]
    return report


def batch_flags(grid: Grid) -> str:
    """The flags of a grid's batch, with which the run on one process starts, too."""
    return grid.flags[grid.flags.index("--global-batch-size") :]


def flags_of(flags: str, steps: int, log: Path) -> list[str]:
    return f"{MODEL} {flags} --train-iters {steps} --log-jsonl {log}".split()


def rows_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def alone(flags: str, steps: int, folder: Path) -> list[float]:
    """Losses of one process."""
    log = folder / f"alone{flags.replace(' ', '')}.jsonl"
    command = [sys.executable, PROGRAM, *flags_of(flags, steps, log)]
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return [row["lm_loss"] for row in rows_of(log)]


def finish(launchers: list[subprocess.Popen], folder: Path) -> None:
    codes = [launcher.wait() for launcher in launchers]
    if any(codes):
        output = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
        raise SystemExit(f"{output}\nerror: the launchers ended with {codes}")


def measure_links(network: Network, per_node: int, folder: Path) -> Path:
    """Measure the links and return the path of the machine file."""
    file = folder / "machine.json"
    program = [str(ROOT / "tools" / "measure_hardware.py"), "--device", "cpu", "--quick", "--output", str(file)]
    finish(network.torchrun(per_node, program, folder), folder)
    return file


def step(network: Network, grid: Grid, steps: int, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step, the median of those that count, and all losses."""
    log, begin = folder / "log.jsonl", time.perf_counter()
    finish(network.torchrun(grid.per_node, [PROGRAM, *flags_of(grid.flags, steps, log)], folder), folder)
    rows = rows_of(log)
    took = [row["iteration_ms"] for row in rows[NOT_COUNTED:]]
    return {
        "measured_ms": statistics.median(took),
        "all_ms": took,
        "losses": [row["lm_loss"] for row in rows],
        "seconds": time.perf_counter() - begin,
    }


def predicted(grid: Grid, file: Path) -> float:
    """Milliseconds of a step by the dry run."""
    result = file.parent / "dry_run.json"
    command = [sys.executable, PROGRAM, *f"{MODEL} {grid.flags} --train-iters 1".split(), "--dry-run"]
    command += ["--world-size", f"{grid.nodes * grid.per_node}", "--gpu", str(file), "--dry-run-json", str(result)]
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())["predicted_ms"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| grid | nodes x processes | Mbit/s | measured, ms | dry run, ms | | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        off = row["predicted_ms"] / row["measured_ms"] - 1
        lines.append(
            f"| {row['grid']} | {row['nodes']} x {row['per_node']} | {row['mbit']:g} | {row['measured_ms']:,.0f} | "
            f"{row['predicted_ms']:,.0f} | {100 * off:+.0f} % | {row['loss_error']:.1e} |"
        )
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw measured and predicted steps, one panel for each rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = list(dict.fromkeys(row["mbit"] for row in rows))
    figure, panels = plt.subplots(1, len(rates), figsize=(5.2 * len(rates), 4.4), squeeze=False, layout="constrained")
    for panel, rate in zip(panels[0], rates):
        mine = [row for row in rows if row["mbit"] == rate][::-1]
        places = range(len(mine))
        measured = [row["measured_ms"] / 1000 for row in mine]
        dry_run = [row["predicted_ms"] / 1000 for row in mine]
        above, below = [p + 0.19 for p in places], [p - 0.19 for p in places]
        panel.barh(above, measured, 0.36, color="#0072b2", label="measured")
        panel.barh(below, dry_run, 0.36, color="#e69f00", label="dry run with measured links")
        goal = {"xerr": [GOAL * value for value in measured], "label": f"{GOAL:.0%} around the measured time"}
        panel.errorbar(measured, above, fmt="none", ecolor="#222222", elinewidth=0.8, capsize=2, **goal)
        panel.set_yticks(list(places), [row["grid"] if panel is panels[0][0] else "" for row in mine])
        panel.set_title(f"{rate:g} Mbit/s per node", loc="left", fontsize=10)
        panel.set_xlabel("seconds per step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
