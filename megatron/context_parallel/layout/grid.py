# SPDX-License-Identifier: Apache-2.0
"""The process grid TP x Ulysses x Ring x DP x PP, as a value (USP paper, recommendation 7).

    rank = tp + T * (u + U * (r + R * (d + D * p)))

A :class:`Grid` holds the sizes, this rank's coordinates and the process groups. Everything else takes a grid, or one of
its axes, as an argument.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.platform.collectives import gathered_objects
from megatron.platform.network import meet
from megatron.system.srun import take_ranks_of_srun


@dataclass(frozen=True)
class Axis:
    """One axis of the grid.

    Attributes:
        size: how many ranks the axis has.
        rank: this process' rank on the axis.
        group: the axis' process group; None if nothing is ever sent. Comparisons ignore it.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Axis:
        """The axis of the process group ``group``; None is an axis of size 1."""
        return cls() if group is None else cls(group.size(), group.rank(), group)

    def global_rank(self, rank: int) -> int:
        """The global rank of this axis' rank ``rank``."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass(frozen=True)
class Grid:
    """Sizes, coordinates and groups: from ``cp.initialize_grid``, :meth:`from_mesh` or :meth:`from_groups`.

    Attributes:
        tensor, ulysses, ring, data, pipeline: the axes, innermost first.
        context: Ulysses x Ring, Ulysses innermost: the ranks that share a sequence.
    """

    tensor: Axis = Axis()
    ulysses: Axis = Axis()
    ring: Axis = Axis()
    data: Axis = Axis()
    pipeline: Axis = Axis()
    context: Axis = Axis()

    @property
    def world_size(self) -> int:
        return self.tensor.size * self.context.size * self.data.size * self.pipeline.size

    def at(self, *, ulysses: int = 0, ring: int = 0, tensor: int = 0) -> Grid:
        """This grid from the view of another rank: sizes and coordinates without groups."""
        return Grid(
            tensor=Axis(self.tensor.size, tensor),
            ulysses=Axis(self.ulysses.size, ulysses),
            ring=Axis(self.ring.size, ring),
            data=Axis(self.data.size, self.data.rank),
            pipeline=Axis(self.pipeline.size, self.pipeline.rank),
            context=Axis(self.context.size, ulysses + self.ulysses.size * ring),
        )

    @classmethod
    def from_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        ulysses: str | None = None,
        ring: str | None = None,
        context: str | None = None,
        tensor: str | None = None,
        data: str | None = None,
        pipeline: str | None = None,
    ) -> Grid:
        """The grid of an existing mesh, by the names of its dims. An axis without a name has size 1.

        Args:
            context: a flattened dim over Ulysses x Ring, Ulysses innermost. Without it, the group is created if both
                axes are larger than 1; then every rank of the mesh has to call this.

        Raises:
            ValueError: the mesh has no such dim, or Ulysses is not inside Ring in it.
        """
        names = dict(ulysses=ulysses, ring=ring, context=context, tensor=tensor, data=data, pipeline=pipeline)
        groups = {}
        for axis, name in names.items():
            try:
                dim = None if name is None else device_mesh[name]
            except (KeyError, RuntimeError):
                dims = ", ".join(device_mesh.mesh_dim_names or ()) or "no names"
                raise ValueError(f"{axis}={name!r} is not a dim of the mesh, which has {dims}") from None
            groups[axis] = None if dim is None else dim.get_group()
        return cls.from_groups(**groups)

    @classmethod
    def from_groups(
        cls,
        *,
        ulysses: dist.ProcessGroup | None = None,
        ring: dist.ProcessGroup | None = None,
        context: dist.ProcessGroup | None = None,
        tensor: dist.ProcessGroup | None = None,
        data: dist.ProcessGroup | None = None,
        pipeline: dist.ProcessGroup | None = None,
    ) -> Grid:
        """The grid of existing process groups. An axis without a group has size 1.

        Args:
            ring: on GPUs all its ranks have to call this, because it runs the group's first collective.
            context: the ranks of Ulysses x Ring, Ulysses innermost. Without it, the group is created if both axes are
                larger than 1; then all ranks of the new group have to call this.

        Raises:
            ValueError: ``context`` is not Ulysses x Ring, or not in this order.
        """
        _connect(ring)
        inner, outer = Axis.of(ulysses), Axis.of(ring)
        if context is None:
            context = _context_group(ulysses, ring)
        both = Axis.of(context)
        if (both.size, both.rank) != (inner.size * outer.size, inner.rank + inner.size * outer.rank):
            raise ValueError(
                f"rank {both.rank} of {both.size} in the context group is rank {inner.rank} of {inner.size} in "
                f"Ulysses and {outer.rank} of {outer.size} in Ring: the group has to hold Ulysses x Ring, Ulysses "
                "innermost"
            )
        return cls(Axis.of(tensor), inner, outer, Axis.of(data), Axis.of(pipeline), both)

    def __str__(self) -> str:
        return (
            f"TP {self.tensor.size} x Ulysses {self.ulysses.size} x Ring {self.ring.size} "
            f"x DP {self.data.size} x PP {self.pipeline.size}"
        )


def abstract_grid(*, ulysses: int = 1, ring: int = 1, tensor: int = 1) -> Grid:
    """A grid without processes: for planning, tests and pictures. Its coordinates are 0; see :meth:`Grid.at`."""
    return Grid(tensor=Axis(tensor), ulysses=Axis(ulysses), ring=Axis(ring), context=Axis(ulysses * ring))


def make_grid(
    *,
    ulysses: int = 1,
    ring: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    backend: str | None = None,
    timeout_minutes: float = 10,
) -> Grid:
    """Create the process groups with torch.distributed only, and return the grid.

    For the arguments see ``cp.initialize_grid``.
    """
    initialize_world(backend, timeout_minutes)
    data = dist.get_world_size() // model_size(ulysses=ulysses, ring=ring, tensor=tensor, pipeline=pipeline)
    ranks = torch.arange(dist.get_world_size()).view(pipeline, data, ring, ulysses, tensor)

    def group(*dims: int) -> dist.ProcessGroup:
        groups = ranks.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)).flatten(0, -2)
        return dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timedelta(minutes=timeout_minutes))[0]

    return Grid.from_groups(
        tensor=group(4), ulysses=group(3), ring=group(2), context=group(2, 3), data=group(1), pipeline=group(0)
    )


def model_size(*, ulysses: int, ring: int, tensor: int, pipeline: int) -> int:
    """Number of processes that share one copy of the model and one sequence.

    Raises:
        ValueError: the number does not divide the world size.
    """
    if min(tensor, ulysses, ring, pipeline) < 1:
        raise ValueError(
            f"grid sizes must be at least 1: tensor {tensor}, ulysses {ulysses}, ring {ring}, pipeline {pipeline}"
        )
    world, model = dist.get_world_size(), tensor * ulysses * ring * pipeline
    if world % model:
        raise ValueError(
            f"a grid of tensor {tensor} x ulysses {ulysses} x ring {ring} x pipeline {pipeline} = {model} ranks "
            f"does not divide the {world} processes: start a multiple of {model}, or make the grid smaller"
        )
    return model


def initialize_world(backend: str | None, timeout_minutes: float, interface: str | None = None) -> str:
    """Initialize torch.distributed from the environment unless it already is; without a launcher, a world of one.

    Args:
        interface: network interface of every node; default: chosen by :mod:`megatron.platform.network`.

    Returns:
        A line with the interfaces in use, or an empty string.

    Raises:
        Unusable: on every rank, if the nodes cannot reach each other over these interfaces.
        ValueError: another launcher than torchrun started several processes, and nothing says which one this is.
    """
    if dist.is_initialized():
        return ""
    take_ranks_of_srun(os.environ)
    timeout = timedelta(minutes=timeout_minutes)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if "RANK" in os.environ:
        return meet(backend, timeout, interface)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return ""


def _connect(ring: dist.ProcessGroup | None) -> None:
    """Let NCCL create the ring's communicator now, while all ranks take part.

    Otherwise it would do so at the first transfer, which then needs every rank of the group (torch.distributed's
    ``batch_isend_irecv``). But a rank that has nothing to send or receive makes no transfer.
    """
    if ring is not None and ring.size() > 1 and "nccl" in dist.get_backend_config(ring):
        dist.barrier(ring, device_ids=[torch.cuda.current_device()])


def _context_group(ulysses: dist.ProcessGroup | None, ring: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of Ulysses x Ring: one of the two if the other has size 1, else a new one."""
    if ulysses is None or ring is None or min(ulysses.size(), ring.size()) == 1:
        return ring if ulysses is None or (ring is not None and ring.size() > 1) else ulysses
    ranks = [rank for row in gathered_objects(dist.get_process_group_ranks(ulysses), ring) for rank in row]
    if ranks != sorted(ranks):  # a group orders its ranks as the world does
        raise ValueError(
            f"Ulysses x Ring over the ranks {ranks} cannot be one group in this order: the ranks must ascend; "
            "put the dim of Ring before that of Ulysses in the mesh"
        )
    return dist.new_group(ranks, use_local_synchronization=True)
