# SPDX-License-Identifier: Apache-2.0
"""What nccl-tests measured beside what we expect, and as the fields of a machine's file."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.simulator.cost.collective_cost import Price, price_of
from megatron.simulator.machines.machine import Machine
from megatron.training.json_file import read_bytes
from megatron.training.refusal import Refusal

# Reads what nccl-tests prints (all_reduce_perf and its like); cost/nccl_tests.py makes a machine's fields of it.
#
# A table has, for each size in bytes of the whole tensor, microseconds and two bandwidths, out of place and in
# place. The bus bandwidth is what a rank sends in a ring over the time (nccl-tests' doc/PERFORMANCE.md): the same
# bytes that a transfer has here. Lines may begin with anything, as mpirun and srun put it there.


KINDS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "p2p",
}  # fmt: skip
PROGRAM = re.compile(rf"\b({'|'.join(KINDS)})_perf")
RANK = re.compile(r"Rank +(\d{1,9}) .*\bon +(\S+) +device")
LONGEST_LINE = 1000  # characters that are looked at
# size, count, type, operation (some have none), root, then twice: microseconds, GB/s, GB/s, errors.
ROW = re.compile(
    r"(?:^|\s)(?P<size>\d+) +(?P<count>\d+) +(?P<type>[a-z]+\w*) +(?P<redop>[a-z]+) +(?:-?\d+ +)?"
    r"(?P<time>[\d.]+) +(?P<alg>[\d.]+) +(?P<bus>[\d.]+) +\S+ +(?P<again>[\d.]+) +[\d.]+ +[\d.]+"
)


@dataclass(frozen=True)
class Run:
    """One table.

    Attributes:
        kind: as a transfer's; ranks, nodes: that took part, as many ranks on each node; 0 nodes where the text does
            not say, which is taken as full nodes.
        rows: (bytes that a rank sends in a ring, seconds), the better of out of place and in place; sizes rise.
    """

    kind: str
    ranks: int
    nodes: int
    rows: tuple[tuple[float, float], ...]

    @property
    def bus(self) -> float:
        """Bytes a second of the largest message."""
        size, took = self.rows[-1]
        return size / took


def read_runs(path: str | Path, kind: str | None = None) -> list[Run]:
    """All tables of a file; ``kind``: of those that do not say what they are, by nccl-tests' name.

    Raises:
        Refusal: the file cannot be read, has no table, or does not say which test it is, or among how many.
    """
    try:
        text = read_bytes(path).decode("utf-8", errors="replace")
    except OSError as error:
        raise Refusal(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise Refusal(f"{path}: {error}: give the output of nccl-tests alone") from None
    try:
        return _runs(path, text, kind)
    except Refusal:
        raise  # it is a ValueError as well
    except (ValueError, OverflowError):
        raise Refusal(f"{path}: a row of its table holds what is no number, such as 1.2.3") from None


def _runs(path: str | Path, text: str, kind: str | None) -> list[Run]:
    found, program, last, hosts, rows = [], kind, -1, set(), []
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
            found.append(_run(path, program, last + 1, len(hosts), rows))
            program, last, hosts, rows = kind, -1, set(), []
    if not found:
        raise Refusal(f"{path}: has no table of nccl-tests, such as all_reduce_perf prints")
    return found


def _run(path: str | Path, program: str | None, ranks: int, nodes: int, rows: list[re.Match]) -> Run:
    last = rows[-1]
    if not float(last["bus"]):
        raise Refusal(f"{path}: the bandwidth of its last size is printed as 0; let the test go on to larger messages")
    share = float(last["bus"]) / max(float(last["alg"]), 1e-9)  # of the tensor, that a rank sends
    if program is None and share > 1:
        program = "all_reduce"
    elif program is None and last["redop"] != "none":
        program = "reduce_scatter" if share < 1 else None
    if program is None:
        raise Refusal(f"{path}: does not say which test it is; give KIND={path}, KIND of {', '.join(KINDS)}")
    if not ranks and program == "sendrecv":
        raise Refusal(f'{path}: has no "Rank" lines, so that nobody knows whether its messages left the node')
    if nodes and ranks % nodes:
        raise Refusal(f"{path}: {ranks} ranks on {nodes} nodes are not as many on each")
    most = 2 if program == "all_reduce" else 1
    if not ranks and share >= most:
        raise Refusal(f"{path}: no {program}, by its bandwidths: bus bandwidth is {share:.3g} of the algorithm's")
    ranks = ranks or round(most / (most - share))
    exact = 1.0 if program == "sendrecv" else most * (ranks - 1) / ranks
    if abs(exact - share) > 0.02:
        raise Refusal(f"{path}: {program} of {ranks} ranks has other bus bandwidths than are printed there")
    times = [(float(row["size"]) * exact, 1e-6 * min(float(row["time"]), float(row["again"]))) for row in rows]
    if not (found := sorted((size, took) for size, took in times if size and took)):
        raise Refusal(f"{path}: has no time above 0")
    return Run(KINDS[program], ranks, nodes, tuple(found))


def fields(runs: list[Run], machine: Machine) -> dict[str, Any]:
    """The fields that make ``machine`` as fast with large messages, and as late with small ones, as was measured.

    Raises:
        Refusal: a bandwidth is more than twice what the machine has, or more GPUs took part on a node than it has.
    """
    for run in runs:
        if run.nodes and run.ranks > run.nodes * machine.gpus:
            raise Refusal(
                f"{run.kind} had {run.ranks // run.nodes} ranks a node, {machine.name} has {machine.gpus} GPUs; give "
                "gpus in a file of your own"
            )
    calibration: dict[str, float] = {}
    ways: dict[str, dict[str, float]] = {}
    order = {"all_gather": 0, "reduce_scatter": 0, "p2p": 1}  # all_reduce and all_to_all build on these
    for run in sorted(runs, key=lambda run: (_nodes(run, machine), order.get(run.kind, 2))):
        shares, name, way = _shares(run, machine)
        calibration |= shares
        if name:
            ways.setdefault(name, {}).update(way)
        machine = with_figures(machine, shares, {name: way} if name else {})
    for run in runs:
        for name, way in _starts(run, machine).items():
            ways.setdefault(name, {}).update(way)
            machine = with_figures(machine, {}, {name: way})
    figures: dict[str, Any] = {"calibration": calibration} if calibration else {}
    return figures | ({"collectives": ways} if ways else {})


def beside(run: Run, machine: Machine) -> list[tuple[float, float, float, str]]:
    """(bytes that a rank sends, measured seconds, ours, the algorithm that we take for it) of each row."""
    price = _price(run, machine)
    return [(size, took, price(size), price.chosen(size)) for size, took in run.rows]


def _price(run: Run, machine: Machine) -> Price:
    """Of nodes that have as many GPUs as took part on each."""
    return price_of(run.kind, run.ranks, 1, replace(machine, gpus=run.ranks // run.nodes) if run.nodes else machine)


def with_figures(machine: Machine, shares: dict[str, float], ways: dict[str, dict[str, float]]) -> Machine:
    known = machine.collectives
    given = {name: replace(getattr(known, name), **figures) for name, figures in ways.items()}
    return replace(
        machine,
        calibration=replace(machine.calibration, **shares),
        collectives=replace(known, **given) if given else known,
    )


def _nodes(run: Run, machine: Machine) -> int:
    return run.nodes or -(-run.ranks // machine.gpus)


def _shares(run: Run, machine: Machine) -> tuple[dict[str, float], str, dict[str, float]]:
    """(shares for the calibration, name of a way, its share) that the largest message asks for."""
    nodes, kept, ways = _nodes(run, machine), machine.calibration, machine.collectives
    link, network, each = machine.link.bandwidth, machine.network.bandwidth, run.ranks // nodes
    if run.kind == "all_reduce" and ways and run.ranks > 2 and each > 1:
        tensor = run.bus * run.ranks / (2 * (run.ranks - 1))
        if nodes == 1 and ways.nvls:
            return {}, "nvls", {"share": _share(run, machine, tensor / (link * kept.link))}
        if nodes == 2 and ways.nvls_tree:
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
            f"{run.kind} of {run.ranks} ranks had {run.bus / 1e9:.0f} GB/s, more than twice what {machine.name} has; "
            "give its link and network in a file of your own"
        )
    return float(f"{value:.4g}")


def _starts(run: Run, machine: Machine) -> dict[str, dict[str, float]]:
    """When LL's rings and trees begin, so that the smallest message takes as long as it did; not before they can."""
    if machine.collectives is None or run.kind in ("p2p", "all_to_all") or run.rows[0][0] > 65536:
        return {}
    size, took = run.rows[0]
    later = took - _price(run, machine)(size)
    names = ("ring_ll", "tree_ll") if run.kind == "all_reduce" else ("ring_ll",)
    starts = {name: getattr(machine.collectives, name).start + later for name in names}
    return {name: {"start": float(f"{max(0.0, start):.4g}")} for name, start in starts.items()}
