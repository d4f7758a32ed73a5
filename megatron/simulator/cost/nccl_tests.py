# SPDX-License-Identifier: Apache-2.0
"""Reads nccl-tests' output, compares it with a machine's predictions, and derives fields of a machine file from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.simulator.cost.collective_cost import Price, price_of
from megatron.simulator.machines.machine import Machine
from megatron.training.json_file import read_bytes
from megatron.training.refusal import Refusal

# all_reduce_perf and similar programs print tables that have, for each size of the complete tensor in bytes,
# microseconds and two bandwidths, out of place and in place. The bus bandwidth counts the bytes that a rank sends in a
# ring (nccl-tests' doc/PERFORMANCE.md), as `trace.Transfer` does. mpirun and srun may put a prefix before each line.

KINDS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "p2p",
}  # fmt: skip
PROGRAM = re.compile(rf"\b({'|'.join(KINDS)})_perf")
RANK = re.compile(r"Rank +(\d{1,9}) .*\bon +(\S+) +device")
LONGEST_LINE = 1000  # characters that are read
# size, count, type, operation (some have none), root, then twice: microseconds, GB/s, GB/s, errors.
ROW = re.compile(
    r"(?:^|\s)(?P<size>\d+) +(?P<count>\d+) +(?P<type>[a-z]+\w*) +(?P<redop>[a-z]+) +(?:-?\d+ +)?"
    r"(?P<time>[\d.]+) +(?P<alg>[\d.]+) +(?P<bus>[\d.]+) +\S+ +(?P<again>[\d.]+) +[\d.]+ +[\d.]+"
)


@dataclass(frozen=True)
class Run:
    """One table."""

    kind: str  # as in `trace.Transfer`
    # ranks, nodes: of the test, with the same number of ranks on each node; 0 nodes: unknown, full nodes are assumed
    ranks: int
    nodes: int
    # (bytes that a rank sends in a ring, seconds) by rising size, the better of out of place and in place
    rows: tuple[tuple[float, float], ...]

    @property
    def bus(self) -> float:
        """Bytes per second of the largest message."""
        size, took = self.rows[-1]
        return size / took


def read_runs(path: str | Path, kind: str | None = None) -> list[Run]:
    """All tables of a file; ``kind``: nccl-tests' name of the test, for tables that do not name it.

    Raises:
        Refusal: the file cannot be read, has no table, or does not name the test or the number of ranks.
    """
    try:
        text = read_bytes(path).decode("utf-8", errors="replace")
    except OSError as error:
        raise Refusal(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise Refusal(f"{path}: {error}: give a file with nothing but the output of nccl-tests") from None
    try:
        return _runs(path, text, kind)
    except Refusal:
        raise  # a Refusal is a ValueError, too
    except (ValueError, OverflowError):
        raise Refusal(f"{path}: a row of its table has an invalid number, such as 1.2.3") from None


def _runs(path: str | Path, text: str, kind: str | None) -> list[Run]:
    runs, program, last, hosts, rows = [], kind, -1, set(), []
    for line in [*text.splitlines(), "# Avg bus bandwidth"]:
        line = line[:LONGEST_LINE]
        if match := PROGRAM.search(line):
            program = kind or match[1]
        elif match := RANK.search(line):
            last = max(last, int(match[1]))
            hosts.add(match[2])
        elif match := ROW.search(line):
            rows.append(match)
        elif "Avg bus bandwidth" in line and rows:
            runs.append(_run(path, program, last + 1, len(hosts), rows))
            program, last, hosts, rows = kind, -1, set(), []
    if not runs:
        raise Refusal(f"{path}: has no table of nccl-tests, such as all_reduce_perf prints")
    return runs


def _run(path: str | Path, program: str | None, ranks: int, nodes: int, rows: list[re.Match]) -> Run:
    last = rows[-1]
    if not float(last["bus"]):
        raise Refusal(f"{path}: the bandwidth of its last size is printed as 0; run the test with larger messages")
    share = float(last["bus"]) / max(float(last["alg"]), 1e-9)  # of the tensor that a rank sends
    if program is None and share > 1:
        program = "all_reduce"
    elif program is None and last["redop"] != "none":
        program = "reduce_scatter" if share < 1 else None
    if program is None:
        raise Refusal(f"{path}: does not name its test; give KIND={path} with a KIND of {', '.join(KINDS)}")
    if not ranks and program == "sendrecv":
        raise Refusal(f'{path}: has no "Rank" lines, which tell whether messages left the node; keep them in the file')
    if nodes and ranks % nodes:
        raise Refusal(f"{path}: {ranks} ranks on {nodes} nodes; give a run with the same number of ranks on each node")
    most = 2 if program == "all_reduce" else 1
    if not ranks and share >= most:
        raise Refusal(
            f"{path}: is not from {program}: its bus bandwidth is {share:.3g} of the algorithm bandwidth; give its KIND"
        )
    ranks = ranks or round(most / (most - share))
    exact = 1.0 if program == "sendrecv" else most * (ranks - 1) / ranks
    if abs(exact - share) > 0.02:
        raise Refusal(f"{path}: its bus bandwidths are not those of {program} with {ranks} ranks; give its KIND")
    times = [(float(row["size"]) * exact, 1e-6 * min(float(row["time"]), float(row["again"]))) for row in rows]
    if not (measured := sorted((size, took) for size, took in times if size and took)):
        raise Refusal(f"{path}: has no time above 0")
    return Run(KINDS[program], ranks, nodes, tuple(measured))


def fields(runs: list[Run], machine: Machine) -> dict[str, Any]:
    """Fields that give ``machine`` the measured bandwidth of large messages and the measured latency of small ones.

    Raises:
        Refusal: a bandwidth is more than twice the machine's, or a run had more ranks per node than there are GPUs.
    """
    for run in runs:
        if run.nodes and run.ranks > run.nodes * machine.gpus:
            raise Refusal(
                f"{run.kind} had {run.ranks // run.nodes} ranks per node, {machine.name} has {machine.gpus} GPUs; give "
                "gpus in a machine file of your own"
            )
    calibration: dict[str, float] = {}
    algorithms: dict[str, dict[str, float]] = {}
    order = {"all_gather": 0, "reduce_scatter": 0, "p2p": 1}  # all_reduce and all_to_all build on these
    for run in sorted(runs, key=lambda run: (_nodes(run, machine), order.get(run.kind, 2))):
        shares, name, algorithm = _shares(run, machine)
        calibration |= shares
        if name:
            algorithms.setdefault(name, {}).update(algorithm)
        machine = with_figures(machine, shares, {name: algorithm} if name else {})
    for run in runs:
        for name, algorithm in _starts(run, machine).items():
            algorithms.setdefault(name, {}).update(algorithm)
            machine = with_figures(machine, {}, {name: algorithm})
    figures: dict[str, Any] = {"calibration": calibration} if calibration else {}
    return figures | ({"collectives": algorithms} if algorithms else {})


def compare(run: Run, machine: Machine) -> list[tuple[float, float, float, str]]:
    """(bytes that a rank sends, measured seconds, predicted seconds, assumed algorithm) of each row."""
    price = _price(run, machine)
    return [(size, took, price(size), price.chosen(size)) for size, took in run.rows]


def _price(run: Run, machine: Machine) -> Price:
    """The machine's price, on nodes with as many GPUs as the run had ranks on each."""
    return price_of(run.kind, run.ranks, 1, replace(machine, gpus=run.ranks // run.nodes) if run.nodes else machine)


def with_figures(machine: Machine, shares: dict[str, float], algorithms: dict[str, dict[str, float]]) -> Machine:
    """``machine`` with other shares of its calibration, and other figures of NCCL's algorithms by name."""
    known = machine.collectives
    given = {name: replace(getattr(known, name), **figures) for name, figures in algorithms.items()}
    return replace(
        machine,
        calibration=replace(machine.calibration, **shares),
        collectives=replace(known, **given) if given else known,
    )


def _nodes(run: Run, machine: Machine) -> int:
    return run.nodes or -(-run.ranks // machine.gpus)


def _shares(run: Run, machine: Machine) -> tuple[dict[str, float], str, dict[str, float]]:
    """(shares for the calibration, name of an algorithm, its share) that give the bandwidth of the largest message."""
    nodes, kept, algorithms = _nodes(run, machine), machine.calibration, machine.collectives
    link, network, each = machine.link.bandwidth, machine.network.bandwidth, run.ranks // nodes
    if run.kind == "all_reduce" and algorithms and run.ranks > 2 and each > 1:
        tensor = run.bus * run.ranks / (2 * (run.ranks - 1))
        if nodes == 1 and algorithms.nvls:
            return {}, "nvls", {"share": _share(run, machine, tensor / (link * kept.link))}
        if nodes == 2 and algorithms.nvls_tree:
            return {}, "nvls_tree", {"between": _share(run, machine, tensor / (link * kept.link))}
    if nodes == 1:
        name = {"all_to_all": "all_to_all", "p2p": "p2p"}.get(run.kind, "link")
        return {name: _share(run, machine, run.bus / link)}, "", {}
    if run.kind == "all_to_all":
        away = (run.ranks - each) / (run.ranks - 1)
        return {"network_all_to_all": _share(run, machine, away * run.bus / (network * kept.network))}, "", {}
    return {"network": _share(run, machine, run.bus / (network * (1 if run.kind == "p2p" else each)))}, "", {}


def _share(run: Run, machine: Machine, value: float) -> float:
    if value > 2:
        raise Refusal(
            f"{run.kind} of {run.ranks} ranks had {run.bus / 1e9:.0f} GB/s, more than twice that of {machine.name}; "
            "give link and network in a machine file of your own"
        )
    return float(f"{value:.4g}")


def _starts(run: Run, machine: Machine) -> dict[str, dict[str, float]]:
    """The ``start`` of LL's rings and trees, at least 0, with which the smallest message takes the measured time."""
    if machine.collectives is None or run.kind in ("p2p", "all_to_all") or run.rows[0][0] > 65536:
        return {}
    size, took = run.rows[0]
    later = took - _price(run, machine)(size)
    names = ("ring_ll", "tree_ll") if run.kind == "all_reduce" else ("ring_ll",)
    starts = {name: getattr(machine.collectives, name).start + later for name in names}
    return {name: {"start": float(f"{max(0.0, start):.4g}")} for name, start in starts.items()}
