# SPDX-License-Identifier: Apache-2.0
"""What a rank's step comes to, in numbers that are linear in its layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megatron.simulator.cost.trace import HostCopy, Trace
from megatron.simulator.dry_run.one_rank import RankStep
from megatron.simulator.dry_run.replay import Replay


@dataclass(frozen=True)
class Figures:
    """What a rank's step comes to; every number is linear in its layers.

    Attributes:
        peaks: most device bytes in each phase, by kind.
        host_peak: bytes of host memory.
        flops: executed, recompute and all, 2 a multiply-add; of attention the pairs that are computed.
        communication: bytes sent, by axis.
        copies: bytes between device and host, by direction.
        seconds, exposed, busy: of the replay on a machine; empty without one.
    """

    peaks: dict[str, dict[str, float]]
    host_peak: float
    flops: float
    communication: dict[str, float]
    copies: dict[str, float]
    seconds: dict[str, float]
    exposed: dict[str, float]
    busy: dict[str, float]

    @property
    def device_peak_by_kind(self) -> dict[str, int]:
        fullest = max(self.peaks.values(), key=lambda kinds: sum(kinds.values()))
        return {kind: round(size) for kind, size in fullest.items()}

    @property
    def device_peak(self) -> int:
        return sum(self.device_peak_by_kind.values())


def figures(done: RankStep, replayed: Replay | None) -> Figures:
    """Figures of a step, from what ran and what that stands for; ``replayed`` is the whole step."""
    trace, times = done.trace, done.repeat.times if done.repeat else 0
    more = done.repeat.more(trace) if done.repeat else Trace()
    sent, sent_more = trace.communication_bytes(), more.communication_bytes()
    copies, copies_more = copied(trace), copied(more)
    seconds, exposed, busy = {}, {}, {}
    if replayed:
        optimizer = next((begin for name, begin in replayed.phases if name == "optimizer"), replayed.seconds)
        seconds = {"step": replayed.seconds, "passes": optimizer}
        exposed, busy = replayed.exposed, replayed.busy
    return Figures(
        done.peaks,
        done.host_peak,
        trace.flops() + times * more.flops(),
        {axis: size + times * sent_more[axis] for axis, size in sent.items()},
        {to: size + times * copies_more[to] for to, size in copies.items()},
        seconds,
        exposed,
        busy,
    )


def copied(trace: Trace) -> dict[str, float]:
    """Bytes copied between device and host, by direction."""
    copies = {"to_host": 0.0, "to_device": 0.0}
    for event in trace.events:
        if isinstance(event, HostCopy):
            copies[event.direction] += event.bytes * event.count
    return copies


def grown(a: Figures, b: Figures, few: int, more: int, all_of_them: int) -> Figures:
    """Figures of ``all_of_them`` layers, from those of ``few`` and ``more``."""
    share = (all_of_them - few) / (more - few)

    def along(x: Any, y: Any) -> Any:
        if isinstance(y, dict):
            return {key: along(x.get(key, 0 if not isinstance(value, dict) else {}), value) for key, value in y.items()}
        return x + share * (y - x)

    return Figures(**{field.name: along(getattr(a, field.name), getattr(b, field.name)) for field in fields(Figures)})
