# SPDX-License-Identifier: Apache-2.0
"""The rotation of RoPE as one Triton kernel for NVIDIA GPUs, which reads and writes each element once.

Sine and cosine are computed in the kernel, in fp32, once for all heads of a block. The angles are within one turn.
An exact subtraction of quarter turns brings them into the range of the polynomials in Cephes' sinf and cosf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that a program rotates at a time (16 bytes of bf16 for each thread), heads of a program, and its warps.
PAIRS_AT_ONCE, HEADS, WARPS = 1024, 8, 4


@triton.jit
def cos_sin(angle):
    """Cosine and sine of fp32 angles from 0 to 2 pi, with an error of at most 2e-7."""
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    # pi / 2 in three parts; the first two have few bits, so that their products with 0 to 4 are exact.
    x = ((angle - quarters * 1.5703125) - quarters * 4.837512969970703125e-4) - quarters * 7.549789954891882e-8
    z = x * x
    sin = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cos = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    quarter = quarters.to(tl.int32)
    swapped = (quarter & 1) == 1
    sin, cos = tl.where(swapped, cos, sin), tl.where(swapped, sin, cos)
    sin = tl.where((quarter & 2) == 2, -sin, sin)
    cos = tl.where(((quarter + 1) & 2) == 2, -cos, cos)
    return cos, sin


@triton.jit
def rotate_kernel(
    x,
    out,
    angles,
    tokens,
    batch,
    heads,
    x_ss,
    x_sb,
    x_sh,
    x_sd,
    out_ss,
    out_sb,
    out_sh,
    out_sd,
    angles_ss,
    angles_sb,
    factor,
    sign,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotates ``ROWS`` of the ``tokens`` (sequence times batch) in ``HEADS`` heads; entries after the pairs are
    copied."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = (row < tokens)[:, None]
    place, sample = (row // batch).to(tl.int64)[:, None], (row % batch).to(tl.int64)[:, None]
    pair = tl.arange(0, PAIRS_BLOCK)[None, :]
    mask = exists & (pair < PAIRS)
    cos, sin = cos_sin(tl.load(angles + place * angles_ss + sample * angles_sb + pair, mask, other=0.0))
    cos, sin = cos * factor, sin * (factor * sign)
    x += place * x_ss + sample * x_sb
    out += place * out_ss + sample * out_sb
    begin = tl.program_id(1).to(tl.int64) * HEADS
    for head in range(begin, tl.minimum(begin + HEADS, heads)):
        from_head, to_head = x + head * x_sh, out + head * out_sh
        if INTERLEAVED:
            # One load for both entries of a pair: [rows, pairs, 2].
            entry = 2 * pair[:, :, None] + tl.arange(0, 2)[None, None, :]
            both = tl.broadcast_to(mask[:, :, None], (ROWS, PAIRS_BLOCK, 2))
            first, second = tl.split(tl.load(from_head[:, :, None] + entry * x_sd, both, other=0.0).to(tl.float32))
            turned = tl.join(first * cos - second * sin, second * cos + first * sin)
            tl.store(to_head[:, :, None] + entry * out_sd, turned.to(out.dtype.element_ty), both)
        else:
            first = tl.load(from_head + pair * x_sd, mask, other=0.0).to(tl.float32)
            second = tl.load(from_head + (pair + PAIRS) * x_sd, mask, other=0.0).to(tl.float32)
            tl.store(to_head + pair * out_sd, (first * cos - second * sin).to(out.dtype.element_ty), mask)
            tl.store(to_head + (pair + PAIRS) * out_sd, (second * cos + first * sin).to(out.dtype.element_ty), mask)
        if REST_BLOCK:
            column = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
            copied = exists & (column < SIZE)
            tl.store(to_head + column * out_sd, tl.load(from_head + column * x_sd, copied), copied)


def rotated(x: Tensor, angles: Tensor, dim: int, factor: float, interleaved: bool, sign: int) -> Tensor:
    """See `Rope.rotate`; ``sign`` -1 rotates back. x [s, b, heads, d] in fp32, bf16 or fp16, with any strides."""
    out = torch.empty_like(x)
    if x.numel():
        arguments, constants = launch(x, out, angles, dim, factor, interleaved, sign)
        programs = (triton.cdiv(x.size(0) * x.size(1), constants["ROWS"]), triton.cdiv(x.size(2), HEADS))
        with torch.cuda.device_of(x):
            rotate_kernel[programs](*arguments, **constants, num_warps=WARPS)
    return out


def launch(
    x: Tensor, out: Tensor, angles: Tensor, dim: int, factor: float, interleaved: bool, sign: int
) -> tuple[tuple, dict[str, int | bool]]:
    """The kernel's arguments, and its constants by name."""
    length, batch, heads, size = x.shape
    angles = angles if angles.stride(-1) == 1 else angles.contiguous()
    of_sample = angles.stride(1) if angles.size(1) > 1 else 0
    numbers = (length * batch, batch, heads, *x.stride(), *out.stride(), angles.stride(0), of_sample)
    pairs_block = triton.next_power_of_2(dim // 2)
    constants = {
        "PAIRS": dim // 2,
        "SIZE": size,
        "PAIRS_BLOCK": pairs_block,
        "REST_BLOCK": triton.next_power_of_2(size - dim) if size > dim else 0,
        "INTERLEAVED": interleaved,
        "ROWS": max(PAIRS_AT_ONCE // pairs_block, 1),
        "HEADS": HEADS,
    }
    return (x, out, angles, *numbers, factor, float(sign)), constants
