# SPDX-License-Identifier: Apache-2.0
"""The process grid TP x Ulysses x Ring x DP x PP, as a value (USP paper, recommendation 7).

    rank = tp + T * (u + U * (r + R * (d + D * p)))

megatron-core makes the groups; a :class:`Grid` holds their sizes, this rank's coordinates and the groups themselves.
Everything else takes a grid, or one of its axes, as an argument.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """One axis of the grid: how many ranks lie along it, which of them this is, and their process group."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def global_rank(self, rank: int) -> int:
        """The world's number of this axis' rank ``rank``."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass(frozen=True)
class Grid:
    """Sizes, coordinates and groups. ``context`` is Ulysses x Ring, Ulysses innermost."""

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
        """This grid as seen from other coordinates: sizes without groups, for looking at what other ranks hold."""
        return Grid(
            tensor=Axis(self.tensor.size, tensor),
            ulysses=Axis(self.ulysses.size, ulysses),
            ring=Axis(self.ring.size, ring),
            data=self.data,
            pipeline=self.pipeline,
            context=Axis(self.context.size, ulysses + self.ulysses.size * ring),
        )

    def __str__(self) -> str:
        return (
            f"TP {self.tensor.size} x Ulysses {self.ulysses.size} x Ring {self.ring.size} "
            f"x DP {self.data.size} x PP {self.pipeline.size}"
        )


def abstract_grid(*, ulysses: int = 1, ring: int = 1, tensor: int = 1) -> Grid:
    """A grid without processes: for planning, tests and pictures. Its coordinates are 0; see :meth:`Grid.at`."""
    return Grid(tensor=Axis(tensor), ulysses=Axis(ulysses), ring=Axis(ring), context=Axis(ulysses * ring))


def initialize_grid(
    *,
    ulysses: int = 1,
    ring: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    backend: str | None = None,
    timeout_minutes: float = 10,
    core_options: Mapping[str, Any] | None = None,
) -> Grid:
    """Make the process groups and return the grid. Data parallelism takes what is left of the world.

    torch.distributed is initialized from the environment (torchrun) if it is not yet; a single process without torchrun
    becomes a world of one.

    Args:
        ulysses, ring, tensor, pipeline: sizes of the axes.
        virtual_pipeline: virtual stages a pipeline rank, for the interleaved schedule.
        backend: torch.distributed backend; default nccl where there is a GPU, else gloo.
        timeout_minutes: time a collective may take before it is an error.
        core_options: further arguments of megatron-core's ``initialize_model_parallel``.

    Raises:
        ValueError: the grid does not divide the world.
    """
    with warnings.catch_warnings():  # core reports at import that apex and Transformer Engine are missing
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _initialize_world(backend, timeout)
    world = dist.get_world_size()
    model = tensor * ulysses * ring * pipeline
    if min(tensor, ulysses, ring, pipeline) < 1:
        raise ValueError(
            f"grid sizes must be at least 1: tensor {tensor}, ulysses {ulysses}, ring {ring}, pipeline {pipeline}"
        )
    if world % model:
        raise ValueError(
            f"a grid of tensor {tensor} x ulysses {ulysses} x ring {ring} x pipeline {pipeline} = {model} ranks "
            f"does not divide the {world} processes: start a multiple of {model}, or make the grid smaller"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline,
        context_parallel_size=ulysses * ring,
        hierarchical_context_parallel_sizes=[ulysses, ring],
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=dist.get_backend() != "gloo",
        distributed_timeout_minutes=timeout_minutes,
        **(core_options or {}),
    )
    return current_grid()


def current_grid() -> Grid:
    """The grid of the groups that megatron-core holds now."""
    from megatron.core import parallel_state as groups

    ulysses, ring = groups.get_hierarchical_context_parallel_groups()
    return Grid(
        tensor=_axis(groups.get_tensor_model_parallel_group()),
        ulysses=_axis(ulysses),
        ring=_axis(ring),
        data=_axis(groups.get_data_parallel_group()),
        pipeline=_axis(groups.get_pipeline_model_parallel_group()),
        context=_axis(groups.get_context_parallel_group()),
    )


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group.size(), group.rank(), group)


def _initialize_world(backend: str | None, timeout: timedelta) -> None:
    import torch

    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
