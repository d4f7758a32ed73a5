# SPDX-License-Identifier: Apache-2.0
"""Work of linear-attention and SSM layers (Gated DeltaNet, Mamba2).

What lies between the two projections: many small kernels. They were counted in dry runs of such layers on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.decisions.state_exchange import KERNEL_BLOCK
from megatron.formulas.kinds.state_figures import States, by_heads_bytes, exchange_bytes, halo_bytes, states_of
from megatron.formulas.strategy import Group, Strategy, Workload
from megatron.simulator.cost.kinds.attention_operations import LayerWork, output, output_grad
from megatron.simulator.cost.operations import BF16, COUNTED, FP32, Segment, collective, gemm, memory
from megatron.simulator.cost.row_operations import Rows
from megatron.simulator.cost.trace import Kernel, Transfer

__all__ = ["mix", "mix_grad", "output", "output_grad", "project", "project_grad"]


def project(rows: Rows) -> list[Segment]:
    """Norm and the first projection."""
    width = rows.shape.linear.projected // rows.strategy.tensor
    product = gemm("qkv", rows.tokens, width, rows.shape.hidden)
    return [rows.run(rows.norm(rows.shape.hidden)), *rows.enter(), rows.run(product)]


def project_grad(rows: Rows) -> list[Segment]:
    """The backward pass of :func:`project`."""
    width = rows.shape.linear.projected // rows.strategy.tensor
    return [*rows.column_grad("qkv", width), rows.run(rows.norm(rows.shape.hidden, backward=True))]


def mix(work: LayerWork, *, saving: bool, kept: bool = False) -> list[Segment]:
    """The forward pass between the projections; nothing of it is kept apart."""
    return state_mixer(work.workload, work.strategy)


def mix_grad(work: LayerWork) -> list[Segment]:
    """The backward pass of :func:`mix`."""
    return state_mixer(work.workload, work.strategy, backward=True)


class Counted(NamedTuple):
    """The kernels of a pass.

    Attributes:
        bytes: for each token and number of a key head, of a head's key, of a value, for each pair of tokens of a block,
            and for each number of a block's states: of kernels bound by memory.
        products: the same of products.
        kernels: numbers of the first kernels, at all and for each segment of a span, and of products of a segment.
        flops: for each token and head, over block x keys, block x values, keys x values.
    """

    bytes: tuple[int, ...]
    products: tuple[int, ...]
    kernels: tuple[int, int, int]
    flops: tuple[int, int, int]


# (forward, backward) of outputs with convolution and norm; and what a state from another rank adds: columns of maps,
# what tokens read of that state, and the product of this with the gradient of the outputs
DELTA = (
    Counted((248, 80, 212, 70, 5), (0, 24, 16, 12, 8), (51, 46, 5), (4, 2, 4)),
    Counted((829, 280, 578, 211, 26), (0, 76, 44, 36, 20), (113, 126, 14), (14, 6, 10)),
)
DELTA_MAPS = (
    Counted((0, 40, 20, 0, 4), (0, 16, 4, 4, 8), (2, 4, 2), (2, 0, 6)),
    Counted((0, 6, 6, 0, 0), (0, 4, 4, 0, 0), (2, 3, 1), (0, 0, 2)),
)
MAMBA = (
    Counted((218, 0, 208, 72, 5), (15, 0, 12, 4, 4), (39, 40, 3), (2, 2, 2)),
    Counted((741, 0, 568, 178, 24), (49, 0, 33, 8, 15), (106, 103, 8), (6, 4, 6)),
)
MAMBA_MAPS = (
    Counted((8, 40, 40, 0, 9), (0, 4, 4, 0, 0), (2, 7, 1), (0, 0, 2)),
    Counted((0, 6, 6, 0, 0), (0, 4, 4, 0, 0), (2, 3, 1), (0, 0, 2)),
)


def state_mixer(workload: Workload, strategy: Strategy, backward: bool = False) -> list[Segment]:
    """Convolution, states and gated norm of a linear-attention or SSM layer, with what is sent."""
    states = states_of(workload, strategy, BF16)
    linear = workload.shape.linear
    counted, of_maps = (DELTA, DELTA_MAPS) if linear.delta else (MAMBA, MAMBA_MAPS)
    mixes = Segment(_state_kernels(states, counted[backward], backward))
    halo = halo_bytes(workload, strategy, BF16)[backward]
    everyone = Group(strategy.context, strategy.tensor)
    rows = Segment((), (Transfer("all_to_all", "cp", everyone, halo),)) if halo else Segment()
    there = maps = sent = Segment()
    if states.by_heads:
        moved = by_heads_bytes(states, strategy.ulysses)[backward]
        packs = memory("pack", 4 * moved, backward=backward)
        there = Segment((packs,), (Transfer("all_to_all", "ulysses", strategy.group("ulysses"), moved),))
    if states.counts.hops:
        axis, group = ("ring", strategy.group("ring")) if states.by_heads else ("cp", everyone)
        maps = Segment(_state_kernels(states, of_maps[backward], backward))
        if states.relay:
            hops, state = states.counts.hops, states.exchanged.state  # this rank makes only some of the hops
            mean = exchange_bytes(states) / hops
            sent = Segment((), (Transfer("p2p", axis, group, mean, count=hops, excess=state - mean),))
        else:
            sent = Segment((), (Transfer("all_gather", axis, group, exchange_bytes(states)),))
    norm = Segment()
    if backward and strategy.tensor > 1 and linear.delta:  # TP ranks normalize other heads with the same weight
        size = BF16 * states.sizes.values
        norm = Segment((), (collective("all_reduce", "tp", strategy.group("tp"), size),))
    order = (norm, there, maps, sent, mixes, rows) if backward else (rows, there, maps, sent, mixes)
    return [one for one in order if one.kernels or one.transfers]


def _state_kernels(states: States, counted: Counted, backward: bool) -> tuple[Kernel, Kernel]:
    s, block = states.sizes, KERNEL_BLOCK
    tokens = s.rows * s.batch
    of = tokens * s.key_heads * s.keys, *(tokens * s.heads * n for n in (s.keys, s.values, block))
    of = *of, tokens * s.heads * s.keys * s.values / block
    segments, (outside, inside, gemms) = states.segments, counted.kernels
    kernels, gemms = outside + inside * segments, gemms * segments
    size, read = (sum(a * b for a, b in zip(each, of)) for each in (counted.bytes, counted.products))
    pairs = block * s.keys, block * s.values, s.keys * s.values
    flops = tokens * s.heads * sum(a * b for a, b in zip(counted.flops, pairs)) / gemms
    shape = (tokens * s.heads / block / segments, block, s.values, s.keys)
    product = Kernel(COUNTED, "gemm", flops, read / gemms, shape, FP32, backward, gemms)
    return memory(COUNTED, size / kernels, backward=backward, count=kernels), product
