# SPDX-License-Identifier: Apache-2.0
"""Finds the rank that hangs, died or fell behind, and what the others wait for.

A collective that times out only says which rank *waited*. Therefore a thread of every rank writes a beat to the
rendezvous store every few seconds: the iteration, and where the main thread is. It reads this from the main thread's
stack, so that training does no work for it. A reader compares the beats at two times: a rank whose count has not
changed is stopped, dead or cut off.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron.context_parallel.layout.grid import Grid
from megatron.system.processes import Process, kill, this_process
from megatron.training.refusal import one_line

COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
PACKAGE = str(Path(__file__).resolve().parents[2])  # the folder megatron/
COMMUNICATION_ERROR = re.compile(r"gloo|nccl|timed? ?out|by peer|broken pipe|connection", re.IGNORECASE)
KEY = "heartbeat"
DEEP = 8  # a stack that waits has torch.distributed within this many innermost frames, below core's wrappers


@dataclass(frozen=True)
class Beat:
    """What one rank writes to the store."""

    process: Process
    count: int  # increases as long as the process runs
    iteration: int  # the last finished one
    place: str  # where its main thread is
    waits: bool  # whether the main thread waits there for other ranks
    since: float  # seconds that the main thread has been there
    failed: str = ""  # the error that ended the rank; empty if there is none


class Heartbeat:
    """Writes this rank's beats and reads those of the others.

    Args:
        grid: gives names to the process groups.
        timeout: seconds that a collective may take.
        store: a client that no other thread uses.
        ranks: the number of ranks.
        every: seconds between two beats.
    """

    def __init__(
        self, grid: Grid, timeout: float, store: dist.Store, rank: int, ranks: int, every: float | None = None
    ) -> None:
        self.store, self.rank, self.ranks, self.timeout = store, rank, ranks, timeout
        # A store serves about a thousand beats per second.
        self.every = max(2.0, ranks / 500) if every is None else every
        self.axes = {id(getattr(grid, name).group): label for name, label in AXES.items() if getattr(grid, name).group}
        self.iteration: Callable[[], int] = lambda: 0  # returns the last finished one
        self._main = threading.main_thread().ident
        self._count, self._at, self._since, self._reported = 0, None, time.monotonic(), False
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def start(self) -> Heartbeat:
        self._beat()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Write no more beats, because the run is over."""
        self._done.set()
        self._thread.join(2 * self.every)

    def failed(self, error: BaseException) -> list[str] | None:
        """This rank ends with ``error``: write that to the store; returns lines to print instead of its traceback.

        None if the cause is on this rank. Otherwise a message failed because of another rank, and the first rank that
        notices this names it. Ranks of this machine that do not answer are killed, so that no launcher waits.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when another rank has ended
        if self._ending():
            return []
        line = one_line(error, 200)
        own = not COMMUNICATION_ERROR.search(str(error))
        self._done.set()
        try:
            at = [frame for frame, _ in walk_tb(error.__traceback__)][::-1]
            self._beat(at, f"{type(error).__name__}: {line}" if own else "")
            if own:
                return None
            lines = self._report() or [f"error on rank {self.rank}: {line}"]
            with self._lock:
                self.store.wait([f"{KEY}/silent"], timedelta(seconds=5 * self.every))
                silent = [Process(**fields) for fields in json.loads(self.store.get(f"{KEY}/silent"))]
        except RuntimeError as gone:
            return [f"error: the rendezvous store is not reachable either ({gone}): its host, or rank 0, is dead"]
        for process in silent:
            kill(process)  # does nothing to a process of another machine or container
        return lines

    def end(self, line: str) -> None:
        """End the job on all ranks; the first rank that calls this prints ``line``. Returns when all others know.

        A rank that waits in a collective receives no message. Its thread sees in the store that the job ends, and
        ends the process with exit code 1, without a line.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when another rank has ended
        self._done.set()
        with self._lock, suppress(RuntimeError):  # without the store, other ranks have ended already
            if self.store.add(f"{KEY}/enders", 1) > 1:
                line = ""
        if line:
            print(f"{line} (rank {self.rank} on {this_process().host})", file=sys.stderr, flush=True)
        with suppress(RuntimeError):
            with self._lock:
                self.store.set(f"{KEY}/ending", "yes")
            self._leave()

    def _ending(self) -> bool:
        """Whether a rank has called `end`."""
        with self._lock, suppress(RuntimeError):
            return self.store.check([f"{KEY}/ending"])
        return False

    def _leave(self) -> None:
        """Wait until every rank knows that the job ends, so that none of them fails on a lost connection or store."""
        with self._lock:
            leaving = self.store.add(f"{KEY}/left", 1)
        limit = time.monotonic() + 4 * self.every
        while leaving < self.ranks and time.monotonic() < limit:
            time.sleep(self.every / 5)
            with self._lock:
                leaving = self.store.add(f"{KEY}/left", 0)

    def table(self) -> dict[int, Beat | None]:
        """The last beat of each rank; None for a rank that never wrote one."""
        keys = [f"{KEY}/{rank}" for rank in range(self.ranks)]
        with self._lock:
            return {
                rank: _beat_of(json.loads(self.store.get(key))) if self.store.check([key]) else None
                for rank, key in enumerate(keys)
            }

    def _run(self) -> None:
        while not self._done.wait(self.every):
            try:
                beat = self._beat()
                if self._ending():
                    with suppress(RuntimeError):
                        self._leave()
                    os._exit(1)
                remaining = self.timeout - beat.since  # NCCL ends the process at the timeout, too late for a report
                if beat.waits and remaining < min(self.timeout / 4, 20 + 3 * self.every) and (lines := self._report()):
                    print("\n".join([f"error: a message times out in {remaining:.0f} s", *lines]), file=sys.stderr)
            except RuntimeError:  # without the store the run has ended
                return

    def _beat(self, frames: Sequence[FrameType] | None = None, failed: str = "") -> Beat:
        """Write a beat about the main thread: where it is, or the ``frames`` in which it failed."""
        if frames is None:
            frames = [frame for frame, _ in walk_stack(sys._current_frames().get(self._main))]
        try:
            place, waits = location_of(frames, self.axes)
        except Exception:  # the thread runs on while its stack is read, so reading may fail
            place, waits = "an unknown place (its stack changed while it was read)", False
        iteration = self.iteration()
        if (at := (place, iteration)) != self._at:
            self._at, self._since = at, time.monotonic()
        self._count += 1
        since = round(time.monotonic() - self._since, 1)
        beat = Beat(this_process(), self._count, iteration, place, waits, since, failed)
        with self._lock:
            self.store.set(f"{KEY}/{self.rank}", json.dumps(asdict(beat)))
        return beat

    def _report(self) -> list[str]:
        """The lines about all ranks, or nothing if some rank has reported already."""
        if self._reported:
            return []
        self._reported = True
        with self._lock:
            first = self.store.add(f"{KEY}/reported", 1) == 1
        if not first:
            return []
        before = self.table()
        time.sleep(2.5 * self.every)
        after = self.table()
        silent = [after[rank] for rank in silent_ranks(before, after, self.rank)]
        with self._lock:
            self.store.set(f"{KEY}/silent", json.dumps([asdict(beat.process) for beat in silent]))
        return verdict(before, after, self.rank)


AXES = {"tensor": "TP", "ulysses": "Ulysses", "ring": "Ring", "context": "CP", "data": "DP", "pipeline": "PP"}


def heartbeat(grid: Grid, timeout_minutes: float) -> Heartbeat | None:
    """A started heartbeat; None for a run on one process, or without a rendezvous address."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or "MASTER_PORT" not in os.environ:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A second client, because that of torch.distributed is locked while the main thread waits in it.
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
    start = [uuid.uuid4().hex]  # a restarted job may use the same store, which still holds older beats
    dist.broadcast_object_list(start)
    store = dist.PrefixStore(start[0], store)
    return Heartbeat(grid, 60 * timeout_minutes, store, dist.get_rank(), dist.get_world_size()).start()


def _beat_of(fields: dict[str, Any]) -> Beat:
    return Beat(**{**fields, "process": Process(**fields["process"])})


def silent_ranks(before: Mapping[int, Beat | None], after: Mapping[int, Beat | None], reporter: int) -> list[int]:
    """Ranks whose beats stopped between two tables, and that reported no error."""
    return [
        rank for rank, beat in after.items() if rank != reporter and beat and before[rank] == beat and not beat.failed
    ]


def verdict(before: Mapping[int, Beat | None], after: Mapping[int, Beat | None], reporter: int) -> list[str]:
    """Lines that name the ranks to blame, then what the others wait for, from two tables."""
    blamed, alive, waiting, silent = [], [], {}, silent_ranks(before, after, reporter)
    for rank, beat in after.items():
        if beat is None:
            blamed.append(f"rank {rank} never reported: it ended, or hangs, before the first step")
            continue
        who = f"rank {rank} on {beat.process.host}"
        seen = f"iteration {beat.iteration + 1}, {beat.place}"
        if beat.failed:
            blamed.append(f"{who} failed in {seen}: {beat.failed}")
        elif rank in silent:
            blamed.append(f"{who} does not answer: it is stopped, dead or cut off; last seen in {seen}")
        elif beat.waits:
            waiting.setdefault(seen, []).append(rank)
        else:
            alive.append(f"{who} is alive and does not wait: {seen}, for {beat.since:.0f} s")
    lines = blamed + alive
    if not lines and len(waiting) > 1:
        lines.append("all ranks answer and wait, but in different places: they wait for each other")
    lines += [f"waiting in {seen}: {_ranks(ranks)}" for seen, ranks in waiting.items()]
    return [f"error: {line}" if number == 0 else f"       {line}" for number, line in enumerate(lines)]


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-5, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def location_of(frames: Sequence[FrameType], axes: Mapping[int, str]) -> tuple[str, bool]:
    """Where a thread is, and whether it waits for other ranks there.

    Args:
        frames: its stack, innermost first.
        axes: names of process groups, by their ids.
    """
    collective, ours, waits = "", None, False
    for frame in frames:
        name = frame.f_code.co_filename
        if ours is None and name.endswith(COLLECTIVES):
            collective, waits = _collective(frame, axes) or collective, True
        elif name.startswith(PACKAGE):
            ours = ours or frame
    if ours is None:
        return collective or "outside the program's code", waits
    place = f"{os.path.relpath(ours.f_code.co_filename, PACKAGE)}:{ours.f_lineno} ({ours.f_code.co_name})"
    if not waits and _waits(frames[0]):
        collective, waits = "the wait for a message", True
    return f"{collective} at {place}" if collective else place, waits


def is_waiting(frames: Sequence[FrameType]) -> bool:
    """Whether a thread with this stack, innermost first, waits for other ranks; faster than :func:`location_of`."""
    return any(frame.f_code.co_filename.endswith(COLLECTIVES) for frame in frames[:DEEP]) or _waits(frames[0])


def _collective(frame: FrameType, axes: Mapping[int, str]) -> str | None:
    """What a frame of torch.distributed does, such as ``all_reduce over TP``; None if the frame has no group."""
    seen: Any = frame.f_locals
    if "group" not in seen:
        return None
    group = seen["group"]
    if group is None or group is dist.group.WORLD:
        return f"{frame.f_code.co_name} over all ranks"
    over = axes.get(id(group)) or f"a group of {group.size()} ranks"
    return f"{frame.f_code.co_name} over {over}"


def _waits(frame: FrameType) -> bool:
    """Whether the frame's present line calls ``wait``. The wait for a message is in C++ and has no frame."""
    return ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)  # f_lineno may be None
