# SPDX-License-Identifier: Apache-2.0
"""The number of kernel launches: one for all tiles between a query block and a key block."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels.base import Final, Scores
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.kernels.triton_kernels import triton_call, triton_kernel, triton_tiles
from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import TritonKernel
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.attention.rule import TileKernel
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.spans import count
from megatron.context_parallel.layout.tiles import Tile

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def launches(monkeypatch):
    """The recorded launches; none is executed."""
    results = []
    monkeypatch.setattr(triton_call.Launch, "run", lambda launch: results.append(launch))
    monkeypatch.setattr(triton_call, "interpreted", lambda: True)
    return results


def walk(ring, mask, rank, launches):
    """(hops with tiles, tiles, forward launches, backward launches) of a rank, with tensors on the meta device."""
    plan = attention_plan(RINGS[ring], mask).ring(rank=rank)
    kernel = TileKernel(triton_kernel.TritonKernel(), Scores(0.1, mask))
    rows = RINGS[ring].seq_length // RINGS[ring].grid.ring.size

    def empty(rows, *shape, dtype=torch.bfloat16):
        return torch.empty(rows, 1, *shape, dtype=dtype, device="meta")

    q, lse = empty(rows, 8, 64), empty(rows, 8, dtype=torch.float32)
    result, dq, counts = Accumulator(q, 64), GradientSum(q), []
    hops = [hop for hop in plan.hops if hop.tiles]
    for hop in hops:
        k = v = empty(count(hop.held), 2, 64)
        before = len(launches)
        kernel.attend(hop.tiles, q, k, v, result)
        forward = len(launches)
        kernel.attend_grad(hop.tiles, q, k, v, Final(q, None, lse, lse), dq, KeyGradients(k, v))
        counts.append((forward - before, len(launches) - forward))
    return len(hops), sum(len(hop.tiles) for hop in hops), *map(sum, zip(*counts))


RINGS = {2: cp.SequenceLayout(2**17, abstract_grid(ring=2)), 8: cp.SequenceLayout(2**20, abstract_grid(ring=8))}
DOCUMENTS = tuple(round(2**20 * (i + 1) / 1000) for i in range(1000))


def test_a_narrow_window_on_a_long_sequence(launches):
    hops, tiles, forward, backward = walk(2, cp.Window(1022), 0, launches)
    assert tiles > 150 and forward == hops <= 4 and backward == 2 * hops


def test_a_thousand_documents_on_a_ring(launches):
    hops, tiles, forward, backward = walk(8, cp.Documents(DOCUMENTS), 3, launches)
    assert tiles > 100 and forward == hops <= 8 and backward == 2 * hops


SPARSE = cp.BlockSparse(64, cp.BigBirdBlocks(1, 1, 3), 2**13)
LOCAL = cp.SequenceLayout(2**13, abstract_grid())


@pytest.mark.parametrize("mask", [SPARSE, cp.Documents(tuple(range(8, 2**13 + 1, 8))), cp.Causal()])
def test_a_second_layer_uses_the_first_ones_plan(launches, monkeypatch, mask):
    """Neither tiles, nor tables for the kernels; a batch's plan is made by its first layer."""

    def layer():
        q, k, v = (torch.empty(2**13, 1, 2, 16, device="meta", requires_grad=True) for _ in range(3))
        out = cp.attention(q, k, v, layout=LOCAL, mask=mask, kernel="triton")
        out.backward(torch.empty_like(out))

    monkeypatch.setattr(TritonKernel, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(
        TritonKernel, "delta", lambda self, out, dout: out.new_empty(out.shape[:3], dtype=torch.float32)
    )
    layer()
    made = []
    monkeypatch.setattr(Tile, "__new__", lambda *arguments, **_: made.append(arguments))
    monkeypatch.setattr(triton_tiles, "_walk", lambda *arguments: made.append(arguments))
    layer()
    assert len(launches) == 6 and not made


def test_chunks_of_a_regular_mask_share_their_tables():
    """16 chunks on a ring of 4: 544 pairs of a chunk and a hop, and a few kinds of tiles."""
    layout = cp.SequenceLayout(2**15, abstract_grid(ring=4), chunks=16)
    plan, kinds, pairs = attention_plan(layout, cp.Causal()), set(), 0
    for query in range(16):
        for key in plan.keys_of(query):
            for hop in plan.ring(chunk=key, query_chunk=query).hops:
                pairs += bool(hop.tiles)
                kinds.add(triton_tiles.geometry(hop.tiles))
    assert pairs > 400 and len(kinds) < 16
