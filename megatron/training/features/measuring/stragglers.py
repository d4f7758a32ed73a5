# SPDX-License-Identifier: Apache-2.0
"""``--log-straggler``: which links between nodes and which ranks are slow."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from traceback import walk_stack

import torch
import torch.distributed as dist

from megatron.platform.collectives import gathered, gathered_objects
from megatron.training.features.feature import Feature, Step, due
from megatron.training.features.heartbeat import is_waiting
from megatron.training.job import Job
from megatron.training.report.reporter import Reporter
from megatron.training.setup import Runtime


class LogStragglers(Feature):
    """Reports slow links and slow ranks. All ranks make it at the same time."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.reporter, self.log_interval = reporter, job.config.logging.log_interval
        self.ranks, self.links = Stragglers(job.runtime), SlowLinks(job.runtime.device)

    def before_step(self) -> None:
        self.ranks.begin()

    def after_step(self, step: Step) -> None:
        self.ranks.end()
        step.slow = self.links.is_slow(step.seconds)

    def after_log(self, step: Step) -> None:
        if (step.last or due(self.log_interval, step.iteration)) and (line := self.ranks.report()):
            self.reporter.say(f" WARNING: {line}")
        if line := self.links.report(bool(step.slow)):
            self.reporter.say(f" WARNING: {line}")

    def stop(self) -> None:
        self.ranks.stop()


# Links. A slow link makes the step of every rank equally slow, so the time of a rank's own work does not show it.
# A small message is therefore timed over each link between neighbouring nodes: once at the start, and again after a
# step that took much longer than recent ones. The ranks agree on that in the all-reduce that every step has anyway
# (features/stopping.py), so ordinary steps cost nothing.

SLOW_STEP = 1.5  # times the median of recent steps
SLOW_LINK = 2.0  # times the usual time of the link
NOISE = 1e-3  # a slow link takes at least this many seconds more than usual
RECENT, LEAST_STEPS = 20, 5  # steps for the median: at most, at least
PAUSE = 5  # steps between a measurement and the next
BYTES = 2**18  # of the message
REPEATS = 5  # the fastest one counts
NAMED = 4  # limit of the links that a line names

Edge = tuple[int, int]  # ranks that send and receive


class SlowLinks:
    """Measures the links between the nodes of a run when steps become slow.

    All ranks make it at the same time, because it gathers their hosts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Two nodes may have the same host name by mistake, so torchrun's number of the node counts too.
        this_node = socket.gethostname(), os.environ.get("GROUP_RANK", "")
        by_rank = gathered_objects(this_node)
        self.hosts = [host for host, _ in by_rank]
        nodes: dict[tuple[str, str], list[int]] = {}
        for rank, node in enumerate(by_rank):
            nodes.setdefault(node, []).append(rank)
        self.phases = edges_by_phase(list(nodes.values()))
        self.edges = [edge for phase in self.phases for edge in phase]
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.usual: list[float] = []
        self.pause = 0

    def is_slow(self, seconds: float) -> bool:
        """Whether a step took much longer than recent ones. The step then counts as a recent one."""
        known = len(self.recent) >= LEAST_STEPS
        slow = known and seconds > SLOW_STEP * statistics.median(self.recent)
        self.recent.append(seconds)
        return slow

    def report(self, slow: bool) -> str:
        """A line that names slow links, or nothing. All ranks call it after each step.

        Args:
            slow: whether :meth:`is_slow` was true on any rank; the same on all.
        """
        self.pause -= 1
        if not self.edges or len(self.recent) < LEAST_STEPS or (self.usual and (not slow or self.pause >= 0)):
            return ""
        times = self._measure()
        if self.usual:
            self.pause = PAUSE
        else:
            median = statistics.median_low(times)
            self.usual = [min(seconds, median) for seconds in times]
        return describe_slow(self.edges, times, self.usual, self.hosts)

    def _measure(self) -> list[float]:
        """Seconds of a message over each edge."""
        rank = dist.get_rank()
        data = torch.zeros(BYTES, dtype=torch.uint8, device=self.device)
        seconds = dict.fromkeys(self.edges, 0.0)
        for phase in self.phases:
            for edge in (edge for edge in phase if rank in edge):
                best = float("inf")
                for _ in range(1 + REPEATS):  # the first one connects
                    best = min(best, self._hop(edge, data))
                seconds[edge] = best if rank == edge[1] else 0.0
            dist.barrier()
        times = torch.tensor(list(seconds.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.tolist()

    def _hop(self, edge: Edge, data: torch.Tensor) -> float:
        """Seconds that a message takes: exact on the receiver, which first sends that it is ready."""
        sender, receiver = edge
        receives, ready = dist.get_rank() == receiver, data[:1].clone()
        self._do(dist.isend if receives else dist.irecv, ready, sender if receives else receiver)
        begin = time.perf_counter()
        self._do(dist.irecv if receives else dist.isend, data, sender if receives else receiver)
        return time.perf_counter() - begin

    def _do(self, operation: object, data: torch.Tensor, peer: int) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, data, peer)]):
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def edges_by_phase(nodes: Sequence[Sequence[int]]) -> list[list[Edge]]:
    """Edges from each node's ranks to those of the next node, and from the last node to the first.

    In one phase a node either sends or receives.

    Args:
        nodes: the ranks of each node.
    """
    count = len(nodes)
    if count == 1:
        return []
    phases: list[list[Edge]] = [[], [], []]
    for index, ranks in enumerate(nodes):
        last_of_odd = count % 2 == 1 and index == count - 1
        phases[2 if last_of_odd else index % 2] += zip(ranks, nodes[(index + 1) % count])
    return [phase for phase in phases if phase]


def describe_slow(edges: Sequence[Edge], times: Sequence[float], usual: Sequence[float], hosts: Sequence[str]) -> str:
    """The line about links that take longer than usual, the slowest first; empty if none does."""
    slow = [
        (took, edge, before)
        for edge, took, before in zip(edges, times, usual)
        if took > SLOW_LINK * before and took > before + NOISE
    ]
    if not slow:
        return ""
    slow.sort(reverse=True)
    words = [
        f"the link from rank {a} on {hosts[a]} to rank {b} on {hosts[b]} takes {1000 * took:.3g} ms for "
        f"{BYTES // 1024} KiB (usually {1000 * before:.3g} ms)"
        for took, (a, b), before in slow[:NAMED]
    ]
    more = f"; and {len(slow) - NAMED} more" if len(slow) > NAMED else ""
    return f"--log-straggler: {'; '.join(words)}{more}"


# Ranks. All ranks take the same time for a step, because each waits for the slowest, which itself waits least. On a
# CPU a thread samples the main thread's stack every 10 ms, which shows how much of a step it waits for messages; the
# rest is the rank's own work. On a GPU the messages wait in the device's queue, which the host cannot see; so a small
# matrix product is timed in each step by CUDA events. Ranks exchange one number each per --log-interval.

OVER = 1.2  # times the median
EVERY = 0.01  # seconds between two samples
LEAST = 300  # samples for a reliable share; with fewer, chance would name ranks


class StackSamples:
    """Measures this rank's own work in a step, in milliseconds, by samples of its main thread's stack."""

    what = "its own work in a step"

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._on, self._done = threading.Event(), threading.Event()
        self.start_again()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stragglers")
        self._thread.start()

    def start_again(self) -> None:
        self.samples = self.waiting = self.steps = 0
        self.seconds = 0.0

    def begin(self) -> None:
        self._begin = time.perf_counter()
        self._on.set()

    def end(self) -> None:
        self._on.clear()
        self.seconds += time.perf_counter() - self._begin
        self.steps += 1

    def result(self) -> tuple[float, bool]:
        """Milliseconds of own work per step since the last restart, and whether there were enough samples."""
        own = 1000 * self.seconds / max(self.steps, 1) * (1 - self.waiting / max(self.samples, 1))
        return own, self.samples >= LEAST

    def stop(self) -> None:
        self._done.set()
        self._on.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(EVERY):
            self._on.wait()
            try:
                frames = [frame for frame, _ in walk_stack(sys._current_frames()[self._main])]
                waits = is_waiting(frames)
            except Exception:  # the thread runs on while its stack is read, so a sample may fail
                continue
            self.samples += 1
            self.waiting += waits


class Products:
    """Measures the milliseconds of a matrix product on this rank's GPU at the end of each step."""

    what, size, least = "a matrix product", 4096, 5

    def __init__(self, device: torch.device) -> None:
        self._factor = torch.ones((self.size, self.size), dtype=torch.bfloat16, device=device)
        self._out = torch.empty_like(self._factor)
        self.start_again()

    def start_again(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        torch.matmul(self._factor, self._factor, out=self._out)
        pair[1].record()
        self._events.append(pair)

    def result(self) -> tuple[float, bool]:
        times = [begin.elapsed_time(end) for begin, end in self._events if end.query()]
        return (statistics.median(times) if times else 0.0), len(times) >= self.least

    def stop(self) -> None:
        self.start_again()


class Stragglers:
    """Finds slow ranks. Call `begin` and `end` around each step."""

    def __init__(self, runtime: Runtime) -> None:
        self.device = runtime.device
        self.clock = Products(self.device) if runtime.platform.on_gpu else StackSamples()
        self.begin, self.end, self.stop = self.clock.begin, self.clock.end, self.clock.stop

    def report(self) -> str:
        """A line that names slow ranks, or nothing. All ranks call it."""
        own = torch.tensor(self.clock.result(), dtype=torch.float64, device=self.device)
        times, known = gathered(own, None).view(-1, 2).t().tolist()
        if not all(known):
            return ""
        self.clock.start_again()
        slow = slow_ranks(times)
        if not slow:
            return ""
        hosts = gathered_objects(socket.gethostname())
        named = ", ".join(f"rank {rank} on {hosts[rank]} takes {times[rank]:.3g} ms" for rank in slow)
        return f"--log-straggler: {named} for {self.clock.what}; the median is {statistics.median(times):.3g} ms"


def slow_ranks(times: Sequence[float]) -> list[int]:
    """The ranks whose time is more than ``OVER`` times the median."""
    usual = statistics.median(times)
    return [rank for rank, seconds in enumerate(times) if seconds > OVER * usual]
