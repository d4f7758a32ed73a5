# SPDX-License-Identifier: Apache-2.0
"""FPDT against plain recompute: chunk sweep, copies that are hidden, the longest context on one GPU and its host."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.program import START, Plan, Program
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.stage import Case, Figures, Stage, read
from benchmarks.gpu.step import expected, log_of, measured, step_flops

STREAMED = "fpdt streamed"


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    length, layers = sizes.fpdt_length, sizes.fpdt_layers
    middle = sizes.fpdt_chunks[len(sizes.fpdt_chunks) // 2]
    plans = [Plan(layers, length, "recompute"), Plan(layers, length, "fpdt", middle)]
    plans += [Plan(layers, length, mode, middle) for mode in ("fpdt on the device", STREAMED)]
    plans += [Plan(layers, length, "fpdt", chunk) for chunk in sizes.fpdt_chunks if chunk != middle]
    cases = []
    for plan in plans:
        profiled = plan.mode == "fpdt" and plan.chunk == middle
        work = partial(measured, plan, sizes, device.type, stage, min(sizes.repeats, 2), profiled)
        name = f"{plan.mode}, chunks of {plan.chunk}" if plan.chunk else plan.mode
        cases.append(Case(name, work, expected(plan, sizes, 4 + profiled), "sweep"))
    stage.run(cases)
    stage.report["copies"] = copies(stage, middle)
    search(stage, sizes, device)


def copies(stage: Stage, chunk: int) -> Figures | None:
    """How long the copies of the middle chunk size take by the measured rate, and what of that its steps feel: they are
    slower by so much than with chunks on the device."""
    cases = stage.report["cases"]
    there, here = (cases.get(f"{mode}, chunks of {chunk}", {}) for mode in ("fpdt", "fpdt on the device"))
    host = ((read(stage.folder, "rates") or {}).get("cases", {}).get("host", {})).get("bytes_per_second")
    if not host or "seconds" not in there or "seconds" not in here:
        return None
    took = max(there["to_host"], there["to_device"]) / host  # the directions run side by side
    felt = max(0.0, there["seconds"] - here["seconds"])
    by_profile = there.get("profile", {}).get("hidden_copies")
    hidden = 1 - min(felt / took, 1.0) if took else None
    return {"copy_seconds": took, "felt_seconds": felt, "hidden": hidden, "hidden_by_profiler": by_profile}


def search(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """Doubles the context until a step fails or there is no time for the next one; one step each, it allocates too."""
    length, chunk = sizes.longest
    longest, ended = 0, "the search reached its end"
    for _ in range(8 if device.type == "cuda" else 1):
        plan = Plan(sizes.fpdt_layers, length, STREAMED, chunk)
        name = f"longest: {length} tokens"
        stage.run([Case(name, partial(one_step, plan, sizes, device.type, stage), expected(plan, sizes, 1) + 30)])
        found = stage.report["cases"].get(name, {})
        if "failed" in found:
            ended = f"{length} tokens: {found['failed']}"
            break
        longest, length = length, 2 * length
        if growth(found) > stage.left():
            ended = (
                f"{length} tokens would take about {growth(found):.0f} s, of the stage {stage.left():.0f} s are left"
            )
            break
    stage.report["longest"] = {"tokens": longest, "layers": sizes.fpdt_layers, "chunk": chunk, "ended": ended}
    stage.write()


def growth(found: Figures) -> float:
    """Seconds of twice the context, whose attention is four times the work."""
    return found["took"] + 3 * found["seconds"]


def one_step(plan: Plan, sizes: Sizes, device: str, stage: Stage) -> Figures:
    limit = min(START + expected(plan, sizes, 4), stage.left())
    with Program(plan, sizes, device, log_of(stage)) as program:
        found = program.ask("meter", limit)
    seconds = found["metered_seconds"]
    figures = {"seconds": seconds, "tokens_per_second": plan.length / seconds}
    return plan.figures() | found | figures | {"flops_per_second": step_flops(plan, sizes) / seconds}
