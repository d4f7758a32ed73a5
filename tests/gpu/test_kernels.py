# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels in bf16 against the math kernel in float64, which tests/unit/test_kernels.py compares with autograd.

Run with ``pytest tests/gpu/test_kernels.py -rs`` to see which backends were skipped, and why.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels import KERNELS, available, fused_kernel, select
from megatron.context_parallel.attention.kernels.tile_by_tile import TileByTile, TileScores
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from tests.unit.test_triton import EXTRAS, MASKS, ZIGZAG, check
from tests.unit.triton_cases import Case, errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the GPU kernels need a CUDA device")

FUSED = ["flash_attn", "cudnn", "flash"]
# Largest error relative to the largest entry: bf16 rounds to 2^-9 of an entry, and p and ds are rounded on the way.
TOLERANCE = {"out": 1e-2, "lse": 1e-4, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}


def kernel_or_skip(name: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> TileByTile:
    reason = KERNELS[name].why_not(device=torch.device("cuda"), dtype=dtype, head_dim=head_dim)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return KERNELS[name]


def make(b=2, h=8, hk=2, sq=384, sk=384, d=64, dtype=torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout, q, k, v as [b, h, s, d] views of [s, b, h, d] memory."""
    torch.manual_seed(0)
    shapes = [(sq, b, h, d), (sq, b, h, d), (sk, b, hk, d), (sk, b, hk, d)]
    return tuple(
        torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype).permute(1, 2, 0, 3) for shape in shapes
    )


def both_ways(kernel: TileByTile, dout, q, k, v, *, causal=False, mask=None, scale=0.125):
    how = TileScores(scale, causal, mask)
    out, lse = kernel.forward(q, k, v, how)
    return out, lse, *kernel.backward(dout, q, k, v, out, lse, how)


def exact(*tensors: Tensor, **options):
    return both_ways(KERNELS["math"], *(x.double() for x in tensors), **options)


def assert_close(got, want, dtype: torch.dtype = torch.bfloat16) -> None:
    for (name, bound), x, y in zip(TOLERANCE.items(), got, want, strict=True):
        assert x.shape == y.shape and x.dtype == (torch.float32 if name == "lse" else dtype), name
        error = ((x.double() - y).abs().max() / y.abs().max().clamp_min(0.1)).item()
        assert error <= bound, f"{name}: {error:.2e} > {bound}"  # a NaN fails too


SHAPES = {
    "grouped": dict(),
    "heads": dict(hk=8),
    "one key head": dict(hk=1),
    "one sequence": dict(b=1),
    "more keys": dict(sq=130, sk=515),
    "more queries": dict(sq=515, sk=130),
    "a remainder of one": dict(sq=1, sk=65),
    "one key": dict(sq=65, sk=1),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_against_float64(name, head_dim, shape):
    kernel, tensors = kernel_or_skip(name, head_dim), make(d=head_dim, **shape)
    assert_close(both_ways(kernel, *tensors), exact(*tensors))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [64, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_causal(name, head_dim, size, dtype):
    kernel, tensors = kernel_or_skip(name, head_dim, dtype), make(d=head_dim, sq=size, sk=size, dtype=dtype)
    assert_close(both_ways(kernel, *tensors, causal=True), exact(*tensors, causal=True), dtype)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("hk", [8, 2, 1])
def test_tiles_merge_to_the_whole(name, head_dim, hk):
    """Causal attention in three tiles of two blocks; each tile's backward takes the final out and lse."""
    kernel, (dout, q, k, v) = kernel_or_skip(name, head_dim), make(d=head_dim, hk=hk, sq=512, sk=512)
    first, second = slice(0, 256), slice(256, 512)
    tiles = [(first, first, True), (second, first, False), (second, second, True)]
    out, lse = torch.zeros(q.shape, device="cuda"), torch.full(q.shape[:3], float("-inf"), device="cuda")
    for rows, keys, causal in tiles:
        out_t, lse_t = kernel.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], TileScores(0.125, causal))
        merged = torch.logaddexp(lse[:, :, rows], lse_t)
        out[:, :, rows] += torch.exp(lse_t - merged).unsqueeze(-1) * (out_t.float() - out[:, :, rows])
        lse[:, :, rows] = merged
    final = out.to(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, device="cuda") for x in (q, k, v))
    for rows, keys, causal in tiles:
        tensors = (dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], final[:, :, rows], lse[:, :, rows])
        dq_t, dk_t, dv_t = kernel.backward(*tensors, TileScores(0.125, causal))
        dq[:, :, rows] += dq_t
        dk[:, :, keys] += dk_t
        dv[:, :, keys] += dv_t
    got = (final, lse, *(x.to(q.dtype) for x in (dq, dk, dv)))
    assert_close(got, exact(dout, q, k, v, causal=True))


@pytest.mark.parametrize("name", FUSED)
def test_any_strides(name):
    kernel, tensors = kernel_or_skip(name, 64), make()
    want = exact(*tensors)
    layouts = [
        lambda x: x.contiguous(),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x, x], -1)[..., 64:128],
        lambda x: x.mT.contiguous().mT,
    ]
    for layout in layouts:
        dout, q, k, v = (layout(x) for x in tensors)
        out, lse = kernel.forward(q, k, v, TileScores(0.125))
        lse_strided = torch.stack([lse, lse], -1)[..., 0]
        grads = kernel.backward(dout, q, k, v, layout(out), lse_strided, TileScores(0.125))
        assert_close((out, lse, *grads), want)
    expanded = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(tensors[0].shape)
    assert_close(both_ways(kernel, expanded, *tensors[1:]), exact(expanded, *tensors[1:]))


@pytest.mark.parametrize("name", FUSED)
def test_rows_whose_final_lse_is_minus_infinity(name):
    kernel, (dout, q, k, v) = kernel_or_skip(name, 64), make()
    out, lse = kernel.forward(q, k, v, TileScores(0.125))
    lse[:, :, 3], out[:, :, 3] = float("-inf"), 0.0
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, TileScores(0.125))
    assert all(x.isfinite().all() for x in (dq, dk, dv)) and not dq[:, :, 3].any()


@pytest.mark.parametrize("name", FUSED)
def test_in_pieces(name, monkeypatch):
    """With a lowered limit of elements, the kernel takes two query heads at a time, half of a group."""
    kernel, tensors = kernel_or_skip(name, 64), make()
    want = exact(*tensors)
    for function in (fused_kernel.forward_in_pieces, fused_kernel.backward_in_pieces):
        monkeypatch.setattr(function, "__defaults__", (3 * 384 * 64,))
    assert_close(both_ways(kernel, *tensors), want)


def test_math_on_the_gpu_with_a_mask_in_host_memory():
    tensors, mask = make(sq=96, sk=96), torch.rand(96, 96) < 0.5
    mask[5] = False

    def rows(start, end, keys):
        return mask[start:end, :keys]

    out, lse, *grads = both_ways(KERNELS["math"], *tensors, mask=rows)
    assert not out[:, :, 5].any() and lse[:, :, 5].isneginf().all() and not grads[0][:, :, 5].any()
    want_out, want_lse, *want_grads = exact(*tensors, mask=rows)
    lse, want_lse = (x.masked_fill(x.isneginf(), 0.0) for x in (lse, want_lse))
    assert_close((out, lse, *grads), (want_out, want_lse, *want_grads))


def test_auto_takes_a_fused_kernel():
    names = available("cuda", torch.bfloat16, 128)
    assert names[-1] == "math" and len(names) > 1
    assert select("auto", device="cuda", dtype=torch.bfloat16, head_dim=128).name == names[0]
    assert select("auto", device="cuda", dtype=torch.float32, head_dim=128).name == ("math" if NO_TRITON else "triton")


# The Triton kernels, compiled for the GPU, against attention's definition in float64.
NO_TRITON = missing_triton()
triton_only = pytest.mark.skipif(NO_TRITON is not None, reason=NO_TRITON or "")
GPU = torch.device("cuda")
LONG = {"q_at": ((0, 611), (1789, 2400)), "blocks": (((0, 611), (1789, 2400)), ((611, 1789),))}


@triton_only
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_triton_fp32(mask, extra):
    check(errors(Case(MASKS[mask], **ZIGZAG, **EXTRAS[extra]), GPU), 2e-5)


@triton_only
@pytest.mark.parametrize("head, value", [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256)])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_triton_bf16(mask, extra, head, value):
    case = Case(MASKS[mask], **LONG, h=4, hk=2, d=head, dv=value, dtype=torch.bfloat16, **EXTRAS[extra])
    if mask == "documents":
        case = Case(MASKS[mask], **ZIGZAG, h=4, hk=2, d=head, dv=value, dtype=torch.bfloat16, **EXTRAS[extra])
    check(errors(case, GPU), 2e-2)


@triton_only
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("kind", ["two passes", "one pass", "specialised"])
@pytest.mark.parametrize("mask, extra", [("causal", "plain"), ("two-sided", "all"), ("full", "plain")])
def test_triton_with_the_blocks_of_long_ranges(mask, extra, kind, head):
    how = {"long": True, "one_pass": kind == "one pass", "plain": kind == "specialised"}
    case = Case(MASKS[mask], **LONG, h=4, hk=2, d=head, dv=head, dtype=torch.bfloat16, **EXTRAS[extra], **how)
    check(errors(case, GPU), 2e-2)


@triton_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_triton_with_any_strides(dtype):
    check(errors(Case(MASKS["two-sided"], layout="strided", b=2, **LONG, dtype=dtype), GPU), 1e-2)
