# SPDX-License-Identifier: Apache-2.0
"""FPDT on a GPU: bf16 against dense float64 attention, copies on separate streams, no wait on the host."""

from __future__ import annotations

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.chunked_loss import add_product, adds_wide
from megatron.context_parallel.fpdt.host_store import Offload, is_host_buffer
from megatron.context_parallel.layout.grid import abstract_grid

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="copy streams need a CUDA device")

WIDTH, SIZE = 256, 64
MODES = ["device", "host", "stream", "recompute"]
MASKS = {"causal": cp.Causal(), "full": cp.Full()}


def tensors(length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, w_qkv, w_out, w_ffn and dy."""
    draw = torch.Generator("cuda").manual_seed(1)
    shapes = [(length, 2, WIDTH), (WIDTH, (heads + 2 * kv_heads) * SIZE), (heads * SIZE, WIDTH), (WIDTH, WIDTH)]
    scales = [1.0, WIDTH**-0.5, WIDTH**-0.5, WIDTH**-0.5, 1.0]
    made = [torch.randn(s, generator=draw, device="cuda") * k for s, k in zip([*shapes, shapes[0]], scales)]
    return [tensor.bfloat16().to(dtype) for tensor in made]


def parts(heads: int, kv_heads: int, weights):
    w_qkv, w_out, w_ffn = weights

    def project(x, chunk):
        sizes = [heads * SIZE, kv_heads * SIZE, kv_heads * SIZE]
        return tuple(part.unflatten(-1, (-1, SIZE)) for part in (x @ w_qkv).split(sizes, dim=-1))

    def output(out, x, chunk):
        return x + out.flatten(2) @ w_out

    def ffn(x):
        return x + torch.tanh(x @ w_ffn)

    return project, output, ffn


def layer(heads, kv_heads, weights, length, mask, mode, offload) -> ChunkedLayer:
    project, output, ffn = parts(heads, kv_heads, weights)
    layout = cp.SequenceLayout(length, abstract_grid(), chunks=4)
    return ChunkedLayer(
        project,
        output,
        weights,
        layout,
        cp.AttentionRule(MASKS[mask]),
        ffn=ffn,
        ffn_pieces=2,
        offload=None if mode == "device" else offload,
        streamed=mode == "stream",
        recompute=mode == "recompute",
    )


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", MODES)
def test_chunks_equal_dense_attention(heads, kv_heads, mask, mode):
    length, offload = 1000, Offload(torch.device("cuda"))
    x, *weights, dy = tensors(length, heads, kv_heads, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, *weights)]
    project, output, ffn = parts(heads, kv_heads, leaves[1:])
    q, k, v = project(leaves[0], 0)
    group = heads // kv_heads
    keys, values = (part.repeat_interleave(group, dim=2) for part in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, keys) * SIZE**-0.5
    if mask == "causal":
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    expected = ffn(output(torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), values), leaves[0], 0))
    expected_grads = torch.autograd.grad(expected, leaves, dy)

    x, *weights, dy = tensors(length, heads, kv_heads, torch.bfloat16)
    mine = [tensor.requires_grad_() for tensor in weights]
    x = offload.to_host(x) if mode == "stream" else x
    x.requires_grad_()
    y = layer(heads, kv_heads, mine, length, mask, mode, offload)(x)
    grads = torch.autograd.grad(y, [x, *mine], offload.to_host(dy) if mode == "stream" else dy)
    torch.cuda.synchronize()
    assert is_host_buffer(y) == is_host_buffer(grads[0]) == (mode == "stream")
    for got, want in zip((y, *grads), (expected, *expected_grads)):
        error = float((got.cuda().double() - want).norm() / want.norm())
        assert error < 2e-2, error


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_on_the_host_and_nothing_leaks(mode):
    offload = Offload(torch.device("cuda"))
    x, *weights, dy = tensors(4096, 8, 2, torch.bfloat16)
    weights = [tensor.requires_grad_() for tensor in weights]
    if mode == "stream":
        x, dy = offload.to_host(x), offload.to_host(dy)
    x.requires_grad_()
    seen = []
    for step in range(10):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first pass may allocate
        try:
            y = layer(8, 2, weights, 4096, "causal", mode, offload)(x)
            grads = torch.autograd.grad(y, [x, *weights], dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        del y, grads
        torch.cuda.synchronize()
        seen.append((torch.cuda.memory_allocated(), offload.pool.allocated, offload.pool.in_use))
    device, host, in_use = zip(*seen[5:])  # the steady state: the first steps fill caches and return some of them
    assert max(device) == device[-1] == device[0] and len({*host}) == len({*in_use}) == 1


def test_host_buffers_are_pinned_and_exact():
    offload = Offload(torch.device("cuda"))
    buffer = offload.empty((3, 1000), torch.bfloat16)
    assert buffer.is_pinned() and offload.pool.allocated == 6000
    x = torch.randn(3, 1000, device="cuda", dtype=torch.bfloat16)
    offload.write(buffer, x)
    assert torch.equal(offload.load(buffer[1:]).wait(), x[1:])


def test_narrow_matrices_are_added_to_a_wide_sum():
    draw = torch.Generator("cuda").manual_seed(2)
    a, b = (torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in [(2048, 512), (2048, 256)])
    total = torch.ones(512, 256, device="cuda")
    add_product(total.clone(), a.t(), b)  # cuBLAS allocates its workspace at the first product
    expected = total.double() + a.t().double() @ b.double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product(total, a.t(), b)
    assert float((total - expected).abs().max() / expected.abs().max()) < 1e-2
    if adds_wide(total.device, torch.bfloat16, torch.float32):  # the product itself adds to the sum: exact, in place
        assert float((total - expected).abs().max() / expected.abs().max()) < 1e-5
        assert torch.cuda.max_memory_allocated() - before < total.nbytes
