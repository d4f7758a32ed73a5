# SPDX-License-Identifier: Apache-2.0
"""Blocks of keys that queries choose, on grids against dense attention in float64: the same choice and gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron.context_parallel as cp
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
    return [torch.tensor([max((e for e in (0, *row) if e <= at)) for at in range(LENGTH)]) for row in ends]


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
