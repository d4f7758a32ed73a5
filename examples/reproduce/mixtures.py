# SPDX-License-Identifier: Apache-2.0
"""Published training runs of mixtures of experts compared with our cost model, whose constants are as they were.

    python examples/reproduce/mixtures.py

Runs whose source names neither all parallel sizes nor one that decides them are listed with the reason instead.
Hybrids are priced with our kernels for linear-attention and SSM layers, and with some as fast as fla's (`fla_share`).
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.decisions.state_exchange import gather_bytes, heads_bytes  # noqa: E402
from megatron.formulas.kinds.expert_figures import Mixture  # noqa: E402
from megatron.formulas.kinds.state_figures import (
    LinearAttention,  # noqa: E402
    states_of,  # noqa: E402
)
from megatron.formulas.strategy import Group, Shape, Strategy, Workload  # noqa: E402
from megatron.simulator.cost.estimate import Estimate, estimate, model_flops  # noqa: E402
from megatron.simulator.cost.kinds.state_operations import state_mixer  # noqa: E402
from megatron.simulator.cost.layer_program import Program  # noqa: E402
from megatron.simulator.cost.operations import price  # noqa: E402
from megatron.simulator.cost.seconds import transfer_seconds  # noqa: E402
from megatron.simulator.cost.trace import Transfer  # noqa: E402
from megatron.simulator.machines.machine import Machine  # noqa: E402
from megatron.simulator.machines.machine_file import load  # noqa: E402
from megatron.simulator.planner.memory_table import shape_of  # noqa: E402
from megatron.simulator.planner.search_space import fewer_layers  # noqa: E402

FILE = Path(__file__).with_name("published") / "moe.csv"
MODELS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "DeepSeek-V3": "deepseek-v3"}
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
HYBRIDS = {  # sizes of the published config.json
    "Nemotron-3-Nano": Shape(
        52, 2688, 1856, 32, 2, 128, 131072, gated=False, pattern=NANO,
        mixture=Mixture(128, 6, 1856, 3712, tuple(kind == "E" for kind in NANO)),
        linear=LinearAttention(tuple(kind == "M" for kind in NANO), 8, 64, 128, 64, 4, delta=False),
    ),
    "Qwen3.5-35B": Shape(
        40, 2048, 512, 16, 2, 256, 248320, qk_norm=True, output_gate=True,
        mixture=Mixture(256, 8, 512, 512, (1,) * 40, gated=True),
        linear=LinearAttention((1, 1, 1, 0) * 10, 16, 32, 128, 128, 4),
    ),
}  # fmt: skip
# fla's context parallelism (pull request 691): a gated delta rule of 64 heads of 128 on 4 H800, 32K tokens.
# Milliseconds of the forward pass, and of both passes: on one GPU, and by each exchange.
FLA_ONE, FLA = (4.808, 15.560), {"gather": (2.001, 5.730), "all-to-all": (4.114, 10.591)}
MACHINES = {"H100": "H100-80G", "B200": "B200-192G"}
MICRO_BATCHES = 8  # for each pipeline stage: assumed, because no source names its global batch
# By a part of the source: program, its assumed recompute and a remark.
PROGRAMS: dict[str, tuple[Program, str]] = {
    "performance-summary": (Program("fused", "cudnn", fp8=True, overlap=True), "none"),
    "trl": (Program("eager", "flash_attn", gradients=2), "full"),
    "verl": (Program("fused", "cudnn", overlap=True), "full"),
}


@dataclass(frozen=True)
class Run:
    """A row of the file, and our estimate or the reason why there is none."""

    row: dict[str, str]
    reason: str = ""
    result: Estimate | None = None
    published: float = 0.0  # seconds of the step that `result` estimates
    once: float = 0.0  # what `result` would take if a token were sent once to each node, not once for each expert
    by_fla: float = 0.0  # what `result` would take with fla's kernels of states

    def error(self, seconds: float) -> float:
        """The error of a step's seconds, in percent of the published ones."""
        return 100 * (seconds / self.published - 1)

    @property
    def name(self) -> str:
        row = self.row
        return f"{row['model']} {int(row['seq_length'] or 0) / 1024:g}K, {row['gpus']} {row['gpu']}"


def unpriced(row: dict[str, str]) -> str:
    """Why a row has no estimate of a step; empty: it has one."""
    if row["model"].startswith("gated"):
        return "it is a part of a layer: see exchanges()"
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
    pipeline, context, tensor = (int(row[name] or 1) for name in ("pp", "cp", "tp"))
    hybrid = HYBRIDS.get(row["model"])
    shape = hybrid or shape_of(MODELS[row["model"]], int(row["seq_length"]))
    first, last = fewer_layers(shape.layers, pipeline) or (0, 0)
    gpus, options = int(row["gpus"]), _options(row)
    data = gpus // pipeline // context // tensor
    grid = {"ring": context} if hybrid else {"ulysses": context}  # Ulysses would have too few heads for some
    strategy = Strategy(
        tensor, data=data, pipeline=pipeline, virtual=int(row["vp"] or 1), recompute=recompute, **grid,
        expert=int(row["ep"]), first_less=first, last_less=last, **options,
    )  # fmt: skip
    workload = Workload(shape, int(row["seq_length"]), data * MICRO_BATCHES * pipeline)
    machine = load(MACHINES[row["gpu"]])
    result = estimate(workload, strategy, machine, program)
    once = result.seconds - result.parts["ep"] * (1 - _sent_once(strategy.expert / machine.gpus, shape.mixture.topk))
    faster = replace(program, states=fla_share())
    by_fla = estimate(workload, strategy, machine, faster).seconds if hybrid else 0.0
    value = float(row["value"])
    if row["unit"] == "tokens/s/GPU":
        return Run(row, "", result, workload.global_batch * workload.seq_length / value / gpus, once, by_fla)
    flops, _ = model_flops(workload, recompute=False)
    rate = value * 1e12 if row["unit"] == "TFLOPS/GPU" else value / 100 * machine.peak["bf16"]  # or causal MFU
    return Run(row, "", result, flops / (rate * gpus), once, by_fla)


def _sent_once(nodes: float, topk: int) -> float:
    """The other nodes among those of a token's ``topk`` experts, over the experts on other nodes; of random experts."""
    return 1.0 if nodes <= 1 else (nodes - 1) * (1 - (1 - 1 / nodes) ** topk) / (topk * (1 - 1 / nodes))


def _options(row: dict[str, str]) -> dict[str, Any]:
    return {"fused": "trl" not in row["source"]}


# --- fla's gated delta rule over ranks ---


def h800() -> Machine:
    """An H100 whose NVLink has 400 GB/s, both directions (NVIDIA H800 data sheet)."""
    machine = load(MACHINES["H100"])
    return replace(machine, link=replace(machine.link, bandwidth=200e9))


RULE = Workload(Shape(1, 8192, 1, 64, 64, 128, 1, linear=LinearAttention((1,), 64, 64, 128, 128, 4)), 32768)


@lru_cache
def fla_share() -> float:
    """The time of fla's kernels over that of our kernels of states, on one H800, in both passes."""
    both = [part for backward in (False, True) for part in state_mixer(RULE, Strategy(), backward)]
    return FLA_ONE[1] / 1e3 / sum(price(both, h800()).values())


def exchanges() -> list[tuple[str, float, float, float, float]]:
    """(exchange, ms of the forward pass as published, predicted; of both passes as published, predicted).

    Predicted: a quarter of the time on one GPU, and the time of the exchange's messages in each pass.
    """
    contiguous = states_of(RULE, Strategy(ring=4, balance="contiguous"), 2)
    sizes, machine = contiguous.sizes, h800()
    sent = {
        "gather": Transfer("all_gather", "cp", Group(4), gather_bytes(sizes, contiguous.counts)),
        "all-to-all": Transfer("all_to_all", "cp", Group(4), heads_bytes(sizes, 4, sizes.key_heads)),
    }
    rows = []
    for name, (forward, both) in FLA.items():
        took = 1e3 * transfer_seconds(sent[name], machine)
        rows.append((name, forward, FLA_ONE[0] / 4 + took, both, FLA_ONE[1] / 4 + 2 * took))
    return rows


# --- tables ---


def largest(run: Run) -> str:
    """The two largest parts of a step."""
    parts = sorted(run.result.parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {100 * seconds / run.result.seconds:.0f}" for name, seconds in parts)


def table() -> list[str]:
    """The table of docs/inside/published-runs.md."""
    lines = ["| run | published, s | ours, s | error | once a node | largest parts, % |", "|---" * 6 + "|"]
    every = runs()
    for run in (run for run in every if run.result and not run.by_fla):
        errors = f"{run.error(run.result.seconds):+.0f} % | {run.error(run.once):+.0f} %"
        seconds = f"{run.published:.2f} | {run.result.seconds:.2f} | {errors}"
        lines.append(f"| {run.name} | {seconds} | {largest(run)} |")
    lines += ["", "| hybrid | published, s | ours, s | error | with fla's kernels | largest parts of ours, % |"]
    lines.append("|---" * 6 + "|")
    for run in (run for run in every if run.by_fla):
        errors = f"{run.error(run.result.seconds):+.0f} % | {run.error(run.by_fla):+.0f} %"
        seconds = f"{run.published:.2f} | {run.result.seconds:.2f} | {errors}"
        lines.append(f"| {run.name}, CP {run.row['cp'] or 1} | {seconds} | {largest(run)} |")
    lines += ["", "| fla, 4 H800, 32K | forward, ms | ours, ms | error | both passes, ms | ours, ms | error |"]
    lines.append("|---" * 7 + "|")
    for name, forward, predicted, both, all_predicted in exchanges():
        pairs = (forward, predicted), (both, all_predicted)
        cells = (f"{one:.2f} | {other:.2f} | {100 * (other / one - 1):+.0f} %" for one, other in pairs)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons: dict[str, list[str]] = {}
    for run in (run for run in every if run.reason and not run.row["model"].startswith("gated")):
        reasons.setdefault(run.reason, []).append(run.row["model"])
    for reason, models in reasons.items():
        names = ", ".join(f"{name} ({models.count(name)})" for name in dict.fromkeys(models))
        lines += ["", f"Not priced, because {reason}: {names}."]
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
