# SPDX-License-Identifier: Apache-2.0
"""Which way FPDT's loops go, and how many of its pieces are taken together."""

from __future__ import annotations

IN_FLIGHT = 2  # device tensors on their way to the host that may wait for their copy: bounds the memory they hold
PARTS = 4  # of a product that is added to a sum


def goes_by_keys(heads: int, kv_heads: int, itemsize: int) -> bool:
    """Whether the backward loop by keys moves fewer bytes to and from the host than the one by queries.

    A tile by queries moves k, v and their fp32 gradients, in and out; by keys it moves q, out, dout and dq.
    """
    return heads * (3 * itemsize + 8) < kv_heads * (2 * itemsize + 16)


def pieces_together(rows: int, hidden_size: int, itemsize: int) -> int:
    """How many chunks, of so many rows of logits each, are put together: the gradients of their logits take at most a
    quarter of the weight's fp32 sum (2,048 rows in bf16 at a hidden size of 4,096)."""
    return max(1, hidden_size // itemsize // rows)
