# SPDX-License-Identifier: Apache-2.0
"""Closed form of the memory for keys and values that a rank keeps during generation."""

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
    """Bytes of one rank: ``2 x layers x batch x rows x heads x head size x itemsize``.

    Rows are about ``(prompt + new tokens) / Ring``, heads are ``KV heads / (TP x Ulysses)``, at least 1. The exact
    numbers come from the plans that the layers themselves use.

    Args:
        grid: as the rank sees it (``Grid.at``); its pipeline stages hold the same number of layers.
        prompt: tokens of the longest prompt of the batch.
        new_tokens: longest answer; its last token is not kept.
        batch: prompts that are answered at the same time.
        itemsize: bytes of one number.
    """
    unit = length_unit(grid.ulysses.size, grid.ring.size, balance)
    layout = SequenceLayout(-(-prompt // unit) * unit, grid, balance)
    rows = CachePlan(layout, (prompt,), new_tokens - 1).rows(grid.ring.rank)
    heads, kv_heads = shape.heads // grid.tensor.size, max(shape.kv_heads // grid.tensor.size, 1)
    kept = cached_heads(heads, kv_heads, grid.ulysses.size, grid.ulysses.rank)
    return 2 * (shape.layers // grid.pipeline.size) * batch * rows * kept * shape.head_dim * itemsize
