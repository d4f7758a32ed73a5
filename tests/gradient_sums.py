# SPDX-License-Identifier: Apache-2.0
"""Finds the axes of the grid over which a program sums each gradient, from its collectives, in one process.

Every gradient is set to 1. While :class:`Marks` is active, each collective that sums multiplies its result by the prime
numbers of its axes. After the program's own reductions the factors of a gradient name the axes. A reduction that
happens twice leaves a square. Axes have 2 ranks, so a mean instead of a sum leaves a factor of 1/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRIMES = {"tp": 3, "ulysses": 5, "ring": 7, "dp": 11, "pp": 13}


class Marks(TorchDispatchMode):
    """Multiplies the result of each sum over ranks by the primes of its axes.

    Args:
        axes: the ranks of this rank's group of each axis, by the axis's name.
    """

    def __init__(self, axes: dict[str, Sequence[int]]) -> None:
        super().__init__()
        self.axes = {name: set(ranks) for name, ranks in axes.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace not in ("c10d", "_c10d_functional"):
            return out
        if "reduce" in func._schema.name:
            results = args[0] if func.namespace == "c10d" else out
            for x in tree_leaves(results):
                x.mul_(self.mark(dist.get_process_group_ranks(_group(args)))) if isinstance(x, Tensor) else None
        elif func._schema.name == "c10d::scatter_":  # a fake group copies nothing
            for x, parts in zip(args[0], args[1] or [[]]):
                x.copy_(parts[_group(args).rank()]) if parts else x.fill_(torch.nan)
        return out

    def mark(self, group: Sequence[int]) -> int:
        """The product of the primes of all axes that a group consists of."""
        mark = size = 1
        for name, ranks in self.axes.items():
            if ranks <= set(group):
                mark, size = mark * PRIMES[name], size * len(ranks)
        if size != len(group):
            raise ValueError(f"the group of ranks {group} does not consist of axes")
        return mark


def factors(mark: float) -> tuple[dict[str, int], float]:
    """(how often a tensor was summed over each axis, the factor that is left, which is 1 unless it was scaled)."""
    counts: dict[str, int] = {}
    for name, prime in PRIMES.items():
        while mark >= prime and abs(mark / prime - round(mark / prime)) < 1e-3 / prime:
            mark, counts[name] = mark / prime, counts.get(name, 0) + 1
    return counts, mark


def set_gradients_to_one(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Run a forward pass that adds up all elements of all parameters, and its backward pass.

    Args:
        model: hooks of its data-parallel wrapper run in the backward pass.
        units: the modules that FSDP gathers separately, with ``model`` as the last.
    """
    nested = {module for unit in units[:-1] for module in unit.modules()}

    def total(own: list[nn.Module], others: Sequence[nn.Module]) -> Any:
        parts = [x.sum() for module in own for x in module._parameters.values() if x is not None]
        return sum([*parts, *(other() for other in others)])

    for unit in units:
        own = [module for module in unit.modules() if unit is not model or module not in nested]
        unit.forward = partial(total, own, units[:-1] if unit is model else ())
    try:
        model().backward()
    finally:
        for unit in units:
            del unit.forward


def _group(args: tuple) -> ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group([x for x in args if isinstance(x, str)][-1])
