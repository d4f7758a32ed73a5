# SPDX-License-Identifier: Apache-2.0
"""Plain ranges of keys by Hopper's loads of blocks (TMA) and specialised warps: some load, others compute.

Triton specialises the warps of one loop, with num_warps=4 and no condition in it; loads must be of descriptors. So the
keys are a list of steps, and edges, where pairs are compared, are left to `forward_kernel`. Where Triton does not
specialise it says nothing. It splits the queries between two groups of warps, but not a descriptor from outside of the
kernel: in 3.6 each group would then load all of them, over the end of its memory. A test of the compiled code looks
for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.context_parallel.attention.kernels.triton_kernels.triton_pairs import (
    LOG2E,
    block_pointers,
    dot,
    inside,
    rounded,
)


@triton.jit(do_not_specialize=["q_rows"])
def plain_kernel(
    q, k, v, out, lse, blocks, steps, q_ss, q_sb, q_sh, q_sd, k_sb, k_sh, v_sb, v_sh, out_ss, out_sb, out_sh, out_sd,
    lse_ss, lse_sb, lse_sh, q_rows, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merges the plain ranges of one block of queries of one head into out (fp32) and lse (natural logarithm).

    ``k``, ``v``: descriptors of [rows, others]. ``blocks``: int32 [blocks, 3], a block's number, and the first and one
    past the last of its ``steps``, int32, the first key of each.
    """
    block = blocks + tl.program_id(0) * 3
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    first_row = tl.load(block) * BLOCK
    rows = first_row + tl.arange(0, BLOCK)
    here = rows < q_rows
    lse += sample.to(tl.int64) * lse_sb + head.to(tl.int64) * lse_sh + rows.to(tl.int64) * lse_ss
    before = tl.load(lse, mask=here, other=float("-inf"))
    total = tl.where(before == float("-inf"), 0.0, 1.0)
    top = tl.where(before == float("-inf"), -1e30, before * LOG2E)  # finite: shrink is then never undefined
    out += sample.to(tl.int64) * out_sb + head.to(tl.int64) * out_sh
    out_at = block_pointers(out, first_row, out_ss, out_sd, BLOCK, VALUE, WIDE)
    out_here = inside(first_row, q_rows, BLOCK, VALUE, VALUE)
    acc = tl.load(out_at, mask=out_here & (total > 0)[:, None], other=0.0)
    q += sample.to(tl.int64) * q_sb + head.to(tl.int64) * q_sh
    q_block = tl.make_tensor_descriptor(q, [q_rows, HEAD], [q_ss, 1], [BLOCK, HEAD]).load([first_row, 0])
    k_at, v_at = sample * k_sb + head // GROUP * k_sh, sample * v_sb + head // GROUP * v_sh
    for at in tl.range(tl.load(block + 1), tl.load(block + 2), warp_specialize=True, num_stages=STAGES):
        key = tl.load(steps + at)
        k_block = k.load([key, k_at])
        products = dot(q_block, tl.trans(k_block), None, PRECISION)
        new_top = tl.maximum(top, tl.max(products, 1) * factor)
        p = tl.exp2(products * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v_block = v.load([key, v_at])
        acc = dot(rounded(p, v_block.dtype, PRECISION), v_block, acc * shrink[:, None], PRECISION)
        top = new_top
    tl.store(out_at, acc / total[:, None], mask=out_here)
    tl.store(lse, (top + tl.log2(total)) / LOG2E, mask=here)
