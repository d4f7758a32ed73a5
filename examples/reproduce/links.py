# SPDX-License-Identifier: Apache-2.0
"""Time of all_reduce by size on 8 to 64 GPUs, by our model and by published outputs of nccl-tests.

    python examples/reproduce/links.py [OUT_DIR]

Prints the errors, writes OUT_DIR/links.png (default out/reproduce/links). Only the two
shares of NVLS (megatron/simulator/machines/nccl_model.py) are fitted to them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.reproduce.picture import GREY, INK, SERIES  # noqa: E402
from megatron.simulator.cost.collective_cost import price_of  # noqa: E402
from megatron.simulator.cost.nccl_tests import (  # noqa: E402
    Run,
    compare,  # noqa: E402
    read_runs,
)
from megatron.simulator.machines.machine import Machine  # noqa: E402
from megatron.simulator.machines.machine_file import load  # noqa: E402

LOGS = Path(__file__).parent / "published" / "nccl_tests"
PUBLISHED = {"H100": ("H100-80G", ("h100_8", "h100_16", "h100_32", "h100_64")), "A100": ("A100-80G", ("a100_8",))}
SHOWN = (1024, 65536, 2**20, 2**24, 2**28, 2**32)  # bytes of the tensor in the printed rows


def tensor(run: Run, sent: float) -> float:
    """Bytes of the tensor if a rank of a ring sends ``sent``."""
    return sent * run.ranks / (2 * (run.ranks - 1))


def table(runs: list[tuple[Machine, Run]]) -> list[str]:
    """A Markdown table: measured and our microseconds for some sizes, and the mean error over all sizes."""
    lines = ["| GPUs | tensor | measured, us | ours, us | | by |", "|---|---|---|---|---|---|"]
    for machine, run in runs:
        rows = compare(run, machine)
        for sent, took, ours, name in rows:
            size = round(tensor(run, sent))
            if size in SHOWN:
                error = f"{100 * (ours / took - 1):+.0f} %"
                unit = f"{size >> 20} MB" if size >= 2**20 else f"{size >> 10} KB"
                times = f"{1e6 * took:,.0f} | {1e6 * ours:,.0f}"
                lines.append(f"| {run.ranks} {machine.name} | {unit} | {times} | {error} | {name} |")
        mean = sum(abs(ours / took - 1) for _, took, ours, _ in rows) / len(rows)
        lines.append(f"| {run.ranks} {machine.name} | all {len(rows)} | | | mean {100 * mean:.0f} % | |")
    return lines


def draw(file: Path, panels: dict[str, list[tuple[Machine, Run]]]) -> None:
    """Bus bandwidth over size: lines are our model, ring marks are measurements."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(11, 4.2), layout="constrained")
    for axes, (name, runs) in zip(all_axes, panels.items()):
        for colour, (machine, run) in zip(SERIES, runs):
            price = price_of(run.kind, run.ranks, 1, machine)
            sizes = [2.0 ** (power / 4) for power in range(40, 137)]
            sent = [size * 2 * (run.ranks - 1) / run.ranks for size in sizes]
            axes.plot(sizes, [1e-9 * s / price(s) for s in sent], color=colour, label=f"{run.ranks} GPUs")
            measured = [(tensor(run, s), 1e-9 * s / took) for s, took in run.rows if tensor(run, s) >= 1024]
            axes.plot(*zip(*measured), "o", color=colour, markersize=5, markerfacecolor="none")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([2**power for power in (10, 15, 20, 25, 30)], ["1 KB", "32 KB", "1 MB", "32 MB", "1 GB"])
        axes.set_xlabel("tensor", color=INK)
        axes.set_ylabel("bus bandwidth, GB/s", color=INK)
        axes.set_title(f"all_reduce on {name}: lines ours, rings nccl-tests", fontsize=10, color=INK)
        axes.grid(color=GREY, alpha=0.25)
        axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", nargs="?", default="out/reproduce/links", type=Path)
    args = parser.parse_args(argv)
    panels = {
        name: [(load(gpu), run) for log in logs for run in read_runs(LOGS / f"{log}.txt", "all_reduce")]
        for name, (gpu, logs) in PUBLISHED.items()
    }
    print(*table([entry for runs in panels.values() for entry in runs]), sep="\n")
    draw(args.out_dir / "links.png", panels)
    print(f"\nwrote {args.out_dir / 'links.png'}")


if __name__ == "__main__":
    main()
