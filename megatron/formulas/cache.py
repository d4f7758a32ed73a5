# SPDX-License-Identifier: Apache-2.0
"""Keys and values that a rank keeps while a model generates."""

from __future__ import annotations

from megatron.context_parallel.attention.kv_cache import CachePlan, cached_heads
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout, length_unit
from megatron.formulas.strategy import Shape


def cache_bytes(
    shape: Shape,
    grid: Grid,
    *,
    prompt: int,
    new_tokens: int,
    batch: int = 1,
    itemsize: int = 2,
    balance: str = "zigzag",
) -> int:
    """``2 x layers x batch x rows x heads x head size x itemsize``, each as one rank has it.

    Rows are about ``(prompt + new tokens) / Ring``, heads ``KV heads / (TP x Ulysses)``, at least 1; the plans of the
    layers themselves say what is kept exactly.

    Args:
        grid: seen from that rank (``Grid.at``); layers are cut evenly over its pipeline.
        prompt: tokens of the longest prompt of the batch.
        new_tokens: longest answer; its last token is not kept.
        batch: prompts at once.
        itemsize: bytes of a number.
    """
    unit = length_unit(grid.ulysses.size, grid.ring.size, balance)
    layout = SequenceLayout(-(-prompt // unit) * unit, grid, balance)
    rows = CachePlan(layout, (prompt,), new_tokens - 1).rows(grid.ring.rank)
    heads, kv_heads = shape.heads // grid.tensor.size, max(shape.kv_heads // grid.tensor.size, 1)
    kept = cached_heads(heads, kv_heads, grid.ulysses.size, grid.ulysses.rank)
    return 2 * (shape.layers // grid.pipeline.size) * batch * rows * kept * shape.head_dim * itemsize
