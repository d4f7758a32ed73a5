# SPDX-License-Identifier: Apache-2.0
"""A simulated world: real grids of ranks that do not exist."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import megatron.context_parallel as cp
from megatron.platform.simulated_cluster import simulated_world

# (tensor, ulysses, ring, data, pipeline)
GRIDS = [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (1, 4, 2, 3, 1), (4, 1, 3, 2, 5), (2, 3, 1, 1, 4), (8, 8, 4, 2, 4)]


def coordinates(rank, sizes):
    """By the design: rank = tp + T * (u + U * (r + R * (d + D * p)))."""
    found = []
    for size in sizes:
        found.append(rank % size)
        rank //= size
    return found


def world_size(sizes):
    total = 1
    for size in sizes:
        total *= size
    return total


CASES = [(sizes, rank) for sizes in GRIDS for rank in sorted({0, 1, world_size(sizes) // 2, world_size(sizes) - 1})]


@pytest.mark.parametrize("sizes, rank", [case for case in CASES if case[1] < world_size(case[0])])
def test_coordinates_and_groups(sizes, rank):
    tensor, ulysses, ring, data, pipeline = sizes
    mine = coordinates(rank, sizes)
    strides = [1, tensor, tensor * ulysses, tensor * ulysses * ring, tensor * ulysses * ring * data]
    with simulated_world(world_size(sizes), rank):
        grid = cp.initialize_grid(tensor=tensor, ulysses=ulysses, ring=ring, pipeline=pipeline)
        axes = (grid.tensor, grid.ulysses, grid.ring, grid.data, grid.pipeline)
        assert [axis.size for axis in axes] == list(sizes)
        assert [axis.rank for axis in axes] == mine
        assert grid.world_size == dist.get_world_size() == world_size(sizes)
        assert dist.get_rank() == rank
        for axis, stride, coordinate in zip(axes, strides, mine):
            first = rank - stride * coordinate
            assert dist.get_process_group_ranks(axis.group) == [first + stride * n for n in range(axis.size)]
            assert axis.global_rank(coordinate) == rank
        first = rank - tensor * (mine[1] + ulysses * mine[2])
        context = [first + tensor * n for n in range(ulysses * ring)]
        assert dist.get_process_group_ranks(grid.context.group) == context
        assert grid.context.rank == mine[1] + ulysses * mine[2]


def test_collectives_return_at_once():
    with simulated_world(64, rank=5):
        grid = cp.initialize_grid(ulysses=4, ring=4)
        x = torch.ones(3)
        dist.all_reduce(x, group=grid.context.group)
        parts = torch.empty(16 * 3)
        dist.all_gather_into_tensor(parts, x, group=grid.context.group)
        dist.barrier()


def test_attention_runs_with_true_shapes():
    with simulated_world(16, rank=9):
        layout = cp.SequenceLayout(64, cp.initialize_grid(ulysses=4, ring=4))
        q = torch.zeros(4, 1, 8, 16, requires_grad=True)
        out = cp.attention(q, q, q, layout=layout)
        out.sum().backward()
        assert out.shape == q.shape == q.grad.shape


def nothing_is_left():
    return not dist.is_initialized() and not parallel_state.model_parallel_is_initialized()


def test_the_context_leaves_nothing_behind():
    create_group = parallel_state.create_group
    with simulated_world(8, rank=3):
        cp.initialize_grid(ulysses=2, ring=2)
        assert parallel_state.create_group is not create_group
    assert nothing_is_left() and parallel_state.create_group is create_group
    with pytest.raises(KeyError):
        with simulated_world(8):
            cp.initialize_grid(ring=8)
            raise KeyError
    assert nothing_is_left() and parallel_state.create_group is create_group
    grid = cp.initialize_grid()  # a real world of one, afterwards
    try:
        assert grid.world_size == 1 and dist.get_backend() == "gloo"
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_a_grid_that_does_not_fit_is_refused_and_leaves_nothing():
    with pytest.raises(ValueError, match="does not divide the 6 processes"):
        with simulated_world(6):
            cp.initialize_grid(ring=4)
    assert nothing_is_left()


def test_no_world_within_a_world():
    with simulated_world(4):
        with pytest.raises(RuntimeError, match="already"):
            with simulated_world(2):
                pass
        assert dist.get_world_size() == 4
    assert nothing_is_left()


@pytest.mark.parametrize("size, rank", [(4, 4), (4, -1), (0, 0)])
def test_there_is_no_such_rank(size, rank):
    with pytest.raises(ValueError, match="has no rank"):
        with simulated_world(size, rank):
            pass


def test_groups_of_16384_ranks_in_five_seconds():
    seconds = []
    for rank in (0, 16383):
        start = time.process_time()  # CPU time: other programs on this machine do not count
        with simulated_world(16384, rank):
            grid = cp.initialize_grid(tensor=8, ulysses=8, ring=4, pipeline=4)
            assert grid.data.size == 16 and grid.world_size == 16384
        seconds.append(time.process_time() - start)
    assert min(seconds) < 5, seconds


def test_a_deterministic_run_leaves_later_ones_as_they_were(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    with simulated_world(2):
        torch.use_deterministic_algorithms(True)
        os.environ |= {"NCCL_ALGO": "Ring", "KEPT": "2"}
    assert not torch.are_deterministic_algorithms_enabled()
    assert "NCCL_ALGO" not in os.environ and os.environ["KEPT"] == "1"
