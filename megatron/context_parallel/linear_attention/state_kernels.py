# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the serial part of linear attention: states from block to block, and their gradients.

PyTorch needs several launches for each block, one after the other. Here one program has a state's columns in registers
and goes through all blocks. A span's map needs no kernel of its own: the columns of M are states too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(x, at, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The matrix [ROWS, COLUMNS] that begins at element ``at``; 0 outside."""
    inside = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    return tl.load(x + at + rows[:, None] * COLUMNS + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store(x, at, value, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    inside = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    tl.store(x + at + rows[:, None] * COLUMNS + columns[None, :], value, mask=inside)


@triton.jit
def states_kernel(
    own, erase, writes, keep, start, out, end, blocks,
    ERASES: tl.constexpr, BY_CHANNEL: tl.constexpr, BY_COLUMN: tl.constexpr, STATES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the state of one head: through all blocks. ``out``: the states before each."""
    head = tl.program_id(1).to(tl.int64)
    row, key = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK)
    value = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    state = _load(start, head * KEYS * VALUES, key, value, KEYS, VALUES)
    for index in range(blocks):
        block = head * blocks + index
        if STATES:
            _store(out, block * KEYS * VALUES, state, key, value, KEYS, VALUES)
        new = _load(own, block * ROWS * VALUES, row, value, ROWS, VALUES)
        if ERASES:
            known = _load(erase, block * ROWS * KEYS, row, key, ROWS, KEYS)
            new -= tl.dot(known, state, input_precision=PRECISION)
        write = _load(writes, block * ROWS * KEYS, row, key, ROWS, KEYS)
        if BY_CHANNEL:
            state *= tl.load(keep + block * KEYS + key, mask=key < KEYS, other=0.0)[:, None]
        elif BY_COLUMN:
            state *= tl.load(keep + block * VALUES + value, mask=value < VALUES, other=0.0)[None, :]
        else:
            state *= tl.load(keep + block)
        state = tl.dot(tl.trans(write), new, state, input_precision=PRECISION)
    _store(end, head * KEYS * VALUES, state, key, value, KEYS, VALUES)


@triton.jit
def state_grads_kernel(
    dout, erase, writes, reads, inside, keep, end, out, start, blocks,
    ERASES: tl.constexpr, BY_CHANNEL: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The reverse: some columns of a state's gradient, from the last block; ``out``: the gradients after each block."""
    head = tl.program_id(1).to(tl.int64)
    row, key = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK)
    value = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    dstate = _load(end, head * KEYS * VALUES, key, value, KEYS, VALUES)
    for step in range(blocks):
        block = head * blocks + blocks - 1 - step
        _store(out, block * KEYS * VALUES, dstate, key, value, KEYS, VALUES)
        given = _load(dout, block * ROWS * VALUES, row, value, ROWS, VALUES)
        before = dstate
        if BY_CHANNEL:
            before *= tl.load(keep + block * KEYS + key, mask=key < KEYS, other=0.0)[:, None]
        elif BY_COLUMN:
            before *= tl.load(keep + block * VALUES + value, mask=value < VALUES, other=0.0)[None, :]
        else:
            before *= tl.load(keep + block)
        read = _load(reads, block * ROWS * KEYS, row, key, ROWS, KEYS)
        before = tl.dot(tl.trans(read), given, before, input_precision=PRECISION)
        if ERASES:
            pairs = _load(inside, block * ROWS * ROWS, row, row, ROWS, ROWS)
            write = _load(writes, block * ROWS * KEYS, row, key, ROWS, KEYS)
            dnew = tl.dot(tl.trans(pairs), given, input_precision=PRECISION)
            dnew = tl.dot(write, dstate, dnew, input_precision=PRECISION)
            known = _load(erase, block * ROWS * KEYS, row, key, ROWS, KEYS)
            before -= tl.dot(tl.trans(known), dnew, input_precision=PRECISION)
        dstate = before
    _store(start, head * KEYS * VALUES, dstate, key, value, KEYS, VALUES)
