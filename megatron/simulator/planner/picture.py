# SPDX-License-Identifier: Apache-2.0
"""Plans, time against memory: the Pareto front, the line where memory ends, the winner."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from megatron.simulator.planner.plans import Plan, Problem, priced
from megatron.simulator.planner.search import Found, everything
from megatron.simulator.planner.words import GIB, count, grid_words, saving_words
from megatron.training.refusal import Refusal

MOST = 12000  # strategies that are priced for a picture; of more, those that the search has met
SLOWEST = 1.6  # times the winner's, that are drawn
INK, BLUE, RED, GREEN = "#222222", "#0072b2", "#cc6677", "#009e73"


def front(plans: list[Plan]) -> list[Plan]:
    """Those that no other beats in both time and memory, by rising memory."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.memory.total, plan.seconds)):
        if not kept or plan.seconds < kept[-1].seconds:
            kept.append(plan)
    return kept


def draw(found: Found, problem: Problem, output: str, model: str) -> None:
    """Writes the picture.

    Raises:
        Refusal: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    winner, room = found.plans[0], problem.machine.usable_memory / GIB
    figure, axes = pyplot.subplots(figsize=(9.5, 5.6), dpi=120, layout="constrained")
    every = [*found.fitting, *found.failing]
    if len(ways := list(islice(everything(problem), MOST))) < MOST:
        every = [priced(problem, way) for way in ways]
    shown = [plan for plan in every if plan.seconds < SLOWEST * winner.seconds and plan.memory.total < 2 * room * GIB]
    fitting = [plan for plan in shown if plan.fits]
    device, host = ([plan for plan in shown if not plan.fits and (plan.margin < 0) == full] for full in (True, False))
    for plans, colour, name in (
        (fitting, BLUE, "fits"),
        (device, RED, "does not fit on the device"),
        (host, GREEN, "does not fit in the node's host memory"),
    ):
        if plans:
            label = f"{name}: {len(plans)}"
            axes.scatter(*points(plans), s=16, color=colour, alpha=0.55, linewidths=0, label=label, zorder=2)
    axes.plot(*points(front(fitting)), color=BLUE, linewidth=1.2, label="none is faster with less memory", zorder=3)
    axes.axvline(room, color=INK, linewidth=1, linestyle="--")
    axes.text(room, 0.99, f" {room:.1f} GiB", transform=axes.get_xaxis_transform(), va="top", fontsize=9, color=INK)
    x, y = winner.memory.total / GIB, winner.seconds
    axes.scatter([x], [y], s=90, marker="*", color="#e69f00", edgecolor=INK, linewidth=0.6, zorder=4)
    saved = saving_words(winner.strategy)
    text = f"{grid_words(winner.strategy)}, ZeRO {winner.strategy.zero}" + (f"\n{saved}" if saved else "")
    axes.annotate(
        text, (x, y), (0, -10), textcoords="offset points", ha="center", va="top", fontsize=9, color=INK, zorder=5
    )
    slowest, fastest = (extreme(plan.seconds for plan in shown) for extreme in (max, min))
    span = slowest - fastest or slowest
    axes.set_ylim(fastest - 0.16 * span, slowest + 0.25 * span)
    axes.set_xlim(left=0)
    axes.set_xlabel("memory of the fullest rank (GiB)", color=INK)
    axes.set_ylabel("predicted time of a step (s)", color=INK)
    length, batch = count(problem.workload.seq_length), problem.workload.global_batch
    title = f"{model}, {length} tokens, global batch {batch}, on {problem.gpus} x {problem.machine.name}"
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9, loc="upper left")
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise Refusal(f"--output {output}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def points(plans: list[Plan]) -> tuple[list[float], list[float]]:
    return [plan.memory.total / GIB for plan in plans], [plan.seconds for plan in plans]
