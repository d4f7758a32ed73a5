# SPDX-License-Identifier: Apache-2.0
"""Every rank begins its collectives in one order, gradient reductions in the backward pass included.

NCCL needs that of all communicators together. One thread runs the whole backward pass (training/step.py), so the order
is that of autograd's queue, which goes by the order of the forward pass: here it is written down on each rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.test_fpdt import DEVICE, FULL, HOST, STREAM, fpdt
from tests.distributed.test_training import GQA, SP, T2, ZERO1, cp
from tests.distributed.training_runs import make_job, train_job
from tests.pairs import also_in_full

OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 5000 --micro-batch-size 1"

# What layers send: Ring, Ulysses; TP. DDP's are coalesced.
CP_SENDS, TP_SENDS = ("transfers", "c10d::alltoall_base_"), ("c10d::_reduce_scatter_base_", "c10d::_allgather_base_")


class Order(TorchDispatchMode):
    """Collectives as they begin: what, on which ranks, of how many bytes; transfers in a row count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            group = next(
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            )
            ranks = tuple(dist.get_process_group_ranks(ProcessGroup.unbox(group)))
            if func._schema.name in ("c10d::send", "c10d::recv_"):
                one = ("transfers", ranks)
            else:
                size = sum(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
                one = (func._schema.name, ranks, size)
            if one[0] != "transfers" or self.begun[-1:] != [one]:
                self.begun.append(one)
        return func(*args, **(kwargs or {}))


def begun(flags: str) -> tuple[list[tuple], list[bool]]:
    """The collectives of two steps on this rank, and whether autograd might have used several threads in any."""
    from megatron.context_parallel.fpdt import chunked_layer

    threads, backward = [], chunked_layer._Chunked.backward

    def looking(ctx: Any, dy: torch.Tensor) -> Any:
        threads.append(torch._C._is_multithreading_enabled())
        return backward(ctx, dy)

    chunked_layer._Chunked.backward = staticmethod(looking)
    try:
        job = make_job(flags)
        with Order() as order:
            train_job(job, 2)
    finally:
        chunked_layer._Chunked.backward = staticmethod(backward)
    return order.begun, threads


@pytest.mark.parametrize(
    "world, grid",
    [
        (4, f"{cp(2, 1)} {ZERO1} {fpdt(16, STREAM)}"),
        *also_in_full(
            (4, f"{cp(1, 2)} {fpdt(16, STREAM)}"),
            (2, f"{ZERO1} --overlap-param-gather {fpdt(13, STREAM, FULL)}"),
            (4, f"{cp(2, 1)} {fpdt(16, HOST)}"),
            (4, f"{cp(1, 2)} {ZERO1} {fpdt(16, DEVICE, FULL)}"),
            (8, f"{T2} {SP} {cp(2, 1)} {ZERO1} {fpdt(16, STREAM)} --global-batch-size 2"),
            (8, f"{cp(2, 2)} {ZERO1} {fpdt(16, STREAM)} --global-batch-size 2"),
        ),
    ],
)
def test_all_ranks_begin_their_collectives_in_one_order(pool, world, grid):
    found = pool.run(begun, world, f"{GQA} --num-layers 2 {OVERLAP} {grid}", timeout=180)
    for mine, (order, _) in enumerate(found):
        for other, (others, _) in enumerate(found):
            both = [[one for one in begun if {mine, other} <= set(one[1])] for begun in (order, others)]
            assert both[0] == both[1]
    order, threads = found[0]
    # DDP reduces between two collectives of a layer (in the second step; in the first it does when all is there).
    layer = CP_SENDS + (TP_SENDS if T2 in grid else ())
    kinds = ["layer" if one[0] in layer else one[0] for one in order]
    between = {now for last, now, after in zip(kinds, kinds[1:], kinds[2:]) if last == after == "layer"}
    assert "layer" not in kinds or any("reduce" in kind for kind in between)
    if STREAM in grid:
        assert threads and not any(threads)
