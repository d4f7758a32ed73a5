# SPDX-License-Identifier: Apache-2.0
"""The longest context on one GPU within its host memory: doubled until a step fails or time is too short for the next.

Hidden states are streamed and layers recomputed, which needs least memory. The model has two layers, because each
takes more than a minute at a million tokens; the memory of more layers follows from the formula.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.program import START, Plan, Program, flags
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage
from benchmarks.gpu.step import FULL, expected, log_of, step_flops, workload
from megatron.formulas.device_memory import device_memory
from megatron.formulas.host_bytes import host_memory

MODE, LAYERS = "fpdt streamed, recompute", 2
DOUBLINGS = 8
HOST = 0.9  # share of host memory that a plan may need by the formula


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """Run one step at each length."""
    length, chunk = sizes.longest
    longest, ended = 0, "the search reached its end"
    for _ in range(DOUBLINGS if device.type == "cuda" else 2):
        plan = Plan(LAYERS, length, MODE, chunk)
        name = f"{length} tokens"
        stage.run([Case(name, partial(one_step, plan, sizes, device.type, stage), expected(plan, sizes, 1) + 30)])
        result = stage.report["cases"].get(name, {})
        if "failed" in result:
            ended = f"{length} tokens: {result['failed']}"
            break
        longest, length = length, 2 * length
        if growth(result) > stage.left():
            took, left = growth(result), stage.left()
            ended = f"{length} tokens would take about {took:.0f} s, and the stage has {left:.0f} s left"
            break
    stage.report["longest"] = {"tokens": longest, "layers": LAYERS, "chunk": chunk, "ended": ended}
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        stage.report["longest"]["by_formula"] = by_formula(sizes, FULL * memory, HOST * stage.report["host_memory"])


def growth(result: Figures) -> float:
    """Expected seconds at twice the length, where attention is four times the work."""
    return result["took"] + 3 * result["seconds"]


def one_step(plan: Plan, sizes: Sizes, device: str, stage: Stage) -> Figures:
    limit = min(START + expected(plan, sizes, 4), stage.left())
    with Program(flags(plan, sizes, device), log_of(stage)) as program:
        result = program.ask("meter", limit)
    seconds = result["metered_seconds"]
    figures = {"seconds": seconds, "tokens_per_second": plan.length / seconds}
    return plan.figures() | result | figures | {"flops_per_second": step_flops(plan, sizes) / seconds}


def by_formula(sizes: Sizes, device: float, host: float) -> dict[str, int]:
    """The longest of the doubled lengths that fits by the formula, with two layers and with all layers of the model.

    0: not even the first length fits.
    """
    result = {}
    for layers in (LAYERS, sizes.model.layers):
        length = sizes.longest[0]
        while fits(Plan(layers, length, MODE, sizes.longest[1]), sizes, device, host):
            length *= 2
        result[f"{layers} layers"] = length // 2 if length > sizes.longest[0] else 0
    return result


def fits(plan: Plan, sizes: Sizes, device: float, host: float) -> bool:
    work, strategy = workload(plan, sizes), plan.strategy()
    needed = host_memory(work, strategy.but(stream_hidden=True), 2).total
    return device_memory(work, strategy).total <= device and needed <= host
