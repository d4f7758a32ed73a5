# SPDX-License-Identifier: Apache-2.0
"""What a rank does in a step, in program order: recorded by a dry run or written down by a closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.formulas.strategy import Group

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "p2p"]
AXES = ("tp", "ulysses", "ring", "dp", "pp")


@dataclass(slots=True)
class Kernel:
    """Work of the compute stream.

    Attributes:
        kind: ``gemm`` and ``attention`` are bound by arithmetic, ``memory`` by the device's memory.
        flops: 2 a multiply-add; of attention, only the pairs that are computed.
        bytes: read and written.
        shape: ``gemm``: (batch, m, n, k). ``attention``: (queries, keys, query heads, head size), batch in the heads.
        itemsize: bytes of an element; tells bf16 from fp32.
        count: this many times in a row.
    """

    name: str
    kind: Literal["gemm", "attention", "memory"]
    flops: float
    bytes: float
    shape: tuple[float, ...] = ()
    itemsize: int = 2
    backward: bool = False
    count: int = 1


@dataclass(slots=True)
class Transfer:
    """A collective, or a send and receive.

    Attributes:
        bytes: sent by this rank, if each piece goes the shortest way: (n-1)/n of the whole for all_gather and
            reduce_scatter, twice that for all_reduce, what is for others in all_to_all.
        ticket: what a :class:`Wait` names; None: the compute stream waits at once.
        excess: bytes of a receive that arrive beyond those which the rank sends at the same time. Links are full
            duplex, so a hop of a ring takes as long as its larger direction.
    """

    kind: Collective
    axis: str
    group: Group
    bytes: float
    ticket: int | None = None
    count: int = 1
    excess: float = 0.0


@dataclass(slots=True)
class HostCopy:
    """Between device and host memory."""

    direction: Literal["to_host", "to_device"]
    bytes: float
    ticket: int | None = None
    count: int = 1


@dataclass(slots=True)
class Wait:
    """The compute stream goes on when these tickets are done."""

    tickets: tuple[int, ...]


@dataclass(slots=True)
class Phase:
    """forward, backward or optimizer begins."""

    name: str


Event = Kernel | Transfer | HostCopy | Wait | Phase


@dataclass
class Trace:
    """One rank's step."""

    events: list[Event] = field(default_factory=list)

    def communication_bytes(self) -> dict[str, int]:
        """Bytes sent, by axis of the grid; ``other`` are groups across several axes."""
        total = dict.fromkeys((*AXES, "other"), 0)
        for event in self.events:
            if isinstance(event, Transfer):
                total[event.axis if event.axis in AXES else "other"] += event.bytes * event.count
        return {axis: round(size) for axis, size in total.items()}

    def flops(self) -> float:
        return sum(event.flops * event.count for event in self.events if isinstance(event, Kernel))
