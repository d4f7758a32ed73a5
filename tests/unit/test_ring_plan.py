# SPDX-License-Identifier: Apache-2.0
"""Plans of a ring are what their definition says, tile by tile, and cost little to make."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron.context_parallel as cp
from megatron.context_parallel.attention import ring_plan as planning
from megatron.context_parallel.attention.ring_plan import Hop, RingPlan, ring_plan
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.spans import Spans, count, joined, place, positions_of, split, union
from megatron.context_parallel.layout.tiles import reach, tiles
from megatron.decisions.division import length_unit


def plan_by_definition(queries, keys, mask, rank: int, step: int) -> tuple[int, RingPlan]:
    """One direction's plan, and the rows that all ranks send in it: everything from the tiles of everybody."""
    size = len(keys)
    needs = {
        (home, hop): tiles(queries[(home + step * hop) % size], keys[home], mask)
        for home, hop in product(range(size), repeat=2)
    }
    rows = {key: union(tile.k for tile in found) for key, found in needs.items()}

    def carried(home: int, hop: int) -> Spans:
        return union(*(rows[home, later] for later in range(hop, size))) if hop < size else ()

    def touched(home: int, hop: int) -> Spans:
        return union(*(rows[home, before] for before in range(1, hop + 1)))

    def last_stop(home: int) -> int:
        return max((hop for hop in range(1, size) if rows[home, hop]), default=0)

    hops = []
    for hop in range(size):
        home = (rank - step * hop) % size
        held = carried(home, hop) if hop else ((0, count(keys[0])),)
        last = last_stop(home)
        active = 0 < hop <= last
        hops.append(
            Hop(
                source=home,
                held=held,
                tiles=tuple(replace(tile, k=place(tile.k, held)) for tile in needs[home, hop]),
                forward=carried(home, hop + 1),
                grads_in=touched(home, hop - 1) if active and hop > 1 else (),
                grads_out=touched(home, hop) if active else (),
                grads_to=(rank + step) % size if hop < last else home,
            )
        )
    last = last_stop(rank)
    sent = sum(count(carried(home, hop)) for home in range(size) for hop in range(1, size))
    home_at_last = (rank + step * last) % size, touched(rank, last)
    return sent, RingPlan(rank, (rank + step) % size, (rank - step) % size, tuple(hops), home_at_last, last)


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
def test_the_plan_is_the_one_of_its_definition(ring, balance, times, data):
    length = length_unit(1, ring, balance) * times
    ends = draw_ends(data, length)
    chunks = data.draw(st.integers(1, min(length // ring, 3)))
    layout = cp.SequenceLayout(length, abstract_grid(ring=ring), balance, chunks).of_documents(ends)
    mask, rank = draw_mask(data, length, ends), data.draw(st.integers(0, ring - 1))
    queries = [layout.ring_spans(r) for r in range(ring)]
    for chunk in (None, *range(chunks)):
        keys = queries if chunk is None else [layout.chunk_spans(chunk, r) for r in range(ring)]
        both = [plan_by_definition(queries, keys, mask, rank, step) for step in (1, -1)]
        assert ring_plan(layout, mask, rank, chunk) == min(both, key=lambda plan: plan[0])[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20), st.sampled_from([cp.Causal(), cp.Full()]))
def test_the_plan_of_keys_of_another_sequence(ring, times, key_times, mask):
    layout = cp.SequenceLayout(2 * ring * times, abstract_grid(ring=ring))
    key_layout = cp.SequenceLayout(ring * key_times, abstract_grid(ring=ring), "contiguous")
    queries, keys = ([lay.ring_spans(r) for r in range(ring)] for lay in (layout, key_layout))
    for rank in range(ring):
        both = [plan_by_definition(queries, keys, mask, rank, step) for step in (1, -1)]
        plan = ring_plan(layout, mask, rank, key_layout=key_layout)
        assert plan == min(both, key=lambda plan: plan[0])[1]


spans_of_any_kind = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])))


@settings(max_examples=200, deadline=None)
@given(spans_of_any_kind, spans_of_any_kind, st.integers(1, 7))
def test_spans_are_sets_of_numbers(some, others, size):
    def members(spans):
        return [number for span in spans for number in range(*span)]

    both = union(some, others)
    assert members(both) == sorted({*members(some), *members(others)})
    assert all(a[1] < b[0] for a, b in zip(both, both[1:]))  # what touches is one
    assert members(joined(both[::-1])) == members(both[::-1])
    parts = [part for span in both for part in split(span, size)]
    assert members(parts) == members(both) and max((b - a for a, b in parts), default=0) <= size
    backwards = both[::-1]  # a block's spans are in any order
    rows = [(i, min(i + size, count(both))) for i in range(0, count(both), size)][::-1]
    assert members(positions_of(rows, backwards)) == [members(backwards)[row] for row in members(rows)]
    for part in parts:
        assert positions_of([place(part, both)], both) == (part,)
    with pytest.raises(ValueError, match="are not among"):
        place((50, 51), both)


def log_normal(documents: int, length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    sizes = [draw.lognormvariate(0, 1) for _ in range(documents)]
    bounds = [int(length * sum(sizes[: i + 1]) / sum(sizes)) for i in range(documents - 1)]
    return (*sorted({*bounds} - {0, length}), length)


def cpu_seconds(work) -> float:
    """The least of three, in seconds of the CPU: what else the machine does counts little."""

    def once() -> float:
        for cached in (planning._plan, tiles, reach):
            cached.cache_clear()
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(once() for _ in range(3))


@pytest.mark.parametrize("balance", ["zigzag", "contiguous", "documents"])
@pytest.mark.parametrize("chunks", [1, 16])
def test_a_thousand_documents_in_a_million_tokens_are_planned_in_no_time(balance, chunks):
    length, ends = 2**20, log_normal(1000, 2**20, seed=0)
    layout = cp.SequenceLayout(length, abstract_grid(ring=8), balance, chunks).of_documents(ends)
    mask = cp.Documents(ends)

    def plans():
        for chunk in range(chunks) if chunks > 1 else [None]:
            ring_plan(layout, mask, 3, chunk)

    # The bands of all documents, once each: what any plan has to look at. A plan costs one or two of these, 16 plans of
    # chunks three to seven; by the definition above it is some twenty.
    looks = cpu_seconds(lambda: [list(mask.bands(span, (0, length))) for span in zip((0, *ends), ends)])
    assert cpu_seconds(plans) < (6 if chunks == 1 else 18) * looks
