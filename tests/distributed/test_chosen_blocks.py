# SPDX-License-Identifier: Apache-2.0
"""Blocks of keys that queries choose, on grids against dense attention in float64: the same choice and gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron.context_parallel as cp
from megatron.context_parallel.attention.ring_plan import AttentionPlan
from megatron.context_parallel.sparse_attention import blocks
from tests.errors import worst
from tests.pairs import also_in_full

LENGTH, BATCH, BLOCK, TOP = 64, 2, 4, 3
HEADS, KEY_HEADS, SIZE, INDEX = 8, 2, 6, 5
ENDS = (1, 18, 39, 64)
MASKS = {
    "causal": cp.Causal(),
    "documents": cp.Documents(ENDS),
    "window": cp.Window(21),
    "each sample": [cp.Documents((23, 64)), cp.Causal()],
    "windows in documents": cp.Documents(ENDS, cp.Window(9)),
}
GRIDS = [(1, 2, "zigzag"), (2, 1, "zigzag"), (2, 2, "zigzag"), (1, 4, "zigzag"), (4, 1, "zigzag"), (1, 4, "contiguous"),
         (2, 2, "documents"), (1, 1, "zigzag")]  # fmt: skip


def inputs(groups: int, whole: bool) -> dict[str, Tensor]:
    """Complete tensors. Whole numbers make scores exact, and many of them equal."""
    torch.manual_seed(3)
    shapes = {"q": (HEADS, SIZE), "k": (KEY_HEADS, SIZE), "v": (KEY_HEADS, SIZE), "index_q": (groups, INDEX),
              "index_k": (INDEX,)}  # fmt: skip
    draw = {name: torch.randn(LENGTH, BATCH, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    return draw | {name: x.round().clamp(-1, 1) for name, x in draw.items() if whole and name.startswith("index")}


def starts_of(mask) -> list[Tensor]:
    """For each sample, the first position of each position's document."""
    ends = [getattr(one, "ends", (LENGTH,)) for one in (mask if isinstance(mask, list) else [mask] * BATCH)]
    return [torch.tensor([max(e for e in (0, *row) if e <= at) for at in range(LENGTH)]) for row in ends]


def allowed(mask) -> Tensor:
    """[b, s, s]."""
    at = torch.arange(LENGTH)
    masks = mask if isinstance(mask, list) else [mask] * BATCH
    return torch.stack([one.allowed(at[:, None], at[None]) for one in masks])


def selection(x: dict[str, Tensor], mask, pool: str, local: int, whole_blocks: bool) -> Tensor:
    """bool [b, groups, s, s]: for each query by itself, the keys that it reads; blocks are lists of positions."""
    seen, found = allowed(mask), torch.zeros(BATCH, x["index_q"].size(2), LENGTH, LENGTH, dtype=torch.bool)
    scores = torch.einsum("qbgd,kbd->bgqk", x["index_q"].float(), x["index_k"].float())
    for sample, starts in enumerate(starts_of(mask)):
        numbers = [(int(starts[at]), (at - int(starts[at])) // BLOCK) for at in range(LENGTH)]
        order = sorted(set(numbers))
        for group in range(found.size(1)):
            for query in range(LENGTH):
                asks = query
                if whole_blocks:  # the first query of a block decides for all
                    asks = int(starts[query]) + (query - int(starts[query])) // BLOCK * BLOCK
                rated = []
                for place, number in enumerate(order):
                    keys = [at for at in range(LENGTH) if numbers[at] == number and seen[sample, asks, at]]
                    if not keys:
                        continue
                    each = scores[sample, group, asks, keys]
                    score = float(each.max() if pool == "max" else each.sum() / len(keys))
                    near = number[0] == numbers[asks][0] and 0 <= numbers[asks][1] - number[1] < local
                    rated.append((-torch.inf if near else -score, place))
                for _, place in sorted(rated)[:TOP]:
                    keys = [at for at in range(LENGTH) if numbers[at] == order[place]]
                    found[sample, group, query, keys] = True
    return found & seen[:, None]


def dense(x: dict[str, Tensor], seen: Tensor) -> Tensor:
    each = HEADS // KEY_HEADS
    k, v = (x[name].repeat_interleave(each, dim=2) for name in ("k", "v"))
    scores = torch.einsum("qbhd,kbhd->bhqk", x["q"], k) * 0.3
    seen = seen.repeat_interleave(HEADS // seen.size(1), dim=1)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0)
    return torch.einsum("bhqk,kbhd->qbhd", weights, v)


def choose(x, layout, mask, pool, local, whole_blocks) -> Tensor:
    chosen = cp.choose_blocks(
        layout.shard(x["index_q"]), layout.shard(x["index_k"]), layout=layout, block=BLOCK, top=TOP, local=local,
        pool=pool, mask=mask,
    )  # fmt: skip
    if whole_blocks:  # every query takes the choice of the first query of its block
        complete = layout.gather(chosen)
        for sample, starts in enumerate(starts_of(mask)):
            at = torch.arange(LENGTH)
            complete[:, sample] = complete[starts + (at - starts) // BLOCK * BLOCK, sample]
        chosen = layout.shard(complete)
    return chosen


def compare(ulysses, ring, balance, name, groups, pool, local, whole, whole_blocks) -> dict[str, float]:
    mask = MASKS[name]
    ends = ENDS if balance == "documents" else ()
    layout = cp.SequenceLayout(LENGTH, cp.initialize_grid(ulysses=ulysses, ring=ring), balance, document_ends=ends)
    start = inputs(groups, whole)
    seen = selection(start, mask, pool, local, whole_blocks)
    theirs = {key: start[key].clone().requires_grad_() for key in ("q", "k", "v")}
    ours = {key: layout.shard(start[key]).clone().requires_grad_() for key in theirs}
    with mock.patch.multiple(blocks, ROWS=7, KEYS=16):
        chosen = choose(start, layout, mask, pool, local, whole_blocks)
    out = cp.block_attention(**ours, chosen=chosen, layout=layout, block=BLOCK, mask=mask, kernel="math", scale=0.3)
    expected = dense(theirs, seen)
    factor = torch.randn_like(expected)
    dist.broadcast(factor, 0)
    (expected * factor).sum().backward()
    (out * layout.shard(factor)).sum().backward()
    return {
        "out": (out - layout.shard(expected)).abs().max().item(),
        **{key: (ours[key].grad - layout.shard(theirs[key].grad)).abs().max().item() for key in theirs},
    }


WAYS = [(2, "max", 1, False, False), (1, "mean", 0, False, False), (2, "max", 2, True, False),
        (1, "max", 1, True, True)]  # fmt: skip
CASES = [(*grid, list(MASKS)[i % len(MASKS)], *WAYS[i % len(WAYS)]) for i, grid in enumerate(GRIDS)]
ALL = [(*grid, name, *way) for grid in GRIDS for name in MASKS for way in WAYS]


@pytest.mark.parametrize("case", [*CASES, *also_in_full(*((case,) for case in ALL if case not in CASES))], ids=str)
@pytest.mark.usual(0, 2)
def test_equals_dense_attention_of_the_same_blocks(pool, case):
    if case[2] == "documents":
        case = (*case[:3], "documents", *case[4:])
    assert worst(rank.values() for rank in pool.run(compare, case[0] * case[1], *case)) < 1e-10


def compare_in_chunks(ulysses: int, ring: int, chunks: int, name: str, whole_blocks: bool) -> dict[str, float]:
    """A layer in chunks (FPDT) with the mask of a choice, which is made before."""
    grid, mask = cp.initialize_grid(ulysses=ulysses, ring=ring), MASKS[name]
    layout, start = cp.SequenceLayout(LENGTH, grid, chunks=chunks), inputs(1, True)
    chosen = layout.gather(choose(start, layout, mask, "max", 1, whole_blocks))
    late = blocks.mask_of_blocks(chosen[:, 0, 0], blocks.block_edges(mask, LENGTH, BLOCK), mask)
    assert late.pairwise != whole_blocks
    x = torch.cat([start[key][:, :1].flatten(2) for key in ("q", "k", "v")], dim=2)
    weight = torch.randn(x.size(2), x.size(2), dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 3
    sizes = [HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE]

    def project(x: Tensor, _: int) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (-1, SIZE)) for part in (x @ mine).split(sizes, dim=-1))

    def output(out: Tensor, x: Tensor, _: int) -> Tensor:  # of the shape of x
        return torch.cat((out.flatten(2), x[..., sizes[0] :]), dim=2)

    mine, rule = weight.clone().requires_grad_(), cp.AttentionRule(mask=late, kernel="math", scale=0.3)
    layer = cp.ChunkedLayer(project, output, [mine], layout, rule)
    out = layer(layout.shard(x))
    seen = selection(start, mask, "max", 1, whole_blocks)[:1]
    theirs = weight.clone().requires_grad_()
    parts = (part.unflatten(-1, (-1, SIZE)) for part in (x @ theirs).split(sizes, dim=-1))
    expected = output(dense(dict(zip(("q", "k", "v"), parts)), seen), x, 0)
    factor = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (expected * factor).sum().backward()
    (out * layout.shard(factor)).sum().backward()
    dist.all_reduce(mine.grad)
    return {"out": (out - layout.shard(expected)).abs().max().item(),
            "grad": (mine.grad - theirs.grad).abs().max().item()}  # fmt: skip


CHUNKS = [(u, r, chunks, name, whole) for u, r, chunks in ((1, 1, 4), (1, 2, 2), (2, 2, 2), (2, 1, 4))
          for name in ("causal", "documents") for whole in (False, True)]  # fmt: skip


@pytest.mark.parametrize(
    "case", [CHUNKS[6], *also_in_full(*((case,) for case in CHUNKS if case != CHUNKS[6]))], ids=str
)
@pytest.mark.usual()
def test_in_chunks(pool, case):
    assert worst(rank.values() for rank in pool.run(compare_in_chunks, case[0] * case[1], *case)) < 1e-10


def wrong_choices() -> tuple[float, float]:
    """Differences if each rank chooses among its own keys, and if blocks and choice ignore documents."""
    layout, x = cp.SequenceLayout(LENGTH, cp.initialize_grid(ring=2)), inputs(2, True)
    mine = {key: layout.shard(value) for key, value in x.items()}
    right = choose(x, layout, cp.Causal(), "max", 1, False)
    alone = cp.SequenceLayout(layout.local_length, cp.abstract_grid())
    own = cp.choose_blocks(mine["index_q"], mine["index_k"], layout=alone, block=BLOCK, top=TOP)
    first = layout.positions[own.long().clamp(min=0) * BLOCK] // BLOCK
    given = {"layout": layout, "block": BLOCK, "kernel": "math", "scale": 0.3}
    qkv = [mine[key] for key in ("q", "k", "v")]
    results = [cp.block_attention(*qkv, chosen, **given) for chosen in (right, first.masked_fill(own < 0, -1).int())]
    expected = dense(x, selection(x, MASKS["documents"], "max", 1, False))
    across = cp.block_attention(*qkv, right, **given) - layout.shard(expected)
    return (results[0] - results[1]).abs().max().item(), across.abs().max().item()


def test_controls_fail(pool):
    for shard, across in pool.run(wrong_choices, 2):
        assert shard > 0.1 and across > 0.1


def test_only_chosen_blocks_are_computed_and_sent():
    grid = cp.abstract_grid(ring=4)
    layout, x = cp.SequenceLayout(1024, grid), torch.arange(1024)
    edges = blocks.block_edges(cp.Causal(), 1024, 16)
    alike = torch.stack((x // 16, x // 32), dim=1).sort(dim=1).values  # its own block and one at half the distance
    each = torch.where((x % 16 == 3)[:, None], torch.stack((x // 16, x // 48), dim=1).sort(dim=1).values, alike)
    pairs = {}
    for name, chosen in (("alike", alike), ("each", each)):
        mask = blocks.mask_of_blocks(chosen, edges, cp.Causal())
        plans = [AttentionPlan(layout, mask).ring(rank=rank) for rank in range(4)]
        pairs[name] = sum(plan.pairs for plan in plans)
        allowed = int(mask.allowed(x[:, None], x[None]).sum())
        assert pairs[name] == allowed if name == "alike" else allowed < pairs[name] < 2 * allowed
    assert pairs["alike"] < 0.07 * 1024 * 1025 / 2 and pairs["each"] < 0.1 * 1024 * 1025 / 2


def test_all_blocks_chosen_is_dense_attention():
    layout, x = cp.SequenceLayout(LENGTH, cp.abstract_grid()), inputs(2, False)
    chosen = cp.choose_blocks(x["index_q"], x["index_k"], layout=layout, block=BLOCK, top=LENGTH)
    out = cp.block_attention(x["q"], x["k"], x["v"], chosen, layout=layout, block=BLOCK, kernel="math", scale=0.3)
    assert (out - dense(x, allowed(cp.Causal())[:, None])).abs().max() < 1e-12


def test_refusals():
    layout, x = cp.SequenceLayout(LENGTH, cp.abstract_grid()), inputs(2, False)
    for sizes in ({"block": 0, "top": 1}, {"block": 4, "top": 0}, {"block": 4, "top": 1, "local": 2}):
        with pytest.raises(ValueError, match="local: not possible"):
            cp.choose_blocks(x["index_q"], x["index_k"], layout=layout, **sizes)
    with pytest.raises(ValueError, match="paths of a tree"):
        mask = cp.Documents(cp.Tree((20, 64), (-1, 0)))
        cp.choose_blocks(x["index_q"], x["index_k"], layout=layout, block=4, top=2, mask=mask)
    with pytest.raises(ValueError, match="3 groups do not divide 8 heads"):
        cp.block_attention(x["q"], x["k"], x["v"], torch.zeros(LENGTH, BATCH, 3, 1), layout=layout, block=4)
