# SPDX-License-Identifier: Apache-2.0
"""Host memory: buffers that come back, and how many bytes move to and from the host, against the formula in docs."""

from __future__ import annotations

import gc

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer, copied_bytes
from megatron.context_parallel.fpdt.host_pool import HostPool, is_host_buffer
from megatron.context_parallel.fpdt.offload import Offload
from megatron.context_parallel.fpdt.saved_inputs import SavedInHost
from megatron.context_parallel.fpdt.shelf import HiddenStates, Shelf
from megatron.context_parallel.layout.grid import abstract_grid

CPU = torch.device("cpu")


def test_a_block_is_allocated_once_and_reused():
    pool = HostPool(pinned=False)
    first = pool.empty((4, 8), torch.float32)
    address = first.data_ptr()
    view = first[2:]
    assert is_host_buffer(first) and is_host_buffer(view) and not is_host_buffer(torch.empty(3))
    del first
    assert pool.in_use == 128  # the view still needs it
    del view
    assert pool.in_use == 0 and pool.allocated == 128
    again = pool.empty((2, 32), torch.bfloat16)
    assert again.data_ptr() == address and pool.allocated == 128
    other = pool.empty((1,), torch.float32)
    assert (pool.allocated, pool.in_use, pool.peak) == (132, 132, 132)
    del again, other
    assert (pool.allocated, pool.in_use, pool.peak) == (132, 0, 132)


def test_buffers_survive_autograd_and_come_back():
    offload = Offload(CPU)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return offload.to_host(x * 2)

        @staticmethod
        def backward(ctx, grad):
            return offload.to_host(grad * 2)

    x = torch.randn(5, requires_grad=True)
    y = Double.apply(Double.apply(x))
    assert is_host_buffer(y) and offload.pool.in_use == 40
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 4.0))
    x.grad = y = None
    gc.collect()
    assert offload.pool.in_use == 0


@pytest.mark.parametrize("offload", [None, Offload(CPU)], ids=["device", "host"])
def test_a_shelf_keeps_adds_and_walks(offload):
    shelf = Shelf(offload)
    for index in range(3):
        shelf.put(("a", index), torch.full((2,), float(index)))
    shelf.put(("sum", 1), torch.tensor([10.0]))
    items = [[("a", index), ("sum", index)] for index in (2, 1, 0)]
    seen = []
    for there in shelf.walk(items, fresh={("a", 0): torch.full((2,), 7.0)}):
        seen.append({name: tensor.tolist() for name, tensor in there.items()})
    assert seen == [{("a", 2): [2.0, 2.0]}, {("a", 1): [1.0, 1.0], ("sum", 1): [10.0]}, {("a", 0): [7.0, 7.0]}]
    shelf.put(("sum", 1), torch.tensor([11.0]))
    assert shelf.pop(("sum", 1)).tolist() == [11.0] and ("sum", 1) not in shelf
    shelf.drop(*(("a", index) for index in range(3)))
    assert offload is None or offload.pool.in_use == 0


def test_rows_of_a_host_buffer_are_copies_and_rows_of_a_device_tensor_are_views():
    offload = Offload(CPU)
    x = torch.arange(12.0).view(6, 2)
    host, here = HiddenStates(offload.to_host(x), offload), HiddenStates(x, offload)
    spans = [(0, 1), (1, 4), (4, 6)]
    for rows in (host, here):
        assert torch.equal(torch.cat(list(rows.walk(spans))), x)
    assert offload.copies.to_device == 48 and offload.copies.to_host == 48
    host.write((1, 3), torch.full((2, 2), -1.0))
    assert host.x[1:3].eq(-1).all() and torch.equal(host.read((3, 6)), x[3:])
    assert next(iter(here.walk(spans))).data_ptr() == x.data_ptr()


def test_saved_layer_inputs_wait_in_host_memory():
    offload = Offload(CPU)
    shape = torch.Size((4, 2, 3))
    hooks = SavedInHost(offload, shape)
    x = start = torch.randn(shape, requires_grad=True)
    small = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        for _ in range(3):
            x = x.sin() + small.exp()  # sin saves its input; exp saves what is no layer input
    size = shape.numel() * 4
    assert offload.copies.to_host == offload.pool.in_use == 3 * size
    grads = torch.autograd.grad(x.sum(), (start, small))
    plain = start
    for _ in range(3):
        plain = plain.sin() + small.exp()
    for mine, expected in zip(grads, torch.autograd.grad(plain.sum(), (start, small))):
        assert torch.equal(mine, expected)
    assert offload.copies.to_device == 3 * size  # each once, ahead of time or not
    del x, hooks
    gc.collect()
    assert offload.pool.in_use == 0


def run_layer(heads, kv_heads, chunks, offload, streamed=False, train=True, length=40, batch=2, size=8, width=16):
    """One pass of an attention half in float32, forward and, if it trains, backward."""
    layout = cp.SequenceLayout(length, abstract_grid(), chunks=chunks)
    w_qkv = torch.randn(width, (heads + 2 * kv_heads) * size, requires_grad=True)
    w_out = torch.randn(heads * size, width, requires_grad=True)

    def project(x, chunk):
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        return tuple(part.unflatten(-1, (-1, size)) for part in (x @ w_qkv).split(sizes, dim=-1))

    def output(out, x, chunk):
        return x + out.flatten(2) @ w_out

    job = ChunkedLayer(project, output, [w_qkv, w_out], layout, offload=offload, streamed=streamed)
    x = torch.randn(length, batch, width)
    x = offload.to_host(x) if streamed else x
    if offload:
        offload.copies.to_host = offload.copies.to_device = 0
    with torch.set_grad_enabled(train):
        y = job(x.requires_grad_(train))
    if not train:
        return None
    forward = (offload.copies.to_host, offload.copies.to_device) if offload else None
    y.backward(torch.ones_like(y) if not streamed else offload.to_host(torch.ones_like(y)))
    return forward


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
def test_bytes_that_move_are_those_of_the_formula(heads, kv_heads, chunks):
    offload = Offload(CPU)
    forward = run_layer(heads, kv_heads, chunks, offload)
    sizes = {"tokens": 40 // chunks * 2, "heads": heads, "kv_heads": kv_heads, "head_dim": 8, "itemsize": 4}
    expected = copied_bytes(chunks, **sizes)
    assert forward == expected.forward
    whole = (offload.copies.to_host, offload.copies.to_device)
    assert whole == tuple(a + b for a, b in zip(expected.forward, expected.backward))


def test_nothing_moves_in_a_pass_that_keeps_nothing():
    offload = Offload(CPU)
    run_layer(4, 2, 4, offload, train=False)
    assert (offload.copies.to_host, offload.copies.to_device, offload.pool.allocated) == (0, 0, 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_host_bytes_are_the_same_after_three_passes_and_after_fifty(streamed):
    offload = Offload(CPU)
    seen = []
    for _ in range(50):
        run_layer(4, 2, 5, offload, streamed=streamed)
        gc.collect(0)
        seen.append((offload.pool.allocated, offload.pool.in_use))
    assert seen[2] == seen[49] and seen[49][1] == 0
