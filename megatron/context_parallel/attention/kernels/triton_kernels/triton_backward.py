# SPDX-License-Identifier: Apache-2.0
"""Gradients of a block of queries, and of a block of keys, summed over all tiles that the block is in.

This is FlashAttention-2's backward pass (arXiv 2307.08691). In two passes only one program writes each sum, so that
results are deterministic, and each pair needs seven products. In one pass it needs five: the programs of key blocks
also add to dq, by atomic additions in no fixed order. All tiles use the *final* lse and delta, so that their gradients
can be added. This is done in place, in fp32; the first launch writes instead, and the only one in the final dtype.
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


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    out, dout, delta, out_ss, out_sb, out_sh, out_sd, dout_ss, dout_sb, dout_sh, dout_sd, delta_ss, delta_sb, delta_sh,
    rows, HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``rowsum(dout * out)`` in fp32, for ``BLOCK`` rows of a head."""
    first = tl.program_id(0) * BLOCK
    b, h = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    out += b * out_sb + h * out_sh
    dout += b * dout_sb + h * dout_sh
    a = load_rows(out, first, rows, out_ss, out_sd, BLOCK, VALUE, VALUE_BLOCK, WIDE, True)
    d = load_rows(dout, first, rows, dout_ss, dout_sd, BLOCK, VALUE, VALUE_BLOCK, WIDE, True)
    number = first + tl.arange(0, BLOCK)
    at = delta + b * delta_sb + h * delta_sh + number.to(tl.int64) * delta_ss
    tl.store(at, tl.sum(a.to(tl.float32) * d.to(tl.float32), 1), mask=number < rows)


@triton.jit
def _weights(
    products, lse, factor, cap, slope, q_at, k_at, visible, keeps, kept_scale,
    EDGE: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """For each pair: the softmax weight, the derivative of the score with respect to the product, dropout's factor."""
    scores, tangent = log2_scores(products, factor, cap, slope, q_at, k_at, ALIBI, CAPPED)
    p = tl.exp2(scores - lse)
    if EDGE:
        p = tl.where(visible, p, 0.0)
    steepness = tangent
    if CAPPED:
        steepness = 1 - tangent * tangent
    drop = p
    if DROPS:
        drop = tl.where(keeps, kept_scale, 0.0)
    return p, steepness, drop


@triton.jit
def _score_gradient(p, steepness, drop, dp, delta, scale, CAPPED: tl.constexpr, DROPS: tl.constexpr):
    """The gradient of each product of q and k; ``delta`` is already multiplied by ``scale``."""
    if DROPS:
        dp = dp * drop
    ds = p * (dp * scale - delta)
    if CAPPED:
        ds = ds * steepness
    return ds


@triton.jit
def _put(at, gradient, mask, FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """Adds to a sum in fp32; if FIRST, writes the gradient in the memory's dtype."""
    if FIRST:
        tl.store(at, rounded(gradient, at.dtype.element_ty, PRECISION), mask=mask)
    else:
        tl.store(at, tl.load(at, mask=mask) + gradient, mask=mask)


@triton.jit
def _prepare(
    lse, delta, ready_lse, ready_delta, lse_ss, lse_sb, lse_sh, delta_ss, delta_sb, delta_sh, rows, q_rows,
    scale, HEADS: tl.constexpr,
):  # fmt: skip
    """Stores, and returns for these rows of a head, whether they have keys, lse * log2(e) and delta * scale.

    ``ready_lse``, ``ready_delta``: [b, heads, q_rows], contiguous. Without keys lse is infinite and delta 0.
    """
    b, h, row = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64), rows.to(tl.int64)
    exist = rows < q_rows
    found = tl.load(lse + b * lse_sb + h * lse_sh + row * lse_ss, mask=exist, other=float("-inf")) * LOG2E
    here = exist & (found > float("-inf"))  # other queries have no keys, and their output may be undefined
    found = tl.where(here, found, float("inf"))
    delta_here = tl.load(delta + b * delta_sb + h * delta_sh + row * delta_ss, mask=here, other=0.0) * scale
    ready = tl.program_id(1).to(tl.int64) * q_rows + rows
    tl.store(ready_lse + ready, found, mask=exist)
    tl.store(ready_delta + ready, delta_here, mask=exist)
    return here, found, delta_here


@triton.jit(do_not_specialize=["q_rows"])
def ready_kernel(
    lse, delta, ready_lse, ready_delta, lse_ss, lse_sb, lse_sh, delta_ss, delta_sb, delta_sh, q_rows, scale,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `query_kernel` prepares for `key_kernel`, where that computes the whole backward pass."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _prepare(
        lse, delta, ready_lse, ready_delta, lse_ss, lse_sb, lse_sh, delta_ss, delta_sb, delta_sh, rows, q_rows, scale,
        HEADS,
    )  # fmt: skip


@triton.jit
def _walk_keys(
    dq, q, dout, lse, delta, rows, k, v, k_blocks, v_blocks, k_first, v_first, ranges, first, last, bits, q_at,
    k_places, row_key, column_keys, slope, k_ss, k_sd, v_ss, v_sd, scale, factor, cap, threshold, kept_scale,
    HEAD: tl.constexpr, VALUE: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, STEP: tl.constexpr,
    KIND: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, DROPS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for index in range(first, last):
        entry = ranges + index * 9
        start, stop = tl.load(entry), tl.load(entry + 1)
        if KIND > 0:
            belongs, lowest, met = bounds(entry, rows, stop)
            if KIND == 2:
                at, words, first_key = bit_rows(entry, rows)
        for key in range(start, stop, STEP):
            if k_blocks is not None:
                k_block, v_block = k_blocks.load([key, k_first]), v_blocks.load([key, v_first])
            else:
                k_block = load_rows(k, key, stop, k_ss, k_sd, STEP, HEAD, HEAD_BLOCK, WIDE, KIND > 0)
                v_block = load_rows(v, key, stop, v_ss, v_sd, STEP, VALUE, VALUE_BLOCK, WIDE, KIND > 0)
            products = dot(q, tl.trans(k_block), None, PRECISION)
            keys = key + tl.arange(0, STEP)
            k_at = keys
            visible = keys[None, :]
            keeps = visible
            if ALIBI or (DROPS and (KIND > 0 or DROPS == 1)):
                k_at = load_numbers(k_places, keys, stop, 0, KIND > 0)
            if DROPS > 1 and KIND == 0:
                group_key = tl.load(column_keys + key + DROPS * tl.arange(0, STEP // DROPS))
                keeps = kept_in_groups(row_key, group_key, threshold, DROPS)
            elif DROPS:
                column_key = load_numbers(column_keys, keys, stop, 0, KIND > 0)
                keeps = kept(row_key[:, None], column_key[None, :], k_at[None, :], threshold)
            if KIND > 0:
                visible = within(keys[None, :], lowest[:, None], met[:, None])
                if KIND == 2:
                    visible &= marked(bits, at, words, key - first_key, belongs, STEP)
            p, steepness, drop = _weights(
                products, lse[:, None], factor, cap, slope, q_at[:, None], k_at[None, :], visible, keeps, kept_scale,
                KIND > 0, ALIBI, CAPPED, DROPS,
            )  # fmt: skip
            dp = dot(dout, tl.trans(v_block), None, PRECISION)
            ds = _score_gradient(p, steepness, drop, dp, delta[:, None], scale, CAPPED, DROPS)
            dq = dot(rounded(ds, k_block.dtype, PRECISION), k_block, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=["q_rows", "k_rows", "threshold"])
def query_kernel(
    q, k, v, dout, lse, delta, dq, ready_lse, ready_delta, blocks, ranges, bits, slopes, q_places, k_places,
    row_keys, column_keys, k_blocks, v_blocks,
    q_ss, q_sb, q_sh, q_sd, k_ss, k_sb, k_sh, k_sd, v_ss, v_sb, v_sh, v_sd, dout_ss, dout_sb, dout_sh, dout_sd,
    lse_ss, lse_sb, lse_sh, delta_ss, delta_sb, delta_sh, dq_ss, dq_sb, dq_sh, dq_sd,
    q_rows, k_rows, scale, factor, cap, threshold, kept_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
    PLAIN: tl.constexpr, ALIBI: tl.constexpr, CAPPED: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to dq of one block of ``BLOCK`` queries of one head, and prepares its lse and delta for `key_kernel`."""
    block = blocks + tl.program_id(0) * 5
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    first_row = tl.load(block) * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    b, h = sample.to(tl.int64), head.to(tl.int64)
    k += b * k_sb + h // GROUP * k_sh
    v += b * v_sb + h // GROUP * v_sh
    q_block = load_rows(q + b * q_sb + h * q_sh, first_row, q_rows, q_ss, q_sd, BLOCK, HEAD, HEAD_BLOCK, WIDE, True)
    dout_block = load_rows(
        dout + b * dout_sb + h * dout_sh, first_row, q_rows, dout_ss, dout_sd, BLOCK, VALUE, VALUE_BLOCK, WIDE, True
    ).to(q_block.dtype)
    here, lse_here, delta_here = _prepare(
        lse, delta, ready_lse, ready_delta, lse_ss, lse_sb, lse_sh, delta_ss, delta_sb, delta_sh, rows, q_rows, scale,
        HEADS,
    )  # fmt: skip
    q_at, row_key, slope = rows, rows, 0.0
    if ALIBI:
        q_at = tl.load(q_places + rows, mask=here, other=0)
        slope = tl.load(slopes + head) * LOG2E
    if DROPS:
        row_key = tl.load(row_keys + tl.program_id(1).to(tl.int64) * q_rows + rows, mask=here, other=0)
        column_keys += b * k_rows
    total = tl.zeros([BLOCK, HEAD_BLOCK], tl.float32)
    for kind in tl.static_range(0 if PLAIN else 1, 3 if MASKED else 2):
        total = _walk_keys(
            total, q_block, dout_block, lse_here, delta_here, rows, k, v, k_blocks, v_blocks,
            sample * k_sb + head // GROUP * k_sh, sample * v_sb + head // GROUP * v_sh, ranges,
            tl.load(block + 1 + kind), tl.load(block + 2 + kind), bits, q_at, k_places, row_key, column_keys, slope,
            k_ss, k_sd, v_ss, v_sd, scale, factor, cap, threshold, kept_scale,
            HEAD, VALUE, HEAD_BLOCK, VALUE_BLOCK, STEP, kind, ALIBI, CAPPED, DROPS, WIDE, PRECISION,
        )  # fmt: skip
    at = block_pointers(dq + b * dq_sb + h * dq_sh, first_row, dq_ss, dq_sd, BLOCK, HEAD_BLOCK, WIDE)
    mask = inside(first_row, q_rows, BLOCK, HEAD, HEAD_BLOCK)
    _put(at, total, mask, FIRST, PRECISION)


@triton.jit
def _walk_queries(
    dk, dv, k, v, first_column, q, dout, q_blocks, dout_blocks, q_first, dout_first, dq, ready_lse, ready_delta,
    ranges, first, last, bits, q_places, k_at, row_keys, column_keys, k_rows, slope, q_ss, q_sd, dout_ss, dout_sd,
    dq_ss, dq_sd, scale, factor, cap, threshold, kept_scale,
    HEAD: tl.constexpr, VALUE: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, DQ: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr,
    ALIBI: tl.constexpr, CAPPED: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores are transposed, [keys, queries], so that nothing has to be transposed before the second product."""
    columns = first_column + tl.arange(0, BLOCK)
    IN_GROUPS: tl.constexpr = DROPS > 1 and KIND == 0
    if DROPS and not IN_GROUPS:
        column_key = tl.load(column_keys + columns, mask=columns < k_rows, other=0)
    for index in range(first, last):
        entry = ranges + index * 9
        start, stop = tl.load(entry), tl.load(entry + 1)
        if KIND > 0:
            belongs, lowest, met = bounds(entry, columns, stop)
            if KIND == 2:
                at, words, first_query = bit_rows(entry, columns)
        for query in range(start, stop, STEP):
            rows = query + tl.arange(0, STEP)
            if q_blocks is not None:
                q_block = q_blocks.load([query, q_first])
            else:
                q_block = load_rows(q, query, stop, q_ss, q_sd, STEP, HEAD, HEAD_BLOCK, WIDE, KIND > 0)
            lse_here = load_numbers(ready_lse, rows, stop, float("inf"), KIND > 0)
            products = dot(k, tl.trans(q_block), None, PRECISION)
            if q_blocks is not None:
                dout_block = dout_blocks.load([query, dout_first])
            else:
                dout_block = load_rows(dout, query, stop, dout_ss, dout_sd, STEP, VALUE, VALUE_BLOCK, WIDE, KIND > 0)
            dout_block = dout_block.to(q_block.dtype)
            if DK and k.dtype != tl.float32:  # issued here, so that tensor cores compute during the softmax weights
                dp = dot(v, tl.trans(dout_block), None, PRECISION)
            q_at = rows
            visible = rows[None, :]
            keeps = visible
            if ALIBI:
                q_at = load_numbers(q_places, rows, stop, 0, KIND > 0)
            if DROPS:
                row_key = load_numbers(row_keys, rows, stop, 0, KIND > 0)
                if IN_GROUPS:  # loading these in every step saves registers
                    group = first_column + DROPS * tl.arange(0, BLOCK // DROPS)
                    group_key = tl.load(column_keys + group, mask=group < k_rows, other=0)
                    keeps = tl.trans(kept_in_groups(row_key, group_key, threshold, DROPS))
                else:
                    keeps = kept(row_key[None, :], column_key[:, None], k_at[:, None], threshold)
            if KIND > 0:
                visible = within(rows[None, :], lowest[:, None], met[:, None])
                if KIND == 2:
                    visible &= marked(bits, at, words, query - first_query, belongs, STEP)
            p, steepness, drop = _weights(
                products, lse_here[None, :], factor, cap, slope, q_at[None, :], k_at[:, None], visible, keeps,
                kept_scale, KIND > 0, ALIBI, CAPPED, DROPS,
            )  # fmt: skip
            if DV:
                weights = p
                if DROPS:
                    weights = p * drop
                dv = dot(rounded(weights, dout_block.dtype, PRECISION), dout_block, dv, PRECISION)
            if DK:
                if k.dtype == tl.float32:  # no tensor cores; computing dp late needs fewer registers
                    dp = dot(v, tl.trans(dout_block), None, PRECISION)
                delta_here = load_numbers(ready_delta, rows, stop, 0.0, KIND > 0)
                ds = _score_gradient(p, steepness, drop, dp, delta_here[None, :], scale, CAPPED, DROPS)
                ds = rounded(ds, q_block.dtype, PRECISION)
                dk = dot(ds, q_block, dk, PRECISION)
                if DQ:
                    more = dot(tl.trans(ds), k, None, PRECISION)
                    dq_at = block_pointers(dq, query, dq_ss, dq_sd, STEP, HEAD_BLOCK, WIDE)
                    if KIND > 0 or HEAD < HEAD_BLOCK:
                        tl.atomic_add(dq_at, more, mask=inside(query, stop, STEP, HEAD, HEAD_BLOCK), sem="relaxed")
                    else:
                        tl.atomic_add(dq_at, more, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["q_rows", "k_rows", "threshold"])
def key_kernel(
    q, k, v, dout, ready_lse, ready_delta, dq, dk, dv, blocks, ranges, bits, slopes, q_places, k_places,
    row_keys, column_keys, q_blocks, dout_blocks,
    q_ss, q_sb, q_sh, q_sd, k_ss, k_sb, k_sh, k_sd, v_ss, v_sb, v_sh, v_sd, dout_ss, dout_sb, dout_sh, dout_sd,
    dq_ss, dq_sb, dq_sh, dq_sd, dk_ss, dk_sb, dk_sh, dk_sd, dv_ss, dv_sb, dv_sh, dv_sd,
    q_rows, k_rows, scale, factor, cap, threshold, kept_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DQ: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr, PLAIN: tl.constexpr, ALIBI: tl.constexpr,
    CAPPED: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to dk (if DK) and dv (if DV) of one block of ``BLOCK`` keys of one key head, from all its query heads.

    If DQ, it also adds to dq of all queries that the block meets.
    """
    block = blocks + tl.program_id(0) * 5
    key_heads = HEADS // GROUP
    sample, key_head = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads
    first_row = tl.load(block) * BLOCK
    columns = first_row + tl.arange(0, BLOCK)
    here = columns < k_rows
    b, h = sample.to(tl.int64), key_head.to(tl.int64)
    k_block = load_rows(k + b * k_sb + h * k_sh, first_row, k_rows, k_ss, k_sd, BLOCK, HEAD, HEAD_BLOCK, WIDE, True)
    v_block = load_rows(v + b * v_sb + h * v_sh, first_row, k_rows, v_ss, v_sd, BLOCK, VALUE, VALUE_BLOCK, WIDE, True)
    k_at, slope = columns, 0.0
    if ALIBI or DROPS:
        k_at = tl.load(k_places + columns, mask=here, other=0)
    if DROPS:
        column_keys += b * k_rows
    dk_total = tl.zeros([BLOCK, HEAD_BLOCK] if DK else [1, 1], tl.float32)
    dv_total = tl.zeros([BLOCK, VALUE_BLOCK] if DV else [1, 1], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        wide = head.to(tl.int64)
        q_head = q + b * q_sb + wide * q_sh
        dout_head = dout + b * dout_sb + wide * dout_sh
        ready = (b * HEADS + wide) * q_rows
        row_keys_head = row_keys
        if DROPS:
            row_keys_head = row_keys + ready
        if ALIBI:
            slope = tl.load(slopes + head) * LOG2E
        dq_head = dq
        if DQ:
            dq_head = dq + b * dq_sb + wide * dq_sh
        for kind in tl.static_range(0 if PLAIN else 1, 3 if MASKED else 2):
            dk_total, dv_total = _walk_queries(
                dk_total, dv_total, k_block, v_block, first_row, q_head, dout_head, q_blocks, dout_blocks,
                sample * q_sb + head * q_sh, sample * dout_sb + head * dout_sh, dq_head, ready_lse + ready,
                ready_delta + ready, ranges, tl.load(block + 1 + kind), tl.load(block + 2 + kind), bits, q_places, k_at,
                row_keys_head, column_keys, k_rows, slope, q_ss, q_sd, dout_ss, dout_sd, dq_ss, dq_sd, scale, factor,
                cap, threshold, kept_scale, HEAD, VALUE, HEAD_BLOCK, VALUE_BLOCK, BLOCK, STEP, DQ, DK, DV, kind, ALIBI,
                CAPPED, DROPS, WIDE, PRECISION,
            )  # fmt: skip
    if DK:
        at = block_pointers(dk + b * dk_sb + h * dk_sh, first_row, dk_ss, dk_sd, BLOCK, HEAD_BLOCK, WIDE)
        mask = inside(first_row, k_rows, BLOCK, HEAD, HEAD_BLOCK)
        _put(at, dk_total, mask, FIRST, PRECISION)
    if DV:
        at = block_pointers(dv + b * dv_sb + h * dv_sh, first_row, dv_ss, dv_sd, BLOCK, VALUE_BLOCK, WIDE)
        mask = inside(first_row, k_rows, BLOCK, VALUE, VALUE_BLOCK)
        _put(at, dv_total, mask, FIRST, PRECISION)
