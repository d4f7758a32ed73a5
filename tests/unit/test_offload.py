# SPDX-License-Identifier: Apache-2.0
"""Host memory: reused buffers, and bytes copied to and from the host compared with the formula in docs."""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import megatron.context_parallel as cp
from megatron.context_parallel.attention import ulysses
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.fpdt import chunk_pass, chunked_ffn, chunked_layer, host_store
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.fpdt.host_store import (
    MOST,
    ChunkStore,
    HiddenStates,
    HostPool,
    Offload,
    SavedInHost,
    is_host_buffer,
)
from megatron.context_parallel.layout.grid import Axis, abstract_grid
from megatron.context_parallel.positions.position_dropout import drop
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, Rope
from megatron.platform.streams import CudaStreams, Streams
from tests.adversary import Adversary, Mutant, call_sites
from tests.unit.closed_forms import copied_bytes

CPU = torch.device("cpu")


def test_a_block_is_allocated_once_and_reused():
    pool = HostPool(Streams(CPU))
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


def test_idle_blocks_are_kept_up_to_the_bound():
    """``allocated`` after each size, of which one buffer at a time is in use; the bound is twice the largest size."""
    for sizes, allocated in (((100, 150), [100, 250]), ((100, 99, 50), [100, 199, 199]), ((100, 250), [100, 350]),
                             ((100, 99, 98, 201), [100, 199, 199, 400]), ((100, 99, 98, 202), [100, 199, 199, 401]),
                             ((100, 120, 140), [100, 220, 140])):  # fmt: skip
        pool, seen = HostPool(Streams(CPU)), []
        for size in sizes:
            buffer = pool.empty((size,), torch.uint8)
            seen.append(pool.allocated)
            del buffer
        assert seen == allocated, sizes


def test_buffers_survive_autograd_and_return_to_the_pool():
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
def test_a_chunk_store_keeps_replaces_and_loads_tensors(offload):
    store = ChunkStore(offload)
    for index in range(3):
        store.put(("a", index), torch.full((2,), float(index)))
    store.put(("sum", 1), torch.tensor([10.0]))
    items = [[("a", index), ("sum", index)] for index in (2, 1, 0)]
    seen = []
    for loaded in store.walk(items, fresh={("a", 0): torch.full((2,), 7.0)}):
        seen.append({name: tensor.tolist() for name, tensor in loaded.items()})
    assert seen == [{("a", 2): [2.0, 2.0]}, {("a", 1): [1.0, 1.0], ("sum", 1): [10.0]}, {("a", 0): [7.0, 7.0]}]
    store.put(("sum", 1), torch.tensor([11.0]))
    assert store.pop(("sum", 1)).tolist() == [11.0] and ("sum", 1) not in store
    store.drop(*(("a", index) for index in range(3)))
    assert offload is None or offload.pool.in_use == 0


def test_rows_of_a_host_buffer_are_copies_and_rows_of_a_device_tensor_are_views():
    offload = Offload(CPU)
    x = torch.arange(12.0).view(6, 2)
    host, device = HiddenStates(offload.to_host(x), offload), HiddenStates(x, offload)
    spans = [(0, 1), (1, 4), (4, 6)]
    for rows in (host, device):
        assert torch.equal(torch.cat(list(rows.walk(spans))), x)
    assert offload.copies.to_device == 48 and offload.copies.to_host == 48
    host.write((1, 3), torch.full((2, 2), -1.0))
    assert host.x[1:3].eq(-1).all() and torch.equal(host.read((3, 6)), x[3:])
    assert next(iter(device.walk(spans))).data_ptr() == x.data_ptr()


def test_saved_layer_inputs_wait_in_host_memory():
    offload = Offload(CPU)
    shape = torch.Size((4, 2, 3))
    hooks = SavedInHost(offload, shape)
    x = start = torch.randn(shape, requires_grad=True)
    small = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        for _ in range(3):
            x = x.sin() + small.exp()  # sin saves its input; exp saves another tensor
    size = shape.numel() * 4
    assert offload.copies.to_host == offload.pool.in_use == 3 * size
    grads = torch.autograd.grad(x.sum(), (start, small))
    plain = start
    for _ in range(3):
        plain = plain.sin() + small.exp()
    for mine, expected in zip(grads, torch.autograd.grad(plain.sum(), (start, small))):
        assert torch.equal(mine, expected)
    assert offload.copies.to_device == 3 * size  # each input once, prefetched or not
    del x, hooks
    gc.collect()
    assert offload.pool.in_use == 0


def test_hooks_that_serve_several_passes_load_each_input_once():
    offload, x = Offload(CPU), torch.randn(3, 4, requires_grad=True)
    hooks = SavedInHost(offload, x.shape)
    for passes in (1, 2, 3):
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            y = x.sin().sin()
        torch.autograd.grad(y.sum(), x)
        assert offload.copies.to_device == offload.copies.to_host == passes * 2 * 48


def run_layer(heads, kv_heads, chunks, offload, streamed=False, train=True, length=40, batch=2, size=8, width=16):
    """An attention half in float32, with backward in training; returns forward's bytes (to host, to device) or None."""
    layout = cp.SequenceLayout(length, abstract_grid(), chunks=chunks)
    w_qkv = torch.randn(width, (heads + 2 * kv_heads) * size, requires_grad=True)
    w_out = torch.randn(heads * size, width, requires_grad=True)

    def project(x, chunk):
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        return tuple(part.unflatten(-1, (-1, size)) for part in (x @ w_qkv).split(sizes, dim=-1))

    def output(out, x, chunk):
        return x + out.flatten(2) @ w_out

    layer = ChunkedLayer(project, output, [w_qkv, w_out], layout, offload=offload, streamed=streamed)
    x = torch.randn(length, batch, width)
    x = offload.to_host(x) if streamed else x
    if offload:
        offload.copies.to_host = offload.copies.to_device = 0
    with torch.set_grad_enabled(train):
        y = layer(x.requires_grad_(train))
    if not train:
        return None
    forward = (offload.copies.to_host, offload.copies.to_device) if offload else None
    y.backward(torch.ones_like(y) if not streamed else offload.to_host(torch.ones_like(y)))
    return forward


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
def test_copied_bytes_equal_the_formula(heads, kv_heads, chunks):
    offload = Offload(CPU)
    forward = run_layer(heads, kv_heads, chunks, offload)
    sizes = {"tokens": 40 // chunks * 2, "heads": heads, "kv_heads": kv_heads, "head_dim": 8, "itemsize": 4}
    expected = copied_bytes(chunks, **sizes)
    assert forward == expected.forward
    whole = (offload.copies.to_host, offload.copies.to_device)
    assert whole == tuple(a + b for a, b in zip(expected.forward, expected.backward))


def test_a_pass_that_saves_nothing_copies_nothing():
    offload = Offload(CPU)
    run_layer(4, 2, 4, offload, train=False)
    assert (offload.copies.to_host, offload.copies.to_device, offload.pool.allocated) == (0, 0, 0)


def test_a_streamed_pass_that_saves_nothing_copies_all_keys_but_the_last():
    offload, hidden, keys = Offload(CPU), 40 * 2 * 16 * 4, 40 * 2 * 2 * 2 * 8 * 4
    run_layer(4, 2, 4, offload, streamed=True, train=False)
    assert offload.copies.to_host == hidden + keys * 3 // 4


class FakeCuda:
    """Records calls for a GPU's streams and pinned memory."""

    def __init__(self, monkeypatch):
        self.done = []
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "current_stream", lambda *_: FakeStream("compute", self.done))
        monkeypatch.setattr(cuda, "Stream", lambda *_: FakeStream("copy", self.done))
        monkeypatch.setattr(cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(cuda, "synchronize", lambda _: self.done.append("synchronize"))
        monkeypatch.setattr(cuda, "check_error", lambda code: None)
        monkeypatch.setattr(cuda, "cudart", lambda: self)

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.done.append(("register", address))

    def cudaHostUnregister(self, address):  # noqa: N802
        self.done.append(("unregister", address))


class FakeStream:
    def __init__(self, name, done):
        self.name, self.done = name, done

    def wait_event(self, event):
        self.done.append((self.name, "waits for", event))

    def record_event(self):
        return self.name


def test_memory_that_is_being_loaded_is_not_reused_before_the_copy_is_done(monkeypatch):
    cuda, streams = FakeCuda(monkeypatch), CudaStreams(torch.device("cuda", 0))
    streams.device = CPU  # allocate on the CPU
    offload = Offload(CPU, streams)
    host = offload.empty((3,), torch.float32)
    cuda.done.clear()
    offload.load(host)  # the result is dropped, so compute waits before it may reuse the memory
    assert cuda.done == [("copy", "waits for", "compute"), ("compute", "waits for", "copy")]


def test_no_two_blocks_share_a_page(monkeypatch):
    cuda, pool = FakeCuda(monkeypatch), HostPool(CudaStreams(torch.device("cuda", 0)))
    buffers = [pool.empty((size,), torch.uint8) for size in (8192, 1, 5000, 65536)]
    pages = [range(x.data_ptr() // mmap.PAGESIZE, (x.data_ptr() + x.nbytes - 1) // mmap.PAGESIZE + 1) for x in buffers]
    assert sum(map(len, pages)) == len(set().union(*pages)) and len(cuda.done) == 4
    assert all(x.data_ptr() % mmap.PAGESIZE == 0 for x in buffers)


def test_pinned_blocks_are_unregistered_when_their_pool_and_its_last_buffer_are_gone(monkeypatch):
    cuda, pool = FakeCuda(monkeypatch), HostPool(CudaStreams(torch.device("cuda", 0)))
    first, second = pool.empty((4,), torch.float32), pool.empty((5,), torch.float32)
    addresses = [first.data_ptr(), second.data_ptr()]
    assert cuda.done == [("register", address) for address in addresses]
    cuda.done.clear()
    del pool, first
    gc.collect()
    assert cuda.done == []  # a buffer is still in use
    del second
    gc.collect()
    assert cuda.done == ["synchronize", *(("unregister", address) for address in addresses)]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_backward_pass_is_refused_in_one_line(recompute):
    layout, w = cp.SequenceLayout(8, abstract_grid(), chunks=2), torch.ones((), requires_grad=True)
    layer = ChunkedLayer(
        lambda x, _: (x[..., None] * w,) * 3, lambda out, x, _: x + out[..., 0], [w], layout, recompute=recompute
    )
    y = layer(torch.randn(8, 1, 4)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass through a layer in chunks is not supported"):
        y.backward()


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("mask", [cp.Causal(), cp.Full(), cp.Window(2)], ids=str)
def test_nothing_is_kept_after_a_backward_pass(monkeypatch, mask, by_keys):
    """Tensors of a chunk are dropped when nothing needs them any more: the last are dropped with the last chunk."""
    stores, most = [], []

    class Recorded(chunk_pass.ChunkStore):
        def __init__(self, offload):
            super().__init__(offload)
            stores.append(self)

        def drop(self, *names):
            most.append(len(self._kept))
            super().drop(*names)

    monkeypatch.setattr(chunk_pass, "ChunkStore", Recorded)
    monkeypatch.setattr(chunked_layer, "goes_by_keys", lambda *_: by_keys)
    layout, w = cp.SequenceLayout(32, abstract_grid(), chunks=4), torch.ones((), requires_grad=True)
    layer = ChunkedLayer(
        lambda x, _: (x[..., None] * w,) * 3,
        lambda out, x, _: x + out[..., 0],
        [w],
        layout,
        rule=AttentionRule(mask),
        offload=Offload(CPU),
    )
    layer(torch.randn(32, 1, 4, requires_grad=True)).sum().backward()
    assert len(stores) == 1 and not stores[0]._kept, most


def test_a_second_backward_pass_through_the_loss_is_refused_in_one_line():
    hidden, weight = torch.randn(4, 1, 8, requires_grad=True), torch.randn(6, 8)
    labels = torch.zeros(4, 1, dtype=torch.int64)
    loss = chunked_linear_cross_entropy(hidden, weight, labels, torch.ones(4, 1), chunks=2, vocab_size=6)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass through the chunked loss is not supported"):
        loss.backward()


# A pool of host memory stays small for any sequence of lengths.


class CountedStreams(Streams):
    """Records pinned blocks and how often the host waited."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.pinned: dict[int, int] = {}
        self.waits = 0

    def pin(self, block):
        self.pinned[block.ctypes.data] = block.nbytes

    def unpin(self, block):
        del self.pinned[block.ctypes.data]

    def synchronize(self):
        self.waits += 1


def layer_of(length: int, offload: Offload) -> None:
    """A training step of a layer in chunks."""
    w = torch.ones(8, 8, requires_grad=True)
    layer = cp.ChunkedLayer(
        lambda x, _: (x.unflatten(2, (2, 4)),) * 3,
        lambda out, x, _: x + out.flatten(2) @ w,
        [w],
        cp.SequenceLayout(length, cp.abstract_grid(), chunks=4),
        offload=offload,
    )
    layer(torch.ones(length, 1, 8)).sum().backward()


def test_a_hundred_lengths_take_little_more_than_the_longest():
    streams = CountedStreams()
    offload = Offload(CPU, streams)
    for length in random.Random(0).sample(range(64, 1024), 100):
        layer_of(length, offload)
        gc.collect(0)
        pool = offload.pool
        assert pool.in_use == 0 and pool.allocated == sum(streams.pinned.values()) <= MOST * pool.peak
    assert streams.waits <= 20  # larger blocks are reused, so memory is rarely returned


def test_identical_steps_allocate_once():
    streams = CountedStreams()
    offload, seen = Offload(CPU, streams), []
    for _ in range(5):
        layer_of(100, offload)
        gc.collect(0)
        seen.append(dict(streams.pinned))
    assert seen[0] == seen[4] and streams.waits == 0


def test_any_order_of_sizes_stays_within_the_bound():
    draw, streams = random.Random(1), CountedStreams()
    pool, out = HostPool(streams), []
    for _ in range(2000):
        if out and draw.random() < 0.5:
            size, buffer = out.pop(draw.randrange(len(out)))
            assert bytes(buffer.numpy()) == bytes([size % 251]) * size  # no other buffer has overwritten it
            del buffer
        else:
            size = draw.choice([1, 7, 64, 100, 1000, draw.randrange(1, 5000)])
            out.append((size, pool.empty((size,), torch.uint8).fill_(size % 251)))
        assert pool.in_use == sum(size for size, _ in out) <= pool.peak
        assert pool.allocated == sum(streams.pinned.values()) <= MOST * pool.peak
    assert len(pool.written) == len(pool.read) == 0


def test_a_freed_block_leaves_no_entry_in_the_pool():
    streams = Adversary(0)
    offload = streams.offload()
    blocks = []
    for length in (40, 41, 42):
        host = offload.to_host(torch.ones(length))
        offload.load(host).wait()
        blocks.append(weakref.ref(host.untyped_storage()))
        del host
    pool = offload.pool
    assert pool.allocated == 168 and len(pool.written) == len(pool.read) == 1
    assert [block() for block in blocks] == [None] * 3
    streams.finish()


def restored_unchanged(streams: Adversary) -> bool:
    """Whether tensors of many sizes return from host memory unchanged."""
    offload, loads = streams.offload(), []
    for length in (100, 101, 102, 103, 104):
        loads.append((length, offload.load(offload.to_host(torch.full((length,), float(length))))))
    right = all(loading.wait().eq(length).all() for length, loading in loads)
    streams.finish()
    return right


@pytest.mark.parametrize("seed", range(3))
def test_a_block_is_returned_after_its_copies(seed):
    assert restored_unchanged(Adversary(seed))


def test_without_the_hosts_wait_a_block_is_freed_before_its_copies_end():
    (site,) = [site for site in call_sites(Path(host_store.__file__).parent) if site.endswith("synchronize")]
    with pytest.raises(AssertionError, match="a host block was returned to the system before its copies"):
        restored_unchanged(Mutant(0, site))


# Nothing in a layer makes the host wait for a GPU, tested with the meta device.


LENGTH = 192
ENDS = (20, 90, 150, LENGTH)
META = torch.device("meta")
COPIES = ("to", "cuda", "copy_", "__setitem__")
READS = ("item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__", "nonzero", "masked_select")


class Waits(TorchFunctionMode):
    """Collects the names of calls that would make the host wait for a GPU; ``meta`` tensors stand for the GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", str(function))
        result = function(*args, **kwargs)
        devices = [x.device.type for x in args if isinstance(x, Tensor)]
        made_on_the_host = name in ("tensor", "as_tensor") and result.device.type == "meta"
        copied = name in COPIES and "cpu" in devices and not kwargs.get("non_blocking")
        copied = copied and "meta" in (*devices[1:], getattr(getattr(result, "device", None), "type", None), devices[0])
        if made_on_the_host or copied or (name in READS and "meta" in devices):
            self.calls.append(name)
        return result


@pytest.mark.parametrize("bad", [lambda x: torch.tensor([1], device=META), lambda x: torch.ones(1).to(META)])
def test_a_wait_is_detected(bad):
    with Waits() as waits:
        bad(torch.empty(3, device=META))
    assert waits.calls


MASKS = {
    "window": cp.Window(50, 3, 2),
    "narrow window in documents": cp.Documents(ENDS, cp.Window(5)),
    "function in documents": cp.Documents(ENDS, cp.MaskFunction(lambda q, k: (q + k) % 3 == 0, cp.Causal())),
    "function around documents": cp.MaskFunction(lambda q, k: (q + k) % 3 == 0, cp.Documents(ENDS)),
    "function in blocks": cp.BlockSparse(
        16, cp.LongformerBlocks(1), LENGTH, cp.MaskFunction(lambda q, k: q != k, cp.Causal())
    ),
}


@pytest.mark.parametrize("threshold", [8, 2**20])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_never_waits(mask, threshold):
    """With slopes from host memory, dropout and sinks, forward and backward."""
    layout = cp.SequenceLayout(LENGTH, abstract_grid())
    q, k, v = (torch.empty(LENGTH, 2, heads, 8, device=META).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.empty(4, device=META).requires_grad_()
    options = {"mask": MASKS[mask], "alibi_slopes": cp.alibi_slopes(4), "softcap": 5.0, "sinks": sinks}
    options |= {"dropout": cp.Dropout(0.1, seed=3, samples=(0, 1)), "mask_cpu_threshold": threshold}
    with Waits() as waits:
        out = cp.attention(q, k, v, layout=layout, kernel="math", **options)
        grads = torch.autograd.grad(out, (q, k, v, sinks), torch.empty_like(out))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v, sinks)] and not waits.calls


def test_key_heads_in_the_all_to_all_never_wait(monkeypatch):
    monkeypatch.setattr(ulysses, "all_to_all", lambda *_, **__: None)
    q, k, v = (torch.empty(16, 1, heads, 8, device=META) for heads in (12, 6, 6))  # 3 query heads per rank, groups of 2
    axis = Axis(4, 1)
    with Waits() as waits:
        results = ulysses.sequence_to_heads(q, k, v, axis)
        grads = ulysses.sequence_to_heads_grad(*results, axis, heads=12, kv_heads=6)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and not waits.calls


def test_dropout_of_hidden_states_and_rotary_angles_never_wait():
    layout = cp.SequenceLayout(LENGTH, abstract_grid())
    rotary = LayoutRotaryEmbedding(Rope(8), layout, META, restarts=True)
    x = torch.empty(LENGTH, 1, 16, device=META).requires_grad_()
    with Waits() as waits:
        y = drop(x, cp.Dropout(0.1, seed=3), layout.positions)
        torch.autograd.grad(y, x, torch.empty_like(y))
        rotary.angles([ENDS])
        rotary.of_spans(layout.local_spans, ENDS)
    assert not waits.calls


def test_without_a_backward_pass_the_last_keys_are_not_kept(monkeypatch):
    kept = []

    class Recorded(chunk_pass.ChunkStore):
        def put(self, name, x):
            kept.append(name)
            super().put(name, x)

    monkeypatch.setattr(chunk_pass, "ChunkStore", Recorded)
    layout = cp.SequenceLayout(32, abstract_grid(), chunks=4)
    layer = ChunkedLayer(lambda x, _: (x[..., None],) * 3, lambda out, x, _: x + out[..., 0], [], layout)
    layer(torch.randn(32, 1, 4))
    assert kept == [("kv", 0), ("kv", 1), ("kv", 2)]


def test_a_chunk_whose_queries_meet_no_key_or_keys_no_query_has_no_gradient():
    layout = cp.SequenceLayout(32, abstract_grid(), chunks=4)
    weight = torch.randn(4, 6, requires_grad=True)

    def project(x, _):
        q, k, v = (x @ weight)[..., None].split((2, 2, 2), dim=2)
        return q, k, torch.cat([v, v], dim=3)

    layer = ChunkedLayer(project, lambda out, x, _: x, [weight], layout)
    work, x = layer.start(torch.randn(32, 3, 4), saving=True).work, torch.randn(8, 3, 4)
    q, kv = work.project(x, 2)
    assert q.shape == (8, 3, 2, 1) and not work.project_grad(x, None, None, 2).any()
    (only_keys, only_queries), both = (
        (work.project_grad(x, *grads, 2) for grads in ((None, kv), (q, None))),
        work.project_grad(x, q, kv, 2),
    )
    torch.testing.assert_close(only_keys + only_queries, both)
    assert only_keys.any() and only_queries.any()


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("offload", [None, "host memory"])
@pytest.mark.parametrize("fewer", [False, True])
def test_the_loop_that_copies_and_sends_less_is_taken(monkeypatch, ring, offload, fewer):
    taken = []
    for name in ("by_keys", "by_queries"):
        loop = SimpleNamespace(
            forward=lambda *_, name=name: taken.append(name), backward=lambda *_, name=name: taken.append(name)
        )
        monkeypatch.setattr(chunked_layer, name, loop)
    monkeypatch.setattr(chunked_layer, "goes_by_keys", lambda *_: fewer)
    layer = SimpleNamespace(layout=cp.SequenceLayout(8, abstract_grid(ring=ring)), offload=offload)
    work = SimpleNamespace(local_heads=4, local_kv_heads=4)
    run = SimpleNamespace(layer=layer, work=work, x=SimpleNamespace(x=torch.empty(1)))
    chunked_layer._Pass.forward(run, None)
    chunked_layer._Pass.backward(run, None)
    forward = "by_keys" if ring > 1 and not offload else "by_queries"
    backward = "by_keys" if ring > 1 or (offload and fewer) else "by_queries"
    assert taken == [forward, backward]


def test_a_pool_at_its_bound_is_not_full_and_takes_the_smallest_larger_block():
    pool = HostPool(Streams(CPU))
    for size in (100, 100):  # one after the other: the second takes the block of the first
        pool.empty((size,), torch.uint8)
    both = [pool.empty((size,), torch.uint8) for size in (90, 95)]  # 100 + 90 + 95 are within twice 185
    assert pool.allocated == 285 and pool.peak == 185
    del both
    exactly = pool.empty((85,), torch.uint8)
    assert pool.allocated == 2 * pool.peak == 370, "a block of 85 is still allowed"
    smallest = pool.empty((86,), torch.uint8)
    assert pool.allocated == 370 and exactly.numel() == 85
    assert pool._blocks[pool.block_of(smallest)].nbytes == 90


def test_gathered_keys_are_refused_in_chunks_of_a_ring_only():
    def layer(ring: int) -> ChunkedLayer:
        layout = cp.SequenceLayout(32, abstract_grid(ring=ring), chunks=2)
        return ChunkedLayer(
            project=lambda x, chunk: (x, x, x), output=lambda out, x, chunk: x, parameters=(), layout=layout,
            rule=AttentionRule(gather_keys=True),
        )  # fmt: skip

    assert layer(1).rule.gather_keys
    with pytest.raises(ValueError, match="gather_keys=True with a layer in chunks"):
        layer(2)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "neither"])
def test_a_chunked_loss_with_weighted_tokens_and_frozen_inputs(frozen):
    torch.manual_seed(3)
    inputs = {"hidden": torch.randn(6, 2, 8).double(), "weight": torch.randn(11, 8).double()}
    labels, weights = torch.randint(0, 11, (6, 2)), torch.rand(6, 2).double()

    def gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
        given = {name: x.clone().requires_grad_(name != frozen) for name, x in inputs.items()}
        loss(*given.values()).backward()
        return [x.grad for x in given.values()]

    def exact(hidden: Tensor, weight: Tensor) -> Tensor:
        losses = torch.nn.functional.cross_entropy(
            (hidden @ weight.t()).view(-1, 11), labels.view(-1), reduction="none"
        )
        return (losses * weights.view(-1)).sum()

    def chunked(hidden: Tensor, weight: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden, weight, labels, weights, chunks=3, vocab_size=11)

    for got, wanted in zip(gradients(chunked), gradients(exact), strict=True):
        assert (got is None) == (wanted is None) and (got is None or (got - wanted).abs().max() < 1e-12)


def test_gradients_go_to_the_main_buffer_if_it_has_the_dtype_of_sums():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert chunked_ffn.main_grad_of(parameter) is None
    for dtype, used in ((torch.bfloat16, False), (torch.float32, True)):
        parameter.main_grad = torch.zeros(3, dtype=dtype)
        assert (chunked_ffn.main_grad_of(parameter) is parameter.main_grad) == used
    parameter.zero_out_wgrad = True
    assert chunked_ffn.main_grad_of(parameter) is None
