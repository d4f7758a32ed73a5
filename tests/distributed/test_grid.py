# SPDX-License-Identifier: Apache-2.0
"""A grid from an existing device mesh or from process groups equals the grid of initialize_grid."""

import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megatron.context_parallel as cp
from megatron.context_parallel.attention.ring_plan import attention_plan
from megatron.context_parallel.core import groups as groups_of_core
from megatron.context_parallel.layout.grid import abstract_grid, make_grid
from tests.distributed.pool import RankError


def mesh_of(sizes, names):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def two_dims():
    return cp.Grid.from_mesh(mesh_of((2, 2), ("r", "u")), ulysses="u", ring="r")


def three_dims():
    return cp.Grid.from_mesh(mesh_of((2, 2, 2), ("dp", "r", "u")), ulysses="u", ring="r", data="dp")


def flattened():
    mesh = mesh_of((2, 2), ("r", "u"))
    flat = mesh["r", "u"]._flatten("cp")
    grid = cp.Grid.from_mesh(mesh, ulysses="u", ring="r", context="cp")
    assert grid.context.group is flat.get_group()
    return grid


def part_of_a_mesh():
    return cp.Grid.from_mesh(mesh_of((2, 2, 2), ("dp", "r", "u"))["r", "u"], ulysses="u", ring="r")


def one_dim():
    return cp.Grid.from_mesh(mesh_of((4,), ("u",)), ulysses="u")


def ring_of_one():
    return cp.Grid.from_mesh(mesh_of((1, 4), ("r", "u")), ulysses="u", ring="r")


def ring_and_tensor():
    return cp.Grid.from_mesh(mesh_of((2, 2), ("r", "tp")), ring="r", tensor="tp")


def groups():
    rank = dist.get_rank()
    pairs, halves = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    rings = [dist.new_group(ranks) for ranks in halves][rank % 2]
    return cp.Grid.from_groups(ulysses=[dist.new_group(ranks) for ranks in pairs][rank // 2], ring=rings)


MADE = {  # how, and the equal arguments of initialize_grid
    two_dims: dict(ulysses=2, ring=2),
    three_dims: dict(ulysses=2, ring=2),
    flattened: dict(ulysses=2, ring=2),
    part_of_a_mesh: dict(ulysses=2, ring=2),
    one_dim: dict(ulysses=4),
    ring_of_one: dict(ulysses=4),
    ring_and_tensor: dict(ring=2, tensor=2),
    groups: dict(ulysses=2, ring=2),
}


def attend(grid):
    """Output and gradients on this rank."""
    layout = cp.SequenceLayout(48, grid)
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(48, 1, 4, 8, generator=generator, dtype=torch.float64) for _ in range(4)]
    *local, dout = (layout.shard(x) for x in whole)
    local = [x.requires_grad_() for x in local]
    out = cp.attention(*local, layout=layout, kernel="math")
    return layout.gather(out.detach()), *torch.autograd.grad(out, local, dout)


def same_as_initialized(make, sizes):
    made, expected = make(), cp.initialize_grid(**sizes)
    axes = ["ulysses", "ring", "context", "tensor", *(["data"] if make is three_dims else [])]
    assert all(getattr(made, axis) == getattr(expected, axis) for axis in axes), (made, expected)
    return all(torch.equal(mine, theirs) for mine, theirs in zip(attend(made), attend(expected)))


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
@pytest.mark.usual(0, 2, 4, 5, 6, 7)
def test_the_same_grid_outputs_and_gradients(pool, make):
    world = 8 if make in (three_dims, part_of_a_mesh) else 4
    assert all(pool.run(same_as_initialized, world, make, MADE[make]))


def without_core(sizes):
    made, expected = make_grid(**sizes), cp.initialize_grid(**sizes)
    for axis in ("tensor", "ulysses", "ring", "data", "pipeline", "context"):
        mine, theirs = getattr(made, axis), getattr(expected, axis)
        assert mine == theirs, axis
        assert dist.get_process_group_ranks(mine.group) == dist.get_process_group_ranks(theirs.group), axis


@pytest.mark.parametrize("sizes", [dict(ulysses=2, tensor=2), dict(ring=2, pipeline=2), dict(ulysses=2, ring=2)])
def test_torch_alone_makes_the_groups_that_core_makes(pool, sizes):
    pool.run(without_core, 8, sizes)


@pytest.mark.parametrize("option", [{"virtual_pipeline": 2}, {"core_options": {"expert_model_parallel_size": 2}}])
def test_options_of_megatron_core_are_refused_without_it(monkeypatch, option):
    made = []
    monkeypatch.setattr(groups_of_core, "core_installed", lambda: False)
    monkeypatch.setattr(groups_of_core, "make_grid", lambda **sizes: made.append(sizes))
    with pytest.raises(ValueError, match="are for megatron-core: pip install megatron-core"):
        cp.initialize_grid(ring=2, **option)
    cp.initialize_grid(ring=2, core_options={})
    assert [sizes["ring"] for sizes in made] == [2]


def ulysses_outside():
    cp.Grid.from_mesh(mesh_of((2, 2), ("u", "r")), ulysses="u", ring="r")


def ulysses_outside_and_flattened():
    mesh = mesh_of((2, 2), ("u", "r"))
    mesh["u", "r"]._flatten("cp")
    cp.Grid.from_mesh(mesh, ulysses="u", ring="r", context="cp")


def unknown_dim():
    cp.Grid.from_mesh(mesh_of((2, 2), ("r", "u")), ulysses="ulysses", ring="r")


def no_names():
    cp.Grid.from_mesh(DeviceMesh("cpu", torch.arange(4).view(2, 2)), ulysses="u")


REFUSED = {
    ulysses_outside: "over the ranks [0, 2, 1, 3] cannot be one group in this order",
    ulysses_outside_and_flattened: "the group has to hold Ulysses x Ring, Ulysses innermost",
    unknown_dim: "ulysses='ulysses' is not a dim of the mesh, which has r, u",
    no_names: "ulysses='u' is not a dim of the mesh, which has no names",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
@pytest.mark.usual(0, 2)
def test_a_mesh_that_is_no_grid_is_refused(pool, make):
    with pytest.raises(RankError, match=re.escape(REFUSED[make])):
        pool.run(make, 4)


def first_meetings():
    """The groups that run a collective of all their ranks while the grid is made, with NCCL assumed as backend."""
    met = []
    with (
        patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"),
        patch.object(dist, "barrier", lambda group, device_ids: met.append(group)),
        patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        grid = cp.initialize_grid(ulysses=2, ring=2)
    return [group is grid.ring.group for group in met]


def test_the_ranks_of_a_ring_meet_before_their_first_transfer(pool):
    """NCCL's first collective needs all ranks, but a ring leaves out ranks that need nothing."""
    layout = cp.SequenceLayout(64, abstract_grid(ring=4), "contiguous")
    first = [attention_plan(layout, cp.Documents((32, 48, 64))).ring(rank=rank).hops[0] for rank in range(4)]
    assert [bool(hop.keys_out.rows or hop.keys_in.rows) for hop in first] == [True, True, False, False]
    assert pool.run(first_meetings, 4) == [[True]] * 4
