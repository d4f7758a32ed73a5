# SPDX-License-Identifier: Apache-2.0
"""Problems and worker processes of benchmarks/attention.py."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import megatron.context_parallel as cp
from benchmarks.machine import busy_seconds, foreign_share
from megatron.context_parallel.attention.kernels.base import Kernel
from megatron.context_parallel.layout.grid import Axis, Grid
from megatron.simulator.machines.measure_device import passes


@dataclass(frozen=True)
class Problem:
    """One causal attention over a complete sequence."""

    seq_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 1

    def __str__(self) -> str:
        return (
            f"{self.seq_length} tokens, {self.heads} heads ({self.kv_heads} for keys and values) of {self.head_dim}, "
            f"batch {self.batch}, {self.dtype}"
        )

    @property
    def flops(self) -> float:
        """FLOPs of the matrix products of forward (2) and backward (5), each with 2 * d per pair of query and key."""
        return self.flops_of(self.seq_length * (self.seq_length + 1) // 2)

    def flops_of(self, pairs: int) -> float:
        return 7 * 2.0 * self.head_dim * self.heads * self.batch * pairs

    def inputs(self, device: str = "cpu") -> list[Tensor]:
        """q, k, v and the gradient of the output, [s, b, heads, d]; the same in every process."""
        how = {"generator": torch.Generator(device).manual_seed(7), "dtype": torch.float32, "device": device}
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(self.seq_length, self.batch, n, self.head_dim, **how).to(self.dtype) for n in heads]


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    wall: float  # seconds
    core: float  # CPU seconds of the busiest core
    foreign: float  # share of the machine that other programs used meanwhile


def time_local(kernel: Kernel, threads: int, *tensors: Tensor) -> Sample:
    """One run of the bare kernel in this process."""
    busy, start, own = busy_seconds(), time.perf_counter(), time.process_time()
    run_kernel(kernel, *tensors)
    wall, own = time.perf_counter() - start, time.process_time() - own
    return Sample(wall, own / threads, foreign_share(busy, own, wall))


def run_kernel(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The kernel on the complete sequence, forward and backward: out, dq, dk, dv as [s, b, heads, d]."""
    forward, backward = passes(kernel, q, k, v)
    out, lse = forward()
    return [out, *backward(dout, out, lse)]


def world_layout(seq_length: int, *, ulysses: int, ring: int) -> cp.SequenceLayout:
    """The zigzag layout of a grid of all ranks; ``ulysses`` or ``ring`` is their number, the other is 1."""
    me, everyone = dist.get_rank(), dist.group.WORLD
    grid = Grid(
        ulysses=Axis(ulysses, me if ulysses > 1 else 0, everyone),
        ring=Axis(ring, me if ring > 1 else 0, everyone),
        context=Axis(ulysses * ring, me, everyone),
    )
    return cp.SequenceLayout(seq_length, grid)


def run_parallel(layout: cp.SequenceLayout, kernel: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """This rank's part, as a training step runs it: out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cp.attention(*leaves, layout=layout, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def largest_error(result: list[Tensor], expected: list[Tensor]) -> float:
    """Over out, dq, dk, dv: the largest difference, relative to the tensor's largest entry."""
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(result, expected))


def log_normal(documents: int, length: int, seed: int = 0) -> tuple[int, ...]:
    """Ends of documents of log-normal length."""
    draw = random.Random(seed)
    sizes = [draw.lognormvariate(0, 1) for _ in range(documents)]
    ends = {max(1, round(sum(sizes[: index + 1]) / sum(sizes) * length)) for index in range(documents)}
    return tuple(sorted(ends | {length}))


class Team:
    """Worker processes of one thread each, started once; every call runs on all of them at the same time."""

    def __init__(self, size: int, problem: Problem, kernel: str) -> None:
        context = mp.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, theirs, self.store.port, problem, kernel), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def call(self, *request: Any) -> list[Any]:
        """Send a request to all workers; returns their answers by rank."""
        for pipe in self.pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in self.pipes]

    def time(self, path: str) -> Sample:
        """One run; all ranks start together. Wall time is from the first rank's start to the last rank's end."""
        busy = busy_seconds()
        times = self.call("time", path)
        cpu = [own for _, _, own in times]
        wall = max(stop for _, stop, _ in times) - min(start for start, _, _ in times)
        return Sample(wall, max(cpu), foreign_share(busy, sum(cpu), wall))

    def results(self, path: str) -> list[Tensor]:
        """out, dq, dk, dv of the complete sequence, put together from all ranks."""
        parts = self.call("results", path)
        order = torch.cat([torch.from_numpy(positions) for positions, _ in parts])
        complete = []
        for pieces in zip(*(tensors for _, tensors in parts)):
            joined = torch.cat([torch.from_numpy(piece) for piece in pieces])
            complete.append(torch.empty_like(joined).index_copy_(0, order, joined))
        return complete

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)


def _serve(rank: int, size: int, pipe: Connection, port: int, problem: Problem, kernel: str) -> None:
    """Main function of a worker."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    layouts = {
        "ulysses": world_layout(problem.seq_length, ulysses=size, ring=1),
        "ring": world_layout(problem.seq_length, ulysses=1, ring=size),
    }
    complete = problem.inputs()
    tensors = {path: [layout.shard(x) for x in complete] for path, layout in layouts.items()}
    del complete
    while True:
        try:
            what, path = pipe.recv()
        except (EOFError, OSError):
            break
        dist.barrier()
        start, own = time.perf_counter(), time.process_time()
        results = run_parallel(layouts[path], kernel, *tensors[path])
        stop, own = time.perf_counter(), time.process_time() - own
        if what == "results":
            pipe.send((layouts[path].positions.numpy(), [x.float().numpy() for x in results]))
        else:
            pipe.send((start, stop, own))
        del results
    dist.destroy_process_group()
