# SPDX-License-Identifier: Apache-2.0
"""Bands and tiles say what each mask says pair by pair; documents are dealt evenly; ALiBi's slopes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron.context_parallel as cp
from megatron.context_parallel.attention.ring_plan import ring_plan
from megatron.context_parallel.layout.documents import UNEVEN, deal, document_ends, document_rows, restart
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.spans import positions
from megatron.context_parallel.layout.tiles import tiles
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.training.report.tensor_memory import TensorMeter
from tests.properties import examples

LENGTH = 160


@st.composite
def spans(draw) -> tuple[tuple[int, int], ...]:
    """Runs of positions that a block may hold, ascending."""
    cuts = draw(st.lists(st.integers(0, LENGTH), min_size=2, max_size=8, unique=True).map(sorted))
    return tuple(zip(cuts[::2], cuts[1::2]))


@st.composite
def masks(draw):
    ends = (*sorted(draw(st.sets(st.integers(1, LENGTH - 1), max_size=8))), LENGTH)
    size = st.integers(0, 80)
    plain = st.one_of(
        st.just(cp.Causal()),
        st.just(cp.Full()),
        st.builds(cp.Window, size, st.one_of(st.just(0), size), st.one_of(st.just(0), size)),
    )
    blocks = LENGTH // 8
    row = st.sets(st.integers(0, blocks - 1), max_size=5).map(tuple)
    pattern = st.one_of(
        st.builds(cp.LongformerBlocks, st.integers(0, 3), st.integers(0, 2)),
        st.builds(cp.BigBirdBlocks, st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)),
        st.builds(cp.StridedBlocks, st.integers(1, 6)),
        st.builds(cp.BlockList, st.lists(row, min_size=blocks, max_size=blocks).map(tuple)),
    )
    documents = st.builds(cp.Documents, st.just(ends), plain)
    sparse = st.builds(cp.BlockSparse, st.just(8), pattern, st.just(LENGTH), st.one_of(plain, documents))
    function = st.builds(cp.MaskFunction, st.just(lambda q, k: (q + k) % 3 == 0), st.one_of(plain, documents, sparse))
    return draw(st.one_of(plain, documents, sparse, function, st.builds(cp.Documents, st.just(ends), function)))


@given(masks(), spans(), spans(), st.booleans())
@examples(150)
def test_tiles_are_what_the_mask_allows(mask, q_spans, k_spans, same):
    k_spans = q_spans if same else k_spans
    q, k = (positions(block, torch.device("cpu")) for block in (q_spans, k_spans))
    computed = torch.zeros(len(q), len(k), dtype=torch.int)
    for tile in tiles(q_spans, k_spans, mask):
        rows, columns = slice(*tile.q), slice(*tile.k)
        q_at, k_at = (positions(at, torch.device("cpu")) for at in (tile.q_at, tile.k_at))
        assert torch.equal(q_at, q[rows]) and torch.equal(k_at, k[columns])
        pairs = torch.ones(len(q_at), len(k_at), dtype=torch.bool)
        if tile.kind != "full":
            assert len(q_at) == len(k_at)
            pairs = pairs.tril() if tile.kind == "causal" else pairs.triu()
        assert int(pairs.sum()) == tile.pairs
        computed[rows, columns] += pairs & (mask.allowed(q_at[:, None], k_at[None]) if tile.masked else True)
    assert torch.equal(computed, mask.allowed(q[:, None], k[None]).int())


def test_a_window_is_cut_in_squares_no_kernel_needs_a_mask_for():
    whole = tiles(((0, 65536),), ((0, 65536),), cp.Window(2047))
    assert not any(tile.masked for tile in whole)
    exact = 2048 * 65536 - 2048 * 2047 // 2
    assert sum(tile.pairs for tile in whole) == exact
    assert len(whole) < 100  # few large ones, linear in the length


def test_a_zigzag_block_is_one_causal_tile():
    block = ((0, 8), (24, 32))
    (tile,) = tiles(block, block, cp.Causal())
    assert (tile.q, tile.k, tile.kind) == ((0, 16), (0, 16), "causal")


def log_normal(documents: int, length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    sizes = [draw.lognormvariate(0, 1) for _ in range(documents)]
    ends = {max(1, round(sum(sizes[: i + 1]) / sum(sizes) * length)) for i in range(documents)}
    return tuple(sorted(ends | {length}))


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_dealt_evenly(seed):
    """64 documents of log-normal length on 8 ranks: equal tokens, work within 5 %."""
    length = 65536
    layout = cp.SequenceLayout(length, abstract_grid(ring=8), "documents", document_ends=log_normal(64, length, seed))
    work = [ring_plan(layout, cp.Documents(layout.document_ends), rank).pairs for rank in range(8)]
    assert max(work) <= 1.05 * sum(work) / 8 and min(work) >= 0.95 * sum(work) / 8
    assert {sum(stop - start for start, stop in layout.ring_spans(rank)) for rank in range(8)} == {length // 8}
    order = layout.order
    assert torch.equal(order.sort().values, torch.arange(length))


@given(st.integers(1, 9), st.integers(1, 40), st.sets(st.integers(1, 10**6), max_size=30))
@examples(200)
def test_dealing_loses_no_token(ranks, share, cuts):
    length = ranks * share
    ends = (*sorted({cut % length for cut in cuts} - {0}), length)
    hands = deal(ends, ranks)
    assert [sum(stop - start for start, stop in hand) for hand in hands] == [share] * ranks
    assert sorted(p for hand in hands for span in hand for p in range(*span)) == list(range(length))
    assert UNEVEN < 0.05


def test_short_documents_stay_whole():
    ends = tuple(range(64, 4097, 64))
    layout = cp.SequenceLayout(4096, abstract_grid(ring=4), "documents", document_ends=ends)
    for rank in range(4):
        assert all(not hop.forward for hop in ring_plan(layout, cp.Documents(ends), rank).hops)


def test_where_documents_end():
    tokens = torch.tensor([5, 9, 3, 3, 9, 9, 1])
    assert document_ends(tokens, eod=9) == (2, 5, 6, 7)
    assert document_ends(tokens[:6], eod=9) == (2, 5, 6)
    assert document_ends(tokens, eod=7) == (7,)
    assert restart(torch.tensor([0, 1, 2, 4, 5, 6]), (2, 5, 6, 7)).tolist() == [0, 1, 0, 2, 0, 0]
    assert document_rows(torch.tensor([[2, 7, 7], [1, 4, 7]])) == [(2, 7), (1, 4, 7)]
    with pytest.raises(ValueError, match="pass masks as values such as cp.Documents"):
        document_rows(torch.ones(1, 1, 7, 7, dtype=torch.bool))


def test_alibi_slopes():
    """The paper's own examples (section 3), and heads that are no power of two."""
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16)[:4].tolist() == pytest.approx([2**-0.5, 2**-1, 2**-1.5, 2**-2])
    twelve = alibi_slopes(12).tolist()
    assert twelve[:8] == alibi_slopes(8).tolist() and twelve[8:] == pytest.approx(alibi_slopes(16)[0:8:2].tolist())


@pytest.mark.parametrize("grid", [{"ring": 4}, {"ulysses": 4}, {"ulysses": 2, "ring": 2}])
@pytest.mark.parametrize("kernel", ["cpu", "math"])
def test_a_custom_mask_at_65536_tokens_never_holds_64_mb(grid, kernel):
    """The largest tiles of 4 ranks: one block of rows of each part is made, and counted."""
    length, mask = 65536, cp.MaskFunction(lambda q, k: (q - k) % 3 == 0)
    layout = cp.SequenceLayout(length, abstract_grid(**grid))
    plans = [ring_plan(layout, mask, rank) for rank in range(layout.grid.ring.size)]
    largest = max((tile for plan in plans for hop in plan.hops for tile in hop.tiles), key=lambda tile: tile.pairs)
    assert largest.pairs > (length // layout.grid.ring.size) ** 2 // 3
    rule = cp.AttentionRule(mask, kernel)
    compute = rule.tile_kernel(torch.randn(1, 1, 1, 8), layout.grid.ulysses, length)
    assert compute.mask_in_host
    found = list(compute.parts([largest]))
    assert sum(tile.pairs for tile in found) == largest.pairs
    q, k = (torch.randn(span[1], 1, 1, 8) for span in (largest.q, largest.k))
    for tile in found[:: max(len(found) // 4, 1)]:
        held_by(compute, tile, q, k)


def held_by(compute, tile, q, k):
    with TensorMeter("cpu") as meter:
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
        compute.forward(tile, q, k, k)
        compute.backward(tile, q, k, k, out, out, lse)
    assert 2**20 < meter.peak < 64 * 2**20, f"{meter.peak / 2**20:.1f} MiB"
