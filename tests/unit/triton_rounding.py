# SPDX-License-Identifier: Apache-2.0
"""A kernel that only rounds; test_triton.py calls it in a subprocess with Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.context_parallel.attention.kernels.triton_kernels.triton_pairs import rounded


@triton.jit
def rounding_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, rounded(tl.load(x + at), tl.bfloat16, "interpreted").to(tl.float32))


def rounded_to_bf16(x: Tensor) -> Tensor:
    """x in fp32, as many elements as a power of two, rounded to bf16 by the kernels' function."""
    out = torch.empty_like(x)
    rounding_kernel[(1,)](x, out, x.numel())
    return out
