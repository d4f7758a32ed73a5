# SPDX-License-Identifier: Apache-2.0
"""Runs a function on the ranks of a process group of forked processes, which may hang or crash without harm."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GRACE, NOT_INSTALLED = 2.0, "not installed"  # seconds; an error's text


class RankFailed(RuntimeError):
    """A rank raised an error, ended or did not end; the text is its error."""


def on_ranks(world: int, work: Callable, *args: Any, patience: float = 300) -> Any:
    """The result of ``work(*args)`` on rank 0 of ``world`` forked processes or, if any fails, a line with its error."""
    try:
        return _on_each(world, work, args, patience)[0]
    except RankFailed as failed:
        return refusal_line(failed)


def on_each_rank(work: Callable, ranks: int, *args: Any, patience: float = 300) -> list[Any]:
    """The results by rank, which may hold tensors; as ``run`` of ``cp.certify``.

    Raises:
        RankFailed: with the error of the first rank that failed.
    """
    packed = _on_each(ranks, _packed, (work, *args), patience)
    return [torch.load(io.BytesIO(one), weights_only=False) for one in packed]  # written by our own forks


def _packed(work: Callable, *args: Any) -> bytes:
    file = io.BytesIO()
    torch.save(work(*args), file)
    return file.getvalue()


def _on_each(world: int, work: Callable, args: tuple, patience: float) -> list[Any]:
    """The results by rank. Each call starts new processes, because ``work`` may leave state behind, hang or crash."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [fork.Pipe(duplex=False) for _ in range(world)]
        processes = [
            fork.Process(target=_rank, args=(rank, world, folder, end[1], work, args)) for rank, end in enumerate(ends)
        ]
        for process, (_, sender) in zip(processes, ends):
            process.start()
            sender.close()
        waiting, answers, until = [receiver for receiver, _ in ends], {}, time.monotonic() + patience
        while waiting and (ready := wait(waiting, max(0.0, until - time.monotonic()))):
            for receiver in ready:
                waiting.remove(receiver)
                try:
                    answers[receiver] = receiver.recv()
                except EOFError:
                    answers[receiver] = None, "its process ended"
                if answers[receiver][1]:  # the others wait for this rank, and may add what they know
                    until = min(until, time.monotonic() + GRACE)
        for process in processes:
            process.kill()
            process.join()
    errors = [error for _, error in answers.values() if error]
    if errors or waiting:
        late = f"not finished within {patience:g} s"
        raise RankFailed(next((line for line in errors if "Connection" not in line), (*errors, late)[0]))
    return [answers[receiver][0] for receiver, _ in ends]


def _rank(rank: int, world: int, folder: str, sender: Connection, work: Callable, args: tuple) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # discard output; errors are reported in one line
        os.dup2(quiet, stream)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    os.environ.update({"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})  # not used
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        answer = work(*args), None
    except Exception as error:  # noqa: BLE001 - any exception is reported
        answer = None, described(error)
    sender.send(answer)
    sender.close()
    time.sleep(1.0)  # other ranks may be in a collective and should fail with their own error first


def described(error: BaseException) -> str:
    """The type of an error and its text."""
    if isinstance(error, ModuleNotFoundError):
        return f"{NOT_INSTALLED}: {error}"
    return str(error).strip() or type(error).__name__


def refusal_line(error: BaseException) -> str:
    """The first line of an error, shortened."""
    line = str(error).splitlines()[0]
    return NOT_INSTALLED if line.startswith(NOT_INSTALLED) else f"refused: {line[:110]}"
