# SPDX-License-Identifier: Apache-2.0
"""``--log-straggler``: which ranks are slow by themselves, and not because they wait for others.

All ranks of a job take the same time a step, as each waits for the slowest. What tells them apart is the time that a
rank does not wait. On a CPU a thread looks every 10 ms whether the main thread is in a message to other ranks: what is
left of a step is the rank's own. On a GPU messages wait in the device's own queue, where nobody sees them from outside;
there a small matrix product is timed in each step, by the device's events. Nothing is sent but one number a rank and
--log-interval.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from traceback import walk_stack

import torch
import torch.distributed as dist

from megatron.training.heartbeat import is_waiting
from megatron.training.setup import Runtime

OVER = 1.2  # times the median
EVERY = 0.01  # seconds between two looks
LEAST = 300  # looks that make a share: with fewer, chance would name ranks


class Looks:
    """Milliseconds of its own that each step takes this rank, by looks at its main thread."""

    what = "a step of its own work"

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._on, self._done = threading.Event(), threading.Event()
        self.start_again()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stragglers")
        self._thread.start()

    def start_again(self) -> None:
        self.seen = self.waited = self.steps = 0
        self.seconds = 0.0

    def begin(self) -> None:
        self._begin = time.perf_counter()
        self._on.set()

    def end(self) -> None:
        self._on.clear()
        self.seconds += time.perf_counter() - self._begin
        self.steps += 1

    def result(self) -> tuple[float, bool]:
        """Own milliseconds a step since the last start, and whether that is known well enough."""
        own = 1000 * self.seconds / max(self.steps, 1) * (1 - self.waited / max(self.seen, 1))
        return own, self.seen >= LEAST

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
            except Exception:  # its stack is read while it runs on: one look may find nonsense, and counts for nothing
                continue
            self.seen += 1
            self.waited += waits


class Products:
    """Milliseconds that a matrix product takes this rank's GPU, timed at the end of each step."""

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
    """Told when each step begins and ends."""

    def __init__(self, runtime: Runtime) -> None:
        self.device = runtime.device
        self.clock = Products(self.device) if runtime.platform.on_gpu else Looks()
        self.begin, self.end, self.stop = self.clock.begin, self.clock.end, self.clock.stop

    def tell(self) -> str:
        """A line that names slow ranks, or nothing. All ranks call it."""
        mine = torch.tensor(self.clock.result(), dtype=torch.float64, device=self.device)
        table = mine.new_empty(2 * dist.get_world_size())
        dist.all_gather_into_tensor(table, mine)
        times, known = table.view(-1, 2).t().tolist()
        if not all(known):
            return ""
        self.clock.start_again()
        slow = slow_ranks(times)
        if not slow:
            return ""
        hosts: list[str] = [""] * len(times)
        dist.all_gather_object(hosts, socket.gethostname())
        named = ", ".join(f"rank {rank} on {hosts[rank]} takes {times[rank]:.3g} ms" for rank in slow)
        return f"--log-straggler: {named} for {self.clock.what}; the median is {statistics.median(times):.3g} ms"


def slow_ranks(own: Sequence[float]) -> list[int]:
    """Those whose own time is more than ``OVER`` times the median."""
    usual = statistics.median(own)
    return [rank for rank, mine in enumerate(own) if mine > OVER * usual]
