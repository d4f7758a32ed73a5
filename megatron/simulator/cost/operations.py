# SPDX-License-Identifier: Apache-2.0
"""Kernels and transfers by their sizes: the words in which a closed form writes down a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.formulas.strategy import Group
from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.trace import Collective, HostCopy, Kernel, Transfer
from megatron.simulator.machines.machine import Machine

BF16, FP32 = 2, 4  # bytes of an element
MANY_TILES = "triton_attention"  # what runs where a mask makes many small tiles (docs/inside/attention-kernels.md)


def gemm(name: str, m: float, n: float, k: float, *, backward: bool = False, count: int = 1) -> Kernel:
    """[m, k] times [k, n] in bf16; of pieces that are not all alike, the mean."""
    return Kernel(
        name, "gemm", 2.0 * m * n * k, float(BF16 * (m * k + k * n + m * n)), (1, m, n, k), BF16, backward, count
    )


def memory(name: str, size: float, *, backward: bool = False, count: int = 1) -> Kernel:
    """Reads and writes ``size`` bytes."""
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
) -> Kernel:
    """A flash attention kernel on ``pairs`` of ``queries`` x ``keys``; batch counts in ``heads``.

    Two matrix products forward; five backward, the scores being computed again (FlashAttention-2 paper, section 3.1),
    and by Triton's kernel for many tiles, which is launched twice, twice.
    """
    many = name == MANY_TILES
    flops = ((7.0 if many else 10.0) if backward else 4.0) * pairs * heads * head_dim
    count *= 2 if backward and many else 1
    moved = BF16 * heads * head_dim * ((4 if backward else 2) * queries + (4 if backward else 2) * keys)
    return Kernel(name, "attention", flops, float(moved), (queries, keys, heads, head_dim), BF16, backward, count)


def collective(kind: Collective, axis: str, group: Group, whole: float, *, count: int = 1) -> Transfer:
    """``whole``: the bytes of the tensor that is gathered or reduced; of all_to_all, what a rank holds of it."""
    share = (group.size - 1) / group.size
    return Transfer(kind, axis, group, whole * share * (2 if kind == "all_reduce" else 1), count=count)


# What happens side by side, and how long it takes: the slowest of the streams decides.


@dataclass(slots=True)
class Segment:
    """Work that begins and ends together, ``count`` times in a row.

    A transfer that nothing overlaps is a segment of its own. ``count`` is not whole where segments are not all alike.
    """

    kernels: tuple[Kernel, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    copies: tuple[HostCopy, ...] = ()
    count: float = 1


Parts = dict[str, float]
"""Seconds by what they went to: a kind of kernel, an axis that was waited for, ``host``."""


# What the host launches of our program, over the kernels of a closed form: counted in dry runs, 1.2 to 1.5 times as
# many, and more around what travels over Ulysses and rings, whose tensors are packed, unpacked and merged.
# Within a fourth of 12 strategies, FPDT among them.
OWN_LAUNCHES, AROUND = 1.35, {"ulysses": 9, "ring": 9}


def price(segments: Iterable[Segment], machine: Machine) -> Parts:
    """Seconds of all of them."""
    return price_and_launches(segments, machine)[0]


def price_and_launches(segments: Iterable[Segment], machine: Machine) -> tuple[Parts, float]:
    """Seconds of all of them, and what the host of our program launches for them.

    Kernels count as what they are. A transfer beside them slows them down by a share of itself
    (:attr:`Calibration.overlap`); that, and what streams take beyond the kernels, counts
    as waiting for the slowest stream.
    """
    parts: Parts = {}
    launches = 0.0
    felt = 1 - machine.calibration.overlap
    for segment in segments:
        count = segment.count
        compute = launched = 0.0
        for kernel in segment.kernels:
            seconds = kernel_seconds(kernel, machine)
            launched += kernel.count
            compute += seconds
            parts[kernel.kind] = parts.get(kernel.kind, 0.0) + seconds * count
        launched *= OWN_LAUNCHES
        travel = 0.0
        for transfer in segment.transfers:
            launched += transfer.count * AROUND.get(transfer.axis, 1)
            travel += transfer_seconds(transfer, machine)
        if travel:
            waited = max(felt * travel, travel - compute)
            axis = segment.transfers[0].axis
            parts[axis] = parts.get(axis, 0.0) + waited * count
            compute += waited
        launches += count * (launched + len(segment.copies))
        if segment.copies:
            ways = {"to_host": 0.0, "to_device": 0.0}
            for copy in segment.copies:
                ways[copy.direction] += copy_seconds(copy, machine)
            waited = max(ways.values()) - compute
            if waited > 0:
                parts["host"] = parts.get("host", 0.0) + waited * count
    return parts, launches


def add(total: Parts, parts: Parts, times: float = 1.0) -> Parts:
    """Add ``parts``, ``times`` over, to ``total``; returns ``total``."""
    for name, seconds in parts.items():
        total[name] = total.get(name, 0.0) + seconds * times
    return total
