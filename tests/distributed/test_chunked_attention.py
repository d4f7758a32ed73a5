# SPDX-License-Identifier: Apache-2.0
"""The chunk pipeline alone, in float64 with the math kernel to 1e-10: projection, attention, output, all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron.context_parallel as cp
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_layer import ChunkedLayer
from megatron.context_parallel.fpdt.host_store import Offload, is_host_buffer
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Band
from megatron.context_parallel.layout.spans import Span
from tests.adversary import Adversary
from tests.distributed.test_mask_attention import dense
from tests.errors import worst
from tests.pairs import also_in_full, by_pairs, pairs
from tests.properties import examples


@dataclass(frozen=True)
class FirstKeys:
    """Queries from ``start`` on attend to the keys before ``stop``; all other queries and keys have no partner."""

    start: int
    stop: int

    pairwise = fine = False

    def bands(self, q: Span, k: Span) -> Iterator[Band]:
        if q[1] > self.start:
            yield Band((max(q[0], self.start), q[1]), 0, self.stop)

    def allowed(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= self.start) & (k < self.stop)


MASKS = {"causal": cp.Causal(), "full": cp.Full(), "first keys": FirstKeys(9, 7)}
WIDTH, SIZE = 24, 8
CPU = torch.device("cpu")


def make(heads: int, kv_heads: int, length: int, batch: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(length + 10 * heads + kv_heads)
    shapes = {
        "x": (length, batch, WIDTH),
        "w_qkv": (WIDTH, (heads + 2 * kv_heads) * SIZE),
        "b_qkv": ((heads + 2 * kv_heads) * SIZE,),
        "w_out": (heads * SIZE, WIDTH),
        "unused": (3,),
        "dy": (batch, WIDTH, length),
    }
    made = {name: torch.randn(*shape, generator=draw, dtype=torch.float64) / 3 for name, shape in shapes.items()}
    made["dy"] = made["dy"].permute(2, 0, 1)  # another memory order, to detect code that ignores strides
    return made


def attend(made, heads, kv_heads, x, layout, mask, offload=None, streamed=False, order=None):
    """The attention half of a layer: x + out(attention(qkv(x)))."""
    w_qkv, b_qkv, w_out = made["w_qkv"], made["b_qkv"], made["w_out"]

    def project(part, chunk):
        sizes = [heads * SIZE, kv_heads * SIZE, kv_heads * SIZE]
        return tuple(p.unflatten(-1, (-1, SIZE)) for p in (part @ w_qkv + b_qkv).split(sizes, dim=-1))

    def output(out, part, chunk):
        return part + out.flatten(2) @ w_out

    parameters = [w_qkv, b_qkv, w_out, made["unused"]]
    job = ChunkedLayer(
        project, output, parameters, layout, cp.AttentionRule(mask, "math"), offload=offload, streamed=streamed
    )
    return job(x), project, output


def errors(pairs) -> list[float]:
    return [
        float((mine - full).detach().abs().max() / full.detach().abs().max().clamp_min(1e-30)) for mine, full in pairs
    ]


def compare(heads, kv_heads, length, batch, mask, layout, offload, streamed=False) -> list[float]:
    """Largest relative errors of y, dx and the parameters' gradients (summed over the context-parallel ranks)."""
    made = make(heads, kv_heads, length, batch)
    names = ["x", "w_qkv", "b_qkv", "w_out"]
    leaves = {name: made[name].clone().requires_grad_() for name in names}
    whole = made | leaves
    plain = cp.SequenceLayout(length, abstract_grid())
    q, k, v = attend(whole, heads, kv_heads, leaves["x"], plain, MASKS[mask])[1](leaves["x"], 0)
    out = dense(q, k, v, MASKS[mask])
    expected = leaves["x"] + out.flatten(2) @ leaves["w_out"]
    expected_grads = torch.autograd.grad(expected, list(leaves.values()), made["dy"])

    mine = {name: made[name].clone().requires_grad_() for name in names[1:]}
    x = layout.shard(made["x"])
    if streamed:
        x = offload.to_host(x)
    x.requires_grad_()
    y = attend(made | mine | {"x": x}, heads, kv_heads, x, layout, MASKS[mask], offload, streamed)[0]
    assert is_host_buffer(y) == streamed
    grads = torch.autograd.grad(y, [x, *mine.values()], layout.shard(made["dy"]))
    if offload:
        offload.streams.synchronize()
    assert is_host_buffer(grads[0]) == streamed
    sums = list(grads[1:])
    if layout.grid.context.size > 1:
        for total in sums:
            torch.distributed.all_reduce(total, group=layout.grid.context.group)
    return errors(
        [(y, layout.shard(expected)), (grads[0], layout.shard(expected_grads[0])), *zip(sums, expected_grads[1:])]
    )


def compare_on_grid(ulysses, ring, heads, kv_heads, length, batch, chunks, balance, mask, offloaded, streamed):
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    layout = cp.SequenceLayout(length, grid, balance, chunks=chunks)
    offload = Offload(CPU) if offloaded else None
    result = compare(heads, kv_heads, length, batch, mask, layout, offload, streamed)
    if offloaded:
        assert offload.copies.to_host and offload.copies.to_device
        assert offload.pool.in_use == 0, "host buffers leak"
    return result


def compare_on_schedules(schedules, ulysses, ring, heads, kv_heads, length, batch, chunks, balance, mask, streamed):
    """The largest errors over all schedules of the copies (tests/adversary.py); each rank has another schedule."""
    grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
    layout = cp.SequenceLayout(length, grid, balance, chunks=chunks)
    result = []
    for seed in range(schedules):
        streams = Adversary(seed * grid.context.size + grid.context.rank)
        result += compare(heads, kv_heads, length, batch, mask, layout, streams.offload(), streamed)
        streams.finish()
    return result


GRIDS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (2, 4), (4, 2)]
CASES = [
    (u, r, *heads, batch, chunks, balance, mask, store)
    for index, (u, r) in enumerate(GRIDS)
    for step, (heads, batch, chunks, balance, mask, store) in enumerate(
        [
            ((8, 8), 1, 2, "zigzag", "causal", "host"),
            ((8, 2), 2, 3, "zigzag", "causal", "device"),
            ((8, 1), 1, 5, "contiguous", "causal", "stream"),
            ((8, 8), 2, 3, "contiguous", "full", "stream"),
            ((8, 2), 1, 5, "zigzag", "full", "host"),
            ((8, 8), 1, 1, "zigzag", "full", "device"),
        ]
    )
    if u * r < 4 or (index + step) % 2  # half of the cases on many ranks
]


def name(u, r, heads, kv_heads, batch, chunks, balance, mask, store):
    return f"U{u}-R{r}-h{heads}kv{kv_heads}-{chunks}-{mask}-{store}"


@pytest.mark.parametrize(
    "ulysses, ring, heads, kv_heads, batch, chunks, balance, mask, store",
    by_pairs(CASES, lambda *case: pairs({*name(*case).split("-")}), lambda u, r, *_: 2 + u * r, name),
)
def test_chunks_equal_dense_attention(pool, ulysses, ring, heads, kv_heads, batch, chunks, balance, mask, store):
    length = 16 * ulysses * ring  # of a ring rank: 16 units, which 3 and 5 do not divide
    case = (ulysses, ring, heads, kv_heads, length, batch, chunks, balance, mask, store != "device", store == "stream")
    result = pool.run(compare_on_grid, ulysses * ring, *case)
    assert worst(result) < 1e-10, result


@pytest.mark.parametrize("ring, heads", [(1, (8, 2)), (1, (8, 8)), (2, (8, 2))])
@pytest.mark.parametrize("store", ["host", "device"])
def test_chunks_without_queries_or_keys(pool, ring, heads, store):
    """Of 4 chunks, some queries meet no keys, and some keys no queries."""
    case = (1, ring, *heads, 16 * ring, 2, 4, "contiguous", "first keys", store == "host", False)
    result = pool.run(compare_on_grid, ring, *case)
    assert worst(result) < 1e-10, result


@pytest.mark.parametrize(
    "ulysses, ring, heads, kv_heads, batch, chunks, balance, mask, store",
    [
        (2, 1, 8, 2, 1, 5, "zigzag", "causal", "stream"),
        (1, 2, 8, 8, 1, 3, "zigzag", "causal", "host"),
        *also_in_full(*(case for case in CASES if case[-1] != "device")),
    ],
)
def test_when_copies_happen_changes_nothing(
    pool, schedules, ulysses, ring, heads, kv_heads, batch, chunks, balance, mask, store
):
    case = (ulysses, ring, heads, kv_heads, 16 * ulysses * ring, batch, chunks, balance, mask, store == "stream")
    result = pool.run(compare_on_schedules, ulysses * ring, schedules, *case, timeout=180)
    assert worst(result) < 1e-10, result


@examples(60)
@given(
    length=st.integers(1, 70),
    data=st.data(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1)]),
    batch=st.integers(1, 3),
    mask=st.sampled_from(["causal", "full"]),
    store=st.sampled_from(["host", "device", "stream"]),
)
@pytest.mark.lab
def test_any_length_in_any_number_of_chunks(length, data, heads, batch, mask, store):
    chunks = data.draw(st.integers(1, min(length, 12)))
    layout = cp.SequenceLayout(length, abstract_grid(), chunks=chunks)
    offload = None if store == "device" else Offload(CPU)
    result = compare(*heads, length, batch, mask, layout, offload, store == "stream")
    assert worst(result) < 1e-10, result
    assert offload is None or offload.pool.in_use == 0


@pytest.mark.parametrize("runs", [1, 2, 5, 100])
@pytest.mark.parametrize("streamed", [False, True])
def test_token_wise_layers_in_chunks(runs, streamed):
    draw = torch.Generator().manual_seed(3)
    x, w1, w2, dy = (
        torch.randn(*s, generator=draw, dtype=torch.float64) for s in [(13, 2, 6), (6, 20), (20, 6), (6, 2, 13)]
    )
    dy, bias = dy.permute(2, 1, 0), torch.randn(6, generator=draw, dtype=torch.float64)
    offload = Offload(CPU) if streamed else None

    def leaves():
        return [tensor.clone().requires_grad_() for tensor in (x, w1, w2, bias)]

    def layer(part, w1, w2, bias):
        return part + torch.tanh(part @ w1) @ w2 + bias

    whole = leaves()
    expected = layer(*whole)
    mine = leaves()
    y = apply_in_chunks(
        lambda part, _: layer(part, *mine[1:]), mine[0], mine[1:], even_spans(13, runs), offload=offload
    )
    grads = zip(torch.autograd.grad(y, mine, dy), torch.autograd.grad(expected, whole, dy))
    assert max(errors([(y, expected), *grads])) < 1e-12


def test_dropout_is_replayed():
    x, w = torch.randn(12, 2, 6), torch.randn(6, 6)

    def replay():
        state = torch.get_rng_state()

        class Again:
            def __enter__(self):
                self.now = torch.get_rng_state()
                torch.set_rng_state(state)

            def __exit__(self, *_):
                torch.set_rng_state(self.now)

        return Again

    def layer(part, run):
        return torch.nn.functional.dropout(part @ w, 0.5)

    leaf = x.clone().requires_grad_()
    y = apply_in_chunks(layer, leaf, [w], even_spans(12, 3), replay=replay)
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    kept = (y != 0).float() * 2
    assert torch.allclose(grad, kept @ w.t(), atol=1e-5)
