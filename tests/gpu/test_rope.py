# SPDX-License-Identifier: Apache-2.0
"""RoPE's fused kernel on a GPU against the rotation in float64, which PyTorch computes."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron.context_parallel.positions.rope import Rope, Yarn, rotary_angles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs a CUDA device and triton"
)

FAR = 2**22
ROPES = {
    "whole heads": (Rope(128, 500000), 128),
    "llama 3.1": (Rope(128, 500000, llama3=8.0), 128),
    "part of a head": (Rope(32, yarn=Yarn(40.0)), 80),
    "interleaved": (Rope(64, interleaved=True), 64),
    "interleaved, part": (Rope(24, interleaved=True), 64),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_rotation_and_its_gradient(name, per_sample, dtype):
    rope, size = ROPES[name]
    torch.manual_seed(0)
    wide = torch.randn(1000, 2, 10, 3 * size, device="cuda").to(dtype)
    x = wide[..., size : 2 * size].detach().requires_grad_()
    positions = torch.randint(FAR, (1000, 2 if per_sample else 1), device="cuda")
    angles = rotary_angles(positions, rope.inverse_frequencies())[:, :, None]
    grad = torch.randn(size, 10, 2, 1000, device="cuda").to(dtype).permute(3, 2, 1, 0)
    out = rope.rotate(x, angles)
    (mine,) = torch.autograd.grad(out, x, grad)
    exact = x.detach().double().requires_grad_()
    wanted = rope.rotate(exact, angles)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, grad.double())
    assert torch.equal(out[..., rope.dim :], x[..., rope.dim :])
    for got, want in ((out, wanted), (mine, wanted_grad)):
        unit = torch.finfo(dtype).eps * want.abs().clamp(min=1e-2) if dtype != torch.float32 else 2e-6
        assert float(((got.double() - want).abs() / unit).max()) < (0.51 if dtype != torch.float32 else 1)
