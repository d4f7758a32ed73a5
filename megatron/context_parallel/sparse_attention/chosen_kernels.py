# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for attention to chosen keys: a program gathers the keys of one query, for many heads at once.

A row of kv is a key's first part and a value. SHARED: the value is also the rest of the key, as in latent attention;
it is then loaded once for both products. Each sum has one writer, and its order is fixed: results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.context_parallel.attention.kernels.triton_kernels.triton_pairs import LOG2E, dot, rounded


@triton.jit
def _of_heads(x, at, head, count, stride, first, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of some heads' rows from ``first`` on, [heads, COLUMNS]; 0 outside."""
    column = tl.arange(0, COLUMNS)
    inside = (head < count)[:, None] & (column < SIZE)[None, :]
    return tl.load(x + at + head[:, None].to(tl.int64) * stride + first + column[None, :], inside, other=0.0)


@triton.jit
def _to_heads(
    x, at, result, head, count, stride, first, SIZE: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    inside = (head < count)[:, None] & (column < SIZE)[None, :]
    to = x + at + head[:, None].to(tl.int64) * stride + first + column[None, :]
    if FIRST:
        tl.store(to, rounded(result, x.dtype.element_ty, PRECISION), inside)
    else:
        tl.store(to, tl.load(to, inside, other=0.0) + result, inside)


@triton.jit
def _gathered(kv, row, here, stride, first, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of chosen rows from ``first`` on, [rows, COLUMNS]; 0 outside."""
    column = tl.arange(0, COLUMNS)
    return tl.load(
        kv + row[:, None].to(tl.int64) * stride + first + column[None, :],
        here[:, None] & (column < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def chosen_forward(
    q, kv, at, begin, end, out, lse,
    q_ss, q_sb, q_sh, kv_ss, kv_sb, kv_sh, at_ss, at_sb, begin_ss, begin_sb, end_ss, end_sb, out_ss, out_sb, out_sh,
    lse_ss, lse_sb, lse_sh, factor,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one query, for BLOCK heads of a key head, merged into out and lse."""
    s, place = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, group = place // (GROUPS * BLOCKS), place // BLOCKS % GROUPS
    head = place % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    kv += b * kv_sb + group * kv_sh
    q_at, out_at = s * q_ss + b * q_sb + group * GROUP * q_sh, s * out_ss + b * out_sb + group * GROUP * out_sh
    lse_at = lse + s * lse_ss + b * lse_sb + (group * GROUP + head) * lse_sh
    q_first = _of_heads(q, q_at, head, GROUP, q_sh, 0, KEY, KEY_BLOCK)
    if SHARED:
        q_rest = _of_heads(q, q_at, head, GROUP, q_sh, KEY, VALUE, VALUE_BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK, VALUE_BLOCK), tl.float32)
    stop = tl.load(end + s * end_ss + b * end_sb)
    for n in range(tl.load(begin + s * begin_ss + b * begin_sb), stop, STEP):
        entry = n + tl.arange(0, STEP)
        here = entry < stop
        row = tl.load(at + s * at_ss + b * at_sb + entry, here, other=0)
        keys = _gathered(kv, row, here, kv_ss, 0, KEY, KEY_BLOCK)
        values = _gathered(kv, row, here, kv_ss, WIDTH - VALUE, VALUE, VALUE_BLOCK)
        scores = dot(q_first, tl.trans(keys), None, PRECISION)
        if SHARED:
            scores = dot(q_rest, tl.trans(values), scores, PRECISION)
        scores = tl.where(here[None, :], scores * factor, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))  # finite: every step has a key
        weights = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(most - now)
        total = total * shrink + tl.sum(weights, 1)
        mean = dot(rounded(weights, values.dtype, PRECISION), values, mean * shrink[:, None], PRECISION)
        most = now
    met = total > 0
    mean = mean / tl.where(met, total, 1.0)[:, None]
    found = tl.where(met, (most + tl.log2(tl.where(met, total, 1.0))) / LOG2E, float("-inf"))
    if not FIRST:
        before = tl.load(lse_at, head < GROUP, other=float("-inf"))
        upper = tl.maximum(before, found)
        upper = tl.where(upper == float("-inf"), 0.0, upper)
        old, new = tl.exp2((before - upper) * LOG2E), tl.exp2((found - upper) * LOG2E)
        both = old + new
        share = tl.where(both > 0, both, 1.0)
        earlier = _of_heads(out, out_at, head, GROUP, out_sh, 0, VALUE, VALUE_BLOCK)
        mean = earlier * (old / share)[:, None] + mean * (new / share)[:, None]
        found = tl.where(both > 0, upper + tl.log2(share) / LOG2E, float("-inf"))
    _to_heads(out, out_at, mean, head, GROUP, out_sh, 0, VALUE, VALUE_BLOCK, True, PRECISION)
    tl.store(lse_at, found, head < GROUP)


@triton.jit
def chosen_query_grads(
    q, kv, at, begin, end, dout, lse, delta, dq,
    q_ss, q_sb, q_sh, kv_ss, kv_sb, kv_sh, at_ss, at_sb, begin_ss, begin_sb, end_ss, end_sb, dout_ss, dout_sb, dout_sh,
    lse_ss, lse_sb, lse_sh, delta_ss, delta_sb, delta_sh, dq_ss, dq_sb, dq_sh, factor, scale,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one query, for BLOCK heads of a key head."""
    s, place = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, group = place // (GROUPS * BLOCKS), place // BLOCKS % GROUPS
    head = place % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    kv += b * kv_sb + group * kv_sh
    q_at, dq_at = s * q_ss + b * q_sb + group * GROUP * q_sh, s * dq_ss + b * dq_sb + group * GROUP * dq_sh
    q_first = _of_heads(q, q_at, head, GROUP, q_sh, 0, KEY, KEY_BLOCK)
    dq_first = tl.zeros((BLOCK, KEY_BLOCK), tl.float32)
    if SHARED:
        q_rest = _of_heads(q, q_at, head, GROUP, q_sh, KEY, VALUE, VALUE_BLOCK)
        dq_rest = tl.zeros((BLOCK, VALUE_BLOCK), tl.float32)
    dout_at = s * dout_ss + b * dout_sb + group * GROUP * dout_sh
    given = _of_heads(dout, dout_at, head, GROUP, dout_sh, 0, VALUE, VALUE_BLOCK).to(q_first.dtype)
    number = group * GROUP + head
    final = tl.load(lse + s * lse_ss + b * lse_sb + number * lse_sh, head < GROUP, other=0.0) * LOG2E
    own = tl.load(delta + s * delta_ss + b * delta_sb + number * delta_sh, head < GROUP, other=0.0)
    stop = tl.load(end + s * end_ss + b * end_sb)
    for n in range(tl.load(begin + s * begin_ss + b * begin_sb), stop, STEP):
        entry = n + tl.arange(0, STEP)
        here = entry < stop
        row = tl.load(at + s * at_ss + b * at_sb + entry, here, other=0)
        keys = _gathered(kv, row, here, kv_ss, 0, KEY, KEY_BLOCK)
        values = _gathered(kv, row, here, kv_ss, WIDTH - VALUE, VALUE, VALUE_BLOCK)
        scores = dot(q_first, tl.trans(keys), None, PRECISION)
        if SHARED:
            scores = dot(q_rest, tl.trans(values), scores, PRECISION)
        weights = tl.where(here[None, :], tl.exp2(scores * factor - final[:, None]), 0.0)
        dweights = dot(given, tl.trans(values), None, PRECISION)
        dscores = rounded(weights * (dweights - own[:, None]) * scale, keys.dtype, PRECISION)
        dq_first = dot(dscores, keys, dq_first, PRECISION)
        if SHARED:
            dq_rest = dot(dscores, values, dq_rest, PRECISION)
    _to_heads(dq, dq_at, dq_first, head, GROUP, dq_sh, 0, KEY, KEY_BLOCK, FIRST, PRECISION)
    if SHARED:
        _to_heads(dq, dq_at, dq_rest, head, GROUP, dq_sh, KEY, VALUE, VALUE_BLOCK, FIRST, PRECISION)


@triton.jit
def chosen_key_grads(
    q, kv, at, begin, end, dout, lse, delta, parts, sums,
    q_ss, q_sb, q_sh, kv_ss, kv_sb, kv_sh, at_ss, at_sb, begin_ss, begin_sb, end_ss, end_sb, dout_ss, dout_sb, dout_sh,
    lse_ss, lse_sb, lse_sh, delta_ss, delta_sb, delta_sh, entries, factor, scale,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, GRADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For one query and STEP of its keys, sums over the heads of a key head.

    If GRADS, the query's part of the gradients of these rows, in ``parts`` [s, b, entries, key heads, WIDTH]; if not,
    softmax weights, in ``sums`` [s, b, key heads, entries].
    """
    s, place = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    steps = (entries + STEP - 1) // STEP
    b, group = place // (GROUPS * steps), place // steps % GROUPS
    stop = tl.load(end + s * end_ss + b * end_sb)
    entry = tl.load(begin + s * begin_ss + b * begin_sb) + (place % steps * STEP).to(tl.int32) + tl.arange(0, STEP)
    here = entry < stop
    if tl.max(here.to(tl.int32), 0) > 0:
        kv += b * kv_sb + group * kv_sh
        row = tl.load(at + s * at_ss + b * at_sb + entry, here, other=0)
        keys = _gathered(kv, row, here, kv_ss, 0, KEY, KEY_BLOCK)
        if SHARED or GRADS:
            values = _gathered(kv, row, here, kv_ss, WIDTH - VALUE, VALUE, VALUE_BLOCK)
        if GRADS:
            dfirst = tl.zeros((STEP, KEY_BLOCK), tl.float32)
            drest = tl.zeros((STEP, VALUE_BLOCK), tl.float32)
        else:
            both = tl.zeros((STEP,), tl.float32)
        q_at = s * q_ss + b * q_sb + group * GROUP * q_sh
        for block in range(BLOCKS):
            head = block * BLOCK + tl.arange(0, BLOCK)
            number = group * GROUP + head
            q_first = _of_heads(q, q_at, head, GROUP, q_sh, 0, KEY, KEY_BLOCK)
            scores = dot(keys, tl.trans(q_first), None, PRECISION)
            if SHARED:
                q_rest = _of_heads(q, q_at, head, GROUP, q_sh, KEY, VALUE, VALUE_BLOCK)
                scores = dot(values, tl.trans(q_rest), scores, PRECISION)
            final = tl.load(lse + s * lse_ss + b * lse_sb + number * lse_sh, head < GROUP, other=0.0) * LOG2E
            known = here[:, None] & (head < GROUP)[None, :]
            weights = tl.where(known, tl.exp2(scores * factor - final[None, :]), 0.0)
            if GRADS:
                dout_at = s * dout_ss + b * dout_sb + group * GROUP * dout_sh
                given = _of_heads(dout, dout_at, head, GROUP, dout_sh, 0, VALUE, VALUE_BLOCK).to(keys.dtype)
                own = tl.load(delta + s * delta_ss + b * delta_sb + number * delta_sh, head < GROUP, other=0.0)
                dweights = dot(values, tl.trans(given), None, PRECISION)
                dscores = rounded(weights * (dweights - own[None, :]) * scale, keys.dtype, PRECISION)
                drest = dot(rounded(weights, keys.dtype, PRECISION), given, drest, PRECISION)
                dfirst = dot(dscores, q_first, dfirst, PRECISION)
                if SHARED:
                    drest = dot(dscores, q_rest, drest, PRECISION)
            else:
                both += tl.sum(weights, 1)
        samples = tl.num_programs(1) // (GROUPS * steps)
        if GRADS:
            base = ((s * samples + b) * entries * GROUPS + group) * WIDTH
            _to_heads(parts, base, dfirst, entry, stop, GROUPS * WIDTH, 0, KEY, KEY_BLOCK, True, PRECISION)
            _to_heads(
                parts, base, drest, entry, stop, GROUPS * WIDTH, WIDTH - VALUE, VALUE, VALUE_BLOCK, True, PRECISION
            )  # fmt: skip
        else:
            tl.store(sums + ((s * samples + b) * GROUPS + group) * entries + entry, both, here)


@triton.jit
def add_parts(
    parts, target, order, stops, dkv, dkv_ss, dkv_sb, size, entries,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds to a row of dkv all parts for it, one after the other.

    ``target``: rows of dkv [b, size], ascending; negative ones are for no row. ``order``: the numbers of their parts
    among the [s, entries] of the sample. ``stops``: where the run of an entry's row ends. The first entry of each run
    does the work.
    """
    first, columns = tl.program_id(0), tl.cdiv(WIDTH, BLOCK)
    b = (tl.program_id(1) // columns).to(tl.int64)
    column = tl.program_id(1) % columns * BLOCK + tl.arange(0, BLOCK)
    samples = tl.num_programs(1) // columns
    target += b * size
    row = tl.load(target + first).to(tl.int64)
    before = tl.load(target + tl.maximum(first - 1, 0)).to(tl.int64)
    if (row >= 0) & ((first == 0) | (row != before)):
        at = dkv + row * dkv_ss + b * dkv_sb + column
        total = tl.load(at, column < WIDTH, other=0.0)
        for index in range(first, tl.load(stops + b * size + first)):
            number = tl.load(order + b * size + index).to(tl.int64)
            part = (number // entries * samples + b) * entries + number % entries
            total += tl.load(parts + part * WIDTH + column, column < WIDTH, other=0.0)
        tl.store(at, total, column < WIDTH)


@triton.jit
def index_scores(
    q, k, weights, out, rows, keys, q_ss, q_sh, k_ss, weights_ss, weights_sh, out_ss,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """An indexer's scores of BLOCK queries and STEP keys. relu(q . k) of a head is never in memory."""
    row, key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * STEP + tl.arange(0, STEP)
    column = tl.arange(0, SIZE_BLOCK)
    these = _gathered(k, key, key < keys, k_ss, 0, SIZE, SIZE_BLOCK)
    total = tl.zeros((BLOCK, STEP), tl.float32)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    for head in range(HEADS):
        at = row.to(tl.int64) * q_ss + head * q_sh
        queries = tl.load(q + at[:, None] + column[None, :], inside, other=0.0)
        weight = tl.load(weights + row.to(tl.int64) * weights_ss + head * weights_sh, row < rows, other=0.0)
        each = tl.maximum(dot(queries, tl.trans(these), None, PRECISION), 0.0)
        total += each * weight.to(tl.float32)[:, None]
    to = out + row[:, None].to(tl.int64) * out_ss + key[None, :]
    tl.store(to, total, (row < rows)[:, None] & (key < keys)[None, :])
