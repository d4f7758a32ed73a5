# SPDX-License-Identifier: Apache-2.0
"""Reports of a dry run: tables in the terminal, a JSON file, pictures of memory and time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from megatron.simulator.cost.jitter import Jitter, describe, spread
from megatron.simulator.cost.trace import AXES
from megatron.simulator.dry_run.allocation.reserved import needed_by_setting, runtime_memory
from megatron.simulator.dry_run.dry_run import DryRun, RankReport
from megatron.simulator.dry_run.replay import duration
from megatron.system.whole_file import replace_file
from megatron.training.refusal import Refusal, refusing
from megatron.training.report.layer_traffic import describe_layers, layer_traffic
from megatron.training.report.memory_picture import DEVICE_KINDS, draw, readable

LABELS = {"default": "reserved by PyTorch", "expandable_segments": "reserved, expandable segments"}


def show(result: DryRun, console: Console, jitter: Jitter | None = None) -> None:
    """Print memory, communication and time of every simulated rank; with ``jitter`` also the time of unequal ranks."""
    console.print(_memory(result))
    console.print(_communication(result))
    for line in describe_layers(result.config):
        console.print(f" > {line}")
    if result.machine is None:
        console.print(" > --gpu NAME adds the time of a step on that GPU, and whether it fits")
        return
    console.print(_time(result))
    console.print(
        f" > a step takes {duration(result.predicted_seconds)} on {result.world_size} x {result.machine.name} "
        f"(simulated), MFU {100 * result.mfu:.1f} %{' of the bf16 peak' if result.config.model.fp8_format else ''}"
    )
    if jitter:
        console.print(f" > {unequal(result, jitter)}")
    if result.machine.is_gpu:
        for line in _runtime(result):
            console.print(f" > {line}")
    for reason in result.reasons:
        console.print(f" > does not fit: {reason}")
    for line in verdict(result):
        console.print(f" > {line}")


ALLOCATORS = {
    "default": "PyTorch's default allocator",
    "expandable_segments": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
}


def verdict(result: DryRun) -> list[str]:
    """For each of the allocator's settings, whether the step fits on the device of the rank that needs most."""
    machine, sizes = result.machine, [needed(result, report) for report in result.ranks]
    if not all(sizes):
        spare = machine.usable_memory - max(report.figures.device_peak for report in result.ranks)
        return [f"the step fits, with {readable(spare)} of device memory to spare"] if result.fits else []
    lines = []
    for setting, name in ALLOCATORS.items():
        spare = machine.memory - max(by_setting[setting] for by_setting in sizes)
        text = f"the step fits, with {readable(spare)} of device memory to spare"
        if spare < 0:
            text = f"the step does not fit: {readable(-spare)} of device memory are missing"
        elif not result.fits:
            text = f"device memory is sufficient, with {readable(spare)} to spare"
        lines.append(f"with {name} {text}")
    return lines


def needed(result: DryRun, report: RankReport) -> dict[str, float]:
    """Device bytes that a rank's process needs, by the allocator's setting; empty: unknown."""
    if result.machine is None:
        return {}
    return needed_by_setting(report.reserved.bytes, result.config, result.world_size, result.machine)


def _runtime(result: DryRun) -> Iterator[str]:
    """Lines about the allocator's reserved memory, if it was scaled or full, and about memory outside of it."""
    yield from sorted({note for report in result.ranks for note in report.reserved.notes})
    for report in result.ranks:
        reserved = report.reserved
        if reserved.scaled:
            yield f"{name(report)}: reserved memory is scaled, not replayed, from {reserved.scaled}"
        for setting, retries in reserved.retries.items():
            if retries is None:
                yield f"{name(report)}: {LABELS.get(setting, f'reserved, {setting}')}: the device has too little memory"
            elif retries:
                yield f"{name(report)}: the device is full; the allocator's cache is freed {retries} times ({setting})"
    if result.config.optimizer.optimizer == "muon" and result.config.parallel.zero_stage == 1:
        yield "Muon: the simulated ranks update their shares of the matrices; ranks with larger shares take longer"
    own = runtime_memory(result.config, result.world_size, result.machine)
    yield (
        f"outside of PyTorch's allocator: context {readable(own.context)}, NCCL {readable(own.nccl)} for "
        f"{own.communicators} groups; inside it: cuBLAS' workspace, {readable(own.cublas)} "
        f"({own.source.partition(':')[0]}); the machine's file reserves {readable(result.machine.reserved)}"
    )


def unequal(result: DryRun, jitter: Jitter) -> str:
    """A sentence about a step on ranks whose speed varies.

    The dry run may have run only some layers; their waits are scaled to the complete step.
    """
    slowest = max(result.ranks, key=lambda report: report.figures.seconds["step"]).replayed
    waits = slowest.waits.scaled(result.predicted_seconds / slowest.seconds)
    return describe(spread(result.predicted_seconds, waits, result.world_size, jitter), jitter)


def _table(result: DryRun, title: str) -> Table:
    """An empty table with a column for each rank."""
    columns = (Column(name(report), justify="right") for report in result.ranks)
    return Table("", *columns, title=title, title_justify="left")


def _memory(result: DryRun) -> Table:
    table = _table(result, "memory of a rank at the peak of a step")
    kinds = [report.figures.device_peak_by_kind for report in result.ranks]
    for kind in DEVICE_KINDS:
        table.add_row(kind, *(readable(sizes.get(kind, 0)) for sizes in kinds))
    table.add_row("device, in all", *(readable(report.figures.device_peak) for report in result.ranks), style="bold")
    for setting in result.ranks[0].reserved.bytes:
        label = LABELS.get(setting, f"reserved, {setting}")
        table.add_row(label, *(readable(report.reserved.bytes[setting]) for report in result.ranks))
    table.add_row("host", *(readable(report.figures.host_peak) for report in result.ranks))
    return table


def _communication(result: DryRun) -> Table:
    table = _table(result, "bytes moved and FLOPs of a rank in a step")
    for axis in (*AXES, "other"):
        sent = [report.figures.communication[axis] for report in result.ranks]
        if any(sent):
            table.add_row(f"sent over {axis}", *(readable(size) for size in sent))
    for direction in ("to_host", "to_device"):
        moved = [report.figures.copies[direction] for report in result.ranks]
        if any(moved):
            table.add_row(f"copied {direction.replace('_', ' ')}", *(readable(size) for size in moved))
    table.add_row("TFLOP", *(f"{report.figures.flops / 1e12:,.3f}" for report in result.ranks))
    return table


def _time(result: DryRun) -> Table:
    table = _table(result, f"where a rank's time goes on {result.machine.name}")
    names = sorted({kind for report in result.ranks for kind in report.figures.exposed})
    for kind in names:
        table.add_row(kind, *(duration(report.figures.exposed.get(kind, 0.0)) for report in result.ranks))
    table.add_row("step", *(duration(report.figures.seconds["step"]) for report in result.ranks), style="bold")
    return table


def name(report: RankReport) -> str:
    """The rank in tables and messages."""
    return f"rank {report.rank} ({report.stage})"


def as_json(result: DryRun) -> dict[str, Any]:
    """The JSON of --dry-run-json; times in ms, memory in bytes."""
    return {
        "ranks": [
            {
                "rank": report.rank,
                "stage": report.stage,
                "device_peak_bytes": report.figures.device_peak,
                "device_peak_by_kind": report.figures.device_peak_by_kind,
                "host_peak_bytes": round(report.figures.host_peak),
                "reserved_bytes": {name: round(size) for name, size in report.reserved.bytes.items()},
                "reserved_retries": report.reserved.retries,
                "reserved_scaled_from": report.reserved.scaled or None,
                "needed_bytes": {name: round(size) for name, size in needed(result, report).items()},
                "flops": report.figures.flops,
                "communication_bytes": {axis: round(size) for axis, size in report.figures.communication.items()},
                "host_copy_bytes": {to: round(size) for to, size in report.figures.copies.items()},
                "exposed_ms": {kind: 1000 * seconds for kind, seconds in report.figures.exposed.items()},
                "layers": report.layers[0],
                "layers_run": report.layers[1],
                "micro_batches": report.micro_batches[0],
                "micro_batches_run": report.micro_batches[1],
            }
            for report in result.ranks
        ],
        "layers": [
            {"mask": str(kind.mask), "layers": kind.layers, "pairs": kind.pairs, "ring_bytes_forward": kind.sent}
            for kind in layer_traffic(result.config)
        ],
        "world_size": result.world_size,
        "gpu": result.machine.name if result.machine else None,
        "predicted_ms": None if result.predicted_seconds is None else 1000 * result.predicted_seconds,
        "mfu": result.mfu,
        "fits": result.fits,
        "reasons": list(result.reasons),
    }


def check_output(path: str | None) -> None:
    """Check that --dry-run-json can be written.

    Raises:
        Refusal: the file cannot be written.
    """
    if path is None:
        return
    with refusing(f"--dry-run-json {path} cannot be written", OSError):
        folder = os.path.dirname(path) or "."
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    if os.path.isdir(path):
        raise Refusal(f"--dry-run-json {path} is a folder: give a file")


def write(result: DryRun, path: str, events: int | None = None) -> list[str]:
    """Write the JSON file and next to it a picture of memory, a picture of each rank's time and a trace.

    Args:
        events: maximum number of events in the trace.

    Returns:
        The paths of all files.
    """
    replace_file(path, json.dumps(as_json(result), indent=1) + "\n")
    written = [path]
    stem = str(Path(path).with_suffix(""))
    profiles = [report.profile for report in result.ranks]
    titles = [f"{name(report)}{_ran(report)}" for report in result.ranks]
    draw(profiles, titles, f"{stem}_memory.png", by="events")
    written.append(f"{stem}_memory.png")
    for report in result.ranks:
        if report.replayed is not None and report.replayed.spans:
            from megatron.simulator.dry_run import timeline

            output = f"{stem}_time_rank{report.rank}.png"
            timeline.draw(report.replayed, output, f"{name(report)} on {result.machine.name}{_ran(report)}")
            written.append(output)
    if result.machine is not None:
        from megatron.simulator.dry_run.timeline import MOST_EVENTS, write_trace

        written.append(f"{stem}_trace.json.gz")
        write_trace(result, written[-1], events or MOST_EVENTS)
    return written


def _ran(report: RankReport) -> str:
    """The numbers of layers and micro-batches that ran, if not all did."""
    all_of_them = (("layers", report.layers), ("micro-batches", report.micro_batches))
    return "".join(f", {ran} of {total} {what}" for what, (total, ran) in all_of_them if ran != total)
