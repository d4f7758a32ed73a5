# SPDX-License-Identifier: Apache-2.0
"""Every rank begins its collectives in one order, gradient reductions in the backward pass included.

NCCL requires this across all communicators. One thread runs the complete backward pass (training/step.py), so the order
is that of autograd's queue, which follows the order of the forward pass. The test records it on each rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.training.refusal import Refusal
from megatron.training.setup import VARIABLES, make_deterministic
from tests.distributed.flags import DEVICE, FULL, HOST, SP, STREAM, T2, ZERO1, ZERO3, fpdt
from tests.distributed.test_training import GQA, cp
from tests.distributed.training_runs import make_job, run_training, train_job
from tests.pairs import also_in_full

OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 5000 --micro-batch-size 1"

# Collectives of layers: Ring, Ulysses; TP. DDP coalesces its own.
CP_SENDS, TP_SENDS = ("transfers", "c10d::alltoall_base_"), ("c10d::_reduce_scatter_base_", "c10d::_allgather_base_")


class Order(TorchDispatchMode):
    """Collectives in the order of their start: kind, ranks, bytes; consecutive transfers count as one."""

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
    from megatron.context_parallel.fpdt import chunk_work

    threads, backward = [], chunk_work._Chunked.backward

    def record_threads(ctx: Any, dy: torch.Tensor) -> Any:
        threads.append(torch._C._is_multithreading_enabled())
        return backward(ctx, dy)

    chunk_work._Chunked.backward = staticmethod(record_threads)
    try:
        job = make_job(flags)
        with Order() as order:
            train_job(job, 2)
    finally:
        chunk_work._Chunked.backward = staticmethod(backward)
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
            (8, f"{SP} {cp(2, 1)} {ZERO1} {fpdt(16, STREAM)} --global-batch-size 2"),
            (8, f"{cp(2, 2)} {ZERO1} {fpdt(16, STREAM)} --global-batch-size 2"),
        ),
    ],
)
@pytest.mark.lab
def test_all_ranks_begin_their_collectives_in_one_order(pool, world, grid):
    result = pool.run(begun, world, f"{GQA} --num-layers 2 {OVERLAP} {grid}", timeout=180)
    for mine, (order, _) in enumerate(result):
        for other, (others, _) in enumerate(result):
            both = [[one for one in begun if {mine, other} <= set(one[1])] for begun in (order, others)]
            assert both[0] == both[1]
    order, threads = result[0]
    # DDP reduces between two collectives of a layer (from the second step on; in the first, at the end).
    layer = CP_SENDS + (TP_SENDS if T2 in grid else ())
    kinds = ["layer" if one[0] in layer else one[0] for one in order]
    between = {now for last, now, after in zip(kinds, kinds[1:], kinds[2:]) if last == after == "layer"}
    assert "layer" not in kinds or any("reduce" in kind for kind in between)
    if STREAM in grid:
        assert threads and not any(threads)


# Where ranks send and receive at the same time, receives are posted first, or gloo sends one direction at a time.
# tests/faults/test_nodes.py measures how much slower the other order is over a link of limited rate.


def posted(what: str, folder: Path) -> list[str]:
    """The messages that this rank posts before each wait: ``r`` for a receive, ``s`` for a send."""
    batches: list[str] = [""]
    batch, send, receive = dist.batch_isend_irecv, dist.isend, dist.irecv

    def spy(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append("".join("r" if one.op is receive else "s" for one in operations))
        return batch(operations)

    def noted(letter: str, call: object) -> object:
        def post(*args: object, **options: object) -> dist.Work:
            batches[-1] += letter
            return call(*args, **options)

        return post

    try:
        dist.batch_isend_irecv = spy
        if what == "ring":
            train_job(make_job("--ring-parallel-size 3 --seq-length 48"), 1)
        elif what == "fpdt":
            train_job(make_job("--ring-parallel-size 3 --seq-length 96 --fpdt --fpdt-chunk-size 48"), 1)
        elif what == "ulysses":
            train_job(make_job("--ulysses-parallel-size 3 --seq-length 48 --num-attention-heads 6 --kv-channels 8"), 1)
        elif what == "links":
            from megatron.simulator.machines.measure_links import transfer

            for kind in ("p2p", "all_to_all"):
                transfer(kind, 64, dist.group.WORLD, torch.device("cpu"))[0]()
        else:
            from megatron.training.checkpoint.in_memory import copy_file

            dist.isend, dist.irecv = noted("s", send), noted("r", receive)
            rank, mine = dist.get_rank(), folder / f"{dist.get_rank()}"
            mine.write_bytes(bytes(range(64)))
            copy_file.swap((mine, (rank + 1) % 3), (folder / f"{rank}.copy", (rank - 1) % 3, 64), dist.group.WORLD)
            assert (folder / f"{rank}.copy").read_bytes() == bytes(range(64))
    finally:
        dist.batch_isend_irecv, dist.isend, dist.irecv = batch, send, receive
    return [one for one in batches if one]


@pytest.mark.parametrize("what", ["ring", pytest.param("fpdt", marks=pytest.mark.full), "ulysses", "links", "copies"])
@pytest.mark.usual(2, 3)
def test_receives_are_posted_before_sends(pool, tmp_path, what):
    every = [one for batches in pool.run(posted, 3, what, tmp_path) for one in batches]
    assert any("r" in one and "s" in one for one in every)
    assert not [one for one in every if "sr" in one]


# ``--deterministic-mode``: a run repeats to the last bit.


DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def run_and_look(flags: str, llama: bool) -> tuple:
    result = run_training(flags, llama, 3)
    return *result, torch.are_deterministic_algorithms_enabled(), {name: os.environ.get(name) for name in VARIABLES}


@pytest.mark.parametrize(
    "world, llama, flags",
    [
        (2, True, f"{GQA} {DROPOUT} {cp(2, 1)}"),
        (2, True, f"{GQA} --bf16 {SP} --loss-chunks 3"),
        *also_in_full(
            (4, True, f"{GQA} {DROPOUT} {cp(2, 2)}"),
            (2, False, f"{DROPOUT} {cp(1, 2)} {ZERO1} --fpdt --fpdt-chunk-size 13"),
            (2, False, f"{DROPOUT} {ZERO3} --micro-batch-size 1"),
        ),
    ],
)
@pytest.mark.usual(1)
def test_a_run_repeats(pool, world, llama, flags):
    flags = f"--num-layers 2 --deterministic-mode {flags}"
    first, second = (pool.run(run_and_look, world, flags, llama) for _ in range(2))
    for (losses, norms, grads, switched, variables), (again, norms_again, grads_again, _, _) in zip(first, second):
        assert losses == again and norms == norms_again
        assert all(torch.equal(grads_again[name], grad) for name, grad in grads.items())
        assert switched and variables == {name: value for name, (value, _) in VARIABLES.items()}
    plain = pool.run(run_training, world, flags.replace("--deterministic-mode", ""), llama, 3)[0][0]
    # In bf16, core's other embedding lookup sums gradients in another order.
    assert first[0][0] == pytest.approx(plain, rel=2e-4 if "bf16" in flags else 1e-6)


def test_the_user_may_choose_what_repeats(monkeypatch):
    chosen = {"NCCL_ALGO": "Ring"}
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    make_deterministic(chosen)
    assert chosen["NCCL_ALGO"] == "Ring" and chosen["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(Refusal, match="--deterministic-mode and .* NCCL_ALGO=NVLS contradict each other: .* unset"):
        make_deterministic({"NCCL_ALGO": "NVLS"})
