# SPDX-License-Identifier: Apache-2.0
"""Functions that the Triton kernels share: loading rows, the score of each pair, masks and dropout.

Vectors over queries and keys have shapes that broadcast, [rows, 1] and [1, keys] or [1, rows] and [keys, 1], so that
the same code works for both orders.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.context_parallel.positions import position_dropout

LOG2E = tl.constexpr(1.4426950408889634)
FIRST = tl.constexpr(position_dropout.FIRST)
SECOND = tl.constexpr(position_dropout.SECOND)
LANES = tl.constexpr(position_dropout.LANES)
LEVELS = tl.constexpr(position_dropout.LEVELS)


@triton.jit
def block_pointers(
    base, first, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """Pointers to rows from ``first`` on. Offsets within the block have 32 bits, or 64 if WIDE."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if WIDE:
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    return base + tl.cast(first, tl.int64) * row_stride + (rows * row_stride + columns * column_stride)


@triton.jit
def inside(first, stop, ROWS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements of a block exist: rows before ``stop``, the first ``SIZE`` columns."""
    return ((first + tl.arange(0, ROWS)) < stop)[:, None] & (tl.arange(0, COLUMNS) < SIZE)[None, :]


@triton.jit
def load_rows(
    base,
    first,
    stop,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Rows from ``first`` on as [ROWS, COLUMNS]; 0 from column ``SIZE`` on and, if CHECKED, from row ``stop`` on."""
    at = block_pointers(base, first, row_stride, column_stride, ROWS, COLUMNS, WIDE)
    if CHECKED:
        return tl.load(at, mask=inside(first, stop, ROWS, SIZE, COLUMNS), other=0.0)
    elif SIZE < COLUMNS:
        return tl.load(at, mask=(tl.arange(0, COLUMNS) < SIZE)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_numbers(base, at, stop, other, CHECKED: tl.constexpr):
    """A number for each row ``at``; ``other`` from row ``stop`` on, if CHECKED."""
    if CHECKED:
        return tl.load(base + at, mask=at < stop, other=other)
    else:
        return tl.load(base + at)


@triton.jit
def bounds(entry, rows, stop):
    """For a range with edges: which rows are in its tile; the first row of the other side that each row meets, and how
    many it meets."""
    belongs = (rows >= tl.load(entry + 2)) & (rows < tl.load(entry + 3))
    lowest = tl.maximum(rows + tl.load(entry + 4), 0)
    count = tl.minimum(rows + tl.load(entry + 5), stop - 1) + 1 - lowest
    return belongs, lowest, tl.where(belongs, tl.maximum(count, 0), 0)


@triton.jit
def within(others, lowest, count):
    """Which rows ``others`` lie within the bounds: one comparison, because negative numbers are large when unsigned."""
    return (others - lowest).to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """``a @ b + total`` in fp32. The interpreter treats bf16 as integers, so for it both become fp32 first."""
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def rounded(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """fp32 rounded to the nearest in ``dtype``. The interpreter would truncate to bf16, so for it we round the bits."""
    if PRECISION == "interpreted" and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def log2_scores(products, factor, cap, slope, q_at, k_at, ALIBI: tl.constexpr, CAPPED: tl.constexpr):
    """Scores times log2(e), from ``q k^T``; and the tanh of the soft-cap, which the backward pass needs.

    The cap comes before ALiBi's bias, as in flash-attn. ``factor``: scale * log2(e); with a cap 2 * scale * log2(e) /
    softcap, and ``cap`` is softcap * log2(e).
    """
    scores = products * factor
    tangent = scores
    if CAPPED:
        tangent = 1 - 2 / (tl.exp2(scores) + 1)
        scores = tangent * cap
    if ALIBI:
        scores -= tl.abs(q_at - k_at).to(tl.float32) * slope
    return scores, tangent


@triton.jit
def bit_rows(entry, rows):
    """For a masked range: where the bits of each row begin, words per row, and the first row of the other side."""
    words = tl.load(entry + 7)
    return tl.load(entry + 6) + (rows - tl.load(entry + 2)) * words, words, tl.load(entry + 8)


@triton.jit
def marked(bits, at, words, first, belongs, STEP: tl.constexpr):
    """The mask [rows, STEP] for STEP rows of the other side, which begin at the tile's row ``first``.

    ``at`` and ``words`` are from `bit_rows`; ``belongs``: which rows are in the tile. A word is read once for all its
    pairs.
    """
    column = tl.arange(0, STEP)[None, :] + (first & 31)
    place = bits + (at + (first >> 5))
    word = tl.load(place, mask=belongs, other=0)[:, None]
    for index in tl.static_range(1, STEP // 32):
        further = tl.load(place + index, mask=belongs & ((first >> 5) + index < words + at * 0), other=0)
        word = tl.where(column >= 32 * index, further[:, None], word)
    return ((word >> (column & 31)) & 1) != 0


@triton.jit
def kept(row_key, column_key, k_at, threshold):
    """Whether dropout keeps a pair: `position_dropout.Dropout.kept`, for one element of a hash at a time."""
    lane = (k_at & (LANES - 1)).to(tl.uint64)
    return ((_hash(row_key, column_key) >> (lane * 16)) & (LEVELS - 1)).to(tl.int32) >= threshold


@triton.jit
def kept_in_groups(row_key, group_key, threshold, TOGETHER: tl.constexpr):
    """`kept` [rows, TOGETHER * n] for complete groups of keys.

    ``group_key``: of each group, if TOGETHER is 4: one hash for each group; or, if it is 2, twice of each group: each
    hash is computed twice, which can be faster than exchanging it between the threads that need its halves.
    """
    x = _hash(row_key[:, None], group_key[None, :])
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    low, high = x.to(tl.uint32), (x >> 32).to(tl.uint32)
    if TOGETHER == LANES:
        halves = tl.reshape(tl.join(low, high), (ROWS, 2 * COLUMNS))
    else:
        halves = tl.where(tl.arange(0, COLUMNS)[None, :] % 2 == 1, high, low)
    # The bits of two keys are compared at once: the addition carries if they reach the threshold.
    carried = (halves & 0x7FFF7FFF) + ((-threshold + LEVELS) * 0x10001).to(tl.uint32)
    bits = tl.reshape(tl.join(carried << 16, carried), (ROWS, TOGETHER * COLUMNS))
    return bits.to(tl.int32, bitcast=True) < 0


@triton.jit
def _hash(row_key, column_key):
    x = row_key.to(tl.uint64, bitcast=True) ^ column_key.to(tl.uint64, bitcast=True)
    x = x * FIRST
    x = x ^ (x >> 32)
    x = x * SECOND
    return x ^ (x >> 32)
