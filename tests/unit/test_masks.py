# SPDX-License-Identifier: Apache-2.0
"""Bands and tiles agree with each mask pair by pair; even distribution of documents; ALiBi's slopes."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import megatron.context_parallel as cp
from megatron.context_parallel.attention.kernels import KERNELS, KernelUnavailable, select
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.attention.kernels.tile_by_tile import TileScores, tile_parts
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.layout.documents import (
    UNEVEN,
    Samples,
    balance_documents,
    document_ends,
    document_rows,
    passed_on,
    restart,
    samples_of,
)
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Band
from megatron.context_parallel.layout.spans import positions
from megatron.context_parallel.layout.tiles import Tiles, tiles
from megatron.context_parallel.positions import position_dropout as by_position
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.context_parallel.positions.position_dropout import LEVELS, Dropout, TileDropout, drop
from megatron.decisions.division import NARROW
from megatron.training.report.tensor_memory import TensorMeter
from tests.properties import examples
from tests.unit.test_kernels import assert_close, both_ways, make

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
    parents = [draw(st.integers(-1, number - 1)) for number in range(len(ends))]
    ends = draw(st.sampled_from((ends, cp.Tree(ends, parents))))
    documents = st.builds(cp.Documents, st.just(ends), plain)
    sparse = st.builds(block_sparse, pattern, st.one_of(plain, documents))
    function = st.builds(cp.MaskFunction, st.just(lambda q, k: (q + k) % 3 == 0), st.one_of(plain, documents, sparse))
    return draw(st.one_of(plain, documents, sparse, function, st.builds(cp.Documents, st.just(ends), function)))


def block_sparse(pattern, within):
    """A list of later blocks, which a causal mask would leave out, is used without it."""
    within = cp.Full() if isinstance(pattern, cp.BlockList) and within == cp.Causal() else within
    return cp.BlockSparse(8, pattern, LENGTH, within)


@given(masks(), spans(), spans(), st.booleans())
@example(cp.Documents((5, 13, 20, 28, 29, 40), cp.Full()), ((18, 24),), ((4, 37),), False)  # keys of later documents
@example(cp.Window(5, 2, global_tokens=3), ((0, 30),), ((2, 21),), False)
@examples(150)
def test_tiles_are_what_the_mask_allows(mask, q_spans, k_spans, same):
    k_spans = q_spans if same else k_spans
    q, k = (positions(block, torch.device("cpu")) for block in (q_spans, k_spans))
    computed = torch.zeros(len(q), len(k), dtype=torch.int)
    together = tiles(q_spans, k_spans, mask)
    for tile in together:
        rows, columns = slice(*tile.q), slice(*tile.k)
        q_at, k_at = (positions(at, torch.device("cpu")) for at in (together.q_at(tile), together.k_at(tile)))
        assert torch.equal(q_at, q[rows]) and torch.equal(k_at, k[columns])
        pairs = torch.ones(len(q_at), len(k_at), dtype=torch.bool)
        if tile.kind != "full":
            assert len(q_at) == len(k_at)
            pairs = pairs.tril() if tile.kind == "causal" else pairs.triu()
        assert int(pairs.sum()) == tile.pairs
        computed[rows, columns] += pairs & (mask.allowed(q_at[:, None], k_at[None]) if tile.masked else True)
    assert torch.equal(computed, mask.allowed(q[:, None], k[None]).int())


def test_the_part_of_a_band_among_some_keys():
    """All small bands and spans of keys: the parts hold each pair once, and each of their queries has a key."""
    for rows, first, length, steps in itertools.product(
        (1, 2, 3), (0, 1), (1, 2, 3), itertools.product((0, 1), (0, 1))
    ):
        band = Band((5, 5 + rows), first, first + length, *steps)
        pairs = [(5 + i, key) for i in range(rows) for key in keys_of(band, i)]
        if any(not keys_of(band, i) for i in range(rows)):
            continue
        assert band.pairs == len(pairs) and band.keys == (pairs[0][1], pairs[-1][1] + 1)
        for start, stop in itertools.combinations(range(8), 2):
            parts = band.clip((start, stop))
            assert all(keys_of(part, i) for part in parts for i in range(part.q[1] - part.q[0]))
            found = [(part.q[0] + i, key) for part in parts for i in range(part.q[1] - part.q[0]) for key in
                     keys_of(part, i)]  # fmt: skip
            assert sorted(found) == [(query, key) for query, key in pairs if start <= key < stop]


def keys_of(band: Band, query: int) -> range:
    return range(band.first + query * band.first_step, band.end + query * band.end_step)


def random_spans(draw: random.Random, length: int) -> tuple[tuple[int, int], ...]:
    cuts = sorted(draw.sample(range(length + 1), 2 * draw.randint(1, 4)))
    return tuple(zip(cuts[::2], cuts[1::2]))


def random_mask(draw: random.Random, length: int):
    ends = (*sorted(draw.sample(range(1, length), draw.randint(0, 8))), length)
    left, right, some = (draw.choice((0, draw.randint(0, length // 2))) for _ in range(3))
    plain = draw.choice((cp.Causal(), cp.Full(), cp.Window(left, right, some)))
    pattern = draw.choice((cp.LongformerBlocks(left % 4, some % 3), cp.BigBirdBlocks(left % 3, some % 3, right % 4),
                           cp.StridedBlocks(1 + left % 6)))  # fmt: skip
    within = draw.choice((plain, cp.Documents(ends, plain)))
    return draw.choice((within, cp.BlockSparse(draw.choice((8, 16)), pattern, length, within)))


def test_the_work_stays_the_same_in_later_versions():
    """Tiles, plans and balanced documents decide the order of sums. So a run that is continued with another version of
    this program computes the same bits. If a change of them is wanted, write the new numbers here."""
    draw, found = random.Random(0), {"tiles": 0, "documents": 0, "plans": 0}
    for length in (32, 160, 500):
        for _ in range(60):
            q, k, mask = random_spans(draw, length), random_spans(draw, length), random_mask(draw, length)
            q, k = draw.choice(((q, k), (q, q), (q[::-1], q[::-1])))
            found["tiles"] = zlib.crc32(repr([*tiles(q, k, mask)]).encode(), found["tiles"])
    for ranks in (2, 3, 4, 8):
        for number in range(25):
            length = ranks * draw.randint(1, 40 if number % 2 else 400)
            ends = (*sorted(draw.sample(range(1, length), draw.randint(0, min(length - 1, 12)))), length)
            found["documents"] = zlib.crc32(repr(balance_documents(ends, ranks)).encode(), found["documents"])
            layout = cp.SequenceLayout(length, abstract_grid(ring=ranks), "documents", document_ends=ends)
            plan = attention_plan(layout, draw.choice((cp.Documents(ends), cp.Window(length // 5))))
            hops = [replace(hop, tiles=()) for rank in (0, ranks - 1) for hop in plan.ring(rank=rank).hops]
            found["plans"] = zlib.crc32(repr(hops).encode(), found["plans"])
    assert found == {"tiles": 202903448, "documents": 1776393986, "plans": 3888136282}


def test_a_window_is_cut_in_squares_that_need_no_mask():
    whole = tiles(((0, 65536),), ((0, 65536),), cp.Window(2047))
    assert not any(tile.masked for tile in whole)
    exact = 2048 * 65536 - 2048 * 2047 // 2
    assert sum(tile.pairs for tile in whole) == exact
    assert len(whole) < 100  # few large tiles, linear in the length


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
def test_documents_are_distributed_evenly(seed):
    """64 documents of log-normal length on 8 ranks: equal tokens, work within 5 %."""
    length = 65536
    layout = cp.SequenceLayout(length, abstract_grid(ring=8), "documents", document_ends=log_normal(64, length, seed))
    work = [attention_plan(layout, cp.Documents(layout.document_ends)).ring(rank=rank).pairs for rank in range(8)]
    assert max(work) <= 1.05 * sum(work) / 8 and min(work) >= 0.95 * sum(work) / 8
    assert {sum(stop - start for start, stop in layout.ring_spans(rank)) for rank in range(8)} == {length // 8}
    order = layout.order
    assert torch.equal(order.sort().values, torch.arange(length))


@given(st.integers(1, 9), st.integers(1, 40), st.sets(st.integers(1, 10**6), max_size=30))
@example(4, 6, {1, 10})
@examples(200)
def test_distributing_documents_loses_no_token(ranks, share, cuts):
    length = ranks * share
    ends = (*sorted({cut % length for cut in cuts} - {0}), length)
    parts = balance_documents(ends, ranks)
    assert [sum(stop - start for start, stop in part) for part in parts] == [share] * ranks
    assert sorted(p for part in parts for span in part for p in range(*span)) == list(range(length))
    assert UNEVEN < 0.05


@pytest.mark.parametrize("ends", [(), (0, 4), (4, 4), (4, 3)])
def test_ends_of_documents_that_do_not_ascend_are_refused(ends):
    with pytest.raises(ValueError, match="must ascend"):
        cp.Documents(ends)


def test_the_smallest_block():
    pattern = cp.LongformerBlocks(1, 0)
    assert cp.BlockSparse(1, pattern, 8).key_spans(5) == ((4, 6),)
    with pytest.raises(ValueError, match="a block must have 1 token or more, not 0"):
        cp.BlockSparse(0, pattern, 8)


def test_short_documents_are_cut_if_the_work_is_uneven_otherwise():
    ends = (8, 13, 44, 49, 60)
    work = [sum(q + 1 - max(end for end in (0, *ends) if end <= q) for span in part for q in range(*span))
            for part in balance_documents(ends, 4)]  # fmt: skip
    assert max(work) < 1.2 * sum(work) / 4


def test_short_documents_stay_whole():
    ends = tuple(range(64, 4097, 64))
    layout = cp.SequenceLayout(4096, abstract_grid(ring=4), "documents", document_ends=ends)
    for rank in range(4):
        assert all(not hop.keys_out.rows for hop in attention_plan(layout, cp.Documents(ends)).ring(rank=rank).hops)


def test_documents_stay_whole_if_the_work_is_nearly_even():
    assert balance_documents((320, 640, 970, 1280), 2) == (((640, 1280),), ((0, 640),))


def test_the_former_name_of_balanced_documents_warns():
    layout = cp.SequenceLayout(64, cp.abstract_grid(ring=2), "documents", document_ends=(32, 64))
    with pytest.warns(DeprecationWarning, match="balanced_spans"):
        assert layout.dealt == layout.balanced_spans


def test_where_documents_end():
    tokens = torch.tensor([5, 9, 3, 3, 9, 9, 1])
    assert document_ends(tokens, eod=9) == (2, 5, 6, 7)
    assert document_ends(tokens[:6], eod=9) == (2, 5, 6)
    assert document_ends(tokens, eod=7) == (7,)
    assert restart(torch.tensor([0, 1, 2, 4, 5, 6]), (2, 5, 6, 7)).tolist() == [0, 1, 0, 2, 0, 0]
    assert document_rows(torch.tensor([[2, 7, 7], [1, 4, 7]])) == [(2, 7), (1, 4, 7)]
    for wrong in (torch.ones(1, 1, 7, 7, dtype=torch.bool), torch.ones(2, 3), torch.ones(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="pass masks as values such as cp.Documents"):
            document_rows(wrong)


class Twice(torch.autograd.Function):
    """As core's recompute: arguments are saved and detached."""

    @staticmethod
    def forward(ctx, seen, x, argument):
        ctx.save_for_backward(x, argument)
        ctx.seen = seen
        seen.append(samples_of(argument))
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        _, argument = (saved.detach() for saved in ctx.saved_tensors)
        ctx.seen.append(samples_of(argument))
        return None, 2 * grad, None


def test_samples_are_one_object_that_recompute_keeps():
    known, seen = Samples((0, 7), ((2, 5), (1, 3, 5)), {cp.Causal(): object()}), []
    x = torch.ones(2, requires_grad=True)
    Twice.apply(seen, x, passed_on(known)).sum().backward()
    assert seen[0] is seen[1] is known and passed_on(Samples()) is None and samples_of(None) == Samples()
    assert [one.numbers + one.ends for one in known.each()] == [(0, (2, 5)), (7, (1, 3, 5))]
    assert all(one.plans is known.plans for one in known.each())
    assert samples_of(torch.tensor([[2, 5, 5], [1, 3, 5]])) == Samples((), ((2, 5), (1, 3, 5)))


def test_alibi_slopes():
    """The paper's examples (section 3), and numbers of heads that are not powers of two."""
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16)[:4].tolist() == pytest.approx([2**-0.5, 2**-1, 2**-1.5, 2**-2])
    twelve = alibi_slopes(12).tolist()
    assert twelve[:8] == alibi_slopes(8).tolist() and twelve[8:] == pytest.approx(alibi_slopes(16)[0:8:2].tolist())


@pytest.mark.parametrize("grid", [{"ring": 4}, {"ulysses": 4}, {"ulysses": 2, "ring": 2}])
@pytest.mark.parametrize("kernel", ["cpu", "math"])
@pytest.mark.usual(0, 1, 2)
def test_a_custom_mask_at_65536_tokens_never_holds_64_mb(grid, kernel):
    """The largest tile of all ring ranks is cut into parts; about four of the parts are computed and measured."""
    length, mask = 65536, cp.MaskFunction(lambda q, k: (q - k) % 3 == 0, cp.Causal())
    layout = cp.SequenceLayout(length, abstract_grid(**grid))
    plans = [attention_plan(layout, mask).ring(rank=rank) for rank in range(layout.grid.ring.size)]
    computed = [(hop.tiles, tile) for plan in plans for hop in plan.hops for tile in hop.tiles]
    whole, largest = max(computed, key=lambda each: each[1].pairs)
    assert largest.pairs > (length // layout.grid.ring.size) ** 2 // 3
    rule = cp.AttentionRule(mask, kernel)
    compute = rule.tile_kernel(torch.randn(1, 1, 1, 8), layout.grid.ulysses, length)
    assert compute.scores.mask_in_host
    result = list(tile_parts([largest], compute.scores))
    assert sum(tile.pairs for tile in result) == largest.pairs
    q, k = (torch.randn(span[1], 1, 1, 8) for span in (largest.q, largest.k))
    for tile in result[:: max(len(result) // 4, 1)]:
        check_peak_memory(compute, Tiles([tile], whole.q_spans, whole.k_spans), q, k)


def check_peak_memory(compute, some, q, k):
    with TensorMeter("cpu") as meter:
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
        compute.attend(some, q, k, k, Accumulator(q, 8))
        compute.attend_grad(some, q, k, k, compute.final(out, out, lse), GradientSum(q), KeyGradients(k, k))
    assert 2**20 < meter.peak < 64 * 2**20, f"{meter.peak / 2**20:.1f} MiB"


# Dropout by position: the generator's numbers and their use in kernels.


CPU = torch.device("cpu")
SIZE = 1024
BASE = Dropout(0.1, seed=1234, stream=3, samples=(5,), head=2)


def kept(dropout: Dropout, heads: int = 1, q=((0, SIZE),), k=((0, SIZE),), flip: bool = False) -> torch.Tensor:
    """Boolean [samples, heads, queries, keys]."""
    columns = sum(stop - start for start, stop in k)
    rows = sum(stop - start for start, stop in q)
    return TileDropout(dropout, heads, q, k, CPU, flip=flip).rows(0, rows, columns).bool()


def sigmas(a: torch.Tensor, b: torch.Tensor) -> float:
    """Absolute correlation of two series, in standard deviations of the value for independent series."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return abs(float((a * b).mean() / (a.var() * b.var()).sqrt())) * math.sqrt(a.numel())


# ---- the generator


def test_known_numbers():
    """The numbers must never change: a resumed run would drop other elements."""
    of_splitmix64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # from state 0, as published
    assert [by_position._hash(n * by_position.GOLDEN % 2**64) for n in (1, 2, 3)] == of_splitmix64
    dropout = Dropout(0.5, seed=7, stream=1, samples=(2, 3), head=4)
    assert dropout.row_keys(torch.tensor([0, 5]), 1)[1, 0].tolist() == KNOWN_ROWS
    assert "".join("x."[int(one)] for one in kept(dropout, k=((0, 32),), q=((9, 10),))[0, 0, 0]) == KNOWN_BITS


KNOWN_ROWS = [8384291230460083626, -8679039842163212732]
KNOWN_BITS = "....xx.xxx.x...xxxxxxxxx..xx..x."


@pytest.mark.parametrize("probability", [0.0, 1e-3, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_the_probability(probability):
    dropout = replace(BASE, probability=probability)
    assert dropout.threshold / LEVELS == pytest.approx(probability, abs=0.5 / LEVELS)
    exact, count = dropout.threshold / LEVELS, 4 * SIZE * SIZE
    dropped = 1 - float(kept(dropout, heads=4).double().mean())
    assert abs(dropped - exact) <= 4.5 * math.sqrt(exact * (1 - exact) / count)
    assert dropout.scale == pytest.approx(1 / (1 - exact), rel=1e-12)


def test_rows_and_columns_are_independent():
    result = kept(BASE)[0, 0]
    for rows, columns in [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (4, 0), (1, 1), (64, 64), (3, 509), (500, 0)]:
        later, earlier = result[rows:, columns:], result[: SIZE - rows, : SIZE - columns]
        assert sigmas(later, earlier) < 4.5, (rows, columns)
    p = BASE.threshold / LEVELS
    for dim in (0, 1):  # each row and column drops its share: sum of squares of SIZE standard normals
        z = (SIZE * (1 - p) - result.double().sum(dim)) / math.sqrt(SIZE * p * (1 - p))
        assert abs(float(z.square().sum()) - SIZE) < 4.5 * math.sqrt(2 * SIZE)


def test_corners_of_rectangles_are_independent():
    """The bits of four corners are independent, although the xor of their keys is 0."""
    result = kept(replace(BASE, probability=0.5))[0, 0].double() * 2 - 1
    for rows, columns in [(1, 1), (1, 4), (64, 64), (512, 256), (3, 16)]:
        one, two = result[rows:], result[: SIZE - rows]
        product = one[:, columns:] * one[:, : SIZE - columns] * two[:, columns:] * two[:, : SIZE - columns]
        assert abs(float(product.mean())) * math.sqrt(product.numel()) < 4.5, (rows, columns)


@pytest.mark.parametrize(
    "other", [{"seed": 1235}, {"stream": 4}, {"samples": (6,)}, {"head": 3}, {"head": 258}, {"seed": 1234 + 2**32}]
)
def test_another_seed_stream_sample_or_head_draws_anew(other):
    assert sigmas(kept(BASE), kept(replace(BASE, **other))) < 4.5


@pytest.mark.parametrize("flip", [False, True])
def test_dropout_depends_only_on_positions(flip):
    """A tile of any spans, in any order, has the bits of the complete matrix."""
    dropout, far = replace(BASE, samples=(5, 9)), 2**40 + 3
    q, k = ((far + 7, far + 10), (far, far + 2)), ((far + 1, far + 6), (far + 9, far + 23), (far + 8, far + 9))
    whole = kept(dropout, 3, ((far, far + 10),), ((far, far + 24),))
    rows, columns = positions(q, CPU, flip) - far, positions(k, CPU, flip) - far
    tile = TileDropout(dropout, 3, q, k, CPU, flip=flip)
    assert torch.equal(tile.rows(0, 5, 20).bool(), whole[:, :, rows][..., columns])
    assert torch.equal(
        tile.rows(1, 4, 13, slice(1, 2), slice(1, 3)).bool(), whole[1:, 1:][:, :, rows[1:4]][..., columns[:13]]
    )
    one = TileDropout(dropout.of_heads(2).of_samples(1, 2), 1, ((far + 3, far + 4),), k[:1], CPU)
    assert torch.equal(one.rows(0, 1, 4)[0, 0, 0].bool(), whole[1, 2, 3, 1:5])


@pytest.mark.parametrize("probability", [-0.1, 1.0, math.nan])
def test_a_value_that_is_no_probability_is_refused(probability):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        Dropout(probability, seed=1)


# ---- hidden states


def test_hidden_states_by_position(monkeypatch):
    dropout, at = replace(BASE, samples=(4, 5)), torch.tensor([8, 9, 3, 100])
    x = torch.randn(4, 2, 10, dtype=torch.float64).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y = drop(x, dropout, at)
    zero = y == 0
    assert 0 < zero.sum() < 20 and torch.equal(y[~zero], (x * dropout.scale)[~zero])
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(grad, (~zero).double() * dropout.scale)
    monkeypatch.setitem(by_position.ELEMENTS_AT_ONCE, "cpu", 20)  # in several pieces
    assert torch.equal(drop(x, dropout, at), y)
    assert torch.equal(drop(x[1:3, 1:], dropout.of_samples(1, 2), at[1:3]), y[1:3, 1:])
    assert drop(x, replace(dropout, probability=0.0), at) is x
    with pytest.raises(ValueError, match="dropout.samples has 2 numbers, not 1: give one for each sample"):
        drop(x[:, :1], dropout, at)


# ---- kernels


def dense(dout, q, k, v, weights, *, causal, allowed, scale=0.25):
    """(out, lse, dq, dk, dv) from the definition; ``weights`` multiply the softmax."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = scale * q @ k.repeat_interleave(group, 1).mT
    if causal:
        allowed = allowed & torch.ones_like(scores, dtype=torch.bool).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    dead = ~allowed.any(-1, keepdim=True)
    p = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0) * weights
    out = p @ v.repeat_interleave(group, 1)
    return out.detach(), torch.logsumexp(scores.detach(), -1), *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("name", ["math", "cpu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("limit", [2**19, 3000])
def test_kernels_against_the_definition(name, causal, masked, limit, monkeypatch):
    from megatron.context_parallel.attention.kernels import math_kernel

    monkeypatch.setitem(math_kernel.SCORE_BYTES, "cpu", limit)  # in blocks of a few rows of one head
    monkeypatch.setattr(math_kernel, "FEWEST_ROWS", 1)
    b, h, s = 2, 4, 40
    tensors = make(b=b, h=h, hk=2, sq=s, sk=s)
    dropout = Dropout(0.3, seed=1, samples=(3, 8))
    tile = TileDropout(dropout, h, ((100, 100 + s),), ((50, 50 + s),), CPU)
    allowed = torch.ones(s, s, dtype=torch.bool)
    if masked:
        allowed = torch.rand(s, s, generator=torch.Generator().manual_seed(3)) < 0.5
        allowed[5] = False
    rows = (lambda start, end, keys: allowed[start:end, :keys]) if masked else None
    mask = TileScores(allowed=rows, dropout=tile)
    want = dense(*tensors, tile.rows(0, s, s).double() * dropout.scale, causal=causal, allowed=allowed)
    assert_close(both_ways(KERNELS[name], *tensors, causal=causal, mask=mask), want, torch.float64)


def test_kernels_without_dropout_are_not_chosen():
    inputs = {"device": "cpu", "dtype": torch.float32, "head_dim": 64}
    assert select("auto", **inputs, needs_dropout=True).name == "cpu"
    with pytest.raises(KernelUnavailable, match="does not support attention dropout by position; .* cpu, math"):
        select("flash_attn", **inputs, needs_dropout=True)


@pytest.mark.parametrize("ends", [[3, 8], (3, 8), torch.tensor([3, 8]), iter([3, 8])])
def test_numbers_may_come_in_any_sequence(ends) -> None:
    """Masks and layouts are keys, which lists cannot be."""
    mask = cp.Documents(ends)
    assert mask == cp.Documents((3, 8)) and hash(mask) == hash(cp.Documents((3, 8)))


def test_other_sequences_of_numbers_become_tuples() -> None:
    layout = cp.SequenceLayout(8, cp.abstract_grid(), "documents")
    assert layout.of_documents([3, 8]) is layout.of_documents((3, 8))
    hash((cp.BlockList([[0], [0, 1]]), cp.Dropout(0.1, 1, samples=[0, 1]), layout.of_documents([3, 8])))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: cp.MaskFunction(torch.ge), "MaskFunction needs within=.*: within=cp.Full.* for all, within=cp.Causal"),
        (lambda: cp.Documents(8), "the ends of documents must be a list of whole numbers, not 8"),
        (lambda: cp.Documents([1.5, 8]), r"the ends of documents must be a list of whole numbers, not \[1.5, 8\]"),
        (lambda: cp.BlockList([0, 1]), "a row of a list of blocks must be a list of whole numbers, not 0"),
        (
            lambda: cp.BlockSparse(4, cp.BlockList([[0, 1], [1]]), 8),
            "keeps key block 1 for query block 0, but a causal mask leaves it out: give within=Full",
        ),
    ],
)  # fmt: skip
def test_a_mask_is_never_narrowed_silently(make, words) -> None:
    with pytest.raises(ValueError, match=f"^.*{words}[^\n]*$"):
        make()


@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.ge, "is no mask: wrap a function: cp.MaskFunction"),
        (cp.Documents((4, 8), within="causal"), "'causal' is no mask: use one of cp's"),
        (cp.Documents((4, 7)), "the last document ends at 7, but the sequence has 8 tokens"),
        (cp.MaskFunction(torch.ge, within=cp.Documents((4, 9))), "the last document ends at 9"),
    ],
)
def test_what_is_no_mask_of_this_sequence_is_refused(mask, words) -> None:
    q = torch.randn(8, 1, 2, 4)
    with pytest.raises((TypeError, ValueError), match=words):
        cp.attention(q, q, q, layout=cp.SequenceLayout(8, cp.abstract_grid()), mask=mask)


def test_patterns_of_blocks_are_those_of_their_papers() -> None:
    """As sets of numbers; the tests above compare masks with ``kept`` itself."""
    longformer, strided = cp.LongformerBlocks(1, 1), cp.StridedBlocks(3)
    assert [longformer.kept(row, 6) for row in (0, 1, 3, 5)] == [set(range(6)), {0, 1, 2}, {0, 2, 3, 4}, {0, 4, 5}]
    assert [strided.kept(row, 8) for row in (0, 4, 7, 9)] == [{0, 2, 5}, {2, 3, 4, 5}, {2, 5, 6, 7}, {2, 5, 7}]
    assert cp.BlockList(((), (0, 3, 4))).kept(1, 3) == {0}
    with pytest.raises(ValueError, match="the list has 2 rows of blocks, but query block 2 needs one"):
        cp.BlockList(((), (0,))).kept(2, 3)
    for row in range(20):
        kept = cp.BigBirdBlocks(0, 0, 2, seed=1).kept(row, 20)
        assert row in kept and len(kept) in (2, 3) and kept == cp.BigBirdBlocks(0, 0, 2, seed=1).kept(row, 20)
    assert cp.BigBirdBlocks(0, 0, 9).kept(1, 4) == {0, 1, 2, 3}
    assert len({*map(frozenset, (cp.BigBirdBlocks(0, 0, 2, seed).kept(0, 50) for seed in range(5)))}) > 1


def test_long_documents_are_dealt_first() -> None:
    """Short ones then fill the gaps; in another order this work would differ by 10 %."""
    ends = (22, 76, 128, 180, 202, 210, 241, 249, 294, 328)
    starts = dict(zip(ends, (0, *ends)))
    work = [
        sum(
            (min(stop, end) - start) * (min(stop, end) - start + 1) // 2 - (first - start) * (first - start + 1) // 2
            for span_first, stop in spans
            for end, start in starts.items()
            if (first := max(span_first, start)) < min(stop, end)
        )
        for spans in balance_documents(ends, 4)
    ]
    mean = sum(work) / 4
    assert max(abs(part - mean) for part in work) / mean < 0.03


@pytest.mark.parametrize("sizes", [(-1, 5, 5), (5, -1, 5), (5, 5, -1)])
def test_a_window_of_a_negative_size_is_refused(sizes):
    with pytest.raises(ValueError, match="sizes of a window must be 0 or more"):
        cp.Window(*sizes)


def test_a_window_is_fine_below_the_width_of_a_narrow_one():
    assert cp.Window(NARROW - 2, 1).fine and not cp.Window(NARROW - 1, 1).fine


@pytest.mark.parametrize("width, masked", [(NARROW - 1, True), (NARROW, False)])
def test_only_a_narrow_band_is_compared_pair_by_pair(width, masked):
    at = ((0, 4 * NARROW),)
    found = tiles(at, at, cp.Window(width - 1))
    assert any(tile.masked for tile in found) is masked
    assert {tile.kind for tile in found if not tile.masked} >= ({"full"} if masked else {"causal", "anticausal"}) - {
        "full"
    }


def test_some_elements_are_kept_at_the_largest_probability():
    assert Dropout(1 - 1e-9, 1).threshold == LEVELS - 1 and Dropout(0.5, 1).threshold == LEVELS // 2


def test_numbers_in_lanes_are_signed():
    assert by_position._in_lanes(0xFFFF) == -1 and by_position._in_lanes(1) == 0x0001000100010001
    assert by_position._in_lanes(0x8000) == 0x8000800080008000 - 2**64


def test_a_list_of_blocks_needs_no_row_after_the_queries():
    mask, at = cp.BlockSparse(4, cp.BlockList(((0,), (1,))), 8, cp.Full()), torch.arange(8)
    expected = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    assert torch.equal(mask.allowed(at[:, None], at[None]), expected)
