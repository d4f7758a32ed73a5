# SPDX-License-Identifier: Apache-2.0
"""Compares a plan with its dry run: a simulated step of the real program, with the plan's flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Table

from megatron.simulator.dry_run.replay import duration
from megatron.simulator.machines.machine_file import find, read_merged
from megatron.simulator.planner.explain import GIB, gib, losing, words
from megatron.simulator.planner.plan_report import Report, training_flags
from megatron.simulator.planner.plans import Plan, Problem
from megatron.simulator.planner.search import search
from megatron.training.arguments.argv import flat, options
from megatron.training.refusal import Refusal

ROOT = Path(__file__).resolve().parents[3]
ALLOCATORS = {"default": "default allocator", "expandable_segments": "expandable segments"}


@dataclass(frozen=True)
class Confirmation:
    """A plan, and the result of its dry run."""

    plan: Plan
    device: int  # bytes allocated on the rank that needs most
    host: int  # bytes allocated on the rank that needs most
    seconds: float  # of a step
    mfu: float
    fits: bool
    memory: float = 0.0  # bytes of a device
    # bytes of the device that the process needs in all, on the rank that needs most, by the allocator's setting
    needed: dict[str, float] = field(default_factory=dict)
    setting: str = "expandable_segments"  # the allocator's in the command

    @property
    def left(self) -> float | None:
        """Bytes of the device that the command leaves; negative: bytes that are missing; None: unknown."""
        return self.memory - self.needed[self.setting] if self.setting in self.needed else None

    def table(self) -> Table:
        """Planned and simulated memory and time."""
        table = Table("", "planned", "dry run", "difference", title="Plan and dry run", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        plan = self.plan
        sizes = (("device memory", plan.memory.total, self.device), ("host memory", plan.memory.host, self.host))
        for name, planned, run in sizes:
            if planned or run:
                table.add_row(name, f"{planned / GIB:.2f} GiB", f"{run / GIB:.2f} GiB", _difference(planned, run))
        times = duration(plan.seconds), duration(self.seconds), _difference(plan.seconds, self.seconds)
        table.add_row("step", *times)
        table.add_row("MFU", f"{100 * plan.estimate.mfu:.1f} %", f"{100 * self.mfu:.1f} %", "")
        for setting, size in self.needed.items():
            planned = gib(plan.margin) if setting == self.setting else ""
            table.add_row(f"left, {ALLOCATORS.get(setting, setting)}", planned, gib(self.memory - size), "")
        table.add_row("fits", "yes", "yes" if self.fits else "no", "")
        return table

    def narrowed(self, problem: Problem) -> Problem:
        """The problem with the machine's memory reduced by the bytes that the dry run needs beyond the plan."""
        machine, node = problem.machine, problem.gpus_per_node
        process = self.needed.get(self.setting, 0.0)
        device_excess = max(max(self.device, process - machine.reserved) - self.plan.memory.total, 0)
        host_excess = max(self.host - self.plan.memory.host, 0) * node
        smaller = replace(
            machine, reserved=machine.reserved + device_excess, host_memory=machine.host_memory - host_excess
        )
        return replace(problem, machine=smaller)


def confirm(report: Report, plan: Plan, gpu: str) -> Confirmation:
    """Run the dry run of a plan and compare. Raises Refusal if the program refuses the plan, or the dry run fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dry_run.json"
        entry, *flags = report.program(plan.strategy)
        if report.problem.node_words:  # the dry run uses all GPUs of a node: give it a machine with smaller nodes
            machine = report.problem.machine
            fields = read_merged(find(gpu)) | {"name": machine.name, "gpus": machine.gpus}
            gpu = str(Path(folder) / "machine.json")
            Path(gpu).write_text(json.dumps(fields))
        imbalance = report.problem.workload.imbalance
        busy = ["--dry-run-expert-imbalance", f"{imbalance:g}"] if imbalance > 1 and plan.strategy.expert > 1 else []
        dry = [*busy, "--dry-run", "--world-size", str(report.problem.gpus), "--gpu", gpu, "--dry-run-json", str(file)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, str(ROOT / entry), *flags, *dry]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not file.exists():  # if there is a file, code 1 means that the plan does not fit
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise Refusal(f"--confirm: the dry run ended with code {done.returncode}: {last.removeprefix('error: ')}")
        result = json.loads(file.read_text())
    device = max(rank["device_peak_bytes"] for rank in result["ranks"])
    host = max(rank["host_peak_bytes"] for rank in result["ranks"])
    by_rank = [rank.get("needed_bytes", {}) for rank in result["ranks"]]
    needed = {name: max(sizes[name] for sizes in by_rank) for name in by_rank[0]}
    times = result["predicted_ms"] / 1e3, result["mfu"]
    return Confirmation(plan, device, host, *times, result["fits"], report.problem.machine.memory, needed)


def safer(done: Confirmation, problem: Problem) -> str:
    """A warning if a plan leaves too little of a device, with the fastest that leaves enough; otherwise empty."""
    if done.left is None or done.left >= problem.spare:
        return ""
    text = f"Little memory is left in the dry run: {gib(done.left)}, less than the usual {gib(problem.spare)}. "
    plans = search(done.narrowed(problem), top=1).plans
    if not plans or plans[0].strategy == done.plan.strategy:
        return text + "No plan leaves more: use more --gpus."
    old, new = (options(training_flags(problem.workload, plan.strategy)) for plan in (done.plan, plans[0]))
    changed = flat(option for option in new if option not in old)
    gone = [flag for flag, *_ in old if flag not in {name for name, *_ in new}]
    without = f", without {' '.join(gone)}" if gone else ""
    return f"{text}Safer: {words(plans[0].strategy)}, {losing(plans[0], done.plan)}: {' '.join(changed)}{without}"


def _difference(planned: float, run: float) -> str:
    return f"{100 * (planned / run - 1):+.1f} %" if run else "-"
