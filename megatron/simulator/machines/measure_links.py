# SPDX-License-Identifier: Apache-2.0
"""Measures what processes can send each other: collectives in a node, between nodes, and copies to the host at once.

Under torchrun the processes are there; else :func:`measure_in_processes` starts some of its own.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron.simulator.machines.machine import KINDS
from megatron.simulator.machines.measure_device import Effort, communicator, host_copy, settle
from megatron.training.refusal import Refusal

SMALL = 4096  # bytes of a message that measures latency
FIRST = 2**18  # bytes of the message that says how large one may be
LONGEST = 0.5  # seconds that the large message of a slow link takes, about
CALLS = 200  # at most, in a batch


@dataclass(frozen=True)
class Figures:
    """(Seconds of a small message, bytes a second of a large one) by kind of transfer; and of copies to the host.

    Attributes:
        node: among the processes of a node; empty with one.
        network: among one process of each node, while its other processes do the same; empty with one node.
        host: bytes a second and seconds, while all copy.
        alone: bytes a second between nodes, of p2p by one process of a node while its others rest; 0: not measured.
        buffers: bytes that NCCL takes for a communicator, in a node (``nccl``) and between nodes (``nccl_network``);
            empty without GPUs.
    """

    node: dict[str, tuple[float, float]]
    network: dict[str, tuple[float, float]]
    host: tuple[float, float]
    processes: int
    nodes: int
    alone: float = 0.0
    buffers: dict[str, int] = field(default_factory=dict)


def transfer(kind: str, size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Callable[[], None], float]:
    """A call that makes every rank send about ``size`` bytes to others, and how many they are exactly.

    Bytes are counted as in cost/trace.py: (n - 1) / n of what is gathered, scattered or exchanged, and twice that of
    what is summed on all ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    part = max(1, size // ranks // 4)
    mine, whole = (torch.zeros(n, dtype=torch.float32, device=device) for n in (part, part * ranks))
    sent = 4.0 * part * (ranks - 1)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, mine, group=group), sent
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(mine, whole, group=group), sent
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group), 2 * sent
    if kind == "all_to_all":
        out = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(out, whole, group=group), sent
    outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    to, of = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))

    def hop() -> None:
        # The receive first, as in attention/ring.py: else gloo sends one direction at a time.
        ops = [dist.P2POp(dist.irecv, incoming, of, group), dist.P2POp(dist.isend, outgoing, to, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return hop, size


def seconds_together(
    call: Callable[[], None], everyone: dist.ProcessGroup | None, device: torch.device, window: float
) -> float:
    """Seconds of a call that ``everyone`` makes at the same time (None: all ranks): the slowest rank's best batch."""
    call()

    def batch(calls: int) -> float:
        settle(device)
        dist.barrier(group=everyone)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        settle(device)
        took = torch.tensor([(time.perf_counter() - start) / calls], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=everyone)
        return float(took)

    once = batch(1)
    calls = max(1, min(CALLS, int(window / 3 / once)))
    return min(once, *(batch(calls) for _ in range(3)))


def both_ends(
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device,
    plan: Effort,
    everyone: dist.ProcessGroup | None = None,
) -> tuple[float, float]:
    """(Seconds of a call beside its bytes, bytes a second.)

    Args:
        plan: its ``message_bytes`` are sent, or fewer where the link would take much longer than its ``window``.
        everyone: who calls this at the same time, each in a ``group`` of its own; None: all ranks.
    """

    def timed(size: int, window: float) -> tuple[float, float]:
        call, sent = transfer(kind, size, group, device)
        return seconds_together(call, everyone, device, window), sent

    small, few = timed(SMALL, plan.window / 3)
    size = min(FIRST, plan.message_bytes)
    took, sent = timed(size, 0.0)
    larger = min(plan.message_bytes, int(size * max(LONGEST, plan.window) / took))
    if larger > size:
        took, sent = timed(larger, plan.window)
    if sent <= few:  # a large message that is none
        return small, sent / took
    bandwidth = (sent - few) / max(took - small, 0.1 * took)
    return max(0.0, small - few / bandwidth), bandwidth


def figures(device: torch.device, per_node: int, plan: Effort, tell: Callable[[str], None]) -> Figures:
    """All figures of the processes of this job, which all call this; ranks of a node are numbered in a row."""
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*")  # names before torch 2.13
    ranks, rank = dist.get_world_size(), dist.get_rank()
    nodes = ranks // per_node
    group, _ = dist.new_subgroups(per_node)
    found, network, alone, buffers = {}, {}, 0.0, {}
    if per_node > 1:
        if device.type == "cuda":
            buffers["nccl"] = communicator(group, device)
        for kind in KINDS:
            tell(f"{kind} among {per_node} processes")
            found[kind] = both_ends(kind, group, device, plan)
    if nodes > 1:
        for first in range(per_node):
            members = list(range(first, ranks, per_node))
            across = dist.new_group(members)
            if rank in members:
                mine = across
        if device.type == "cuda":
            buffers["nccl_network"] = communicator(mine, device)
        for kind in KINDS:
            tell(f"{kind} among {nodes} nodes")
            network[kind] = both_ends(kind, mine, device, plan)
    if nodes > 1 and per_node > 1:
        tell("p2p by one process of each node")
        dist.barrier()
        if rank % per_node == 0:
            alone = both_ends("p2p", mine, device, plan, mine)[1]
        dist.barrier()
    tell("copies to the host, all at once")
    dist.barrier()
    copied = torch.tensor(host_copy(plan.copy_bytes, device, plan.window), dtype=torch.float64, device=device)
    bandwidth, latency = copied.tolist() if per_node == 1 else slowest(copied, group)
    return Figures(found, network, (bandwidth, latency), per_node, nodes, alone, buffers)


def slowest(copied: Tensor, group: dist.ProcessGroup) -> list[float]:
    copied[0] *= -1
    dist.all_reduce(copied, dist.ReduceOp.MAX, group=group)
    return [-copied[0].item(), copied[1].item()]


def work(rank: int, processes: int, device: str, plan: Effort, store: str, timeout: float, said: mp.Queue) -> None:
    """One of the processes that :func:`measure_in_processes` starts; rank 0 says how it goes."""
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=processes,
            timeout=timedelta(seconds=timeout),
        )
        tell = (lambda text: said.put(text)) if rank == 0 else (lambda text: None)
        result = figures(where, processes, plan, tell)
        if rank == 0:
            said.put(result)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        said.put(RuntimeError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
        os._exit(1)  # nobody waits for the others


def measure_in_processes(
    processes: int, device: str, plan: Effort, timeout: float, tell: Callable[[str], None]
) -> Figures:
    """
    Raises:
        Refusal: they did not come to an end, or one of them failed; says so and names the way out.
    """
    context = mp.get_context("spawn")
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, device, plan, os.path.join(folder, "store"), timeout, said)
        started = [context.Process(target=work, args=(rank, *arguments), daemon=True) for rank in range(processes)]
        for process in started:
            process.start()
        try:
            result = listen(started, said, timeout, tell)
            for process in started:
                process.join(5)
            return result
        finally:
            for process in started:
                process.kill()  # does nothing to those that have ended
                process.join()


def listen(started: list[BaseProcess], said: mp.Queue, timeout: float, tell: Callable[[str], None]) -> Figures:
    """What the processes say, until it is their figures."""
    end = time.monotonic() + timeout
    way_out = "give --processes 1 to leave the links out"
    while time.monotonic() < end:
        try:
            message = said.get(timeout=0.5)
        except queue.Empty:
            dead = [process.exitcode for process in started if process.exitcode]
            if dead:
                raise Refusal(f"--processes {len(started)}: one ended with code {dead[0]}; {way_out}") from None
            continue
        if isinstance(message, Figures):
            return message
        if isinstance(message, Exception):
            raise Refusal(f"--processes {len(started)}: {message}; {way_out}")
        tell(message)
    raise Refusal(f"--processes {len(started)}: not done after {timeout:.0f} s; give --timeout more, or {way_out}")
