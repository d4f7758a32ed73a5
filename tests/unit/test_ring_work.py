# SPDX-License-Identifier: Apache-2.0
"""The closed forms of a ring's work (megatron/formulas/ring_work.py) equal what its plans compute and send."""

from __future__ import annotations

from itertools import product

import pytest

from megatron.context_parallel.attention.ring_plan import RingPlan, attention_plan
from megatron.context_parallel.layout.grid import Axis, Grid
from megatron.context_parallel.layout.masks import Causal, Full
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import count
from megatron.formulas.host_bytes import forward_loads
from megatron.formulas.ring_work import block_pairs, chunk_pairs, key_blocks_by_queries, ring_blocks
from tests.unit.closed_forms import busiest_share


def plans(ring: int, block: int, balance: str, causal: bool) -> list[RingPlan]:
    layout = SequenceLayout(block * ring, Grid(ring=Axis(ring, 0), context=Axis(ring)), balance)
    return [attention_plan(layout, Causal() if causal else Full()).ring(rank=rank) for rank in range(ring)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("block", [2, 12, 120])
def test_pairs_of_the_busiest_rank_are_those_of_its_plan(ring: int, block: int, balance: str, causal: bool) -> None:
    computed = plans(ring, block, balance, causal)
    busiest = max(computed, key=lambda plan: plan.pairs)
    pairs = [sum(tile.pairs for tile in hop.tiles) for hop in busiest.hops]
    diagonal = block / 2 if causal else 0.0
    own, keys = block_pairs(block, balance, causal, own=True)
    assert (pairs[0], keys) == (own + diagonal, block)
    assert set(pairs[1:]) <= {block_pairs(block, balance, causal, own=False)[0]}
    mean = sum(plan.pairs - diagonal for plan in computed) / ring
    assert busiest.pairs - diagonal == busiest_share(ring, balance, causal) * mean
    for chunks in (1, 2, 3):
        size = block / chunks
        on_diagonal = chunks * (size * (size + 1) / 2 if causal else size * size)
        assert busiest.pairs == pytest.approx(chunk_pairs(chunks, ring, balance, causal) * size**2 + on_diagonal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ring", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_blocks_on_a_ring_are_those_of_its_plans(ring: int, chunks: int, balance: str, causal: bool) -> None:
    """The most keys that a rank sends, and the gradients that rank 1 (zigzag) or the last rank (contiguous) sends."""
    block, keys, grads = 240, [], []
    for rank in range(ring):
        grid = Grid(ring=Axis(ring, rank), context=Axis(ring))
        layout = SequenceLayout(block * ring, grid, balance, chunks=chunks)
        mask = Causal() if causal else Full()
        plans = [attention_plan(layout, mask).ring(chunk=chunk if chunks > 1 else None) for chunk in range(chunks)]
        hops = [hop for plan in plans for hop in plan.hops]
        keys.append(sum(count(hop.keys_out.rows) for hop in hops))
        grads.append(sum(count(hop.grads_out.rows) for hop in hops))
    expected = ring_blocks(ring, balance, causal)
    assert max(keys) == expected.keys * block
    assert grads[1 if balance == "zigzag" else -1] == expected.grads * block
    if balance == "zigzag":
        assert keys[1] == max(keys)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
def test_blocks_that_meet_query_chunks_are_those_of_the_plans(
    ring: int, chunks: int, balance: str, causal: bool
) -> None:
    block, keys, met = 240, [], 0
    for rank in range(ring):
        layout = SequenceLayout(block * ring, Grid(ring=Axis(ring, rank), context=Axis(ring)), balance, chunks=chunks)
        mask, pairs = Causal() if causal else Full(), list(product(range(chunks), repeat=2))
        plans = [attention_plan(layout, mask).ring(chunk=key, query_chunk=query) for query, key in pairs]
        keys.append(sum(count(hop.keys_out.rows) for plan in plans for hop in plan.hops))
        met = sum(plan.any_needed for plan in plans)
        assert sum(plan.pairs for plan in plans) == attention_plan(layout, mask).ring().pairs
    expected = key_blocks_by_queries(ring, balance, causal, chunks)
    assert max(keys) == expected * block == keys[1 if balance == "zigzag" else ring - 2]
    loads = forward_loads(chunks, ring, early_half=causal and balance == "zigzag")
    assert loads.keys == met - chunks
