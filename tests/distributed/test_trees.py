# SPDX-License-Identifier: Apache-2.0
"""Trees of samples that share beginnings against the same samples in separate rows: attention, states, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megatron.context_parallel as cp
from tests.distributed.test_linear_attention import (
    CONTROL,
    GRIDS,
    KEPT,
    compare_by_fla,
    compare_chunked,
    compare_convolution,
    compare_mixer,
    each_path,
    errors_of,
    layout_of,
    random_like,
)
from tests.errors import worst
from tests.pairs import by_pairs

LENGTH = 168
TREES = {
    "group": cp.Tree((90, 117, 118, 140, 168), (-1, 0, 0, 0, 0)),
    "turns": cp.Tree((50, 53, 90, 117, 118, 140, 168), (-1, 0, 0, 2, 2, 0, -1)),
    "forest": cp.Tree((20, 40, 41, 100, 130, 168), (-1, 0, 0, -1, 3, 3)),
    "not depth first": cp.Tree((7, 20, 60, 61, 130, 168), (-1, -1, 0, 1, 1, 0)),
}
NAMES, BALANCES = list(TREES), ["zigzag", "contiguous", "documents"]
RULES = ["gated_delta", "kda", "mamba2", "decay"]


def siblings(tree: cp.Tree) -> cp.Tree:
    """The same segments as documents of one root each: a control, whose siblings see each other."""
    return cp.Tree(tree, [number - 1 for number in range(len(tree))])


def compare_attention(ulysses, ring, balance, tree, kernel, dtype, wrong=False, gather_keys=False):
    """Largest errors of out, dq, dk and dv on this rank; the dense result is of separate rows."""
    layout = layout_of(ulysses, ring, balance, (tree,), LENGTH)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(LENGTH, 1, h, 8, generator=generator).double().requires_grad_() for h in (12, 6, 6))

    def dense(*qkv: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(
            2, 0, 1, 3
        )

    expected = each_path(dense, [q, k, v], tree)
    dout = random_like(expected)
    grads = torch.autograd.grad(expected, (q, k, v), dout)
    local = [layout.shard(x).detach().to(dtype).requires_grad_() for x in (q, k, v)]
    mask = cp.Documents(siblings(tree) if wrong else tree)
    out = cp.attention(*local, layout=layout, mask=mask, kernel=kernel, gather_keys=gather_keys)
    mine = torch.autograd.grad(out, local, layout.shard(dout).to(dtype))
    return errors_of(layout, [out, *mine], [expected, *grads])


@pytest.mark.parametrize(
    "ulysses, ring, balance, name",
    by_pairs(
        [(*grid, b, NAMES[(i + j) % 4]) for i, grid in enumerate(GRIDS) for j, b in enumerate(BALANCES)],
        lambda u, r, *others: {(u, r), *others},
    ),
)
def test_attention_in_a_tree(pool, ulysses, ring, balance, name):
    case = (ulysses, ring, balance, TREES[name])
    assert worst(pool.run(compare_attention, ulysses * ring, *case, "math", torch.float64)) < 1e-12
    assert worst(pool.run(compare_attention, ulysses * ring, *case, "auto", torch.float32, False, True)) < 1e-5
    assert worst(pool.run(compare_attention, ulysses * ring, *case, "math", torch.float64, True)) > CONTROL


STATES = [
    (*grid, b, NAMES[(i + j + n) % 4], ["gather", "relay", "heads", "auto"][(i + 2 * j + n) % 4], rule)
    for i, grid in enumerate(GRIDS)
    for j, b in enumerate(BALANCES)
    for n, rule in enumerate(RULES)
]


@pytest.mark.parametrize(
    "ulysses, ring, balance, name, exchange, rule",
    by_pairs(STATES, lambda u, r, *others: {(u, r), *others, (others[0], others[2])}),
)
@pytest.mark.usual(0, 3, 5, 7)
def test_states_fork_at_branches(pool, ulysses, ring, balance, name, exchange, rule):
    case = (ulysses, ring, balance, (TREES[name],), exchange, rule, LENGTH, 1, 12, 6)
    assert worst(pool.run(compare_mixer, ulysses * ring, *case)) < 1e-10
    assert worst(pool.run(compare_by_fla, ulysses * ring, compare_mixer, *case)) < 1e-10


def test_samples_with_different_trees(pool):
    documents = (TREES["group"], TREES["forest"])
    assert worst(pool.run(compare_mixer, 4, 2, 2, "zigzag", documents, "auto", "kda", LENGTH, 2, 12, 6)) < 1e-10
    assert worst(pool.run(compare_convolution, 4, 2, 2, "zigzag", documents, 4, LENGTH, 2, "silu")) < 1e-10


@pytest.mark.parametrize(
    "ulysses, ring, balance, name, width",
    by_pairs(
        [(*grid, b, NAMES[(i + j) % 4], 4 + j % 2) for i, grid in enumerate(GRIDS) for j, b in enumerate(BALANCES)],
        lambda u, r, *others: {(u, r), *others},
    ),
)
@pytest.mark.usual(0, 2, 4)
def test_a_convolution_in_a_tree(pool, ulysses, ring, balance, name, width):
    case = (ulysses, ring, balance, (TREES[name],), width, LENGTH, 1, "silu")
    assert worst(pool.run(compare_convolution, ulysses * ring, *case)) < 1e-10


CHUNKED = [
    (*grid, b, NAMES[(i + j + n) % 4], chunks, ["gather", "relay", "heads"][(i + j + n) % 3], rule,
     KEPT[(i + j + n) % 4])
    for i, grid in enumerate([(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
    for j, b in enumerate(BALANCES)
    for n, (chunks, rule) in enumerate([(5, "gated_delta"), (3, "kda"), (12, "mamba2")])
]  # fmt: skip


@pytest.mark.parametrize(
    "ulysses, ring, balance, name, chunks, exchange, rule, kept",
    by_pairs(CHUNKED, lambda u, r, *others: {(u, r), *others}),
)
@pytest.mark.usual(0, 3, 5)
def test_layers_in_chunks_fork_their_states(pool, ulysses, ring, balance, name, chunks, exchange, rule, kept):
    case = (ulysses, ring, balance, (TREES[name],), chunks, exchange, rule, kept, LENGTH)
    assert worst(pool.run(compare_chunked, ulysses * ring, *case)) < 1e-10
