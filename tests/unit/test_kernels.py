# SPDX-License-Identifier: Apache-2.0
"""The local attention kernels against dense attention in float64, which autograd differentiates."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.context_parallel.attention import kernels, usp
from megatron.context_parallel.attention.attend import sinks_grad
from megatron.context_parallel.attention.kernels import (
    KERNELS,
    base,
    cpu_kernel,
    cudnn_kernel,
    fused_kernel,
    math_kernel,
    sums,
    tile_by_tile,
)
from megatron.context_parallel.attention.kernels.tile_by_tile import TileScores
from megatron.context_parallel.attention.ring import GatherSource
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.layout.grid import Axis, abstract_grid
from megatron.context_parallel.layout.masks import ROW_MASK_BYTES, Documents, Full, MaskFunction
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.tiles import Tile, Tiles
from megatron.context_parallel.positions.position_dropout import Dropout
from tests.properties import examples
from tests.unit.triton_cases import some_pairs

CPU_KERNELS = ["math", "cpu"]
# Largest error of (out, lse, each gradient), relative to the largest entry of the exact result.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12, 1e-12),
    torch.float32: (2e-6, 2e-6, 5e-6),
    torch.bfloat16: (1e-2, 1e-4, 2e-2),
}


def sbhd(s: int, b: int, h: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random [b, h, s, d], a view of [s, b, h, d] memory."""
    return torch.randn(s, b, h, d, dtype=torch.float64).to(dtype).permute(1, 2, 0, 3)


def make(b=2, h=4, hk=2, sq=24, sk=40, d=16, dtype=torch.float64, seed=0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random (dout, q, k, v), each [b, h, s, d]."""
    torch.manual_seed(seed)
    return sbhd(sq, b, h, d, dtype), sbhd(sq, b, h, d, dtype), sbhd(sk, b, hk, d, dtype), sbhd(sk, b, hk, d, dtype)


def dense(dout, q, k, v, *, causal=False, mask=None, scale=0.25):
    """(out, lse, dq, dk, dv) in float64, from the definition."""
    dout, q, k, v = (x.detach().double() for x in (dout, q, k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = scale * q @ k.repeat_interleave(group, 1).mT
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask
    scores = scores.masked_fill(~allowed, float("-inf"))
    dead = ~allowed.any(-1, keepdim=True)
    p = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    out = p @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return out.detach(), torch.logsumexp(scores.detach(), -1), *grads


def rows_of(mask: Tensor | None) -> TileScores:
    return TileScores() if mask is None else TileScores(allowed=lambda start, end, keys: mask[start:end, :keys])


def both_ways(kernel, dout, q, k, v, *, causal=False, mask=None, scale=0.25):
    """(out, lse, dq, dk, dv) of one kernel with a single tile. ``mask``: [sq, sk], True = attend."""
    how = replace(mask if isinstance(mask, TileScores) else rows_of(mask), scale=scale, causal=causal)
    out, lse = kernel.forward(q, k, v, how)
    return out, lse, *kernel.backward(dout, q, k, v, out, lse, how)


def assert_close(got, want, dtype: torch.dtype) -> None:
    names, (out, lse, grad) = ("out", "lse", "dq", "dk", "dv"), TOLERANCE[dtype]
    for name, x, y, bound in zip(names, got, want, (out, lse, grad, grad, grad), strict=True):
        assert x.shape == y.shape, name
        assert x.dtype == (sums.accumulation_dtype(dtype) if name == "lse" else dtype), name
        x, y = x.double(), y.double()
        assert torch.equal(x.isneginf(), y.isneginf()), name
        x, y = x.masked_fill(x.isneginf(), 0.0), y.masked_fill(y.isneginf(), 0.0)
        error = ((x - y).abs().max() / y.abs().max().clamp_min(0.1)).item()
        assert error <= bound, f"{name}: {error:.2e} > {bound}"  # a NaN fails too


def random_mask(sq, sk, seed=1, dead_row: int | None = 3) -> Tensor:
    mask = torch.rand(sq, sk, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 0] = True  # no row is empty, except dead_row
    if dead_row is not None:
        mask[..., dead_row, :] = False
    return mask


SHAPES = {
    "heads": dict(h=4, hk=4),
    "grouped": dict(h=4, hk=2),
    "one key head": dict(h=4, hk=1),
    "more keys": dict(sq=7, sk=65),
    "more queries": dict(sq=65, sk=7),
    "single query and key": dict(sq=1, sk=1),
    "two blocks of the op": dict(b=1, h=2, hk=1, sq=200, sk=600, d=8),
}


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_against_dense(name, dtype, shape):
    tensors = make(dtype=dtype, **shape)
    assert_close(both_ways(KERNELS[name], *tensors), dense(*tensors), dtype)


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 33, 300])
def test_causal(name, dtype, size):
    tensors = make(b=1, h=2, hk=1, sq=size, sk=size, dtype=dtype)
    assert_close(both_ways(KERNELS[name], *tensors, causal=True), dense(*tensors, causal=True), dtype)


MASKS = {
    "pairs": lambda: random_mask(24, 24),
    "nothing at all": lambda: torch.zeros(24, 24, dtype=torch.bool),
    "strided": lambda: random_mask(24, 48)[:, ::2],
}


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks_and_rows_without_keys(name, dtype, causal, mask, monkeypatch):
    tensors, mask = make(sk=24, dtype=dtype), mask()
    want = dense(*tensors, causal=causal, mask=mask)
    assert_close(both_ways(KERNELS[name], *tensors, causal=causal, mask=mask), want, dtype)
    monkeypatch.setattr(cpu_kernel, "ROW_MASK_BYTES", 5 * 24 * 8)  # again, in blocks of rows, the last one shorter
    monkeypatch.setitem(math_kernel.SCORE_BYTES, "cpu", 5 * 8 * 24 * 8)
    monkeypatch.setattr(math_kernel, "FEWEST_ROWS", 1)
    assert_close(both_ways(KERNELS[name], *tensors, causal=causal, mask=mask), want, dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_math_in_blocks_of_rows(rows, causal, monkeypatch):
    tensors = make(sk=24)
    monkeypatch.setitem(math_kernel.SCORE_BYTES, "cpu", rows * 2 * 4 * 24 * 8)
    monkeypatch.setattr(math_kernel, "FEWEST_ROWS", 1)
    assert_close(both_ways(KERNELS["math"], *tensors, causal=causal), dense(*tensors, causal=causal), torch.float64)


LAYOUTS = {
    "[b, h, s, d] memory": lambda x: x.contiguous(),
    "[b, s, h, d] memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a fused projection": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "rows of a longer sequence": lambda x: torch.cat([x, x], 2)[:, :, x.shape[2] :],
    "last dimension strided": lambda x: x.mT.contiguous().mT,
    "every second element": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_strides(name, layout):
    """Tensors may have any memory layout, and a kernel does not change its inputs."""
    kernel, tensors = KERNELS[name], make()
    want = dense(*tensors)
    dout, q, k, v = (layout(x) for x in tensors)
    out, lse = kernel.forward(q, k, v, TileScores(0.25))
    lse_strided = torch.stack([lse, lse], -1)[..., 0]
    grads = kernel.backward(dout, q, k, v, layout(out), lse_strided, TileScores(0.25))
    assert_close((out, lse, *grads), want, torch.float64)
    assert all(torch.equal(x, y) for x, y in zip((dout, q, k, v), tensors, strict=True))


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_expanded_tensors(name):
    """The gradient of a sum is a single expanded number; keys may be expanded, too."""
    _, q, k, v = make()
    dout, k = torch.ones((), dtype=q.dtype).expand(q.shape), k[:, :, :1].expand(k.shape)
    assert_close(both_ways(KERNELS[name], dout, q, k, v), dense(dout, q, k, v), torch.float64)


def merge(out: Tensor, lse: Tensor, out_t: Tensor, lse_t: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) merged with the tile (out_t, lse_t).

    The usual ``lse - logsigmoid(lse - lse_t)`` and ``sigmoid(lse_t - lse)`` give the same where lse is finite, but are
    NaN where the first tile, or both, left a row without keys.
    """
    merged = torch.logaddexp(lse, lse_t)
    weight = torch.exp(lse_t - tile_by_tile.lse_for_backward(merged, merged.dtype)).unsqueeze(-1)
    return out - weight * (out - out_t), merged


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_merge_to_the_whole(name, dtype, masked):
    """Keys in two tiles: forward is merged, and each tile's backward gets the final out and lse."""
    kernel, (dout, q, k, v), cut = KERNELS[name], make(sk=40, dtype=dtype), 15
    mask = None
    if masked:
        mask = random_mask(24, 40, dead_row=None)
        mask[5, :cut] = mask[7, cut:] = mask[9] = False  # rows without keys in one tile, or both
    acc = sums.accumulation_dtype(dtype)
    tiles = [slice(0, cut), slice(cut, 40)]
    parts = [replace(rows_of(mask if mask is None else mask[:, t]), scale=0.25) for t in tiles]
    out, lse = None, None
    for t, part in zip(tiles, parts, strict=True):
        out_t, lse_t = kernel.forward(q, k[:, :, t], v[:, :, t], part)
        if out is None:
            out, lse = out_t.to(acc), lse_t
        else:
            if not masked:  # the usual formula
                torch.testing.assert_close(lse - F.logsigmoid(lse - lse_t), merge(out, lse, out_t.to(acc), lse_t)[1])
            out, lse = merge(out, lse, out_t.to(acc), lse_t)
    dq, dk, dv = torch.zeros_like(q, dtype=acc), torch.empty_like(k), torch.empty_like(v)
    for t, part in zip(tiles, parts, strict=True):
        dq_t, dk[:, :, t], dv[:, :, t] = kernel.backward(dout, q, k[:, :, t], v[:, :, t], out.to(dtype), lse, part)
        dq += dq_t
    assert_close((out.to(dtype), lse, dq.to(dtype), dk, dv), dense(dout, q, k, v, mask=mask), dtype)


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_whose_final_lse_is_minus_infinity(name, causal):
    """Rows without keys give zeros, not NaN, even for a tile without a mask."""
    dout, q, k, v = make(sk=24)
    out, lse = KERNELS[name].forward(q, k, v, TileScores(0.25, causal))
    lse[:, :, 3], out[:, :, 3] = float("-inf"), 0.0
    got = KERNELS[name].backward(dout, q, k, v, out, lse, TileScores(0.25, causal))
    assert all(x.isfinite().all() for x in got) and not got[0][:, :, 3].any()
    dout = dout.clone()
    dout[:, :, 3] = 0.0
    want = dense(dout, q, k, v, causal=causal)
    for x, y in zip(got[1:], want[3:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_large_scores(name):
    """Scores of thousands, far beyond the range of exp."""
    dout, q, k, v = make()
    tensors = (dout, 30 * q, 30 * k, v)
    for x, y in zip(both_ways(KERNELS[name], *tensors), dense(*tensors), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@examples(40)
@given(st.data())
def test_cpu_agrees_with_math(data):
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    hk, group, d = draw(1, 3), draw(1, 3), draw(1, 40)
    causal, sq = data.draw(st.booleans()), draw(1, 70)
    sk = sq if causal else draw(1, 70)
    tensors = make(b=draw(1, 2), h=hk * group, hk=hk, sq=sq, sk=sk, d=d, seed=draw(0, 9))
    mask = random_mask(sq, sk, seed=draw(0, 9), dead_row=draw(0, sq - 1)) if data.draw(st.booleans()) else None
    scale = data.draw(st.sampled_from([0.05, 0.25, 2.0]))
    got, want = (both_ways(KERNELS[n], *tensors, causal=causal, mask=mask, scale=scale) for n in ("cpu", "math"))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["math", "cpu", "flash", "cudnn", "flash_attn"])
def test_invalid_tiles_are_refused(name):
    kernel, (dout, q, k, v) = KERNELS[name], make()
    mask = torch.ones(24, 40, dtype=torch.bool)
    wrong = [
        ("square", (q, k, v), TileScores(causal=True)),
        ("does not fit", (q[:, :3], k, v), TileScores()),
        ("does not fit", (q, k, v[:, :, :-1]), TileScores()),
        ("empty", (q[:, :, :0], k, v), TileScores()),
        ("empty", (q, k[:, :, :0], v[:, :, :0]), TileScores()),
    ]
    if not kernel.supports_value_dim:
        wrong.append(("value heads of the key heads' size", (q, k, v[..., :-1]), TileScores()))
    if not kernel.supports_mask:
        wrong.append((name, (q, k, v), rows_of(mask)))
    for message, tensors, how in wrong:
        with pytest.raises(ValueError, match=message):
            kernel.forward(*tensors, how)
        with pytest.raises(ValueError, match=message):
            kernel.backward(dout, *tensors, q, q[..., 0], how)


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("masked", [False, True])
def test_under_fake_tensors(name, masked):
    """A simulated run sees the shapes and dtypes of a real one."""
    real = make(sk=24, dtype=torch.bfloat16)
    mask = random_mask(24, 24) if masked else None
    want = both_ways(KERNELS[name], *real, mask=mask)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in real]
        got = both_ways(KERNELS[name], *fake, mask=mode.from_tensor(mask) if masked else None)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]


@pytest.mark.parametrize("sq, sk", [(0, 4), (4, 0)])
def test_an_empty_tile_is_refused(sq, sk):
    _, q, k, v = make(sq=sq, sk=sk)
    with pytest.raises(ValueError, match="empty attention tile"):
        KERNELS["math"].check_tile(q, k, v, TileScores())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ulysses_rank_has_the_slopes_sinks_and_dropout_of_its_heads(rank):
    sinks, slopes = torch.arange(6.0), torch.arange(6.0) / 8
    rule = AttentionRule(sinks=sinks, alibi_slopes=slopes, dropout=Dropout(0.5, seed=1))
    q, mine = torch.zeros(4, 1, 3, 8), slice(3 * rank, 3 * rank + 3)
    assert torch.equal(rule.local_sinks(q, Axis(2, rank)), sinks[mine])
    scores = rule.tile_kernel(q, Axis(2, rank), 8).scores
    assert torch.equal(scores.slopes, slopes[mine]) and scores.dropout == rule.dropout.of_heads(3 * rank)


@pytest.mark.parametrize("value_dim, largest", [(None, 8), (8, 8), (4, 8), (16, 16)])
def test_a_kernel_is_chosen_for_the_larger_of_the_head_sizes(value_dim, largest, monkeypatch):
    wanted = {}
    monkeypatch.setattr(kernels, "select", lambda name, **needs: wanted.update(needs) or KERNELS["math"])
    AttentionRule().tile_kernel(torch.zeros(4, 1, 3, 8), Axis(), 8, value_dim)
    assert wanted["head_dim"] == largest and wanted["needs_value_dim"] == (value_dim not in (None, 8))


def test_the_gradient_of_sinks_is_that_of_the_definition():
    dout, q, k, v = make(h=4, hk=4)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    scores = q @ k.mT / 4
    together = torch.cat([scores, sinks[:, None, None].expand(2, 4, scores.shape[2], 1)], dim=-1)
    out, lse = together.softmax(-1)[..., :-1] @ v, together.logsumexp(-1)
    out.backward(dout)
    by_row = (dout.permute(2, 0, 1, 3), out.detach().permute(2, 0, 1, 3), lse.detach().permute(2, 0, 1))
    # In fp64 both sum the same products in another order.
    torch.testing.assert_close(sinks_grad(sinks.detach(), *by_row), sinks.grad, rtol=1e-12, atol=1e-12)


def test_alibi_is_exact_at_positions_that_fp32_cannot_hold():
    at = ((2**30 + 1, 2**30 + 5),)
    tile = Tile((0, 4), (0, 4), "full")
    scores = base.Scores(1.0, slopes=torch.tensor([0.5]))
    mask = tile_by_tile.tile_scores(Tiles([tile], at, at), tile, torch.zeros(4, 1, 1, 8), scores)
    here = torch.arange(4.0)
    assert torch.equal(mask.bias(1, 4, 3)[0], -0.5 * (here[1:4, None] - here[:3]).abs())


@pytest.mark.parametrize("sums_exist", [False, True])
def test_gradients_of_all_rows_are_added_to_earlier_ones(sums_exist):
    like = torch.zeros(3, 1, 2, 4, dtype=torch.float64)
    total = sums.GradientSum(like, torch.ones_like(like) if sums_exist else None)
    total.add((0, 3), torch.full_like(like, 2.0))
    total.add((0, 3), torch.full_like(like, 4.0))
    total.add((1, 2), torch.full_like(like[:1], 8.0))
    want = torch.tensor([6.0, 14.0, 6.0], dtype=torch.float64) + sums_exist
    assert torch.equal(total.finish(), want.view(3, 1, 1, 1).expand_as(like))


# Tensors with too many elements for int32 are computed in several calls


@pytest.mark.parametrize("heads_per_call", [1, 2, 3, 4, 8, 12, 24, 25, 30, 100])
@pytest.mark.parametrize("hk", [1, 3, 12])
def test_pieces(heads_per_call, hk):
    b, h, sq, sk, d = 3, 12, 5, 9, 4
    tensors = dout, q, k, v = make(b=b, h=h, hk=hk, sq=sq, sk=sk, d=d)
    limit, math, calls = heads_per_call * sk * d + 1, KERNELS["math"], []

    def check(*tensors: Tensor) -> None:
        for x in tensors:
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            assert x.numel() < limit and last < limit
        calls.append(1)

    def forward(q, k, v):
        check(q, k, v)
        return math.forward(q, k, v, TileScores(0.25))

    def backward(dout, q, k, v, out, lse):
        check(dout, q, k, v, out, lse)
        return math.backward(dout, q, k, v, out, lse, TileScores(0.25))

    out, lse = fused_kernel.forward_in_pieces(forward, q, k, v, limit)
    grads = fused_kernel.backward_in_pieces(backward, dout, q, k, v, out, lse, limit)
    assert_close((out, lse, *grads), dense(*tensors), torch.float64)
    assert (len(calls) == 2) == (heads_per_call >= b * h)


def test_a_tensor_at_the_limit_is_read_in_place():
    x = torch.empty(2, 3, 5, 4)
    assert fused_kernel.compact(x, limit=x.numel()) is x
    part = torch.empty(2, 3, 5, 8)[..., :4]
    assert fused_kernel.compact(part, limit=2 * 3 * 5 * 8 - 4) is part
    assert fused_kernel.compact(part, limit=2 * 3 * 5 * 8 - 5).is_contiguous()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [5, 1000, 10_000, 2**18])
@pytest.mark.parametrize("rows", [8, 1000])
def test_blocks_of_scores_fit_the_memory_limits(rows, keys, masked):
    """As few blocks as the limits allow; several heads in one block only if it has FEW_ROWS rows."""
    mask = TileScores(allowed=lambda start, end, keys: None) if masked else TileScores()
    for b, h, hk in [(1, 2, 1), (5, 4, 2), (2, 6, 6)]:
        q, k = torch.empty(1).expand(b, h, rows, 4), torch.empty(1).expand(b, hk, keys, 4)
        group, limit = h // hk, math_kernel.SCORE_BYTES["cpu"] * torch.get_num_threads()
        seen = torch.zeros(b, h, rows, dtype=torch.int)
        for start, end, _, heads in math_kernel._blocks(q, k, mask):
            for batch, query_heads, key_heads in heads:
                part = seen[batch, query_heads, start:end]
                part += 1
                size, pairs = part.numel() * keys * 4, part.shape[0] * (key_heads.stop - key_heads.start)
                most = float("inf") if pairs == 1 else group * limit  # if the block has few rows
                assert size <= limit or size <= most and end - start <= math_kernel.FEWEST_ROWS
                if not masked and end < rows and pairs > 1:
                    assert (end - start) * group >= math_kernel.FEW_ROWS
            if masked and end - start > 1:
                assert (end - start) * mask.bytes_per_row(keys, 4) <= ROW_MASK_BYTES
            if b * h * rows * keys * 4 <= limit // 4:
                assert len(heads) == 1 and end - start == rows
        assert seen.eq(1).all()


def test_pieces_of_ordinary_tensors():
    q = torch.empty(1, 32, 131072, 128, device="meta", dtype=torch.bfloat16)
    assert len(fused_kernel.pieces(q, q)) == 1
    q = torch.empty(1, 32, 2**20, 128, device="meta", dtype=torch.bfloat16)
    k = torch.empty(1, 8, 2**20, 128, device="meta", dtype=torch.bfloat16)
    assert all((p[1].stop - p[1].start) * 2**20 * 128 < 2**31 for p in fused_kernel.pieces(q, k))
    assert len(fused_kernel.pieces(q, k)) == 3  # three groups of four heads per call: 12, 12, 8


# Backends that cannot run on this machine must call their operators with the right names and shapes


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("hk", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_ops_on_the_meta_device(name, hk, causal):
    tensors = [x.to("meta") for x in make(b=2, h=4, hk=hk, sq=64, sk=64, d=64, dtype=torch.bfloat16)]
    got = both_ways(KERNELS[name], *tensors, causal=causal)
    dout, q, k, v = tensors
    assert [x.shape for x in got] == [q.shape, q.shape[:3], q.shape, k.shape, v.shape]
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 3


@pytest.mark.parametrize("dims", [3, 4])
def test_cudnn_gets_lse_back_as_its_version_returned_it(dims, monkeypatch):
    """With the CPU's operator in place of cuDNN's."""
    aten = torch.ops.aten

    def forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale):
        assert (attn_bias, compute_log_sumexp, dropout_p) == (None, True, 0.0)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse if dims == 3 else lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None

    def backward(dout, q, k, v, out, lse, *, dropout_p, is_causal, scale, max_q, max_k, **unused):
        assert lse.dim() == dims and lse.is_contiguous() and (dropout_p, max_q, max_k) == (0.0, q.shape[2], k.shape[2])
        lse = lse.view(q.shape[:3])
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )

    monkeypatch.setattr(cudnn_kernel, "_forward", forward)
    monkeypatch.setattr(cudnn_kernel, "_backward", backward)
    cudnn_kernel._lse_dims.cache_clear()
    try:
        for shape in (dict(), dict(sq=1), dict(sk=1)):
            tensors = make(**shape)
            assert_close(both_ways(KERNELS["cudnn"], *tensors), dense(*tensors), torch.float64)
    finally:
        cudnn_kernel._lse_dims.cache_clear()


def test_every_kernel_has_the_arguments_of_the_base_class():
    def names(owner: object, method: str) -> list[str]:
        given = inspect.signature(getattr(owner, method)).parameters
        return [name.removesuffix("_SBHD") for name in given if name != "self"]

    for name, kernel in KERNELS.items():
        assert kernel.name == name
        for method in ("why_not", "why_not_on", "attend", "attend_grad", "delta"):
            assert names(kernel, method) == names(base.Kernel, method)


def test_package_exports():
    assert all(hasattr(kernels, name) for name in kernels.__all__)


@pytest.mark.parametrize("rows, each, limit, ends", [(10, 3, 8, [2, 4, 6, 8, 10]), (5, 4, 8, [2, 4, 5]),
                                                     (2, 9, 8, [1, 2]), (3, 1, 8, [3])])  # fmt: skip
def test_blocks_of_rows_are_as_long_as_the_limit_allows(rows, each, limit, ends):
    assert list(tile_by_tile.row_blocks(rows, each, limit)) == list(zip([0, *ends], ends))


def test_slices_of_heads_are_as_large_as_the_limit_allows():
    """Each head of each sample is in one slice, together with its key head."""
    for b, h, hk in itertools.product((1, 2, 3), (2, 4, 6), (1, 2)):
        for limit in range(1, b * h + 2):
            cuts = fused_kernel.head_slices(b, h, hk, limit)
            met = torch.zeros(b, h)
            for batch, heads, key_heads in cuts:
                met[batch, heads] += 1
                here = range(heads.start, heads.stop)
                assert {head // (h // hk) for head in here} == set(range(key_heads.start, key_heads.stop))
                assert batch.stop <= b and 0 < (batch.stop - batch.start) * len(here) <= limit
            assert met.eq(1).all()
            whole = limit // h if limit >= h else 0
            group = h // hk
            by_sample = -(-hk // (limit // group)) if limit >= group else hk * -(-group // limit)
            assert len(cuts) == (-(-b // whole) if whole else b * by_sample)


def test_kernels_of_a_gpu_are_none_without_one():
    if not torch.cuda.is_available():
        assert not set(kernels.available("cuda", torch.bfloat16, 64)) - {"math"}


@pytest.mark.parametrize(
    "b, h, hk, sq, sk", [(1, 4, 4, 300, 50), (3, 8, 2, 64, 4096), (2, 6, 1, 7, 3000), (1, 2, 1, 5, 2)]
)
def test_blocks_of_scores_fit_the_cache(b, h, hk, sq, sk, monkeypatch):
    """Blocks are at most as large as the limit and, if there are several, more than a fourth of it."""
    q, k = torch.empty(b, h, sq, 8), torch.empty(b, hk, sk, 8)
    for limit in (2**16, 2**18, 2**20):
        monkeypatch.setitem(math_kernel.SCORE_BYTES, "cpu", limit // torch.get_num_threads())
        sizes, met = [], torch.zeros(b, h, sq)
        for start, end, keys, heads_at_once in math_kernel._blocks(q, k, TileScores()):
            assert keys == sk
            for batch, heads, key_heads in heads_at_once:
                met[batch, heads, start:end] += 1
                here = met[batch, heads].shape[:2].numel()
                assert (heads.stop - heads.start) * hk == (key_heads.stop - key_heads.start) * h
                sizes.append((here * (end - start) * sk * 4, end - start, here))
        assert met.eq(1).all()
        for size, rows, together in sizes:
            assert size <= limit or (rows <= math_kernel.FEWEST_ROWS and together == h // hk)
        largest = max(size for size, *_ in sizes)
        assert len(sizes) == 1 or largest > limit / 4


@pytest.mark.parametrize("value_dim, largest", [(None, 16), (8, 16), (24, 24)])
def test_a_kernel_is_chosen_for_the_larger_head_size(monkeypatch, value_dim, largest):
    asked = []
    monkeypatch.setattr(kernels, "select", lambda name, **options: asked.append(options["head_dim"]))
    AttentionRule().tile_kernel(torch.empty(4, 1, 2, 16), Axis(), 4, value_dim)
    assert asked == [largest]


@pytest.mark.parametrize("softcap", [0.0, -1.0])
def test_a_softcap_that_is_not_above_0_is_refused(softcap):
    with pytest.raises(ValueError, match=f"softcap={softcap} must be above 0"):
        AttentionRule(softcap=softcap)


def test_with_latents_a_kernel_is_chosen_for_the_heads_that_they_make(monkeypatch):
    """Of 24 entries of a key 8 are rotated and 16 come from the latent, as do 12 of its value."""
    asked = []
    monkeypatch.setattr(usp, "tiled_attention", lambda *_, **options: None)
    monkeypatch.setattr(AttentionRule, "tile_kernel", lambda *arguments: asked.append(arguments[-1]))
    q, k, v = (torch.empty(4, 1, *shape) for shape in ((2, 24), (2, 8), (1, 10)))
    rule = AttentionRule(up=torch.empty(2, 16 + 12, 10))
    usp.attention_between_all_to_alls(q, k, v, layout=SequenceLayout(4, abstract_grid()), rule=rule)
    assert asked == [12]


def test_blocks_of_scores_have_few_rows_where_masks_are_large(monkeypatch):
    monkeypatch.setattr(math_kernel, "ROW_MASK_BYTES", 10**4)
    q, row = torch.empty(1, 2, 64, 8), torch.empty(2, 1, 40)
    for mask in (TileScores(allowed=lambda *_: row[0] > 0), TileScores(bias=lambda *_: row, heads=2)):
        (most,) = {end - start for start, end, *_ in list(math_kernel._blocks(q, q[:, :, :40], mask))[:-1]}
        assert most == 10**4 // mask.bytes_per_row(40, 4) < 64


def test_cudnn_leaves_single_queries_and_keys_to_others():
    def single(queries: int, keys: int) -> bool:
        return cudnn_kernel._single(torch.empty(1, 1, queries, 8), torch.empty(1, 1, keys, 8))

    assert single(1, 5) and single(5, 1) and not single(5, 5)


def test_keys_are_gathered_only_on_a_ring_and_only_if_asked(monkeypatch):
    sources = []
    monkeypatch.setattr(usp, "tiled_attention", lambda *_, source, **options: sources.append(source))
    for ring, gather in itertools.product((1, 2), (False, True)):
        layout = SequenceLayout(8, abstract_grid(ring=ring))
        x = torch.empty(layout.local_length, 1, 2, 8)
        usp.attention_between_all_to_alls(x, x, x, layout=layout, rule=AttentionRule(gather_keys=gather))
    assert [isinstance(source, GatherSource) for source in sources] == [False, False, False, True]


def test_masks_are_made_in_host_memory_for_long_queries_or_keys(monkeypatch):
    in_host = []
    monkeypatch.setattr(
        usp, "tiled_attention", lambda *_, kernel, **options: in_host.append(kernel.scores.mask_in_host)
    )
    short, long = (SequenceLayout(length, abstract_grid()) for length in (8, 16))
    for queries, keys in ((short, short), (short, long), (long, short)):
        q, k = (torch.empty(layout.seq_length, 1, 2, 8) for layout in (queries, keys))
        rule = AttentionRule(Full(), mask_cpu_threshold=8)
        usp.attention_between_all_to_alls(q, k, k, layout=queries, rule=rule, key_layout=keys)
    assert in_host == [False, True, True]


def test_one_mask_for_several_samples_with_dropout():
    """Each sample draws its own dropout, as if it were alone."""
    layout, x = SequenceLayout(8, abstract_grid()), sbhd(8, 2, 2, 8).permute(2, 0, 1, 3)
    dropout = Dropout(0.4, seed=1, samples=(3, 7))
    both = usp.attention(x, x, x, layout=layout, dropout=dropout)
    for i, sample in enumerate(x.split(1, dim=1)):
        alone = usp.attention(sample, sample, sample, layout=layout, dropout=dropout.of_samples(i, i + 1))
        assert torch.equal(both[:, i : i + 1], alone)
    assert not torch.equal(both, usp.attention(x, x, x, layout=layout))


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_a_mask_of_pairs_in_tiles(name):
    """Full, causal and masked tiles; every ninth query sees no key."""
    layout, at = SequenceLayout(45, abstract_grid(), "contiguous"), torch.arange(45)
    pairs = MaskFunction(lambda q, k: some_pairs(q, k) & (k <= q), Full())
    dout, q, k, v = make(b=2, h=4, hk=2, sq=45, sk=45)
    for mask in (pairs, Documents((20, 45)), Full()):
        leaves = [x.permute(2, 0, 1, 3).detach().clone().requires_grad_() for x in (q, k, v)]
        out = usp.attention(*leaves, layout=layout, mask=mask, kernel=name, scale=0.25)
        grads = torch.autograd.grad(out, leaves, dout.permute(2, 0, 1, 3))
        true_out, _, *true_grads = dense(dout, q, k, v, mask=mask.allowed(at[:, None], at[None]))
        for got, true in zip((out, *grads), (true_out, *true_grads), strict=True):
            assert (got.permute(1, 2, 0, 3) - true).abs().max() < 1e-12
