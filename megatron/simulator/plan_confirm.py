# SPDX-License-Identifier: Apache-2.0
"""A plan against a dry run of it: one simulated step of the real program, with the plan's own flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.table import Table

from megatron.simulator.plan_report import Report
from megatron.simulator.plan_words import GIB
from megatron.simulator.planner import Plan
from megatron.simulator.replay import duration
from megatron.training.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]


def confirmed(report: Report, plan: Plan, gpu: str) -> Table:
    """Predicted against dry-run time and memory; takes as long as the dry run does.

    Raises:
        Refusal: the program refuses the plan, or the dry run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dry_run.json"
        entry, *flags = report.program(plan.strategy)
        dry = ["--dry-run", "--world-size", str(report.problem.gpus), "--gpu", gpu, "--dry-run-json", str(file)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, str(ROOT / entry), *flags, *dry]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not file.exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise Refusal(f"--confirm: the dry run ended with code {done.returncode}: {last.removeprefix('error: ')}")
        found = json.loads(file.read_text())
    return _table(plan, found)


def _table(plan: Plan, found: dict) -> Table:
    table = Table("", "planned", "dry run", "difference", title="Plan and dry run", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    device = max(rank["device_peak_bytes"] for rank in found["ranks"])
    host = max(rank["host_peak_bytes"] for rank in found["ranks"])
    rows = [("device memory", plan.memory.total, device), ("host memory of a rank", plan.memory.host, host)]
    for name, ours, theirs in rows:
        if ours or theirs:
            table.add_row(name, f"{ours / GIB:.2f} GiB", f"{theirs / GIB:.2f} GiB", _difference(ours, theirs))
    if found.get("predicted_ms"):
        seconds = found["predicted_ms"] / 1e3
        table.add_row("a step", duration(plan.seconds), duration(seconds), _difference(plan.seconds, seconds))
    if found.get("mfu"):
        mfu = found["mfu"]
        table.add_row("MFU", f"{100 * plan.estimate.mfu:.1f} %", f"{100 * mfu:.1f} %", "")
    fits = {True: "yes", False: "no"}
    if found.get("fits") is not None:
        table.add_row("fits", fits[plan.fits], fits[bool(found["fits"])], "")
    return table


def _difference(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1):+.1f} %" if theirs else "-"
