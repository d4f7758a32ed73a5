# SPDX-License-Identifier: Apache-2.0
"""Trees of segments: what they refuse, their positions, forks and pairs, and how they travel."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.layout.documents import document_rows, restart

TREE = cp.Tree((4, 6, 9, 10, 12), (-1, 0, 0, 2, -1))


@pytest.mark.parametrize(
    "ends, parents, words",
    [
        ((4, 8), (-1, 1), "segment 1 has the parent 1, which does not come before it: a tree has no cycles"),
        ((4, 8, 9), (-1, 2, 1), "segment 1 has the parent 2, which does not come before it: a tree has no cycles"),
        ((4, 8), (-1, 5), r"segment 1 is an orphan: its parent 5 does not exist; use -1 .* or one of 0 to 0$"),
        ((4, 8), (-1, -2), "segment 1 is an orphan: its parent -2 does not exist"),
        ((4, 8), (-1,), "a tree of 2 segments has 1 parents: give one for each"),
        ((4, 4), (-1, 0), "the ends of a tree's segments must ascend"),
        ((), (), "the ends of a tree's segments must ascend"),
        ((4.5, 8), (-1, 0), "the ends of a tree's segments must be a list of whole numbers"),
    ],
)
def test_what_is_no_tree_is_refused_in_one_line(ends, parents, words):
    with pytest.raises(ValueError, match=words) as error:
        cp.Tree(ends, parents)
    assert "\n" not in str(error.value)


def test_positions_forks_and_documents():
    assert restart(torch.arange(12), TREE).tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 0, 1]
    assert TREE.forks == {6: 4} and TREE.documents == (10, 12)
    assert TREE.paths == ((0,), (0, 1), (0, 2), (0, 2, 3), (4,))
    every = torch.arange(12)
    assert TREE.pairs == int(cp.Documents(TREE).allowed(every[:, None], every[None]).sum())


def test_a_tree_is_not_its_ends():
    other = cp.Tree(TREE, (-1, 0, 0, 2, 3))
    assert TREE != other and TREE != tuple(TREE) and tuple(TREE) != TREE
    assert len({TREE, other, tuple(TREE), copy.deepcopy(TREE), pickle.loads(pickle.dumps(TREE))}) == 3
    assert cp.Documents(TREE) != cp.Documents(tuple(TREE))


def test_a_tensor_of_ends_and_parents():
    rows = [[*zip(TREE, TREE.parents)], [(12, -1)] * 5]
    assert document_rows(torch.tensor(rows)) == [TREE, cp.Tree((12,), (-1,))]


def test_the_pairs_of_a_tree_are_dealt_evenly():
    tree = cp.Tree((6000, *range(6250, 8001, 250)), (-1, *(0,) * 8))
    work = []
    layout = cp.SequenceLayout(8000, cp.abstract_grid(ring=4), "documents", document_ends=tree)
    for rank in range(4):
        work.append(attention_plan(layout, cp.Documents(tree)).ring(rank=rank).pairs)
    assert sum(work) == tree.pairs and max(work) < 1.05 * tree.pairs / 4


def test_distances_of_alibi_do_not_follow_a_tree():
    layout, q = cp.SequenceLayout(12, cp.abstract_grid()), torch.zeros(12, 1, 2, 8)
    with pytest.raises(ValueError, match="ALiBi's distances do not follow the paths of a tree"):
        cp.attention(q, q, q, layout=layout, mask=cp.Documents(TREE), alibi_slopes=torch.ones(2))
