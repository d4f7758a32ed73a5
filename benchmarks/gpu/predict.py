# SPDX-License-Identifier: Apache-2.0
"""The simulator's predictions for all measured cases, with the measured machine file and with the shipped one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.program import Plan
from benchmarks.gpu.rates import MACHINE, shipped
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage, read
from benchmarks.gpu.step import workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.operations import gemm, tile
from megatron.simulator.cost.seconds import kernel_seconds
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """A case for each measured case of the other stages."""
    machines = machines_of(stage.folder, stage.report["device"])
    stage.report["machines"] = {what: machine.name for what, machine in machines.items()}
    cases = []
    for name, result in finished(stage.folder, "attention").items():
        for direction in ("forward", "backward") if "kernel" in result else ():
            cases.append(Case(f"{name} {direction}", partial(of_kernel, result, direction, sizes, machines)))
    for source in ("step", "fpdt", "longest"):
        for name, result in finished(stage.folder, source).items():
            cases.append(Case(f"{source}: {name}", partial(of_step, result, sizes, machines)))
    stage.run(cases)


def machines_of(folder: Path, device: str) -> dict[str, Machine]:
    result = {}
    if (folder / MACHINE).exists():
        result["measured"] = load(folder / MACHINE)
    if shipped(device):
        result["shipped"] = load(shipped(device))
    if not result:
        raise FileNotFoundError(f"{folder / MACHINE}: run the stage rates first")
    return result


def finished(folder: Path, stage: str) -> dict[str, Figures]:
    cases = (read(folder, stage) or {}).get("cases", {})
    return {name: result for name, result in cases.items() if "failed" not in result}


def compared(measured: float, predicted: dict[str, float]) -> Figures:
    """Measured and predicted seconds, and their ratios."""
    ratio = {f"{what}_over_measured": seconds / measured for what, seconds in predicted.items()}
    return {"seconds": measured, "predicted": predicted, **ratio}


def prediction(name: str, result: Figures, sizes: Sizes, machine: Machine) -> dict[str, float]:
    """What the simulator predicts for a case of any stage, by the place of the measured figure, such as
    "forward/seconds"; empty for tests, and for the simulator's own stage."""
    model = sizes.model
    if "mode" in result:
        plan = Plan(result["layers"], result["length"], result["mode"], result["chunk"])
        return {"seconds": estimate(workload(plan, sizes), plan.strategy(), machine).seconds}
    if "flops_per_second" in result and ("m" in result or "size" in result):  # a product
        m, n, k = (result.get(side, result.get("size")) for side in "mnk")
        return {"flops_per_second": 2 * m * n * k / kernel_seconds(gemm(name, m, n, k), machine)}
    if "pairs_of_causal" in result or "kernel" in result or name.startswith("attention over "):
        length = result.get("length", result.get("size"))
        pairs = result.get("pairs_of_causal", 1.0) * length * (length + 1) / 2
        tiles = (tile(length, length, model.heads, model.head_dim, pairs, backward=way) for way in (False, True))
        if "kernel" in result:
            machine = replace(machine, attention_kernel=result["kernel"])
        forward, backward = (kernel_seconds(one, machine) for one in tiles)
        if "pairs_of_causal" in result:
            return {"seconds": forward + backward}
        if "kernel" in result:
            return {"forward/seconds": forward, "backward/seconds": backward}
        work = 4 * pairs * model.heads * model.head_dim
        return {"forward": work / forward, "backward": 2.5 * work / backward}
    figures = {
        "memory": ("bytes_per_second", machine.memory_bandwidth * machine.calibration.memory),
        "host": ("bytes_per_second", machine.host_link.bandwidth * machine.calibration.host),
        "launch": ("seconds", machine.launch),
    }
    return dict([figures[name]]) if name in figures else {}


def predictor(stage: Stage, sizes: Sizes) -> Callable[[str, Figures], dict[str, float]]:
    """:func:`prediction` by the shipped file of this GPU for the stage rates, by the measured file for the others."""
    try:
        machines = machines_of(stage.folder, stage.report["device"])
    except FileNotFoundError:
        return lambda *_: {}
    what = "shipped" if stage.name == "rates" else next(iter(machines))
    if what not in machines:
        return lambda *_: {}
    return lambda name, result: prediction(name, result, sizes, machines[what])


def of_kernel(result: Figures, direction: str, sizes: Sizes, machines: dict[str, Machine]) -> Figures:
    """Prediction for a kernel, at the kernel's rate if the machine file has one, without calibration."""
    length, model = result["length"], sizes.model
    one = tile(length, length, model.heads, model.head_dim, length * length / 2, backward=direction == "backward")
    predicted = {}
    for what, machine in machines.items():
        calibration = replace(machine.calibration, attention=1.0)
        machine = replace(machine, attention_kernel=result["kernel"], calibration=calibration)
        predicted[what] = kernel_seconds(one, machine)
    return compared(result[direction]["seconds"], predicted)


def of_step(result: Figures, sizes: Sizes, machines: dict[str, Machine]) -> Figures:
    plan = Plan(result["layers"], result["length"], result["mode"], result["chunk"])
    work, strategy = workload(plan, sizes), plan.strategy()
    estimates = {what: estimate(work, strategy, machine) for what, machine in machines.items()}
    parts = {what: one.parts for what, one in estimates.items()}
    return compared(result["seconds"], {what: one.seconds for what, one in estimates.items()}) | {"parts": parts}
