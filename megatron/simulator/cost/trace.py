# SPDX-License-Identifier: Apache-2.0
"""Events of a rank's step in program order, recorded by a dry run or made by a closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.formulas.strategy import Group

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "p2p"]
AXES = ("tp", "ulysses", "ring", "cp", "ep", "dp", "pp")


@dataclass(slots=True)
class Kernel:
    """Work of the compute stream."""

    name: str
    # `gemm` and `attention` are bound by arithmetic, `memory` by the device's memory
    kind: Literal["gemm", "attention", "memory"]
    flops: float  # 2 for each multiply-add; attention counts only pairs that are computed
    bytes: float  # read and written
    # `gemm`: (batch, m, n, k). `attention`: (queries, keys, batch x query heads, head size).
    shape: tuple[float, ...] = ()
    itemsize: int = 2  # bytes of an element, from which the dtype follows
    backward: bool = False
    count: int = 1  # repetitions in a row


@dataclass(slots=True)
class Transfer:
    """A collective, or a send and receive."""

    kind: Collective
    axis: str
    group: Group
    # sent by this rank, if no byte is sent twice: (n-1)/n of the gathered or reduced tensor for all_gather and
    # reduce_scatter, twice that for all_reduce, the other ranks' part for all_to_all
    bytes: float
    ticket: int | None = None  # a Wait names it; None: the compute stream waits immediately
    count: int = 1
    # bytes received minus bytes sent at the same time, if positive. Links are full duplex, so a hop of a ring takes as
    # long as its larger direction.
    excess: float = 0.0


@dataclass(slots=True)
class HostCopy:
    """A copy between device and host memory."""

    direction: Literal["to_host", "to_device"]
    bytes: float
    ticket: int | None = None
    count: int = 1


@dataclass(slots=True)
class Wait:
    """The compute stream waits until the transfers and copies with these tickets are finished."""

    tickets: tuple[int, ...]


@dataclass(slots=True)
class Phase:
    """The phase ``name`` begins: forward, backward or optimizer."""

    name: str


Event = Kernel | Transfer | HostCopy | Wait | Phase


@dataclass
class Trace:
    """One rank's step."""

    events: list[Event] = field(default_factory=list)

    def communication_bytes(self) -> dict[str, int]:
        """Bytes sent, by axis of the grid; ``other``: groups over several axes."""
        total = dict.fromkeys((*AXES, "other"), 0)
        for event in self.events:
            if isinstance(event, Transfer):
                total[event.axis if event.axis in AXES else "other"] += event.bytes * event.count
        return {axis: round(size) for axis, size in total.items()}

    def flops(self) -> float:
        return sum(event.flops * event.count for event in self.events if isinstance(event, Kernel))
