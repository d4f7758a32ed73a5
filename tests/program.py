# SPDX-License-Identifier: Apache-2.0
"""Runs programs of the repository with a command line, in forks of a process that has imported everything."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.distributed.pool import fork_server
from tests.distributed.worker import keep_coverage
from tests.patience import patience

# In which a program finds the repository, also from a script elsewhere.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
GRACE = 10.0  # seconds for the other ranks to end after one has failed


def run_forked(
    script: Path, argv: Sequence[str], environment: Mapping[str, str], timeout: float = 100
) -> subprocess.CompletedProcess:
    """Run ``python script *argv`` in a fork, which saves the time of its imports.

    ``timeout``: seconds on a quiet machine; it is longer on a busy one.
    """
    return run_each(script, argv, [environment], timeout)[0]


def run_ranks(
    script: Path, argv: Sequence[str], environment: Mapping[str, str], ranks: int, timeout: float = 100
) -> list[subprocess.CompletedProcess]:
    """Run ``torchrun --nproc-per-node ranks script *argv``; returns results by rank. If one fails, all end.

    As under torchrun, the ranks use a store; it is in this process, at a free port.
    """
    with meeting(environment, ranks) as environments:
        return run_each(script, argv, environments, timeout)


@contextmanager
def meeting(environment: Mapping[str, str], ranks: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank; their store lives as long as the context."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if sys.platform == "linux":
        common.setdefault("GLOO_SOCKET_IFNAME", "lo")
    yield [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    del store


def start_forked(script: Path, argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> Any:
    """Start ``python script *argv`` in a fork; returns the process. Its output goes to the files ``out`` and ``err`` in
    ``folder``, which is created."""
    folder.mkdir(parents=True)
    process = fork_server().Process(target=_main, args=([str(script), *argv], dict(environment), str(folder)))
    process.start()
    return process


def run_each(
    script: Path, argv: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float = 100
) -> list[subprocess.CompletedProcess]:
    """Run the script once in each environment; if one fails, the others are ended after a while."""
    command = [str(script), *argv]
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(number)) for number in range(len(environments))]
        processes = [start_forked(script, argv, one, mine) for one, mine in zip(environments, folders)]
        deadline = time.monotonic() + patience(timeout)
        running, late = list(processes), False
        while running:
            late = not connection.wait([one.sentinel for one in running], max(0.0, deadline - time.monotonic()))
            if late:
                break
            running = [one for one in running if one.is_alive()]
            if any(one.exitcode for one in processes):
                deadline = min(deadline, time.monotonic() + patience(GRACE))
        for process in processes:
            process.kill()
            process.join()
        output = [[(mine / name).read_text() for name in ("out", "err")] for mine in folders]
        if late and not any(one.exitcode for one in processes if one not in running):
            raise subprocess.TimeoutExpired(command, patience(timeout), *map("\n".join, zip(*output)))
    return [subprocess.CompletedProcess(command, one.exitcode, *texts) for one, texts in zip(processes, output)]


def _main(command: list[str], environment: dict[str, str], folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the shell started the tests in the background
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(command[0]))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        keep_coverage()
