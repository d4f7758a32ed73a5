# SPDX-License-Identifier: Apache-2.0
"""Masks on a GPU: tiles of every kind with the fused kernels in bf16, and masks of pairs from host memory."""

from __future__ import annotations

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels import KERNELS
from megatron.context_parallel.layout.grid import abstract_grid

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the GPU kernels need a CUDA device")

LENGTH, HEADS, SIZE = 768, 4, 64
ENDS = (1, 200, 201, 500, LENGTH)
TILED = {
    "window": cp.Window(99),
    "window both sides": cp.Window(100, 60),
    "window and global": cp.Window(63, 0, 16),
    "documents": cp.Documents(ENDS),
    "documents and window": cp.Documents(ENDS, cp.Window(49)),
    "bigbird": cp.BlockSparse(64, cp.BigBirdBlocks(1, 1, 2), LENGTH),
}
PAIRS = {"narrow window": cp.Window(9), "function": cp.MaskFunction(lambda q, k: (q - k) % 3 == 0, cp.Causal())}
# bf16 rounds to 2^-9 of an entry; probabilities and their gradients are rounded, too.
TOLERANCE = 2e-2


def largest_error(mask, kernel: str, slopes=None, threshold: int = 16384) -> float:
    """The largest relative error of out, dq, dk and dv in bf16, against dense attention in float64."""
    draw = torch.Generator(DEVICE).manual_seed(3)
    q, k, v, dout = (
        torch.randn(LENGTH, 2, heads, SIZE, generator=draw, device=DEVICE).bfloat16() for heads in (HEADS, 2, 2, HEADS)
    )
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    at = torch.arange(LENGTH, device=DEVICE)
    scores = torch.einsum("qbhd,kbhd->bhqk", whole[0], whole[1].repeat_interleave(2, dim=2)) * SIZE**-0.5
    if slopes is not None:
        scores = scores - slopes.to(DEVICE).double()[:, None, None] * (at[:, None] - at).abs()
    weights = scores.masked_fill(~mask.allowed(at[:, None], at[None]), -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = torch.einsum("bhqk,kbhd->qbhd", weights, whole[2].repeat_interleave(2, dim=2))
    expected_grads = torch.autograd.grad(expected, whole, dout.double())

    local = [x.detach().requires_grad_() for x in (q, k, v)]
    layout = cp.SequenceLayout(LENGTH, abstract_grid())
    options = {"kernel": kernel, "alibi_slopes": slopes, "mask_cpu_threshold": threshold}
    out = cp.attention(*local, layout=layout, mask=mask, **options)
    grads = torch.autograd.grad(out, local, dout)
    pairs = [(out, expected), *zip(grads, expected_grads)]
    return max(float((mine.double() - full).abs().max() / full.abs().max()) for mine, full in pairs)


@pytest.mark.parametrize("kernel", ["flash_attn", "cudnn", "flash", "math"])
@pytest.mark.parametrize("mask", TILED)
def test_tiles_need_no_mask(mask, kernel):
    reason = KERNELS[kernel].why_not(device=torch.device(DEVICE), dtype=torch.bfloat16, head_dim=SIZE)
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")
    assert largest_error(TILED[mask], kernel) < TOLERANCE


@pytest.mark.parametrize("threshold", [0, 16384])
@pytest.mark.parametrize("mask", PAIRS)
def test_masks_of_pairs(mask, threshold):
    assert largest_error(PAIRS[mask], "math", threshold=threshold) < TOLERANCE


def test_alibi():
    assert largest_error(cp.Causal(), "math", cp.alibi_slopes(HEADS)) < TOLERANCE
