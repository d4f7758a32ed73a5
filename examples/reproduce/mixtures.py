# SPDX-License-Identifier: Apache-2.0
"""Published training runs of mixtures of experts compared with our cost model, whose constants are as they were.

    python examples/reproduce/mixtures.py

Runs whose source names neither all parallel sizes nor one that decides them, and models with state-space or linear
attention layers, are listed with the reason instead.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.formulas.strategy import Strategy, Workload  # noqa: E402
from megatron.simulator.cost.estimate import Estimate, estimate, model_flops  # noqa: E402
from megatron.simulator.cost.layer_program import Program  # noqa: E402
from megatron.simulator.machines.machine_file import load  # noqa: E402
from megatron.simulator.planner.memory_table import shape_of  # noqa: E402
from megatron.simulator.planner.search_space import fewer_layers  # noqa: E402

FILE = Path(__file__).with_name("published") / "moe.csv"
MODELS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "DeepSeek-V3": "deepseek-v3"}
MACHINES = {"H100": "H100-80G", "B200": "B200-192G"}
MICRO_BATCHES = 8  # for each pipeline stage: assumed, because no source names its global batch
# By a part of the source: program, its assumed recompute and a remark.
PROGRAMS: dict[str, tuple[Program, str]] = {
    "performance-summary": (Program("fused", "cudnn", fp8=True, overlap=True), "none"),
    "trl": (Program("eager", "flash_attn", gradients=2), "full"),
}


@dataclass(frozen=True)
class Run:
    """A row of the file, and our estimate or the reason why there is none."""

    row: dict[str, str]
    reason: str = ""
    result: Estimate | None = None
    published: float = 0.0  # seconds of the step that `result` estimates
    once: float = 0.0  # what `result` would take if a token were sent once to each node, not once for each expert

    def error(self, seconds: float) -> float:
        """The error of a step's seconds, in percent of the published ones."""
        return 100 * (seconds / self.published - 1)

    @property
    def name(self) -> str:
        row = self.row
        return f"{row['model']} {int(row['seq_length'] or 0) / 1024:g}K, {row['gpus']} {row['gpu']}"


def unpriced(row: dict[str, str]) -> str:
    """Why a row has no estimate; empty: it has one."""
    if "hybrid" in row["note"] or row["model"].startswith(("Qwen3.5", "gated")):
        return "layers have a state instead of softmax attention"
    if not row["ep"]:
        return "the source names no parallel sizes of the experts"
    return ""


def runs() -> list[Run]:
    """All rows of the file, in its order."""
    with FILE.open(encoding="utf-8") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    if reason := unpriced(row):
        return Run(row, reason)
    program, recompute = next(how for part, how in PROGRAMS.items() if part in row["source"])
    pipeline, context = int(row["pp"] or 1), int(row["cp"] or 1)
    shape = shape_of(MODELS[row["model"]], int(row["seq_length"]))
    first, last = fewer_layers(shape.layers, pipeline) or (0, 0)
    gpus, options = int(row["gpus"]), _options(row)
    data = gpus // pipeline // context
    strategy = Strategy(
        ulysses=context, data=data, pipeline=pipeline, virtual=int(row["vp"] or 1), recompute=recompute,
        expert=int(row["ep"]), first_less=first, last_less=last, **options,
    )  # fmt: skip
    workload = Workload(shape, int(row["seq_length"]), data * MICRO_BATCHES * pipeline)
    machine = load(MACHINES[row["gpu"]])
    result = estimate(workload, strategy, machine, program)
    once = result.seconds - result.parts["ep"] * (1 - _sent_once(strategy.expert / machine.gpus, shape.mixture.topk))
    value = float(row["value"])
    if row["unit"] == "tokens/s/GPU":
        return Run(row, "", result, workload.global_batch * workload.seq_length / value / gpus, once)
    flops, _ = model_flops(workload, recompute=False)  # causal MFU, in percent
    return Run(row, "", result, flops / (value / 100 * gpus * machine.peak["bf16"]), once)


def _sent_once(nodes: float, topk: int) -> float:
    """The other nodes among those of a token's ``topk`` experts, over the experts on other nodes; of random experts."""
    return 1.0 if nodes <= 1 else (nodes - 1) * (1 - (1 - 1 / nodes) ** topk) / (topk * (1 - 1 / nodes))


def _options(row: dict[str, str]) -> dict[str, Any]:
    return {"fused": "trl" not in row["source"]}


def largest(run: Run) -> str:
    """The two largest parts of a step."""
    parts = sorted(run.result.parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {100 * seconds / run.result.seconds:.0f}" for name, seconds in parts)


def table() -> list[str]:
    """The table of docs/inside/published-runs.md."""
    lines = ["| run | published, s | ours, s | error | once a node | largest parts, % |", "|---" * 6 + "|"]
    every = runs()
    for run in (run for run in every if run.result):
        errors = f"{run.error(run.result.seconds):+.0f} % | {run.error(run.once):+.0f} %"
        seconds = f"{run.published:.2f} | {run.result.seconds:.2f} | {errors}"
        lines.append(f"| {run.name} | {seconds} | {largest(run)} |")
    reasons: dict[str, list[str]] = {}
    for run in (run for run in every if run.reason):
        reasons.setdefault(run.reason, []).append(run.row["model"])
    for reason, models in reasons.items():
        names = ", ".join(f"{name} ({models.count(name)})" for name in dict.fromkeys(models))
        lines += ["", f"Not priced, because {reason}: {names}."]
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
