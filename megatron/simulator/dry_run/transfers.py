# SPDX-License-Identifier: Apache-2.0
"""What an operation of torch.distributed sends, over which axis of the grid."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from megatron.context_parallel.layout.grid import Grid
from megatron.formulas.strategy import Group
from megatron.simulator.cost.trace import Collective
from megatron.simulator.dry_run.kernels import bytes_of

STAGES = "pp"  # stands for the pipeline's group among the names of groups


@cache
def communicates(func: Any) -> bool:
    return func.namespace in ("c10d", "_c10d_functional")


def sent(kind: Collective, size: int, ranks: int) -> int:
    """Bytes a rank sends of a whole of ``size`` bytes; see :class:`Transfer`."""
    if kind in ("all_gather", "reduce_scatter"):
        return size * (ranks - 1) // ranks
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) // ranks
    return size


def transfer(func: Any, args: tuple, out: Any) -> tuple[Collective, ProcessGroup, int] | None:
    """(kind, group, bytes) of a communication operation; of gathers and reductions, the bytes of the whole."""
    name = func._schema.name.split("::")[1]
    if name in ("barrier", "monitored_barrier_", "wait_tensor", "recv_", "recv_any_source_"):
        return None  # a message is its sender's; of a ring see `received`
    group = _group(args)
    if name.startswith(("allreduce", "all_reduce", "reduce_")) and "scatter" not in name:
        return "all_reduce", group, bytes_of(args[0])
    if "reduce_scatter" in name:
        return "reduce_scatter", group, bytes_of(args[0] if func.namespace == "_c10d_functional" else args[1])
    if name.startswith(("allgather", "_allgather", "all_gather")):
        return "all_gather", group, bytes_of(out if func.namespace == "_c10d_functional" else args[0])
    if name.startswith(("alltoall", "all_to_all")):
        return "all_to_all", group, _sent_to_others(args, group)
    if name in ("scatter", "scatter_"):  # a part each, from rank 0
        return "broadcast", group, bytes_of(args[1]) * (group.size() - 1) // group.size() if args[1] else 0
    if name.startswith("broadcast"):
        root = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        return "broadcast", group, bytes_of(args[0]) if group.rank() == root else 0
    if name == "send":
        return "p2p", group, bytes_of(args[0])
    raise NotImplementedError(f"{func} is not known to the recorder")


def received(func: Any, args: tuple) -> tuple[ProcessGroup, int] | None:
    """(group, bytes) of a receive, else None."""
    return (_group(args), bytes_of(args[0])) if func._schema.name == "c10d::recv_" else None


def _sent_to_others(args: tuple, group: ProcessGroup) -> int:
    """alltoall_base_(out, in, group, out sizes, in sizes) or alltoall_(outs, ins, group)."""
    source = args[1]
    if isinstance(source, (list, tuple)):
        return bytes_of([x for rank, x in enumerate(source) if rank != group.rank()])
    sizes, total = args[4] if len(args) > 4 else [], bytes_of(source)
    if not sizes:
        return total * (group.size() - 1) // group.size()
    return total * (sum(sizes) - sizes[group.rank()]) // max(sum(sizes), 1)


def _group(args: tuple) -> ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(arg)
            except RuntimeError:  # a reduction's operator
                continue
    return dist.distributed_c10d._resolve_process_group([x for x in args if isinstance(x, str)][-1])


def axes_of(grid: Grid) -> dict[str, tuple[str, Group]]:
    """The axis that each of this rank's process groups belongs to, by the group's name."""
    from megatron.core import parallel_state as ps

    tensor, ulysses, ring = grid.tensor.size, grid.ulysses.size, grid.ring.size
    context = ulysses * ring
    dp, pp = Group(context * grid.data.size, tensor), Group(grid.pipeline.size, tensor * context * grid.data.size)
    named = [
        ("pp", grid.pipeline.group, pp),
        ("dp", grid.data.group, Group(grid.data.size, tensor * context)),
        ("dp", ps.get_data_parallel_group(with_context_parallel=True), dp),
        ("tp", grid.tensor.group, Group(tensor)),
        ("ulysses", grid.ulysses.group, Group(ulysses, tensor)),
        ("ring", grid.ring.group, Group(ring, tensor * ulysses)),
    ]
    found = {group.group_name: (axis, placement) for axis, group, placement in named if group is not None}
    found[STAGES] = ("pp", pp)
    for group in (ps.get_embedding_group(check_initialized=False),):
        if group is not None and group.group_name not in found:
            found[group.group_name] = ("pp", Group(group.size(), pp.stride * max(1, pp.size - 1)))
    return found
