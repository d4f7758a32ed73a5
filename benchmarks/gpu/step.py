# SPDX-License-Identifier: Apache-2.0
"""A training step with Llama-3-8B's shape and as many layers as fit on the device: MFU, and time by kind of kernel."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.program import START, Failed, Plan, Program, flags
from benchmarks.gpu.rates import best_gemm
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage, reason
from megatron.formulas.device_memory import device_memory
from megatron.formulas.strategy import Workload
from megatron.simulator.cost.estimate import model_flops

FULL = 0.88  # share of device memory that a plan may need by the formula; the context and fragments need the rest
GUESS = 3e14  # assumed FLOP/s, for time limits
MODE = {"none": "none", "full": "recompute"}


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    cases = []
    for length, recompute in sizes.steps:
        plan = fitting(sizes, Plan(sizes.model.layers, length, MODE[recompute]), device)
        work = partial(measured, plan, sizes, device.type, stage, sizes.repeats, True)
        name = f"{length} tokens, {'no recompute' if recompute == 'none' else 'full recompute'}"
        cases.append(Case(name, work, expected(plan, sizes, 2 + sizes.repeats)))
    stage.run(cases)


def workload(plan: Plan, sizes: Sizes) -> Workload:
    return Workload(replace(sizes.model, layers=plan.layers), plan.length)


def fitting(sizes: Sizes, plan: Plan, device: torch.device) -> Plan:
    """The plan with as many layers as should fit, at least one."""
    if device.type != "cuda":
        return plan
    available = FULL * torch.cuda.get_device_properties(device).total_memory
    for layers in range(plan.layers, 1, -1):
        result = replace(plan, layers=layers)
        if device_memory(workload(result, sizes), result.strategy()).total <= available:
            return result
    return replace(plan, layers=1)


def step_flops(plan: Plan, sizes: Sizes) -> float:
    """FLOPs of the model in a step: causal, without recompute."""
    return model_flops(workload(plan, sizes), recompute=False)[0]


def expected(plan: Plan, sizes: Sizes, steps: int) -> float:
    return 30 + steps * step_flops(plan, sizes) / GUESS


def measured(plan: Plan, sizes: Sizes, device: str, stage: Stage, repeats: int, profiled: bool) -> Figures:
    """Figures of a plan's steps; with fewer layers if memory is insufficient."""
    while True:
        try:
            return steps_of(plan, sizes, device, stage, repeats, profiled)
        except Failed as error:
            if "out of memory" not in str(error) or plan.layers < 3:
                raise
            stage.say(f"   {plan.layers} layers: out of memory")
            plan = replace(plan, layers=plan.layers - 2)


def steps_of(plan: Plan, sizes: Sizes, device: str, stage: Stage, repeats: int, profiled: bool) -> Figures:
    limit, steps = min(START + expected(plan, sizes, 4), stage.left()), []
    with Program(flags(plan, sizes, device), log_of(stage)) as program:
        program.ask("step", limit)
        steps = [program.ask("step", limit) for _ in range(repeats)]
        memory = program.ask("meter", limit)
        where: Figures | None = None
        if profiled:
            try:
                where = program.ask("profile", limit)
            except Failed as error:  # keep the other figures
                where = {"failed": reason(error)}
    seconds = statistics.median(step["seconds"] for step in steps)
    flops = step_flops(plan, sizes)
    peak = steps[0]["peak_flops"]
    rate = best_gemm(stage.folder)
    result = plan.figures() | {
        "of_gemm_rate": flops / seconds / rate if rate else None,
        "seconds": seconds,
        "steps": [step["seconds"] for step in steps],
        "tokens_per_second": plan.length / seconds,
        "flops_per_second": flops / seconds,
        "mfu": flops / seconds / peak if peak else None,
        **memory,
    }
    return result | ({"profile": where} if where else {})


def log_of(stage: Stage) -> Path:
    return stage.folder / f"{stage.name}.log"
