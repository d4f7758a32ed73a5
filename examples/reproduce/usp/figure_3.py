#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 3 of the USP paper: the work of each rank of a ring under a causal mask, contiguous and zigzag.

    python examples/reproduce/usp/figure_3.py [OUT_DIR]

Work is counted from the tiles that a training run computes (rings of 2 to 16). For a ring of 4, every rank's tiles are
also run here, one rank after another on one thread, and their CPU seconds are measured.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.reproduce.picture import GREY, SERIES  # noqa: E402
from examples.reproduce.report import Row, command, write  # noqa: E402

RINGS, TIMED = (2, 4, 8, 16), 4
BALANCES = {"contiguous": SERIES[1], "zigzag": SERIES[0]}
LENGTH, HEADS, HEAD_DIM = 8192, 4, 64
PUBLISHED = {("contiguous", 4): 7.0, ("zigzag", 4): 1.0}  # "almost 7 times"; "perfectly balanced"


def plans_of(ring: int, balance: str) -> list:
    """Every rank's plan."""
    from benchmarks import attention  # imports torch

    return attention.plans_of(ring, balance, LENGTH)


def shares(amounts: list[float]) -> list[float]:
    """Amounts divided by their mean."""
    mean = statistics.mean(amounts)
    return [amount / mean for amount in amounts]


def timed(ring: int, repeats: int = 3) -> dict[str, list[float]]:
    """CPU seconds of each rank's tiles, forward and backward, by balance; ranks and balances alternate."""
    import torch

    from benchmarks.attention import time_balances
    from benchmarks.parallel_attention import Problem
    from megatron.context_parallel.attention import kernels

    problem = Problem(LENGTH, HEADS, HEADS, HEAD_DIM, torch.float32)
    kernel = kernels.select("auto", device="cpu", dtype=problem.dtype, head_dim=HEAD_DIM)
    rounds = time_balances({balance: plans_of(ring, balance) for balance in BALANCES}, problem, kernel, repeats)
    return {balance: [min(result) for result in by_rank] for balance, by_rank in rounds.items()}


def draw(figure: Any, seconds: dict[str, list[float]]) -> None:
    """The work of each rank divided by an even share, for each ring."""
    for axes, ring in zip(figure.subplots(1, len(RINGS), width_ratios=[3 + r for r in RINGS]), RINGS):
        for shift, (balance, colour) in zip((-0.2, 0.2), BALANCES.items()):
            work = shares([plan.pairs for plan in plans_of(ring, balance)])
            places = [rank + shift for rank in range(ring)]
            axes.bar(places, work, width=0.38, color=colour, label=f"{balance}, pairs (simulated)")
            if ring == TIMED:
                axes.plot(places, shares(seconds[balance]), "k_", markersize=9, markeredgewidth=2,
                          label="CPU time (measured)" if balance == "zigzag" else None)  # fmt: skip
        if ring == TIMED:
            handles, names = axes.get_legend_handles_labels()
            figure.legend(handles, names, frameon=False, fontsize=9, loc="outside lower center", ncols=3)
        axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(title=f"ring of {ring}", xlabel="rank", ylim=(0, 2.3), xticks=range(0, ring, 1 if ring < 16 else 3))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("work of a rank over an even share")


def main() -> None:
    args = command(__file__, __doc__).parse_args()
    seconds, rows = timed(TIMED), []
    for ring in RINGS:
        for balance in BALANCES:
            pairs = [plan.pairs for plan in plans_of(ring, balance)]
            work = {"pairs of query and key": (pairs, "simulated")}
            if ring == TIMED:
                work["CPU seconds"] = (seconds[balance], "measured")
            for of, (amounts, marked) in work.items():
                label, printed = {"ring": ring, "balance": balance, "of": of}, PUBLISHED.get((balance, ring))
                rows.append(Row(label, printed, max(amounts) / min(amounts), marked, "busiest / idlest rank"))
                rows.append(Row(label, None, max(shares(amounts)), marked, "busiest rank / even share"))
    title = "USP, figure 3: balance of a causal ring"
    write(args.out_dir, "figure_3", title, rows, draw=lambda figure: draw(figure, seconds))


if __name__ == "__main__":
    main()
