# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of queries to all ranges of keys that it attends to, merged into a running output.

This is FlashAttention-2's forward pass (arXiv 2307.08691). It begins with the running output, which counts as one
additional key: the key's score is the running lse, its value the running output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.context_parallel.attention.kernels.triton_kernels.triton_pairs import (
    LOG2E,
    bit_rows,
    block_pointers,
    bounds,
    dot,
    inside,
    kept,
    kept_in_groups,
    load_numbers,
    load_rows,
    log2_scores,
    marked,
    rounded,
    within,
)


@triton.jit
def _step(
    acc, top, total, products, visible, key, stop, v, v_ss, v_sd, q_at, k_places, row_key, column_keys, slope, factor,
    cap, threshold, VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, STEP: tl.constexpr, EDGE: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merges the keys from ``key`` on, whose products with the queries are known."""
    keys = key + tl.arange(0, STEP)
    k_at = keys
    if ALIBI or (DROPS and (EDGE or DROPS == 1)):
        k_at = load_numbers(k_places, keys, stop, 0, EDGE)
    scores, unit = products, factor  # multiplied later, by a fused multiply-add
    if ALIBI or CAPPED:
        scores, _ = log2_scores(products, factor, cap, slope, q_at[:, None], k_at[None, :], ALIBI, CAPPED)
        unit = 1.0
    if EDGE:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    above = new_top
    if EDGE:
        above = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores * unit - above[:, None])
    shrink = tl.exp2(top - above)
    total = total * shrink + tl.sum(p, 1)
    if DROPS > 1 and not EDGE:
        group_key = tl.load(column_keys + key + DROPS * tl.arange(0, STEP // DROPS))
        p = tl.where(kept_in_groups(row_key, group_key, threshold, DROPS), p, 0.0)
    elif DROPS:
        column_key = load_numbers(column_keys, keys, stop, 0, EDGE)
        p = tl.where(kept(row_key[:, None], column_key[None, :], k_at[None, :], threshold), p, 0.0)
    v_block = load_rows(v, key, stop, v_ss, v_sd, STEP, VALUE, VALUE_BLOCK, WIDE, EDGE)
    acc = dot(rounded(p, v_block.dtype, PRECISION), v_block, acc * shrink[:, None], PRECISION)
    return acc, new_top, total


@triton.jit
def _walk(
    acc, top, total, q, rows, k, v, ranges, first, last, bits, q_at, k_places, row_key, column_keys, slope,
    k_ss, k_sd, v_ss, v_sd, factor, cap, threshold,
    HEAD: tl.constexpr, VALUE: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, STEP: tl.constexpr,
    KIND: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, DROPS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes ranges of one KIND: 0: plain; 1: edges, where pairs are compared; 2: masked, where bits are read."""
    for index in range(first, last):
        entry = ranges + index * 9
        start, stop = tl.load(entry), tl.load(entry + 1)
        if KIND > 0:
            belongs, lowest, met = bounds(entry, rows, stop)
            if KIND == 2:
                at, words, first_key = bit_rows(entry, rows)
        for key in range(start, stop, STEP):
            k_block = load_rows(k, key, stop, k_ss, k_sd, STEP, HEAD, HEAD_BLOCK, WIDE, KIND > 0)
            products = dot(q, tl.trans(k_block), None, PRECISION)
            visible = rows
            if KIND > 0:
                visible = within((key + tl.arange(0, STEP))[None, :], lowest[:, None], met[:, None])
                if KIND == 2:
                    visible &= marked(bits, at, words, key - first_key, belongs, STEP)
            acc, top, total = _step(
                acc, top, total, products, visible, key, stop, v, v_ss, v_sd, q_at, k_places, row_key, column_keys,
                slope, factor, cap, threshold,
                VALUE, VALUE_BLOCK, STEP, KIND > 0, ALIBI, CAPPED, DROPS, WIDE, PRECISION,
            )  # fmt: skip
    return acc, top, total


@triton.jit(do_not_specialize=["q_rows", "k_rows", "threshold"])
def forward_kernel(
    q, k, v, out, lse, blocks, ranges, bits, slopes, q_places, k_places, row_keys, column_keys,
    q_ss, q_sb, q_sh, q_sd, k_ss, k_sb, k_sh, k_sd, v_ss, v_sb, v_sh, v_sd, out_ss, out_sb, out_sh, out_sd,
    lse_ss, lse_sb, lse_sh, q_rows, k_rows, factor, cap, threshold, kept_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
    PLAIN: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of ``BLOCK`` queries of one head: updates out (fp32) and lse (natural logarithm) in place.

    If FIRST, it writes both without reading them, and out may have another dtype. PLAIN: with plain ranges.
    """
    block = blocks + tl.program_id(0) * 5
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    first_row = tl.load(block) * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    here = rows < q_rows
    b, h = sample.to(tl.int64), head.to(tl.int64)
    q += b * q_sb + h * q_sh
    k += b * k_sb + h // GROUP * k_sh
    v += b * v_sb + h // GROUP * v_sh
    out += b * out_sb + h * out_sh
    lse += b * lse_sb + h * lse_sh + rows.to(tl.int64) * lse_ss

    out_at = block_pointers(out, first_row, out_ss, out_sd, BLOCK, VALUE_BLOCK, WIDE)
    out_here = inside(first_row, q_rows, BLOCK, VALUE, VALUE_BLOCK)
    if FIRST:
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, VALUE_BLOCK], tl.float32)
    else:
        before = tl.load(lse, mask=here, other=float("-inf"))
        top = before * LOG2E
        total = tl.where(before == float("-inf"), 0.0, 1.0)
        # The output of queries without any key so far is not read.
        acc = tl.load(out_at, mask=out_here & (total > 0)[:, None], other=0.0)
    q_block = load_rows(q, first_row, q_rows, q_ss, q_sd, BLOCK, HEAD, HEAD_BLOCK, WIDE, True)
    q_at, row_key, slope = rows, rows, 0.0
    if ALIBI:
        q_at = tl.load(q_places + rows, mask=here, other=0)
        slope = tl.load(slopes + head) * LOG2E
    if DROPS:
        row_key = tl.load(row_keys + tl.program_id(1).to(tl.int64) * q_rows + rows, mask=here, other=0)
        column_keys += b * k_rows
        acc = acc / kept_scale  # the result is multiplied by it at the end
    for kind in tl.static_range(0 if PLAIN else 1, 3 if MASKED else 2):
        acc, top, total = _walk(
            acc, top, total, q_block, rows, k, v, ranges, tl.load(block + 1 + kind), tl.load(block + 2 + kind), bits,
            q_at, k_places, row_key, column_keys, slope, k_ss, k_sd, v_ss, v_sd, factor, cap, threshold,
            HEAD, VALUE, HEAD_BLOCK, VALUE_BLOCK, STEP, kind, ALIBI, CAPPED, DROPS, WIDE, PRECISION,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # rows without keys
    if DROPS:
        acc = acc * kept_scale
    tl.store(out_at, rounded(acc / total[:, None], out.dtype.element_ty, PRECISION), mask=out_here)
    tl.store(lse, (top + tl.log2(total)) / LOG2E, mask=here)


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    out, lse, tile_out, tile_lse, to, out_ss, out_sb, out_sh, out_sd, lse_ss, lse_sb, lse_sh, tile_out_ss, tile_out_sb,
    tile_out_sh, tile_out_sd, tile_lse_ss, tile_lse_sb, tile_lse_sh, to_ss, to_sb, to_sh, to_sd, rows,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Merges a tile's output into ``out``, for ``BLOCK`` rows of a head: writes ``to`` and updates lse in place."""
    first = tl.program_id(0) * BLOCK
    b, h = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    number = first + tl.arange(0, BLOCK)
    row, here = number.to(tl.int64), number < rows
    at = lse + b * lse_sb + h * lse_sh + row * lse_ss
    before = tl.load(at, mask=here, other=float("-inf"))
    other = tl.load(tile_lse + b * tile_lse_sb + h * tile_lse_sh + row * tile_lse_ss, mask=here, other=float("-inf"))
    empty, above = other == float("-inf"), other - before  # rows without a key of the tile stay as they are
    share = tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp(-above)))
    total = tl.maximum(before, other) + tl.log(1.0 + tl.exp(-tl.abs(above)))
    tl.store(at, tl.where(empty, before, total), mask=here)
    a = load_rows(out + b * out_sb + h * out_sh, first, rows, out_ss, out_sd, BLOCK, VALUE, VALUE_BLOCK, WIDE, True)
    tile_out += b * tile_out_sb + h * tile_out_sh
    c = load_rows(tile_out, first, rows, tile_out_ss, tile_out_sd, BLOCK, VALUE, VALUE_BLOCK, WIDE, True)
    a = a.to(tl.float32)
    to_at = block_pointers(to + b * to_sb + h * to_sh, first, to_ss, to_sd, BLOCK, VALUE_BLOCK, WIDE)
    merged = a - share[:, None] * (a - c.to(tl.float32))
    tl.store(to_at, merged, mask=inside(first, rows, BLOCK, VALUE, VALUE_BLOCK))
