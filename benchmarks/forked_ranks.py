# SPDX-License-Identifier: Apache-2.0
"""Runs a function on the ranks of a process group of forked processes, which may hang or crash without harm."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(world: int, work: Callable, *args: Any, patience: float = 300) -> Any:
    """The result of ``work(*args)`` on rank 0 of ``world`` forked processes or, if any fails, a line with its error.

    Each call starts new processes, because ``work`` may leave state behind, hang or crash. They are killed after
    ``patience`` seconds.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [fork.Pipe(duplex=False) for _ in range(world)]
        processes = [
            fork.Process(target=_rank, args=(rank, world, folder, end[1], work, args)) for rank, end in enumerate(ends)
        ]
        for process, (_, sender) in zip(processes, ends):
            process.start()
            sender.close()
        answers, until = [], time.monotonic() + patience
        for receiver, _ in ends:
            try:
                arrived = receiver.poll(max(0.0, until - time.monotonic()))
                answers.append(receiver.recv() if arrived else (None, f"not finished within {patience:g} s"))
            except EOFError:
                answers.append((None, "its process ended"))
        for process in processes:
            process.kill()
            process.join()
    lines = [line for _, line in answers if line]
    return next((line for line in lines if "Connection" not in line), lines[0]) if lines else answers[0][0]


def _rank(rank: int, world: int, folder: str, sender: Connection, work: Callable, args: tuple) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # discard output; errors are reported in one line
        os.dup2(quiet, stream)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        answer = work(*args), None
    except Exception as error:  # noqa: BLE001 - any exception is reported
        answer = None, refusal_line(error)
    sender.send(answer)
    sender.close()
    time.sleep(1.0)  # other ranks may be in a collective and should fail with their own error first


def refusal_line(error: BaseException) -> str:
    """The first line of an error, shortened."""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    return f"refused: {(str(error).strip().splitlines() or [type(error).__name__])[0][:110]}"
