# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for rules without a delta (Mamba2, decay), which read q, k, v and gates as they are.

States go through the blocks of a segment one after the other, forward (`decay_states`) and backward
(`decay_state_grads`), a program for each head. All else is done for each block by itself (`decay_outputs`,
`decay_value_grads`, `decay_key_grads`): there a program has all heads that share a key head, and computes the products
of queries and keys once for them. States are kept only at the borders of blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.context_parallel.attention.kernels.triton_kernels.triton_pairs import dot, rounded


@triton.jit
def _rows(x, at, row, column, stride_row, stride_column, rows, COLUMNS: tl.constexpr):
    """The block [row, column] that begins at element ``at``; 0 outside."""
    inside = (row[:, None] < rows) & (column[None, :] < COLUMNS)
    return tl.load(x + at + row[:, None].to(tl.int64) * stride_row + column[None, :] * stride_column, inside, other=0.0)


@triton.jit
def _gate(x, at, row, stride_row, rows):
    return tl.load(x + at + row.to(tl.int64) * stride_row, row < rows, other=0.0).to(tl.float32)


@triton.jit
def _state(x, at, key, value, KEYS: tl.constexpr, VALUES: tl.constexpr):
    inside = (key[:, None] < KEYS) & (value[None, :] < VALUES)
    return tl.load(x + at + key[:, None] * VALUES + value[None, :], inside, other=0.0)


@triton.jit
def _keep_state(x, at, state, key, value, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr):
    inside = (key[:, None] < KEYS) & (value[None, :] < VALUES)
    tl.store(x + at + key[:, None] * VALUES + value[None, :], rounded(state, x.dtype.element_ty, PRECISION), inside)


@triton.jit
def _sums(g):
    """(sums of finite log-decays up to each token, how many tokens up to it forget all) of a block's log-decays, and
    both after the last token."""
    forgets = g == float("-inf")
    finite = tl.where(forgets, 0.0, g)
    count = forgets.to(tl.int32)
    return tl.cumsum(finite, 0), tl.cumsum(count, 0), tl.sum(finite, 0), tl.sum(count, 0)


@triton.jit
def _entry(sums, part):
    """The decay from the block's begin to each token."""
    return tl.where(part == 0, tl.exp(tl.where(part == 0, sums, 0.0)), 0.0)


@triton.jit
def _left(sums, part, total, parts):
    """The decay from each token to the block's end."""
    last = part == parts
    return tl.where(last, tl.exp(tl.where(last, total - sums, 0.0)), 0.0)


@triton.jit
def _between(sums, part, row):
    """The decay from token j to token i [i, j]; 0 for later j, and where a token between them forgets all."""
    known = (row[:, None] >= row[None, :]) & (part[:, None] == part[None, :])
    return tl.where(known, tl.exp(tl.where(known, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit
def decay_states(
    k, v, g, beta, start, every, end, length, blocks,
    k_ss, k_sb, k_sh, k_sd, v_ss, v_sb, v_sh, v_sd, g_ss, g_sb, g_sh, beta_ss, beta_sb, beta_sh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the state of one head, through all blocks; ``every``: the states before each."""
    place = tl.program_id(1).to(tl.int64)
    sample, head = place // HEADS, place % HEADS
    row, key = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK)
    value = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    size = KEYS * VALUES
    state = _state(start, place * size, key, value, KEYS, VALUES).to(tl.float32)
    k_at, v_at = sample * k_sb + head // GROUP * k_sh, sample * v_sb + head * v_sh
    g_at, beta_at = sample * g_sb + head * g_sh, sample * beta_sb + head * beta_sh
    for index in range(blocks):
        token = index * ROWS + row
        _keep_state(every, (place * blocks + index) * size, state, key, value, KEYS, VALUES, PRECISION)
        sums, part, total, parts = _sums(_gate(g, g_at, token, g_ss, length))
        factor = _left(sums, part, total, parts) * _gate(beta, beta_at, token, beta_ss, length)
        keys = _rows(k, k_at, token, key, k_ss, k_sd, length, KEYS)
        values = _rows(v, v_at, token, value, v_ss, v_sd, length, VALUES)
        state *= tl.where(parts == 0, tl.exp(total), 0.0)
        written = rounded(values.to(tl.float32) * factor[:, None], k.dtype.element_ty, PRECISION)
        state = dot(tl.trans(keys), written, state, PRECISION)
    if end is not None:
        _keep_state(end, place * size, state, key, value, KEYS, VALUES, PRECISION)


@triton.jit
def decay_state_grads(
    q, dout, g, before, end, every, products, start, length, blocks,
    q_ss, q_sb, q_sh, q_sd, dout_ss, dout_sb, dout_sh, dout_sd, g_ss, g_sb, g_sh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The reverse: a state's gradient from the last block to the first.

    ``every``: those of the states after each block. ``products``: the sum of such a gradient times the state ``before``
    the block, [sample and head, block, program of the same head].
    """
    place = tl.program_id(1).to(tl.int64)
    sample, head = place // HEADS, place % HEADS
    row, key = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK)
    value = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    size = KEYS * VALUES
    dstate = _state(end, place * size, key, value, KEYS, VALUES).to(tl.float32)
    q_at, dout_at = sample * q_sb + head // GROUP * q_sh, sample * dout_sb + head * dout_sh
    g_at = sample * g_sb + head * g_sh
    for step in range(blocks):
        index = blocks - 1 - step
        token = index * ROWS + row
        at = place * blocks + index
        _keep_state(every, at * size, dstate, key, value, KEYS, VALUES, PRECISION)
        product = dstate * _state(before, at * size, key, value, KEYS, VALUES).to(tl.float32)
        tl.store(products + at * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(product, 1), 0))
        sums, part, total, parts = _sums(_gate(g, g_at, token, g_ss, length))
        queries = _rows(q, q_at, token, key, q_ss, q_sd, length, KEYS)
        given = _rows(dout, dout_at, token, value, dout_ss, dout_sd, length, VALUES)
        dstate *= tl.where(parts == 0, tl.exp(total), 0.0)
        read = rounded(given.to(tl.float32) * _entry(sums, part)[:, None], q.dtype.element_ty, PRECISION)
        dstate = dot(tl.trans(queries), read, dstate, PRECISION)
    _keep_state(start, place * size, dstate, key, value, KEYS, VALUES, PRECISION)


@triton.jit
def decay_outputs(
    q, k, v, g, beta, skip, every, out, length, blocks,
    q_ss, q_sb, q_sh, q_sd, k_ss, k_sb, k_sh, k_sd, v_ss, v_sb, v_sh, v_sd, g_ss, g_sb, g_sh,
    beta_ss, beta_sb, beta_sh, skip_ss, skip_sb, skip_sh, out_ss, out_sb, out_sh, out_sd,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SKIP: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a block, of all heads that share a key head."""
    index, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sample, key_head = place // KEY_HEADS, place % KEY_HEADS
    row, key, value = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    token = index * ROWS + row
    queries = _rows(q, sample * q_sb + key_head * q_sh, token, key, q_ss, q_sd, length, KEYS)
    keys = _rows(k, sample * k_sb + key_head * k_sh, token, key, k_ss, k_sd, length, KEYS)
    pairs = dot(queries, tl.trans(keys), None, PRECISION)
    for one in range(GROUP):
        head = key_head * GROUP + one
        sums, part, _, _ = _sums(_gate(g, sample * g_sb + head * g_sh, token, g_ss, length))
        factor = _gate(beta, sample * beta_sb + head * beta_sh, token, beta_ss, length)
        values = _rows(v, sample * v_sb + head * v_sh, token, value, v_ss, v_sd, length, VALUES)
        at = ((sample * KEY_HEADS * GROUP + head) * blocks + index) * KEYS * VALUES
        state = _state(every, at, key, value, KEYS, VALUES)
        result = dot(queries, state, None, PRECISION) * _entry(sums, part)[:, None]
        inside = pairs * _between(sums, part, row) * factor[None, :]
        result = dot(rounded(inside, v.dtype.element_ty, PRECISION), values, result, PRECISION)
        if SKIP:
            more = _gate(skip, sample * skip_sb + head * skip_sh, token, skip_ss, length)
            result += more[:, None] * values.to(tl.float32)
        at = sample * out_sb + head * out_sh
        _keep_rows(out, at, result, token, value, out_ss, out_sd, length, VALUES, PRECISION)


@triton.jit
def _keep_rows(
    x, at, result, token, column, stride_row, stride_column, rows, COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):
    inside = (token[:, None] < rows) & (column[None, :] < COLUMNS)
    to = x + at + token[:, None].to(tl.int64) * stride_row + column[None, :] * stride_column
    tl.store(to, rounded(result, x.dtype.element_ty, PRECISION), inside)


@triton.jit
def _keep_gate(x, at, result, token, stride_row, rows):
    tl.store(x + at + token.to(tl.int64) * stride_row, result.to(x.dtype.element_ty), token < rows)


@triton.jit
def decay_value_grads(
    q, k, v, g, beta, skip, dout, every, after, products, dv, dg, dbeta, dskip, length, blocks, columns,
    q_ss, q_sb, q_sh, q_sd, k_ss, k_sb, k_sh, k_sd, v_ss, v_sb, v_sh, v_sd, g_ss, g_sb, g_sh,
    beta_ss, beta_sb, beta_sh, skip_ss, skip_sb, skip_sh, dout_ss, dout_sb, dout_sh, dout_sd,
    dv_ss, dv_sb, dv_sh, dv_sd, dg_ss, dg_sb, dg_sh, dbeta_ss, dbeta_sb, dbeta_sh, dskip_ss, dskip_sb, dskip_sh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SKIP: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a block's values and gates, of one head; ``products``: see `decay_state_grads`."""
    index, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sample, head = place // HEADS, place % HEADS
    row, key, value = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    token = index * ROWS + row
    gate = _gate(g, sample * g_sb + head * g_sh, token, g_ss, length)
    sums, part, total, parts = _sums(gate)
    factor = _gate(beta, sample * beta_sb + head * beta_sh, token, beta_ss, length)
    at = (place * blocks + index) * KEYS * VALUES
    dtotal = 0.0
    for column in range(columns):
        dtotal += tl.load(products + (place * blocks + index) * columns + column)
    dtotal *= tl.where(parts == 0, tl.exp(total), 0.0)
    # What is read of the state before the block, and what is written to that after it.
    queries = _rows(q, sample * q_sb + head // GROUP * q_sh, token, key, q_ss, q_sd, length, KEYS)
    carried = dot(queries, _state(every, at, key, value, KEYS, VALUES), None, PRECISION)
    given = _rows(dout, sample * dout_sb + head * dout_sh, token, value, dout_ss, dout_sd, length, VALUES)
    dsums = _entry(sums, part) * tl.sum(carried * given.to(tl.float32), 1)
    keys = _rows(k, sample * k_sb + head // GROUP * k_sh, token, key, k_ss, k_sd, length, KEYS)
    dwritten = dot(keys, _state(after, at, key, value, KEYS, VALUES), None, PRECISION)
    values = _rows(v, sample * v_sb + head * v_sh, token, value, v_ss, v_sd, length, VALUES)
    left = _left(sums, part, total, parts)
    dfactor = left * tl.sum(dwritten * values.to(tl.float32), 1)
    moved = tl.where(row == ROWS - 1, 0.0, dfactor * factor)  # the last token's own decay is 1
    dtotal += tl.sum(moved, 0)
    dsums -= moved
    dvalues = dwritten * (left * factor)[:, None]
    # Pairs of tokens of the block. The decay of a token to itself is 1.
    pairs = dot(queries, tl.trans(keys), None, PRECISION) * _between(sums, part, row)
    inside = rounded(pairs * factor[None, :], q.dtype.element_ty, PRECISION)
    dvalues = dot(tl.trans(inside), given, dvalues, PRECISION)
    by_pair = dot(given, tl.trans(values), None, PRECISION) * pairs
    dfactor += tl.sum(by_pair, 0)
    by_pair = tl.where(row[:, None] == row[None, :], 0.0, by_pair * factor[None, :])
    dsums += tl.sum(by_pair, 1) - tl.sum(by_pair, 0)
    if SKIP:
        more = _gate(skip, sample * skip_sb + head * skip_sh, token, skip_ss, length)
        dvalues += more[:, None] * given.to(tl.float32)
        dmore = tl.sum(given.to(tl.float32) * values.to(tl.float32), 1)
        _keep_gate(dskip, sample * dskip_sb + head * dskip_sh, dmore, token, dskip_ss, length)
    _keep_rows(dv, sample * dv_sb + head * dv_sh, dvalues, token, value, dv_ss, dv_sd, length, VALUES, PRECISION)
    _keep_gate(dbeta, sample * dbeta_sb + head * dbeta_sh, dfactor, token, dbeta_ss, length)
    dsums += tl.where(row == ROWS - 1, dtotal, 0.0)
    dgate = tl.where(gate == float("-inf"), 0.0, tl.cumsum(dsums, 0, reverse=True))
    _keep_gate(dg, sample * dg_sb + head * dg_sh, dgate, token, dg_ss, length)


@triton.jit
def decay_key_grads(
    q, k, v, g, beta, dout, every, after, dq, dk, length, blocks,
    q_ss, q_sb, q_sh, q_sd, k_ss, k_sb, k_sh, k_sd, v_ss, v_sb, v_sh, v_sd, g_ss, g_sb, g_sh,
    beta_ss, beta_sb, beta_sh, dout_ss, dout_sb, dout_sh, dout_sd,
    dq_ss, dq_sb, dq_sh, dq_sd, dk_ss, dk_sb, dk_sh, dk_sd,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a block's queries and keys: sums over the heads that share the key head."""
    index, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sample, key_head = place // KEY_HEADS, place % KEY_HEADS
    row, key, value = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    token = index * ROWS + row
    dpairs = tl.zeros((ROWS, ROWS), tl.float32)
    dqueries = tl.zeros((ROWS, KEY_BLOCK), tl.float32)
    for one in range(GROUP):
        head = key_head * GROUP + one
        sums, part, _, _ = _sums(_gate(g, sample * g_sb + head * g_sh, token, g_ss, length))
        factor = _gate(beta, sample * beta_sb + head * beta_sh, token, beta_ss, length)
        values = _rows(v, sample * v_sb + head * v_sh, token, value, v_ss, v_sd, length, VALUES)
        given = _rows(dout, sample * dout_sb + head * dout_sh, token, value, dout_ss, dout_sd, length, VALUES)
        dpairs += dot(given, tl.trans(values), None, PRECISION) * _between(sums, part, row) * factor[None, :]
        read = rounded(given.to(tl.float32) * _entry(sums, part)[:, None], q.dtype.element_ty, PRECISION)
        at = ((sample * KEY_HEADS * GROUP + head) * blocks + index) * KEYS * VALUES
        state = _state(every, at, key, value, KEYS, VALUES)
        dqueries = dot(read, tl.trans(state), dqueries, PRECISION)
    dpairs = rounded(dpairs, q.dtype.element_ty, PRECISION)
    keys = _rows(k, sample * k_sb + key_head * k_sh, token, key, k_ss, k_sd, length, KEYS)
    dqueries = dot(dpairs, keys, dqueries, PRECISION)
    _keep_rows(dq, sample * dq_sb + key_head * dq_sh, dqueries, token, key, dq_ss, dq_sd, length, KEYS, PRECISION)
    queries = _rows(q, sample * q_sb + key_head * q_sh, token, key, q_ss, q_sd, length, KEYS)
    dkeys = dot(tl.trans(dpairs), queries, None, PRECISION)
    for one in range(GROUP):  # by itself, because both sums together leave too few registers
        head = key_head * GROUP + one
        sums, part, total, parts = _sums(_gate(g, sample * g_sb + head * g_sh, token, g_ss, length))
        factor = _gate(beta, sample * beta_sb + head * beta_sh, token, beta_ss, length)
        factor *= _left(sums, part, total, parts)
        values = _rows(v, sample * v_sb + head * v_sh, token, value, v_ss, v_sd, length, VALUES)
        written = rounded(values.to(tl.float32) * factor[:, None], q.dtype.element_ty, PRECISION)
        at = ((sample * KEY_HEADS * GROUP + head) * blocks + index) * KEYS * VALUES
        dstate = _state(after, at, key, value, KEYS, VALUES)
        dkeys = dot(written, tl.trans(dstate), dkeys, PRECISION)
    _keep_rows(dk, sample * dk_sb + key_head * dk_sh, dkeys, token, key, dk_ss, dk_sd, length, KEYS, PRECISION)
