# SPDX-License-Identifier: Apache-2.0
"""``tools/measure_hardware.py --nccl-tests``: write a machine file from outputs of nccl-tests."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron.simulator.cost.nccl_tests import KINDS, Run, compare, fields, read_runs
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import MACHINES, find, machine_of, merge, read_fields, read_machine
from megatron.training.ownership.atomic import atomic_files
from megatron.training.refusal import Refusal


def import_logs(args: argparse.Namespace) -> int:
    """Write the machine file, and print its predictions next to the measured times; returns the exit code.

    If --output is also the file of --extends, its other figures are kept. Raises Refusal.
    """
    output = Path(args.output)
    machine, base = _base(args.extends)
    try:
        runs = [run for given in args.nccl_tests for run in read_runs(*_file(given))]
        new = fields(runs, machine)
    except Refusal as refusal:
        raise Refusal(f"--nccl-tests {refusal}") from None
    new["sources"] = _sources(new, [_file(given)[0] for given in args.nccl_tests])
    if base.resolve() == output.resolve():
        raw = read_fields(base)
        if (old := raw.get("sources", {}).get("collectives")) and "collectives" in new:  # name both sources
            new["sources"]["collectives"] = f"{old}; {new['sources']['collectives']}"
        raw = merge(raw, new)
    else:
        if base.parent != MACHINES and base.resolve().parent != output.resolve().parent:
            raise Refusal(f"--extends {args.extends}: it must be in the same folder as --output {output}")
        extends = args.extends if base.parent == MACHINES else base.name
        raw = {"extends": extends, "name": output.stem} | new
    after = machine_of(output, raw)  # before anything is written
    with atomic_files([args.output], args.overwrite) as (name,):
        Path(name).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    show(runs, machine, after)
    print(f"written: {args.output}; use it as --gpu {args.output}")
    return 0


def _file(given: str) -> tuple[str, str | None]:
    kind, _, path = given.partition("=")
    return (path, kind) if path and kind in KINDS else (given, None)


def _base(extends: str) -> tuple[Machine, Path]:
    try:
        return read_machine(path := find(extends)), path
    except Refusal as refusal:
        raise Refusal(f"--extends {str(refusal).removeprefix('--gpu ')}") from None


def _sources(raw: dict[str, Any], files: list[str]) -> dict[str, str]:
    source = f"nccl-tests: {', '.join(files)}"
    sources = {f"calibration.{name}": source for name in raw.get("calibration", {})}
    return sources | ({"collectives": f"NCCL's tuning table; {source}"} if "collectives" in raw else {})


def show(runs: list[Run], before: Machine, after: Machine) -> None:
    """Print the measured times of the runs, and those that both machine files predict."""
    table = Table("", "bytes sent", "measured, us", before.name, "", after.name, "", "by")
    for column in table.columns[1:7]:
        column.justify = "right"
    for run in runs:
        label = f"{run.kind}, {run.ranks} ranks"
        for old, new in list(zip(compare(run, before), compare(run, after)))[:: max(1, len(run.rows) // 8)]:
            size, took = old[:2]
            errors = [f"{100 * (one[2] / took - 1):+.0f} %" for one in (old, new)]
            times = [f"{1e6 * one[2]:.1f}" for one in (old, new)]
            table.add_row(label, f"{size:.0f}", f"{1e6 * took:.1f}", times[0], errors[0], times[1], errors[1], new[3])
    Console(width=None if sys.stdout.isatty() else 120).print(table)
