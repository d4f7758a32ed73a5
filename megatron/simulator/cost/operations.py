# SPDX-License-Identifier: Apache-2.0
"""Kernels and transfers by their sizes: the words in which a closed form writes down a layer."""

from __future__ import annotations

from megatron.formulas.strategy import Group
from megatron.simulator.cost.trace import Collective, Kernel, Transfer

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
