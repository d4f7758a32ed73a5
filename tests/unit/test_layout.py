# SPDX-License-Identifier: Apache-2.0
"""Layouts are bijections, and zigzag is balanced: property-tested over random grids and lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron.context_parallel as cp
from megatron.context_parallel.attention.attend import tiled_attention
from megatron.context_parallel.attention.kernels import select
from megatron.context_parallel.attention.kernels.sums import Accumulator
from megatron.context_parallel.attention.kernels.tile_by_tile import TileScores
from megatron.context_parallel.attention.ring import RingSource
from megatron.context_parallel.attention.ring_plan import Hop, Message, RingPlan, attention_plan
from megatron.context_parallel.layout import grid as grid_module
from megatron.context_parallel.layout.grid import Axis, abstract_grid
from megatron.context_parallel.layout.masks import Causal, Full
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Spans, count, joined, numbered, place, positions_of, split, union
from megatron.context_parallel.layout.tiles import Tile, Tiles, reach, tiles
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
    """A layout of any shape, with or without chunks and TP sequence parallelism."""
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
                rows = rank.positions.view(parts, -1)[:, start:stop].flatten()  # the TP ranks' parts in order
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
        return [attention_plan(layout, Causal()).ring(rank=rank).pairs for rank in range(ring)]

    assert len(set(work("zigzag"))) == 1
    assert sum(work("zigzag")) == sum(work("contiguous")) == 240 * ring * (240 * ring + 1) // 2
    assert max(work("contiguous")) / max(work("zigzag")) == pytest.approx((2 * ring - 1) / ring, rel=0.01)


def test_a_causal_ring_sends_nothing_that_no_later_tile_needs():
    layout = SequenceLayout(64, abstract_grid(ring=4), "contiguous")
    plans = [attention_plan(layout, Causal()).ring(rank=rank) for rank in range(4)]
    sent = [sum(stop - start for hop in plan.hops for start, stop in hop.keys_out.rows) for plan in plans]
    assert sent == [16, 32, 48, 0]  # no other rank needs rank 3's keys
    layout = SequenceLayout(64, abstract_grid(ring=4), "zigzag")
    plans = [attention_plan(layout, Causal()).ring(rank=rank) for rank in range(4)]
    sent = sum(stop - start for plan in plans for hop in plan.hops for start, stop in hop.keys_out.rows)
    # Keys travel downwards: both blocks of a rank (8 tokens each) for 3 + 2 + 1 hops to rank 0, then one for 1 + 2 + 3.
    assert sent == 8 * (2 * 6 + 6)


@pytest.mark.parametrize(
    "length, ulysses, ring, balance, hint",
    [
        (100, 1, 8, "zigzag", "multiple of 16, for example 96 or 112"),
        (30, 4, 1, "zigzag", "multiple of 4, for example 28 or 32"),
        (3, 2, 2, "contiguous", "multiple of 4"),
        (12, 2, 3, "zigzag", None),
    ],
)
def test_lengths_that_cannot_be_cut_are_refused_with_a_hint(length, ulysses, ring, balance, hint):
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


# Plans of a ring equal their definition tile by tile, and are cheap.


def plan_by_definition(queries, keys, mask, rank: int, step: int) -> tuple[int, RingPlan]:
    """(number of rows that all ranks send in total, the plan of ``rank``) in one direction, derived from all tiles."""
    size = len(keys)
    needs = {
        (home, hop): tiles(queries[(home + step * hop) % size], keys[home], mask)
        for home, hop in product(range(size), repeat=2)
    }
    rows = {key: union(tile.k for tile in results) for key, results in needs.items()}

    def carried(home: int, hop: int) -> Spans:
        return union(*(rows[home, later] for later in range(hop, size))) if hop < size else ()

    def touched(home: int, hop: int) -> Spans:
        return union(*(rows[home, before] for before in range(1, hop + 1)))

    def last_stop(home: int) -> int:
        return max((hop for hop in range(1, size) if rows[home, hop]), default=0)

    hops, above, below = [], (rank + step) % size, (rank - step) % size
    for hop in range(size):
        home = (rank - step * hop) % size
        held = carried(home, hop) if hop else ((0, count(keys[0])),)
        last, following = last_stop(home), (home - step) % size
        own, arrives = last_stop(rank), 0 < hop < last_stop(following)
        hops.append(
            Hop(
                source=home,
                held=held,
                tiles=tuple(tile._replace(k=place(tile.k, held)) for tile in needs[home, hop]),
                needed=rows[home, hop] if size > 1 else held,
                keys_out=Message(carried(home, hop + 1), above),
                keys_in=Message(carried(following, hop + 1), below),
                grads_out=Message(touched(home, hop) if 0 < hop <= last else (), above if hop < last else home),
                grads_home=Message(touched(rank, hop) if hop == own else (), (rank + step * hop) % size),
                grads_in=Message(touched(following, hop) if arrives else (), below),
            )
        )
    sent = sum(count(carried(home, hop)) for home in range(size) for hop in range(1, size))
    return sent, RingPlan(rank, step, tuple(hops))


def direct_by_definition(queries, keys, mask, rank: int) -> tuple[int, RingPlan]:
    """As :func:`plan_by_definition`, for a plan in which each rank sends its own rows to those that need them."""
    size, hops = len(keys), []
    rows = {
        (home, other): union(tile.k for tile in tiles(queries[other], keys[home], mask))
        for home, other in product(range(size), repeat=2)
    }
    for hop in range(size):
        home, above, below = (rank - hop) % size, (rank + hop) % size, (rank - hop - 1) % size
        held = rows[home, rank] if hop else ((0, count(keys[0])),)
        last = hop + 1 == size
        hops.append(
            Hop(
                source=home,
                held=held,
                tiles=tuple(t._replace(k=place(t.k, held)) for t in tiles(queries[rank], keys[home], mask)),
                needed=rows[home, rank],
                keys_out=Message(() if last else rows[rank, (above + 1) % size], (above + 1) % size),
                keys_in=Message(() if last else rows[below, rank], below),
                grads_out=Message(held if hop else (), home),
                grads_home=Message(rows[rank, above] if hop else (), above),
            )
        )
    sent = sum(count(needed) for (home, other), needed in rows.items() if home != other)
    return sent, RingPlan(rank, 1, tuple(hops), any(rows.values()), direct=True)


def best_by_definition(queries, keys, mask, rank: int) -> RingPlan:
    sent, plan = min((plan_by_definition(queries, keys, mask, rank, step) for step in (1, -1)), key=lambda one: one[0])
    alone, direct = direct_by_definition(queries, keys, mask, rank)
    return direct if sent and 2 * alone <= sent else plan


def draw_ends(data, length: int) -> tuple[int, ...]:
    return (*sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=12))), length) if length > 1 else (1,)


def draw_mask(data, length: int, ends: tuple[int, ...]):
    inner = data.draw(
        st.sampled_from([
            cp.Causal(),
            cp.Full(),
            cp.Window(9),
            cp.Window(60, 3, global_tokens=5),
            cp.BlockSparse(8, cp.BigBirdBlocks(1, 1, 1), length),
            cp.BlockSparse(5, cp.StridedBlocks(3), length, within=cp.Window(50)),
            cp.MaskFunction(lambda q, k: (q + k) % 2 == 0, within=cp.Window(20)),
        ])
    )  # fmt: skip
    return cp.Documents(ends, inner) if data.draw(st.booleans()) else inner


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 6), st.sampled_from(["zigzag", "contiguous", "documents"]), st.integers(1, 12), st.data())
def test_the_plan_equals_its_definition(ring, balance, times, data):
    length = length_unit(1, ring, balance) * times
    ends = draw_ends(data, length)
    chunks = data.draw(st.integers(1, min(length // ring, 3)))
    layout = cp.SequenceLayout(length, abstract_grid(ring=ring), balance, chunks).of_documents(ends)
    mask, rank = draw_mask(data, length, ends), data.draw(st.integers(0, ring - 1))
    queries = [layout.ring_spans(r) for r in range(ring)]
    for chunk in (None, *range(chunks)):
        keys = queries if chunk is None else [layout.chunk_spans(chunk, r) for r in range(ring)]
        plan = attention_plan(layout, mask).ring(rank=rank, chunk=chunk)
        assert plan == best_by_definition(queries, keys, mask, rank)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20), st.sampled_from([cp.Causal(), cp.Full()]))
def test_the_plan_for_keys_of_another_sequence(ring, times, key_times, mask):
    layout = cp.SequenceLayout(2 * ring * times, abstract_grid(ring=ring))
    key_layout = cp.SequenceLayout(ring * key_times, abstract_grid(ring=ring), "contiguous")
    queries, keys = ([lay.ring_spans(r) for r in range(ring)] for lay in (layout, key_layout))
    for rank in range(ring):
        plan = attention_plan(layout, mask, key_layout=key_layout).ring(rank=rank)
        assert plan == best_by_definition(queries, keys, mask, rank)


spans_of_any_kind = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])))


@settings(max_examples=200, deadline=None)
@given(spans_of_any_kind, spans_of_any_kind, st.integers(1, 7))
def test_spans_are_sets_of_numbers(some, others, size):
    def members(spans):
        return [number for span in spans for number in range(*span)]

    both = union(some, others)
    assert members(both) == sorted({*members(some), *members(others)})
    assert all(a[1] < b[0] for a, b in zip(both, both[1:]))  # adjacent spans are joined
    assert members(joined(both[::-1])) == members(both[::-1])
    parts = [part for span in both for part in split(span, size)]
    assert members(parts) == members(both) and max((b - a for a, b in parts), default=0) <= size
    backwards = both[::-1]  # a block's spans may have any order
    rows = [(i, min(i + size, count(both))) for i in range(0, count(both), size)][::-1]
    assert members(positions_of(rows, backwards)) == [members(backwards)[row] for row in members(rows)]
    for part in parts:
        assert positions_of([place(part, both)], both) == (part,)
    assert count(both) == len(members(both))
    assert positions_of([*rows, (3, 3), (2, 1)], backwards) == positions_of(rows, backwards), (
        "empty rows change nothing"
    )
    for start in (-1, 50, *(stop for _, stop in both)):
        with pytest.raises(ValueError, match="are not among"):
            place((start, start + 1), both)


def test_a_block_of_kept_rows_is_numbered_from_its_first_span():
    kept = ((2, 5), (9, 12), (20, 30))
    assert [place(span, kept) for span in ((2, 5), (3, 4), (9, 10), (21, 30))] == [(0, 3), (1, 2), (3, 4), (7, 16)]
    assert count(kept) == 16


def test_the_two_middle_blocks_of_a_zigzag_are_one_span():
    layout = SequenceLayout(24, abstract_grid(ring=3))
    assert [layout.ring_spans(rank) for rank in range(3)] == [((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 16),)]


def test_a_layout_without_groups_keeps_its_coordinates():
    grid = abstract_grid(ulysses=2, ring=3, tensor=4).at(ulysses=1, ring=2, tensor=3)
    assert SequenceLayout(48, grid, tensor_parts=4).without_groups() == SequenceLayout(48, grid, tensor_parts=4)
    other = replace(SequenceLayout(48, grid, tensor_parts=4).without_groups().grid, tensor=grid.tensor)
    assert other.tensor.rank == 3 and SequenceLayout(48, grid).without_groups().grid.tensor.rank == 3


@pytest.mark.parametrize("tensor, chunks", [(1, 5), (2, 3), (3, 1), (3, 4)])
def test_chunks_over_ulysses_and_tp_ranks_hold_every_position_once(tensor, chunks):
    layout = SequenceLayout(2 * 3 * 12 * tensor, abstract_grid(ulysses=3, ring=2), chunks=chunks, tensor_parts=tensor)
    assert sorted(layout.order.tolist()) == list(range(layout.seq_length)) and layout.chunk_unit == 3 * tensor
    with pytest.raises(ValueError, match="use 1 to 12"):
        replace(layout, chunks=13)


@pytest.mark.parametrize("balance, ends", [("zigzag", (4, 12)), ("documents", (4, 11))])
def test_ends_of_documents_that_do_not_fit_the_layout_are_refused(balance, ends):
    with pytest.raises(ValueError, match="document_ends"):
        SequenceLayout(12, abstract_grid(ring=2), balance, document_ends=ends)


def test_gathering_on_one_rank_needs_no_processes():
    layout, x = SequenceLayout(6, abstract_grid()), torch.randn(2, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(layout.gather(x, 1), x, torch.arange(12.0).view(2, 6))
    assert layout.gather(x, 1).equal(x) and grad.equal(torch.arange(12.0).view(2, 6))


# Partial outputs are merged in fp32, or in fp64 for fp64 inputs, also with rows without keys.


def tiles_of(dtype: torch.dtype, pieces: int):
    """(q, (out, lse) of each of ``pieces`` key blocks, float64 output for all keys); q and out are in ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 64, 16, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 64 * pieces, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    kernel = select("math", device=q.device, dtype=q.dtype, head_dim=16)
    whole, _ = kernel.forward(q, k, v, TileScores(0.25))
    parts = [kernel.forward(q, kk, vv, TileScores(0.25)) for kk, vv in zip(k.chunk(pieces, 2), v.chunk(pieces, 2))]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return q.permute(2, 0, 1, 3).to(dtype), [(out.to(dtype), lse.to(lse_dtype)) for out, lse in parts], whole


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_many_tiles_merge_without_loss(dtype, tolerance):
    # bf16: rounding the inputs and the result adds 2**-9 each; merging in bf16 would add 64 rounding errors.
    q, parts, whole = tiles_of(dtype, 64)
    result = Accumulator(q, q.size(3))
    for out, lse in parts:
        result.add((0, 64), out, lse)
    out, lse = result.finish()
    assert out.dtype == dtype
    error = (out.permute(1, 2, 0, 3).double() - whole).abs().max() / whole.abs().max()
    assert error < tolerance


def test_tiles_on_some_rows_and_rows_without_keys():
    q, parts, _ = tiles_of(torch.float64, 2)
    (out, lse), (other, other_lse) = parts
    result = Accumulator(q, q.size(3))
    result.add((0, 32), out[:, :, :32], lse[:, :, :32])
    nothing = torch.full_like(lse[:, :, 32:], -torch.inf)
    result.add((32, 64), torch.zeros_like(out[:, :, 32:]), nothing)
    result.add((0, 64), other, other_lse)
    merged, merged_lse = result.finish()
    assert torch.isfinite(merged).all() and torch.isfinite(merged_lse).all()
    assert torch.allclose(merged[32:], other.permute(2, 0, 1, 3)[32:], rtol=1e-14)


def test_queries_without_any_key_give_zero():
    out, lse = Accumulator(torch.ones(4, 1, 2, 8), 8).finish()
    assert not out.any() and out.shape == (4, 1, 2, 8)
    assert (lse == -torch.inf).all() and lse.shape == (4, 1, 2)


def attend(q, k, v, layout):
    plan = attention_plan(layout, cp.Causal()).ring()
    kernel = cp.AttentionRule(kernel="math", scale=0.3).tile_kernel(q, layout.grid.ulysses, len(q))
    return tiled_attention(q, k, v, source=RingSource(plan, layout.grid.ring), kernel=kernel)


def test_gradients_against_finite_differences():
    layout = cp.SequenceLayout(6, cp.abstract_grid())
    q, k, v = (torch.randn(6, 2, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, layout), (q, k, v))


def test_second_derivatives_are_refused_not_wrong():
    layout = cp.SequenceLayout(6, cp.abstract_grid())
    q, k, v = (torch.randn(6, 1, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    (grad,) = torch.autograd.grad(attend(q, k, v, layout).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", [cp.Causal(), cp.Full(), cp.Window(20), cp.Documents((13, 50, 120))], ids=str)
@pytest.mark.parametrize("ring", [1, 2, 3, 5])
def test_each_send_of_a_rank_has_a_receive_of_its_peer_at_the_same_hop(balance, mask, ring):
    layout = cp.SequenceLayout(120, cp.abstract_grid(ring=ring), balance)
    plans = [attention_plan(layout, mask).ring(rank=rank) for rank in range(ring)]
    for at in range(ring):
        sent, received = [], []
        for rank in range(ring):
            hop = plans[rank].hops[at]
            for results, kind, message in (
                (sent, "keys", hop.keys_out),
                (sent, "grads", hop.grads_out),
                (received, "keys", hop.keys_in),
                (received, "grads", hop.grads_in),
                (received, "grads", hop.grads_home),
            ):
                ends = (rank, message.peer) if results is sent else (message.peer, rank)
                results += [(kind, ends, message.rows)] if message.rows else []
        assert sorted(sent) == sorted(received)


def test_spans_are_numbered_by_their_first_row():
    assert list(numbered(((2, 5), (7, 9), (20, 21)))) == [(0, (2, 5)), (3, (7, 9)), (5, (20, 21))]


def test_a_layout_may_have_one_token_and_as_many_chunks_as_tokens_of_a_rank():
    assert SequenceLayout(1, abstract_grid()).local_length == 1
    for ulysses, ring, tensor in product((1, 2), (1, 3), (1, 2)):
        for each in (1, 5):
            grid, length = abstract_grid(ulysses=ulysses, ring=ring), ulysses * ring * tensor * each
            layout = SequenceLayout(length, grid, "contiguous", chunks=each, tensor_parts=tensor)
            assert {stop - start for start, stop in layout.chunk_rows} == {ulysses * tensor}
            with pytest.raises(ValueError, match=f"use 1 to {each}$"):
                SequenceLayout(length, grid, "contiguous", chunks=each + 1, tensor_parts=tensor)


def test_sizes_of_a_grid_without_processes():
    grid = abstract_grid(ulysses=2, ring=3, tensor=5)
    assert (grid.context.size, grid.world_size) == (6, 30)
    whole = replace(grid, data=Axis(7, 5), pipeline=Axis(3, 2)).at(ulysses=1, ring=2, tensor=4)
    assert (whole.context.rank, whole.data, whole.pipeline) == (5, Axis(7, 5), Axis(3, 2))


def test_processes_share_gpus_if_there_are_more_processes(monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(grid_module, "meet", lambda backend, timeout, interface: backend)
    monkeypatch.setenv("RANK", "3")
    for rank in "0", "1", "2", "3":
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert grid_module.initialize_world(timeout_minutes=1, backend="nccl") == "nccl"
    assert used == [0, 1, 0, 1]


@pytest.mark.parametrize("steps, direct", [((2,), True), ((1, 2), False), ((1,), False)])
def test_messages_are_direct_if_they_are_at_most_half_of_the_rows(steps, direct):
    """On a ring of 4 the block of a rank that is two steps away passes one other rank in each direction."""
    rows = tuple(tuple(sorted({rank, *((rank + step) % 4 for step in steps)})) for rank in range(4))
    mask = cp.BlockSparse(4, cp.BlockList(rows), 16, cp.Full())
    assert attention_plan(SequenceLayout(16, abstract_grid(ring=4), "contiguous"), mask).ring().direct is direct


def test_tiles_equal_sequences_of_the_same_tiles():
    some = tiles(((0, 4),), ((0, 8),), Causal())
    assert some == list(some) and some != list(some) * 2 and some != 5


def test_keys_of_tiles_are_numbered_within_the_rows_that_are_kept():
    some = tiles(((0, 12),), ((0, 4), (8, 12)), Full())
    assert [tile.k for tile in some] == [(0, 8)] and some.within(((0, 8),)) is some
    later = tiles(((0, 12),), ((0, 12),), cp.Window(2, 2)).within(((0, 12),))
    assert later.within(((0, 12),)) is later
    whole = Tiles([Tile((0, 4), (8, 12), "full", False)], ((0, 4),), ((0, 12),))
    assert [tile.k for tile in whole.within(((8, 12),))] == [(0, 4)]
    assert [tile.k for tile in whole.within(((0, 2), (8, 12)))] == [(2, 6)]


def test_no_empty_span_is_within_reach():
    assert reach(((8, 12),), cp.Window(0, 0), 8) == () and reach(((6, 12),), cp.Window(0, 0), 8) == ((6, 8),)


class Members:
    """A process group as far as `_context_group` uses it where it makes no other."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


def test_the_group_of_ulysses_by_ring_is_the_larger_one_if_the_other_has_one_rank():
    one, two, three = Members(1), Members(2), Members(3)
    group = grid_module._context_group
    assert [group(two, None), group(None, two), group(None, None)] == [two, two, None]
    assert [group(one, three), group(three, one)] == [three, three]
