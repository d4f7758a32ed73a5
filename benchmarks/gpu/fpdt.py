# SPDX-License-Identifier: Apache-2.0
"""FPDT against plain recompute: a sweep over chunk sizes, and which part of the copies is overlapped."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.program import Plan
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage, read
from benchmarks.gpu.step import expected, measured


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    length, layers = sizes.fpdt_length, sizes.fpdt_layers
    middle = sizes.fpdt_chunks[len(sizes.fpdt_chunks) // 2]
    plans = [Plan(layers, length, "recompute"), Plan(layers, length, "fpdt", middle)]
    plans += [Plan(layers, length, mode, middle) for mode in ("fpdt on the device", "fpdt streamed")]
    plans += [Plan(layers, length, "fpdt", chunk) for chunk in sizes.fpdt_chunks if chunk != middle]
    cases = []
    for plan in plans:
        profiled = plan.mode == "fpdt" and plan.chunk == middle
        work = partial(measured, plan, sizes, device.type, stage, min(sizes.repeats, 2), profiled)
        name = f"{plan.mode}, chunks of {plan.chunk}" if plan.chunk else plan.mode
        cases.append(Case(name, work, expected(plan, sizes, 4 + profiled), "sweep"))
    stage.run(cases)
    stage.report["copies"] = copies(stage, middle)


def copies(stage: Stage, chunk: int) -> Figures | None:
    """Seconds of copies with chunks of this size at the measured rate, and the seconds of them that are not overlapped:
    the time of a step with chunks in host memory minus that of a step with chunks on the device.
    """
    cases = stage.report["cases"]
    on_host, on_device = (cases.get(f"{mode}, chunks of {chunk}", {}) for mode in ("fpdt", "fpdt on the device"))
    host = ((read(stage.folder, "rates") or {}).get("cases", {}).get("host", {})).get("bytes_per_second")
    if not host or "seconds" not in on_host or "seconds" not in on_device:
        return None
    copying = max(on_host["to_host"], on_host["to_device"]) / host  # the two directions overlap
    exposed = max(0.0, on_host["seconds"] - on_device["seconds"])
    by_profile = on_host.get("profile", {}).get("hidden_copies")
    hidden = 1 - min(exposed / copying, 1.0) if copying else None
    return {"copy_seconds": copying, "exposed_seconds": exposed, "hidden": hidden, "hidden_by_profiler": by_profile}
