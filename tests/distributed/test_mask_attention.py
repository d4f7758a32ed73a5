# SPDX-License-Identifier: Apache-2.0
"""Every mask and position scheme on every backend against dense attention in float64: outputs and all gradients."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron.context_parallel as cp
from megatron.context_parallel.attention import ring_plan
from megatron.context_parallel.attention.kernels.triton_kernels import triton_call, triton_tiles
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import TritonKernel
from megatron.context_parallel.fpdt.host_store import Offload
from megatron.context_parallel.layout.documents import balance_documents
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Band
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.context_parallel.positions.position_dropout import TileDropout
from tests.errors import worst
from tests.pairs import also_in_full

LENGTH, SIZE, WIDTH = 192, 8, 24
ENDS = (1, 20, 90, 91, 150, 192)  # documents of one token, and one longer than a rank's share
LONG = (130, 131, 192)
TREE = cp.Tree((90, 91, 130, 150, 170, 192), (-1, 0, 0, 2, 2, -1))
EMPTY_ROW = cp.BlockList(((0,), (0, 1), (), (0, 3), (1, 4), (5,), (2, 6), (0, 7), (), (7, 9), (4, 10), (0, 11)))


def sees_nothing(q, k):
    """The queries of the second half see no key at all, so that whole ranks have nothing to do."""
    return (q < LENGTH // 2) & ((q * 7 + k * 3) % 4 != 0)


MASKS = {
    "causal": cp.Causal(),
    "full": cp.Full(),
    "window 1": cp.Window(0),
    "window 20": cp.Window(19),
    "window 50": cp.Window(49),
    "window both sides": cp.Window(40, 30),
    "window and global": cp.Window(33, 0, 5),
    "window and global both sides": cp.Window(10, 10, 3),
    "documents": cp.Documents(ENDS),
    "long document": cp.Documents(LONG),
    "documents both ways": cp.Documents(ENDS, cp.Full()),
    "documents and window": cp.Documents(LONG, cp.Window(35)),
    "tree": cp.Documents(TREE),
    "tree and window": cp.Documents(TREE, cp.Window(35)),
    "longformer": cp.BlockSparse(16, cp.LongformerBlocks(1, 1), LENGTH),
    "bigbird both ways": cp.BlockSparse(16, cp.BigBirdBlocks(0, 1, 2), LENGTH, cp.Full()),
    "strided": cp.BlockSparse(8, cp.StridedBlocks(4), LENGTH),
    "empty block row": cp.BlockSparse(16, EMPTY_ROW, LENGTH),
    "blocks in documents": cp.Documents(ENDS, cp.BlockSparse(16, cp.LongformerBlocks(1), LENGTH)),
    "function": cp.MaskFunction(lambda q, k: (q - k) % 3 == 0, cp.Causal()),
    "function both ways": cp.MaskFunction(lambda q, k: (q + 2 * k) % 5 < 2, cp.Full()),
    "function in documents": cp.Documents(LONG, cp.MaskFunction(lambda q, k: (q + k) % 2 == 0, cp.Window(40))),
    "half sees nothing": cp.MaskFunction(sees_nothing, cp.Causal()),
}
SCHEMES = {name: (name, "") for name in MASKS}
SCHEMES |= {f"ALiBi, {name}": (name, "ALiBi") for name in ("causal", "full", "window 50", "documents", "function")}
SCHEMES |= {f"dropout, {name}": (name, "dropout") for name in ("causal", "full", "window 50", "documents", "function")}
SCHEMES |= {"dropout and ALiBi, window both sides": ("window both sides", "dropout and ALiBi")}
SCHEMES |= {f"soft-cap, {name}": (name, "soft-cap") for name in ("causal", "window 50", "function")}
SCHEMES |= {
    f"sinks, {name}": (name, "sinks") for name in ("causal", "full", "window 20", "documents", "half sees nothing")
}
SCHEMES |= {
    f"narrow values, {name}": (name, "narrow values")
    for name in ("causal", "window and global", "documents", "longformer")
}
SCHEMES |= {"wide values, full": ("full", "wide values")}
SCHEMES |= {"all of these, window 50": ("window 50", "dropout, ALiBi, soft-cap, sinks, narrow values")}
# (Ulysses, Ring, TP, balance, chunks)
BACKENDS = {
    "one process": (1, 1, 1, "zigzag", 1),
    "Ulysses": (2, 1, 1, "zigzag", 1),
    "Ring": (1, 4, 1, "zigzag", 1),
    "Ring contiguous": (1, 3, 1, "contiguous", 1),
    "USP with TP": (2, 2, 2, "zigzag", 1),
    "Ring gathered": (1, 4, 1, "zigzag", 1),
    "USP gathered": (2, 3, 1, "contiguous", 1),
    "FPDT": (1, 1, 1, "zigzag", 5),
    "FPDT, USP": (2, 2, 1, "zigzag", 3),
}


def dense(q, k, v, mask, slopes=None, dropout=None, softcap=None, sinks=None):
    """Plain attention on [s, b, h, d] in float64; queries without any key give 0."""
    group = q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    at_q, at_k = torch.arange(q.size(0))[:, None], torch.arange(k.size(0))[None]
    allowed = mask.allowed(at_q, at_k)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * q.size(3) ** -0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (at_q - at_k).abs()
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.size(0)]
    if dropout is not None:
        spans = [((0, len(x)),) for x in (q, k)]
        kept = TileDropout(dropout, q.size(2), *spans, q.device).rows(0, len(q), len(k))
        weights = weights * kept.double() * dropout.scale
    return torch.einsum("bhqk,kbhd->qbhd", weights, v)


def make_layout(backend, document_ends=(), grid=None):
    ulysses, ring, tensor, balance, chunks = BACKENDS[backend] if isinstance(backend, str) else backend
    grid = grid or cp.initialize_grid(ulysses=ulysses, ring=ring, tensor=tensor)
    return cp.SequenceLayout(LENGTH, grid, balance, chunks=chunks, document_ends=document_ends)


def inputs(heads, kv_heads, batch, keys=LENGTH, value_size=SIZE):
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(LENGTH, batch, heads, SIZE, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(keys, batch, kv_heads, d, generator=draw, dtype=torch.float64) for d in (SIZE, value_size))
    # A gradient with another memory order, to detect code that ignores strides.
    dout = torch.randn(batch, value_size, heads, LENGTH, generator=draw, dtype=torch.float64).permute(3, 0, 2, 1)
    return q, k, v, dout


def errors(pairs):
    # dq and dk are zero if each query sees one key; inputs and all other gradients are of order one.
    return [float((mine.double() - full).abs().max() / full.abs().max().clamp_min(0.1)) for mine, full in pairs]


VALUE_SIZE = {"narrow values": 5, "wide values": 12}


def compare(scheme, backend, kernel, dtype, threshold=16384, batch=2, layout=None, gather=False, recompute=False):
    """Largest errors of out, dq, dk, dv, and the sinks' gradient on this rank, each relative to its largest entry."""
    name, more = SCHEMES[scheme]
    mask, slopes = MASKS[name], alibi_slopes(4) if "ALiBi" in more else None
    dropout = cp.Dropout(0.25, seed=5, stream=8, samples=tuple(range(20, 20 + batch))) if "dropout" in more else None
    layout = layout or make_layout(backend)
    softcap = 1.5 if "soft-cap" in more else None
    sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0], dtype=torch.float64) if "sinks" in more else None
    value_size = next((size for name, size in VALUE_SIZE.items() if name in more), SIZE)
    q, k, v, dout = inputs(4, 2, batch, value_size=value_size)
    whole = [x.clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    expected = dense(*whole[:3], mask, slopes, dropout, softcap, *whole[3:])
    expected_grads = torch.autograd.grad(expected, whole, dout)
    local = [layout.shard(x).to(dtype).requires_grad_() for x in (q, k, v)]
    options = {"kernel": kernel, "alibi_slopes": slopes, "mask_cpu_threshold": threshold, "dropout": dropout}
    options |= {"softcap": softcap}
    leaves = local
    if sinks is not None:
        options["sinks"] = sinks.to(dtype).requires_grad_()
        leaves = [*local, options["sinks"]]
    if layout.chunks > 1:
        out = chunked(*local, layout, cp.AttentionRule(mask, **options), recompute)
    else:
        out = cp.attention(*local, layout=layout, mask=mask, gather_keys=gather, **options)
    grads = torch.autograd.grad(out, leaves, layout.shard(dout).to(dtype))
    pairs = [(mine, layout.shard(full)) for mine, full in zip((out, *grads), (expected, *expected_grads[:3]))]
    if sinks is not None:
        total = grads[3].clone()
        dist.all_reduce(total, group=layout.grid.context.group)
        pairs.append((total, expected_grads[3]))
    return errors(pairs)


def chunked(q, k, v, layout, rule, recompute=False):
    """FPDT's pipeline around bare attention: the layer's input is q, k and v side by side."""
    x = torch.cat([part.flatten(2) for part in (q, k, v)], dim=2)
    sizes, heads = [part[0, 0].numel() for part in (q, k, v)], q.size(2)
    width = heads * v.size(3)

    def project(part, chunk):
        return tuple(piece.unflatten(2, like.shape[2:]) for piece, like in zip(part.split(sizes, dim=2), (q, k, v)))

    def output(out, part, chunk):
        return part + torch.cat([out.flatten(2), torch.zeros_like(part)[:, :, : x.size(2) - width]], dim=2)

    offload = Offload(torch.device("cpu"))
    layer = cp.ChunkedLayer(project, output, [], layout, rule, offload=offload, recompute=recompute)
    return (layer(x) - x)[:, :, :width].unflatten(2, (heads, -1))


def compare_schemes(schemes, backend, kernel, dtype):
    layout = make_layout(backend)
    gather = "gathered" in backend
    return {scheme: compare(scheme, backend, kernel, dtype, layout=layout, gather=gather) for scheme in schemes}


def ranks(backend):
    ulysses, ring, tensor, *_ = BACKENDS[backend]
    return ulysses * ring * tensor


# The usual run tests every scheme on this backend, whose tiles are of every kind.
EVERY_SCHEME_ON = "Ring"
# On other backends it tests the plain masks, and these schemes with several features at once.
COMBINED = ("dropout and ALiBi, window both sides", "sinks, half sees nothing", "all of these, window 50")


def check(pool, backend, kernel, dtype, tolerance, schemes):
    """Compare all schemes in one job, because starting a job costs more than attention on 192 tokens."""
    result = pool.run(compare_schemes, ranks(backend), list(schemes), backend, kernel, dtype, timeout=180)
    errors = {scheme: worst(rank[scheme] for rank in result) for scheme in schemes}
    assert len(errors) >= 24 and not {scheme: error for scheme, error in errors.items() if not error < tolerance}


# Only --full runs these. The other backends cover Ulysses, Ring, gathered keys and chunks.
IN_FULL = ("one process", "Ring", "Ring contiguous", "FPDT", "USP with TP", "USP gathered")


@pytest.mark.parametrize("backend", [*(name for name in BACKENDS if name not in IN_FULL), *also_in_full(*IN_FULL)])
@pytest.mark.usual(0)
def test_float64_matches_dense_attention(pool, backend, pytestconfig):
    every = backend == EVERY_SCHEME_ON or pytestconfig.getoption("--full")
    check(pool, backend, "math", torch.float64, 1e-10, SCHEMES if every else (*MASKS, *COMBINED))


@pytest.mark.parametrize("backend", ["one process", *also_in_full(*list(BACKENDS)[1:])])
def test_the_fast_kernel(pool, backend):
    check(pool, backend, "cpu", torch.float32, 2e-5, SCHEMES)


@pytest.mark.parametrize("threshold", [8, 16384])
def test_masks_in_host_memory_and_on_the_device_are_the_same(pool, threshold):
    result = pool.run(compare, 4, "function", (2, 2, 1, "zigzag", 1), "cpu", torch.float64, threshold)
    assert worst(result) < 1e-10


def compare_recomputed(backend):
    return compare("all of these, window 50", backend, "math", torch.float64, recompute=True)


@pytest.mark.parametrize("backend", ["FPDT", "FPDT, USP"])
def test_sinks_under_recompute(pool, backend):
    result = pool.run(compare_recomputed, ranks(backend), backend)
    assert worst(result) < 1e-10, result


def derived_by_layers(mask, layers):
    """How often each layer derived tiles, hops or a kernel's tables, forward and backward; no kernel is executed."""
    layout, counts = cp.SequenceLayout(512, cp.initialize_grid(ring=4), chunks=16), []
    q, k, v = (torch.zeros(128, 1, heads, SIZE, requires_grad=True) for heads in (2, 1, 1))
    with ExitStack() as patches:
        patch = lambda *args: patches.enter_context(mock.patch.object(*args))  # noqa: E731
        patch(triton_call, "interpreted", lambda: True)
        patch(triton_call.Launch, "run", lambda launch: None)
        patch(TritonKernel, "why_not", lambda *_, **__: None)
        derive = [(ring_plan, "tiles"), (ring_plan, "_plan"), (ring_plan, "reach"), (triton_tiles, "_walk")]
        made = [patch(module, name, mock.Mock(wraps=getattr(module, name))) for module, name in derive]
        for _ in range(layers):
            before = [each.call_count for each in made]
            chunked(q, k, v, layout, cp.AttentionRule(mask, "triton")).sum().backward()
            counts.append([each.call_count - first for each, first in zip(made, before)])
    return counts


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("mask", [cp.Causal(), *also_in_full(cp.Window(70), cp.Documents((1, 130, 131, 512)))])
def test_only_the_first_chunked_layer_on_a_ring_derives_its_plan(pool, mask):
    for first, *others in pool.run(derived_by_layers, 4, mask, 3):
        assert all(first) and not any(map(any, others)), (first, others)


def compare_plain(layout, mask, attend, keys=LENGTH, key_layout=None, batch=2):
    """Errors of out, dq, dk and dv of ``attend`` (of this rank's q, k, v); a mask for each sample or for all."""
    q, k, v, dout = inputs(4, 2, batch, keys)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    masks = mask if isinstance(mask, list) else [mask] * batch
    expected = torch.cat([dense(*(x[:, i : i + 1] for x in whole), one) for i, one in enumerate(masks)], dim=1)
    expected_grads = torch.autograd.grad(expected, whole, dout)
    layouts = [layout, layout, key_layout or layout, key_layout or layout]
    local = [part.shard(x).requires_grad_() for part, x in zip(layouts[1:], (q, k, v))]
    out = attend(*local)
    grads = torch.autograd.grad(out, local, layout.shard(dout))
    pairs = zip(layouts, (out, *grads), (expected, *expected_grads))
    return errors((mine, part.shard(full)) for part, mine, full in pairs)


def compare_dealt(ends, ulysses, ring, chunks, grid):
    """Documents balanced over the ring, as ``--context-parallel-balance documents`` does."""
    mask = cp.Documents(ends)
    layout = make_layout((ulysses, ring, 1, "documents", chunks), ends, grid)
    assert layout.ring_spans(layout.grid.ring.rank) == balance_documents(ends, ring)[layout.grid.ring.rank]
    q = inputs(4, 2, 1)[0]
    assert torch.equal(layout.gather(layout.shard(q)), q)
    if chunks > 1:
        return compare_plain(
            layout, mask, partial(chunked, layout=layout, rule=cp.AttentionRule(mask, "math")), batch=1
        )
    return compare_plain(layout, mask, partial(cp.attention, layout=layout, mask=mask, kernel="math"), batch=1)


def compare_all_dealt(ulysses, ring, chunks):
    """Errors by the ends of documents."""
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    every = (ENDS, LONG, tuple(range(1, LENGTH + 1)), (LENGTH,))
    return {ends: compare_dealt(ends, ulysses, ring, chunks, grid) for ends in every}


@pytest.mark.parametrize("ulysses, ring, chunks", [(1, 4, 1), (2, 2, 1), (1, 2, 5)])
@pytest.mark.usual(1)
def test_dealt_documents(pool, ulysses, ring, chunks):
    for result in pool.run(compare_all_dealt, ulysses * ring, ulysses, ring, chunks):
        assert len(result) == 4 and all(worst([one]) < 1e-10 for one in result.values()), result


def compare_samples(ulysses, ring):
    """Each sample of a batch has other documents."""
    masks = [cp.Documents(ENDS), cp.Documents(LONG), cp.Causal()]
    layout = make_layout((ulysses, ring, 1, "zigzag", 1))
    return compare_plain(layout, masks, partial(cp.attention, layout=layout, mask=masks, kernel="math"), batch=3)


def test_a_mask_for_each_sample(pool):
    assert worst(pool.run(compare_samples, 4, 2, 2)) < 1e-10


CROSS = {
    "full": cp.Full(),
    "causal": cp.Causal(),
    "window": cp.Window(40, 30),
    "function": cp.MaskFunction(lambda q, k: (q + k) % 3 == 0, cp.Full()),
}


def compare_cross(mask, ulysses, ring, keys, balance):
    """Queries and keys of different lengths and layouts."""
    layout = make_layout((ulysses, ring, 1, "zigzag", 1))
    key_layout = cp.SequenceLayout(keys, layout.grid, balance)
    options = {"layout": layout, "key_layout": key_layout, "mask": CROSS[mask], "kernel": "math"}
    return compare_plain(layout, CROSS[mask], partial(cp.attention, **options), keys, key_layout)


@pytest.mark.parametrize("mask", CROSS)
@pytest.mark.parametrize(
    "ulysses, ring, keys, balance", [(1, 1, 7, "zigzag"), (2, 2, 64, "contiguous"), (1, 4, 304, "zigzag")]
)
def test_cross_attention(pool, mask, ulysses, ring, keys, balance):
    result = pool.run(compare_cross, ulysses * ring, mask, ulysses, ring, keys, balance)
    assert worst(result) < 1e-10, result


def refusals():
    layout = make_layout((2, 1, 1, "zigzag", 1))
    q, k, v, _ = (layout.shard(x) for x in inputs(4, 2, 2))
    with pytest.raises(ValueError, match="3 masks for 2 samples"):
        cp.attention(q, k, v, layout=layout, mask=[cp.Causal()] * 3)
    with pytest.raises(ValueError, match="give one number for each of 4 heads"):
        cp.attention(q, k, v, layout=layout, alibi_slopes=alibi_slopes(2))
    with pytest.raises(ValueError, match="sinks .* give one number for each of 4 heads"):
        cp.attention(q, k, v, layout=layout, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="softcap=0"):
        cp.attention(q, k, v, layout=layout, softcap=0.0)
    with pytest.raises(ValueError, match="True = attend"):
        cp.attention(q, k, v, layout=layout, mask=cp.MaskFunction(lambda q, k: q - k, cp.Causal()))
    with pytest.raises(ValueError, match="query block 1 needs one"):
        cp.attention(q, k, v, layout=layout, mask=cp.BlockSparse(96, cp.BlockList(((0,),)), LENGTH))
    with pytest.raises(ValueError, match="need balance=documents"):
        cp.SequenceLayout(LENGTH, layout.grid, document_ends=ENDS)


def test_bad_masks_are_refused_by_name(pool):
    pool.run(refusals, 2)


def test_ranks_out_of_the_window_exchange_nothing():
    """On a contiguous ring with a window, only the next rank gets keys, and only those that it needs."""
    from megatron.context_parallel.attention.ring_plan import attention_plan
    from megatron.context_parallel.layout.spans import count

    layout = cp.SequenceLayout(1024, abstract_grid(ring=8), "contiguous")
    for rank in range(8):
        plan = attention_plan(layout, cp.Window(100)).ring(rank=rank)
        sent = [count(hop.keys_out.rows) for hop in plan.hops]
        assert sent == [100 if rank < 7 else 0] + [0] * 7
        assert [bool(hop.tiles) for hop in plan.hops] == [True, rank > 0] + [False] * 6


def test_a_clipped_band_covers_the_same_pairs():
    assert list(Band((0, 10), 0, 1, 0, 1).clip((4, 6))) == [
        Band((4, 6), 4, 5, 0, 1),
        Band((6, 10), 4, 6, 0, 0),
    ]
