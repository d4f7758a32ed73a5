# SPDX-License-Identifier: Apache-2.0
"""One persistent pool of gloo workers that serves every distributed test of a pytest run.

Importing torch and megatron-core takes seconds. Here one fork server imports them once, up to eight workers are forked
from it when they are first needed, and each job of world size n runs on workers 0..n-1 in a fresh process group::

    def mean_over_ranks(x):                                    # a function of the test module, run on every rank
        dist.all_reduce(x)
        return x / dist.get_world_size()

    def test_mean(pool):
        results = pool.run(mean_over_ranks, 4, torch.ones(3))   # the return values by rank

A rank that raises, dies or hangs fails the test with that rank's traceback, and the workers of the job are replaced:
the next test gets a clean pool.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from tests.distributed import worker
from tests.patience import patience

ROOT = str(Path(__file__).resolve().parents[2])
PRELOAD = ["tests.distributed.preload"]  # what the fork server imports for its workers
GRACE = 2.0  # seconds the other ranks have to report after a first failure
START_TIMEOUT = 60.0  # first import of torch and megatron-core


class RankError(RuntimeError):
    """A job of the pool failed; the message holds the failing rank's traceback and output."""


@dataclass
class Worker:
    """The parent's view of a worker process."""

    process: multiprocessing.process.BaseProcess
    conn: connection.Connection
    life: connection.Connection  # closes when this process ends, which ends the worker
    log: Path


class Pool:
    """Workers for jobs of up to ``max_workers`` ranks. One job runs at a time."""

    def __init__(self, max_workers: int = 8) -> None:
        import torch.distributed as dist

        self.max_workers = max_workers
        self._workers: dict[int, Worker] = {}
        self._jobs = 0
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        # One store for all jobs: only one port is chosen, and the store survives a dead rank.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=patience(60))
        )
        atexit.register(self.close)  # runs before multiprocessing's handler, which would wait for the workers

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks; the return values by rank, or RankError.

        ``timeout``: seconds on a quiet machine; it is longer on a busy one.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= self.max_workers:
            raise ValueError(f"world size {world_size} does not fit a pool of {self.max_workers}")
        payload = pickle.dumps((fn, args, kwargs))
        timeout = patience(timeout)
        try:
            self._start(world_size)
            self._jobs += 1
            # gloo's timeout is longer than ours, so that a hang is reported with the stacks of all ranks
            request = pickle.dumps((self._jobs, world_size, timeout + 30, payload))
            answers, failures = self._serve(world_size, request, timeout)
        except BaseException:  # Ctrl-C or a timeout of pytest: an unfinished job must not disturb the next one
            self._kill(range(self.max_workers))
            raise
        if failures:
            message = self._report(fn, world_size, failures)
            self._kill(range(world_size))
            raise RankError(message)
        return [answers[rank] for rank in range(world_size)]

    def close(self) -> None:
        atexit.unregister(self.close)
        self._kill(range(self.max_workers))
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, world_size: int) -> None:
        """Start workers 0..world_size-1 if they do not run."""
        missing = [n for n in range(world_size) if n not in self._workers or not self._workers[n].process.is_alive()]
        if not missing:
            return
        self._kill(missing)
        context = fork_server()
        for n in missing:
            ours, theirs = context.Pipe()
            life, their_life = context.Pipe()
            log = self._folder / f"worker{n}.log"
            log.unlink(missing_ok=True)
            process = context.Process(
                target=worker.serve, args=(n, theirs, their_life, ROOT, str(log), self._store.port), daemon=False
            )
            process.start()
            theirs.close()
            their_life.close()
            self._workers[n] = Worker(process, ours, life, log)
        deadline = time.monotonic() + patience(START_TIMEOUT)
        for n in missing:
            w = self._workers[n]
            connection.wait([w.conn, w.process.sentinel], max(0.0, deadline - time.monotonic()))
            try:
                if not w.conn.poll(0) or pickle.loads(w.conn.recv_bytes()) != ("ready",):
                    raise EOFError
            except (EOFError, OSError):
                text = _tail(w.log)
                self._kill(range(self.max_workers))
                raise RankError(f"worker {n} of the test pool did not start:\n{text}") from None

    def _serve(
        self, world_size: int, request: bytes, timeout: float
    ) -> tuple[dict[int, Any], list[tuple[bool, float, int, str]]]:
        """Send a job and collect what comes back: values by rank, and failures as (secondary, time, rank, text)."""
        answers: dict[int, Any] = {}
        failures: list[tuple[bool, float, int, str]] = []
        deadline = time.monotonic() + timeout
        waiting = set(range(world_size))
        for rank in range(world_size):
            try:
                self._workers[rank].conn.send_bytes(request)
            except OSError:
                pass  # it has just died: its sentinel is handled below
        while waiting:
            sources = {self._workers[rank].conn: rank for rank in waiting}
            sources |= {self._workers[rank].process.sentinel: rank for rank in waiting}
            ready = connection.wait(list(sources), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted({sources[r] for r in ready}):
                waiting.discard(rank)
                try:
                    kind, *rest = pickle.loads(self._workers[rank].conn.recv_bytes())
                except (EOFError, OSError):
                    failures.append((False, time.monotonic(), rank, _end_of(self._workers[rank].process)))
                    continue
                if kind == "ok":
                    answers[rank] = rest[0]
                else:
                    failures.append((rest[0], rest[1], rank, rest[2]))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if waiting and not failures:
            stacks = self._dump_stacks(sorted(waiting))
            text = f"no answer after {timeout:.0f} s from ranks {sorted(waiting)}\n{stacks}"
            failures.append((False, time.monotonic(), min(waiting), text))
        return answers, failures

    def _report(self, fn: Callable[..., Any], world_size: int, failures: list[tuple[bool, float, int, str]]) -> str:
        """The message of a failed job: the root cause first, in full, then a line for each other rank."""
        failures.sort()
        _, _, rank, text = failures[0]
        lines = [f"{fn.__module__}.{fn.__qualname__} failed on rank {rank} of {world_size}:", "", text.rstrip()]
        output = _tail(self._workers[rank].log)
        if output and "no answer" not in text:
            lines += ["", f"output of rank {rank}:", output]
        for _, _, other, other_text in failures[1:]:
            lines += ["", f"rank {other} then: {other_text.rstrip().splitlines()[-1]}"]
        return "\n".join(lines)

    def _dump_stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(
            f"--- rank {rank}, output and Python stacks:\n{_tail(self._workers[rank].log)}" for rank in ranks
        )

    def _kill(self, numbers: Any) -> None:
        gone = [self._workers.pop(n) for n in list(numbers) if n in self._workers]
        for w in gone:
            try:
                os.killpg(w.process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet the leader of its group, or gone
                w.process.kill()
        for w in gone:
            w.process.join(10)
            w.conn.close()
            w.life.close()


def fork_server() -> multiprocessing.context.BaseContext:
    """The fork server, whose processes have imported everything; it starts with the first call.

    No GPU is visible to it: a CUDA context would not survive the fork, and gloo needs none.
    With FORK_THIS_PROCESS set, this process takes its place (tests/mutants).
    """
    if "FORK_THIS_PROCESS" in os.environ:
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    settings = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "TORCH_GLOO_LAZY_INIT": "1",  # connect on first use: megatron-core's dozens of groups in a third of the time
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _end_of(process: multiprocessing.process.BaseProcess) -> str:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process exited with code {code}"


def _tail(log: Path, size: int = 6000) -> str:
    try:
        return log.read_text(errors="replace")[-size:].rstrip()
    except OSError:
        return ""
