# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on a machine: when everything happens, what waits for what, where the step's time goes.

Streams, as on a GPU: ``compute``; one for each axis's communication; ``to_device`` and ``to_host``, the two directions
of the host link. Each works off its events in order. A transfer or copy starts when its stream is free, and not before
the compute that precedes it in the trace. With a ticket it runs beside compute until a Wait names the ticket; without
one compute waits at once. While a transfer runs beside compute, NCCL's kernels take part of the device: that part of
its time (1 - ``calibration.overlap``) compute stands still, and counts as waiting for the transfer's axis.

One rank is replayed: others are as fast, and ready when it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.trace import HostCopy, Kernel, Phase, Trace, Transfer, Wait
from megatron.simulator.machines.machine import Machine

COMPUTE = ("gemm", "attention", "memory")
HOST = {"to_device": "host load", "to_host": "host store"}


class Interval(NamedTuple):
    """Something that a stream did; seconds since the step began."""

    stream: str
    kind: str
    begin: float
    end: float
    name: str


@dataclass
class Replay:
    """How a step went.

    Attributes:
        seconds: of the step; it ends when all streams have.
        busy: seconds of work by stream.
        exposed: where the step's seconds go: compute by kind (gemm, attention, memory), else what compute waited for
            (an axis, ``host load``, ``host store``). They add up to ``seconds``.
        phases: when each began.
        spans: in the order of the trace; none if they were not kept.
    """

    seconds: float
    busy: dict[str, float]
    exposed: dict[str, float]
    phases: list[tuple[str, float]]
    spans: list[Interval]

    def mfu(self, model_flops: float, peak: float) -> float:
        """Share of ``peak`` FLOP/s that the model's FLOPs of this rank make: no recompute, by convention."""
        return model_flops / (self.seconds * peak) if self.seconds else 0.0


def replay(trace: Trace, machine: Machine, keep_spans: bool = True) -> Replay:
    """
    Raises:
        ValueError: a Wait names a ticket that nothing before it has issued.
    """
    now = 0.0  # of the compute stream
    free: dict[str, float] = {}
    busy: dict[str, float] = {"compute": 0.0}
    exposed: dict[str, float] = {}
    done: dict[int, tuple[float, str]] = {}
    phases: list[tuple[str, float]] = []
    spans: list[Interval] = []
    felt = 1.0 - machine.calibration.overlap
    for event in trace.events:
        if isinstance(event, Kernel):
            took = kernel_seconds(event, machine)
            busy["compute"] += took
            exposed[event.kind] = exposed.get(event.kind, 0.0) + took
            if keep_spans:
                spans.append(Interval("compute", event.kind, now, now + took, event.name))
            now += took
        elif isinstance(event, Transfer | HostCopy):
            if isinstance(event, Transfer):
                took, stream, name = transfer_seconds(event, machine), event.axis, event.kind
            else:
                took, stream, name = copy_seconds(event, machine), HOST[event.direction], event.direction
            begin = max(now, free.get(stream, 0.0))
            end = free[stream] = begin + took
            busy[stream] = busy.get(stream, 0.0) + took
            if keep_spans and took:
                spans.append(Interval(stream, stream, begin, end, name))
            if event.ticket is None:
                stop = end
            else:
                done[event.ticket] = (end, stream)
                stop = now + felt * took if isinstance(event, Transfer) else now
            if stop > now:
                exposed[stream] = exposed.get(stream, 0.0) + stop - now
                now = stop
        elif isinstance(event, Wait):
            for end, stream in sorted(ended(ticket, done) for ticket in event.tickets):
                if end > now:
                    exposed[stream] = exposed.get(stream, 0.0) + end - now
                    now = end
        elif isinstance(event, Phase):
            phases.append((event.name, now))
    for end, stream in sorted((end, stream) for stream, end in free.items()):  # what nobody has waited for
        if end > now:
            exposed[stream] = exposed.get(stream, 0.0) + end - now
            now = end
    return Replay(now, busy, exposed, phases, spans)


def ended(ticket: int, done: dict[int, tuple[float, str]]) -> tuple[float, str]:
    if ticket not in done:
        raise ValueError(f"the trace waits for ticket {ticket}, which nothing before it has issued")
    return done[ticket]


def table(result: Replay, machine: Machine, model_flops: float | None = None) -> Table:
    """Where the time goes: a row for each kind of compute and each stream beside it, the largest share first.

    With ``model_flops`` of this rank, also MFU against the peak of the machine's dtype.
    """
    title = f"one step on {machine.name}: {duration(result.seconds)}"
    if model_flops is not None:
        title += f", MFU {100 * result.mfu(model_flops, machine.peak[machine.dtype]):.1f} %"
    out = Table("", "busy", "step's time", "share", title=title, title_justify="left")
    for column in out.columns[1:]:
        column.justify = "right"
    names = {*result.exposed, *result.busy} - {"compute"}
    for name in sorted(names, key=lambda name: (name not in COMPUTE, -result.exposed.get(name, 0.0), name)):
        exposed = result.exposed.get(name, 0.0)
        work = exposed if name in COMPUTE else result.busy[name]
        label = f"compute: {name}" if name in COMPUTE else name if name in HOST.values() else f"communication: {name}"
        share = exposed / result.seconds if result.seconds else 0.0
        out.add_row(label, duration(work), duration(exposed), f"{100 * share:.1f} %")
    return out


def duration(seconds: float) -> str:
    """Three digits and a unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.{2 if seconds < 10 * size else 1 if seconds < 100 * size else 0}f} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0"
