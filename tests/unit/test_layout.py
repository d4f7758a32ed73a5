# SPDX-License-Identifier: Apache-2.0
"""Layouts are bijections, and zigzag is balanced: property-tested over random grids and lengths."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.context_parallel.attention.ring_plan import ring_plan
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Causal, Full
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.tiles import tiles
from megatron.decisions.division import length_unit
from tests.properties import examples

grids = st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["zigzag", "contiguous"]), st.integers(1, 7))


def all_ranks(layout: SequenceLayout) -> list[SequenceLayout]:
    """The layout as every context-parallel rank sees it, in the order of the context-parallel group."""
    grid = layout.grid
    return [
        replace(layout, grid=grid.at(ulysses=u, ring=r))
        for r in range(grid.ring.size)
        for u in range(grid.ulysses.size)
    ]


def draw_layout(data, case) -> SequenceLayout:
    """A layout of any shape, whole or in chunks, with or without TP sequence parallelism."""
    ulysses, ring, balance, times = case
    tensor = data.draw(st.integers(1, 3))
    length = length_unit(ulysses, ring, balance, tensor) * times
    chunks = data.draw(st.integers(1, length // (ulysses * ring * tensor)))
    return SequenceLayout(length, abstract_grid(ulysses=ulysses, ring=ring), balance, chunks, tensor)


@examples(300)
@given(grids, st.data())
def test_every_position_is_held_once(case, data):
    layout = draw_layout(data, case)
    length = layout.seq_length
    held = torch.cat([rank.positions for rank in all_ranks(layout)])
    assert torch.equal(held.sort().values, torch.arange(length))
    assert torch.equal(held, layout.order)
    assert all(rank.positions.numel() == layout.local_length for rank in all_ranks(layout))


@examples(200)
@given(grids, st.integers(0, 2), st.data())
def test_shards_put_back_in_order_give_the_whole(case, dim, data):
    layout = draw_layout(data, case)
    shape = [2, 3, 4]
    shape[dim] = layout.seq_length
    x = torch.randn(shape)
    shards = torch.cat([rank.shard(x, dim) for rank in all_ranks(layout)], dim)
    whole = torch.empty_like(x).index_copy_(dim, layout.order, shards)
    assert torch.equal(whole, x)


@examples(100)
@given(grids)
def test_the_ulysses_ranks_of_a_ring_rank_hold_its_sequence_in_order(case):
    ulysses, ring, balance, times = case
    layout = SequenceLayout(
        length_unit(ulysses, ring, balance) * times, abstract_grid(ulysses=ulysses, ring=ring), balance
    )
    for r in range(ring):
        joined = [rank.positions for rank in all_ranks(layout) if rank.grid.ring.rank == r]
        spans = torch.cat([torch.arange(*span) for span in layout.ring_spans(r)])
        assert torch.equal(torch.cat(joined), spans)


@examples(200)
@given(grids, st.data())
def test_gathering_a_chunk_over_tp_and_then_ulysses_gives_it_in_order(case, data):
    layout = draw_layout(data, case)
    parts = layout.tensor_parts
    for r in range(layout.grid.ring.size):
        ranks = [rank for rank in all_ranks(layout) if rank.grid.ring.rank == r]
        for chunk, (start, stop) in enumerate(layout.local_chunks):
            gathered = []
            for rank in ranks:
                rows = rank.positions.view(parts, -1)[:, start:stop].flatten()  # what TP ranks hold, one after another
                assert rows.tolist() == [p for span in rank.local_chunk_spans(chunk) for p in range(*span)]
                gathered.append(rows)
            spans = [p for span in layout.chunk_spans(chunk, r) for p in range(*span)]
            assert torch.cat(gathered).tolist() == spans
        together = [p for c in range(layout.chunks) for s in layout.chunk_spans(c, r) for p in range(*s)]
        assert together == [p for span in layout.ring_spans(r) for p in range(*span)]


def test_chunks_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="cannot be cut in 5 chunks over Ulysses 2 x Ring 1 x 1 TP parts: use 1 to 4"):
        SequenceLayout(8, abstract_grid(ulysses=2), chunks=5)


@examples(100)
@given(grids, st.booleans())
def test_tiles_cover_exactly_the_mask(case, causal):
    ulysses, ring, balance, times = case
    layout = SequenceLayout(
        length_unit(ulysses, ring, balance) * times, abstract_grid(ulysses=ulysses, ring=ring), balance
    )
    mask = Causal() if causal else Full()
    for q_rank in range(ring):
        for k_rank in range(ring):
            q_spans, k_spans = layout.ring_spans(q_rank), layout.ring_spans(k_rank)
            q = torch.cat([torch.arange(*span) for span in q_spans])
            k = torch.cat([torch.arange(*span) for span in k_spans])
            computed = torch.zeros(len(q), len(k), dtype=torch.int)
            pairs = 0
            for tile in tiles(q_spans, k_spans, mask):
                block = torch.ones(tile.q[1] - tile.q[0], tile.k[1] - tile.k[0], dtype=torch.int)
                block = block.tril() if tile.kind == "causal" else block
                computed[slice(*tile.q), slice(*tile.k)] += block
                pairs += tile.pairs
            wanted = (k[None] <= q[:, None]) if causal else torch.ones(len(q), len(k), dtype=torch.bool)
            assert torch.equal(computed, wanted.int())
            assert pairs == int(wanted.sum())


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_zigzag_gives_every_ring_rank_the_same_work(ring):
    def work(balance):
        layout = SequenceLayout(240 * ring, abstract_grid(ring=ring), balance)
        return [ring_plan(layout, Causal(), rank).pairs for rank in range(ring)]

    assert len(set(work("zigzag"))) == 1
    assert sum(work("zigzag")) == sum(work("contiguous")) == 240 * ring * (240 * ring + 1) // 2
    assert max(work("contiguous")) / max(work("zigzag")) == pytest.approx((2 * ring - 1) / ring, rel=0.01)


def test_a_causal_ring_sends_nothing_that_no_later_tile_needs():
    layout = SequenceLayout(64, abstract_grid(ring=4), "contiguous")
    plans = [ring_plan(layout, Causal(), rank) for rank in range(4)]
    sent = [sum(stop - start for hop in plan.hops for start, stop in hop.forward) for plan in plans]
    assert sent == [16, 32, 48, 0]  # rank 3's keys are of no use to anybody
    layout = SequenceLayout(64, abstract_grid(ring=4), "zigzag")
    plans = [ring_plan(layout, Causal(), rank) for rank in range(4)]
    sent = sum(stop - start for plan in plans for hop in plan.hops for start, stop in hop.forward)
    assert sent == 8 * (2 * 6 + 6)  # whole blocks down to rank 0 (3+2+1 hops), halves after the wrap (1+2+3)


@pytest.mark.parametrize(
    "length, ulysses, ring, balance, hint",
    [
        (100, 1, 8, "zigzag", "multiple of 16, for example 96 or 112"),
        (30, 4, 1, "zigzag", "multiple of 4, for example 28 or 32"),
        (3, 2, 2, "contiguous", "multiple of 4"),
        (12, 2, 3, "zigzag", None),
    ],
)
def test_lengths_that_cannot_be_cut_are_refused_with_a_way_out(length, ulysses, ring, balance, hint):
    grid = abstract_grid(ulysses=ulysses, ring=ring)
    if hint is None:
        SequenceLayout(length, grid, balance)
        return
    with pytest.raises(ValueError, match=hint):
        SequenceLayout(length, grid, balance)


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="zigzag, contiguous or documents"):
        SequenceLayout(16, abstract_grid(), "striped")


def test_a_tensor_of_another_length_is_refused():
    layout = SequenceLayout(16, abstract_grid(ring=2))
    with pytest.raises(ValueError, match="16"):
        layout.shard(torch.zeros(15))
    with pytest.raises(ValueError, match="8"):
        layout.gather(torch.zeros(9))
