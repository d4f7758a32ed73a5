# SPDX-License-Identifier: Apache-2.0
"""What nccl-tests measured beside what we expect, and as the fields of a machine's file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.simulator.cost.collectives import Price, price_of
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.nccl_log import Run
from megatron.training.refusal import Refusal


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
