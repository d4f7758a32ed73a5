# SPDX-License-Identifier: Apache-2.0
"""Fit the constants of a paper's cluster to its tables, and print the error on each table that was left out.

    python examples/reproduce/fit.py [CLUSTER ...] [--write]

Prints for each cluster the constants, the mean absolute error, and for each table the error with constants of the
other tables. ``--write`` writes the constants into clusters/CLUSTER.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.reproduce.fpdt import training as fpdt  # noqa: E402
from examples.reproduce.genslm import tables as genslm  # noqa: E402
from examples.reproduce.report import Row  # noqa: E402
from examples.reproduce.simulate import CLUSTERS, Simulated, cluster  # noqa: E402
from examples.reproduce.ulysses import tables as ulysses  # noqa: E402
from examples.reproduce.usp import tables as usp  # noqa: E402
from megatron.simulator.machines.machine import Machine  # noqa: E402
from megatron.simulator.machines.machine_file import load  # noqa: E402

Table = Callable[[Machine], list[Row]]
STEPS = (1.25, 1.08, 1.02, 1.5, 1.1, 1.02)
LIMITS = {"gemm": 1.05, "attention": 1.05, "network_all_to_all": 1.1}  # upper limits of constants; otherwise 1


@dataclass(frozen=True)
class Fit:
    """Which constants of a machine's :class:`Calibration` are free, and the tables to which they are fitted.

    ``start``: initial values of some constants; others start with the shipped machine's values. ``limits``:
    upper limits of constants whose shipped rates were not measured. ``by_hand``: other choices in the
    cluster's file or its tables that were not measured, but chosen by reading or by the shape of a curve.
    """

    constants: tuple[str, ...]
    tables: dict[str, Table]
    start: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    by_hand: tuple[str, ...] = ()


def simulated(rows: Callable[..., list[Row]], **given: Any) -> Table:
    """Turn a table that takes a clock into one that takes a machine."""
    return lambda machine: rows(Simulated(machine), **given)


FITS = {
    "usp-a800": Fit(
        ("gemm", "attention", "link", "all_to_all", "network", "interleaved", "overlap"),
        {f"table {table}": simulated(usp.training_rows, tables=(table,)) for table in (5, 6, 7)},
        {"interleaved": 1.0, "gemm": 1.0},  # the shipped A800's values come from table 6 and published runs
        by_hand=(
            "gradients not overlapped with compute",
            "overlapped with compute in figure 5",
            "16 micro-batches of 30K",
            "an MLP counted as two matrices",
            "link rounded up, for figure 5",
        ),
    ),
    "usp-a100": Fit(
        ("attention", "all_to_all", "p2p", "overlap"),
        {"table 4": partial(usp.attention_rows, table="8xA100_nvlink")},
        by_hand=("8 key/value heads", "128K read as 256K"),
    ),
    "usp-l20": Fit(
        ("attention", "all_to_all", "p2p", "network", "network_all_to_all", "overlap"),
        {"table 3": partial(usp.attention_rows, table="8xL20_pcie")},
        {"all_to_all": 0.1, "p2p": 0.5, "network": 0.35, "network_all_to_all": 0.06, "overlap": 0.7},
        {"attention": 1.15},
        ("GPUs below a CPU", "link below it", "link between the CPUs", "8 key/value heads"),
    ),
    "ulysses-a100": Fit(
        ("gemm", "attention", "network_all_to_all"),
        {f"table {table}": simulated(ulysses.scaling_rows, tables=(table,)) for table in (2, 3)},
        {"gemm": 1.0},  # the shipped A100's is fitted to published runs
        by_hand=("full mask", "MEGATRON_TP of 7B", "MEGATRON_TP of 30B", "TOKENS", "SPARSE"),
    ),
    "fpdt-a100": Fit(
        ("gemm", "attention", "network", "network_all_to_all", "overlap"),
        {f"figure 11, {model}": simulated(fpdt.figure_11_rows, models=(model,)) for model in fpdt.MODELS},
        {"gemm": 1.0},
        by_hand=("host", "head_size of 64", "head_size of 65", "what MFU counts", "64 heads for 30B"),
    ),
    "genslm-a100": Fit(
        ("gemm", "attention", "network"),
        {"throughput, new": simulated(genslm.throughput_rows, frameworks=("new",))},
        {"gemm": 1.0},
        by_hand=("width and heads", "two sequences a step", "old framework: OLD"),
    ),
}


def errors(machine: Machine, tables: Sequence[Table]) -> list[float]:
    """The errors of all rows with two numbers, in percent."""
    return [row.error for table in tables for row in table(machine) if row.error is not None]


def mean_error(machine: Machine, tables: Sequence[Table]) -> float:
    result = errors(machine, tables)
    return sum(map(abs, result)) / len(result)


def fit(
    machine: Machine, constants: Sequence[str], tables: Sequence[Table], limits: dict[str, float] | None = None
) -> Machine:
    """Coordinate search: change each constant by a step as long as the error falls, then by a smaller step."""
    best, limits = mean_error(machine, tables), LIMITS | (limits or {})
    for step in STEPS:
        better = True
        while better:
            better = False
            for name in constants:
                for factor in (step, 1 / step):
                    value = getattr(machine.calibration, name) * factor
                    if not 0.02 <= value <= limits.get(name, 1.0):
                        continue
                    moved = replace(machine, calibration=replace(machine.calibration, **{name: round(value, 4)}))
                    error = mean_error(moved, tables)
                    if error < best - 1e-3:
                        machine, best, better = moved, error, True
    return machine


def unfitted(name: str) -> Machine:
    """The cluster with the shipped machine's values of the constants to fit."""
    machine = cluster(name)
    base = load(json.loads((CLUSTERS / f"{name}.json").read_text())["extends"]).calibration
    values = {key: getattr(base, key) for key in FITS[name].constants}
    return replace(machine, calibration=replace(machine.calibration, **values))


def beginning(name: str) -> Machine:
    """The cluster with the initial values of the search for the constants to fit."""
    machine = unfitted(name)
    return replace(machine, calibration=replace(machine.calibration, **FITS[name].start))


def distinct(name: str) -> int:
    """Number of different configurations. Two units of one run count once, and so does a configuration in two tables.
    The kind of ring does not count if Ulysses uses all ranks."""
    rows = [row for table in FITS[name].tables.values() for row in table(cluster(name)) if row.error is not None]
    keys = set()
    for row in rows:
        label = dict(row.label)
        if label.get("ulysses") == 8 and label.get("ring") in usp.RINGS:
            label.pop("ring")
        keys.add(tuple(label.items()))
    return len(keys)


def left_out(name: str) -> dict[str, str]:
    """The error of each table with constants fitted to the others; empty for a single table."""
    wanted, start, result = FITS[name], beginning(name), {}
    for out, table in wanted.tables.items():
        others = [other for key, other in wanted.tables.items() if key != out]
        if others:
            machine = fit(start, wanted.constants, others, wanted.limits)
            result[out] = f"{mean_error(machine, [table]):.1f} %"
    return result


def how_much(names: Sequence[str], *, leave_out: bool = False) -> Iterator[str]:
    """A Markdown table: constants and data of each fit, the error without and with the fit and, on request, with one
    table left out."""
    more = " one table left out |" if leave_out else ""
    yield (
        "| cluster | fitted constants | set by hand | rows, distinct | unfitted | where the search begins | fitted |"
        f"{more}\n" + "|---" * (8 if leave_out else 7) + "|"
    )
    for name in names:
        wanted, tables = FITS[name], list(FITS[name].tables.values())
        means = [f"{mean_error(made(name), tables):.1f} %" for made in (unfitted, beginning, cluster)]
        counts = f"{len(errors(cluster(name), tables))}, {distinct(name)}"
        without = left_out(name) if leave_out else {}
        each = ", ".join(f"{out.split(', ')[-1]} {error}" for out, error in without.items()) or "one table alone"
        last = f" {each} |" if leave_out else ""
        yield (
            f"| {name} | {len(wanted.constants)} | {len(wanted.by_hand)}: {'; '.join(wanted.by_hand)} | {counts} | "
            f"{' | '.join(means)} |{last}"
        )


def report(name: str) -> Machine:
    """Fit a cluster, print the result, return its machine."""
    wanted, start = FITS[name], beginning(name)
    result = fit(start, wanted.constants, list(wanted.tables.values()), wanted.limits)
    constants = ", ".join(f"{key} {getattr(result.calibration, key):.3g}" for key in wanted.constants)
    print(f"{name}: {constants}")
    print(f"  mean absolute error {mean_error(result, list(wanted.tables.values())):.1f} %")
    without = left_out(name)
    for key, table in wanted.tables.items():
        refitted = f"; fitted without it: {without[key]}" if without else ""
        print(f"  {key}: {mean_error(result, [table]):.1f} %{refitted}")
    return result


def write(name: str, machine: Machine) -> None:
    path = CLUSTERS / f"{name}.json"
    raw = json.loads(path.read_text())
    for key in FITS[name].constants:
        raw.setdefault("calibration", {})[key] = round(getattr(machine.calibration, key), 3)
        raw["sources"][f"calibration.{key}"] = f"fitted by fit.py to {', '.join(FITS[name].tables)}"
    path.write_text(json.dumps(raw, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clusters", nargs="*", metavar="CLUSTER", help=f"of {', '.join(FITS)}")
    parser.add_argument("--write", action="store_true", help="change clusters/CLUSTER.json")
    parser.add_argument("--how-much", action="store_true", help="fit nothing: errors with and without what was fitted")
    parser.add_argument("--left-out", action="store_true", help="with --how-much: fit without each table, two minutes")
    options = parser.parse_args()
    if options.how_much:
        print(*how_much(options.clusters or list(FITS), leave_out=options.left_out), sep="\n")
        return
    for name in options.clusters or FITS:
        machine = report(name)
        if options.write:
            write(name, machine)


if __name__ == "__main__":
    main()
