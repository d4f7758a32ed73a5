# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch.distributed, which renamed two of them in 2.13."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

RENAMED = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if RENAMED else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if RENAMED else "reduce_scatter_tensor"


def all_gather(output: Tensor, x: Tensor, **options: Any) -> dist.Work | None:
    """``x`` of every rank, one after the other, into ``output``; ``options`` as of torch.distributed."""
    return getattr(dist, ALL_GATHER)(output, x, **options)


def reduce_scatter(output: Tensor, x: Tensor, **options: Any) -> dist.Work | None:
    """This rank's part of the sum of ``x`` over ranks into ``output``; ``options`` as of torch.distributed."""
    return getattr(dist, REDUCE_SCATTER)(output, x, **options)


def gathered_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ``value`` of every rank, by rank; only this process's without process groups."""
    if not dist.is_initialized():
        return [value]
    every: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def gathered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks [ranks x n, ...], one rank's after the other's; ``x`` [n, ...] has as many on each."""
    every = x.new_empty((dist.get_world_size(group) * len(x), *x.shape[1:]))
    all_gather(every, x.contiguous(), group=group)
    return every


def scattered(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's rows [n, ...] of the sum of ``x`` [ranks x n, ...] over ranks: the gradient of :func:`gathered`."""
    mine = x.new_empty((len(x) // dist.get_world_size(group), *x.shape[1:]))
    reduce_scatter(mine, x.contiguous(), group=group)
    return mine
