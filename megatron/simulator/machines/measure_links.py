# SPDX-License-Identifier: Apache-2.0
"""Measures collectives in a node and between nodes, and host copies that all processes make at the same time.

torchrun may start the processes; otherwise :func:`measure_in_processes` does.
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

from megatron.context_parallel.attention.ulysses import all_to_all
from megatron.platform.collectives import all_gather, reduce_scatter
from megatron.simulator.machines.machine import KINDS
from megatron.simulator.machines.measure_device import Effort, communicator, host_copy, settle
from megatron.system.processes import end_with_parent
from megatron.training.refusal import Refusal

SMALL = 4096  # bytes of a message that measures latency
FIRST = 2**18  # bytes of the message whose time decides the size of the large message
LONGEST = 0.5  # about how many seconds the large message takes over a slow link
CALLS = 200  # limit of the calls in a batch


@dataclass(frozen=True)
class Figures:
    """(Latency in seconds, bytes per second) by kind of transfer, and of host copies."""

    node: dict[str, tuple[float, float]]  # among the processes of a node; empty with one process
    # among one process of each node, while the other processes do the same; empty with one node
    network: dict[str, tuple[float, float]]
    host: tuple[float, float]  # bytes per second and latency in seconds, while all processes copy
    processes: int
    nodes: int
    # bytes per second between nodes, of p2p by one process of each node while all others idle; 0: not measured
    alone: float = 0.0
    # bytes that NCCL allocates for a communicator, in a node (`nccl`) and between nodes (`nccl_network`); empty without
    # GPUs
    buffers: dict[str, int] = field(default_factory=dict)


def transfer(kind: str, size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Callable[[], None], float]:
    """(a call in which every rank sends about ``size`` bytes, the exact number of bytes).

    Bytes are counted as in cost/trace.py: (n - 1) / n of a tensor that is gathered, scattered or exchanged, twice that
    for all_reduce.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    part = max(1, size // ranks // 4)
    mine, whole = (torch.zeros(n, dtype=torch.float32, device=device) for n in (part, part * ranks))
    sent = 4.0 * part * (ranks - 1)
    if kind == "all_gather":
        return lambda: all_gather(whole, mine, group=group), sent
    if kind == "reduce_scatter":
        return lambda: reduce_scatter(mine, whole, group=group), sent
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group), 2 * sent
    if kind == "all_to_all":
        out = torch.empty_like(whole)
        return lambda: all_to_all(out, whole, group), sent
    outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    to, of = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))

    def hop() -> None:
        # The receive comes first, as in attention/ring.py; otherwise gloo sends one direction at a time.
        ops = [dist.P2POp(dist.irecv, incoming, of, group), dist.P2POp(dist.isend, outgoing, to, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return hop, size


def seconds_together(
    call: Callable[[], None], everyone: dist.ProcessGroup | None, device: torch.device, window: float
) -> float:
    """Seconds of a call that ``everyone`` (None: all ranks) makes at the same time: the slowest rank's best batch."""
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


def latency_and_bandwidth(
    kind: str, group: dist.ProcessGroup, device: torch.device, plan: Effort, everyone: dist.ProcessGroup | None = None
) -> tuple[float, float]:
    """(latency in seconds, bytes per second), from a small and a large message.

    Args:
        plan: the large message has its ``message_bytes``, or fewer where they would take much longer than ``window``.
        everyone: the ranks that call this at the same time, each in its own ``group``; None: all ranks.
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
    return line(few, small, sent, took)


def line(few: float, small: float, sent: float, took: float) -> tuple[float, float]:
    """(latency, bytes per second) of a link that takes ``small`` seconds for ``few`` bytes and ``took`` for ``sent``.

    On a busy machine the large message may take more than its share of bytes; then the latency is 0.
    """
    if sent <= few:  # the large message is no larger than the small one
        return small, sent / took
    bandwidth = (sent - few) / max(took - small, 0.1 * took)
    return max(0.0, small - few / bandwidth), bandwidth


def figures(device: torch.device, per_node: int, plan: Effort, report: Callable[[str], None]) -> Figures:
    """All figures of this job. All its processes call this; the processes of a node have consecutive ranks.

    ``report`` is called with a line of text before each measurement.
    """
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*")  # names before torch 2.13
    ranks, rank = dist.get_world_size(), dist.get_rank()
    nodes = ranks // per_node
    group, _ = dist.new_subgroups(per_node)
    node, network, alone, buffers = {}, {}, 0.0, {}
    if per_node > 1:
        if device.type == "cuda":
            buffers["nccl"] = communicator(group, device)
        for kind in KINDS:
            report(f"{kind} among {per_node} processes")
            node[kind] = latency_and_bandwidth(kind, group, device, plan)
    if nodes > 1:
        for first in range(per_node):
            members = list(range(first, ranks, per_node))
            new_group = dist.new_group(members)
            if rank in members:
                across_nodes = new_group
        if device.type == "cuda":
            buffers["nccl_network"] = communicator(across_nodes, device)
        for kind in KINDS:
            report(f"{kind} among {nodes} nodes")
            network[kind] = latency_and_bandwidth(kind, across_nodes, device, plan)
    if nodes > 1 and per_node > 1:
        report("p2p by one process of each node")
        dist.barrier()
        if rank % per_node == 0:
            alone = latency_and_bandwidth("p2p", across_nodes, device, plan, across_nodes)[1]
        dist.barrier()
    report("copies to the host, all at once")
    dist.barrier()
    copied = torch.tensor(host_copy(plan.copy_bytes, device, plan.window), dtype=torch.float64, device=device)
    bandwidth, latency = copied.tolist() if per_node == 1 else slowest(copied, group)
    return Figures(node, network, (bandwidth, latency), per_node, nodes, alone, buffers)


def slowest(copied: Tensor, group: dist.ProcessGroup) -> list[float]:
    """[smallest bandwidth, largest latency] of the ranks' ``copied`` [2], which is changed in place."""
    copied[0] *= -1
    dist.all_reduce(copied, dist.ReduceOp.MAX, group=group)
    return [-copied[0].item(), copied[1].item()]


def work(rank: int, processes: int, device: str, plan: Effort, store: str, timeout: float, messages: mp.Queue) -> None:
    """One process of :func:`measure_in_processes`; rank 0 reports its progress and result through ``messages``."""
    end_with_parent()
    torch.set_num_threads(1)
    own_device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(own_device)
    try:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=processes,
            timeout=timedelta(seconds=timeout),
        )
        report = (lambda text: messages.put(text)) if rank == 0 else (lambda text: None)
        result = figures(own_device, processes, plan, report)
        if rank == 0:
            messages.put(result)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        messages.put(RuntimeError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
        os._exit(1)  # without waiting for the other ranks


def measure_in_processes(
    processes: int, device: str, plan: Effort, timeout: float, report: Callable[[str], None]
) -> Figures:
    """Start ``processes`` processes on this machine and return their figures.

    Raises:
        Refusal: the processes did not finish in ``timeout`` seconds, or one of them failed.
    """
    context = mp.get_context("spawn")
    messages = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, device, plan, os.path.join(folder, "store"), timeout, messages)
        started = [context.Process(target=work, args=(rank, *arguments), daemon=True) for rank in range(processes)]
        for process in started:
            process.start()
        try:
            result = listen(started, messages, timeout, report)
            for process in started:
                process.join(5)
            return result
        finally:
            for process in started:
                process.kill()  # does nothing to those that have ended
                process.join()


def listen(started: list[BaseProcess], messages: mp.Queue, timeout: float, report: Callable[[str], None]) -> Figures:
    """Report the processes' messages until they send their figures, and return these."""
    end = time.monotonic() + timeout
    way_out = "give --processes 1 to leave the links out"
    while time.monotonic() < end:
        try:
            message = messages.get(timeout=0.5)
        except queue.Empty:
            dead = [process.exitcode for process in started if process.exitcode]
            if dead:
                raise Refusal(f"--processes {len(started)}: one ended with code {dead[0]}; {way_out}") from None
            continue
        if isinstance(message, Figures):
            return message
        if isinstance(message, Exception):
            raise Refusal(f"--processes {len(started)}: {message}; {way_out}")
        report(message)
    raise Refusal(f"--processes {len(started)}: not done after {timeout:.0f} s; give --timeout more, or {way_out}")
