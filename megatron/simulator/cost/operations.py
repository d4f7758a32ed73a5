# SPDX-License-Identifier: Apache-2.0
"""Building blocks of closed forms: kernels and transfers by size, and segments of concurrent work with their price."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.formulas.strategy import Group
from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.trace import Collective, HostCopy, Kernel, Transfer
from megatron.simulator.machines.machine import Machine

BF16, FP32 = 2, 4  # bytes of an element
MANY_TILES = "triton_attention"  # the kernel for masks with many small tiles (docs/inside/attention-kernels.md)


def gemm(name: str, m: float, n: float, k: float, *, backward: bool = False, count: int = 1) -> Kernel:
    """[m, k] times [k, n] in bf16; the mean, if ``count`` products differ in size."""
    return Kernel(
        name, "gemm", 2.0 * m * n * k, float(BF16 * (m * k + k * n + m * n)), (1, m, n, k), BF16, backward, count
    )


def memory(name: str, size: float, *, backward: bool = False, count: int = 1) -> Kernel:
    """A kernel that reads and writes ``size`` bytes in all."""
    return Kernel(name, "memory", 0.0, float(size), backward=backward, count=count)


def tile(
    queries: float,
    keys: float,
    heads: int,
    head_dim: int,
    pairs: float,
    *,
    backward: bool = False,
    count: int = 1,
    name: str = "attention",
    value_dim: int = 0,
) -> Kernel:
    """A flash attention kernel on ``pairs`` of ``queries`` x ``keys``; ``heads`` is batch x heads.

    ``value_dim``: the size of a value head, if it differs from that of a key head.

    Forward has two matrix products. Backward has five, because it computes scores again (FlashAttention-2 paper,
    section 3.1). Triton's kernel for many tiles has two backward launches, and computes scores in both.
    """
    many = name == MANY_TILES
    value = value_dim or head_dim
    again = 3.5 if many else 5.0  # products; of two of them one side has values or their gradients
    flops = 2 * ((again - 2) * head_dim + 2 * value if backward else head_dim + value) * pairs * heads
    count *= 2 if backward and many else 1
    moved = BF16 * heads * (head_dim + value) * (2 if backward else 1) * (queries + keys)
    return Kernel(name, "attention", flops, float(moved), (queries, keys, heads, head_dim), BF16, backward, count)


def collective(kind: Collective, axis: str, group: Group, whole: float, *, count: int = 1) -> Transfer:
    """A collective. ``whole``: bytes of the gathered or reduced tensor; for all_to_all, of the rank's input."""
    share = (group.size - 1) / group.size
    return Transfer(kind, axis, group, whole * share * (2 if kind == "all_reduce" else 1), count=count)


@dataclass(slots=True)
class Segment:
    """Work that runs concurrently, ``count`` times in a row: the slowest of the streams decides how long it takes.

    A transfer that nothing overlaps is a separate segment. ``count`` may be a fraction, as a mean.
    """

    kernels: tuple[Kernel, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    copies: tuple[HostCopy, ...] = ()
    count: float = 1


Parts = dict[str, float]
"""Seconds by cause: a kind of kernel, an axis whose transfers were waited for, or ``host`` for host copies."""


# Launches of this program's host per kernel of a closed form, and additional launches per transfer, whose tensors are
# packed, unpacked and merged. Dry runs of 12 strategies, FPDT among them, have 1.2 to 1.5 per kernel; the estimate is
# within 25 % of their launches.
LAUNCHES_PER_KERNEL, LAUNCHES_PER_TRANSFER = 1.35, {"ulysses": 9, "ring": 9, "ep": 9}
COUNTED = "states"  # kernels of this name were counted one by one


def price(segments: Iterable[Segment], machine: Machine) -> Parts:
    """Seconds of all segments."""
    return price_and_launches(segments, machine)[0]


def price_and_launches(segments: Iterable[Segment], machine: Machine) -> tuple[Parts, float]:
    """(seconds of all segments, launches that this program's host makes for them).

    Kernels count under their kind. A transfer slows concurrent kernels down by a share of its time
    (:attr:`Calibration.overlap`). This share, and the time that other streams need beyond the kernels, count as waiting
    for the slowest stream.
    """
    parts: Parts = {}
    launches = 0.0
    slowdown = 1 - machine.calibration.overlap
    for segment in segments:
        count = segment.count
        compute = launched = 0.0
        for kernel in segment.kernels:
            seconds = kernel_seconds(kernel, machine)
            launched += kernel.count * (1.0 if kernel.name == COUNTED else LAUNCHES_PER_KERNEL)
            compute += seconds
            parts[kernel.kind] = parts.get(kernel.kind, 0.0) + seconds * count
        travel = 0.0
        for transfer in segment.transfers:
            launched += transfer.count * LAUNCHES_PER_TRANSFER.get(transfer.axis, 1)
            travel += transfer_seconds(transfer, machine)
        if travel:
            waited = max(slowdown * travel, travel - compute)
            axis = segment.transfers[0].axis
            parts[axis] = parts.get(axis, 0.0) + waited * count
            compute += waited
        launches += count * (launched + len(segment.copies))
        if segment.copies:
            directions = {"to_host": 0.0, "to_device": 0.0}
            for copy in segment.copies:
                directions[copy.direction] += copy_seconds(copy, machine)
            waited = max(directions.values()) - compute
            if waited > 0:
                parts["host"] = parts.get("host", 0.0) + waited * count
    return parts, launches


def add(total: Parts, parts: Parts, times: float = 1.0) -> Parts:
    """Add ``parts`` x ``times`` to ``total`` in place; returns ``total``."""
    for name, seconds in parts.items():
        total[name] = total.get(name, 0.0) + seconds * times
    return total
