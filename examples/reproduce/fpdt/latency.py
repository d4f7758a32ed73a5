# SPDX-License-Identifier: Apache-2.0
"""How long the parts of FPDT's pipeline take (figure 10), by simulation: one layer of 32 heads of 128 on 4 GPUs."""

from __future__ import annotations

from examples.reproduce.report import Row
from megatron.formulas.strategy import Group
from megatron.simulator.cost.operations import BF16, collective, tile
from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.trace import HostCopy, Transfer
from megatron.simulator.machines.machine import Machine

GPUS, HEADS, HEAD_DIM = 4, 32, 128
LENGTHS = tuple(4096 << n for n in range(8))


def figure_10_rows(machine: Machine) -> list[Row]:
    """Milliseconds: all-to-all of one tensor, attention of the whole sequence, fetching keys and values."""
    crossing = first_covered(machine)
    told = f"attention takes longer than fetching from {crossing // 1024}K tokens on; the text says 32K to 64K"
    return [
        Row(
            {"part": part, "seq_length": length},
            None,
            round(1e3 * took, 3),
            "simulated",
            "ms",
            told * (n == 3 and length == LENGTHS[0]),
        )
        for length in LENGTHS
        for n, (part, took) in enumerate(latencies(machine, length).items())
    ]


def latencies(machine: Machine, length: int) -> dict[str, float]:
    """Seconds, by what it is."""
    heads, group = HEADS // GPUS, Group(GPUS)
    tensor = BF16 * length * heads * HEAD_DIM  # of q, k, v or out on one GPU, before or after the all-to-all
    forward, backward = (
        kernel_seconds(tile(length, length, heads, HEAD_DIM, length**2 / 2, backward=way), machine)
        for way in (False, True)
    )
    scatter = Transfer("p2p", "ulysses", group, 2.0 * tensor * (GPUS - 1))
    return {
        "all-to-all": transfer_seconds(collective("all_to_all", "ulysses", group, tensor), machine),
        "attention forward": forward,
        "attention backward": backward,
        "fetch, each GPU its own": copy_seconds(HostCopy("to_device", 2.0 * tensor), machine),
        "fetch by one GPU, then scatter": copy_seconds(HostCopy("to_device", 2.0 * tensor * GPUS), machine)
        + transfer_seconds(scatter, machine),
    }


def first_covered(machine: Machine) -> int:
    """The shortest length, in steps of 1K, whose forward attention takes as long as fetching."""
    length = 1024
    while True:
        found = latencies(machine, length)
        if found["attention forward"] >= found["fetch, each GPU its own"]:
            return length
        length += 1024
