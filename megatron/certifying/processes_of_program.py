# SPDX-License-Identifier: Apache-2.0
"""Processes that run a program on several grids, one grid after another."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 - imported later, it would keep the first job's group as a default
from torch import multiprocessing

from megatron.certifying.of_torch.choices import Choice, Flip
from megatron.certifying.recording import Recording, Reference
from megatron.system.user_function import user_function

Run = Callable[..., list]  # (function, number of ranks, *arguments) -> its results by rank


class ProgramFailed(RuntimeError):
    """The program raised an error on a rank, or did not end."""


class Processes:
    """Processes that form gloo groups and keep their imports between calls. They end when the context ends.

    A function that they run must be importable: defined at the top of a module or of the program that is started. It
    returns tensors, numbers, lists and dicts of them, or a Recording or a Reference.
    """

    def __init__(self, timeout: float = 600) -> None:
        self._timeout, self._jobs = timeout, 0
        self._folder = tempfile.TemporaryDirectory(prefix="certify-")
        self._running: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` on each rank of a new process group; returns the results by rank.

        Raises:
            ProgramFailed: with the traceback of the first rank that failed.
        """
        context = multiprocessing.get_context("spawn")
        while len(self._running) < ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._running.append((process, ours))
        self._jobs += 1
        store = str(Path(self._folder.name, str(self._jobs)))
        workers = self._running[:ranks]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((rank, ranks, store, self._timeout, function, arguments))
        results: dict[int, Any] = {}
        while len(results) < ranks:
            ready = wait([pipe for rank, (_, pipe) in enumerate(workers) if rank not in results], self._timeout)
            if not ready:
                late = sorted(set(range(ranks)) - set(results))
                self._fail(f"no answer after {self._timeout:.0f} s from ranks {late}")
            for rank in [rank for rank, (_, pipe) in enumerate(workers) if pipe in ready]:
                try:
                    good, path = workers[rank][1].recv()
                except (EOFError, ConnectionResetError):
                    self._fail(f"rank {rank} of {ranks} ended {_how(workers[rank][0])}")
                if not good:
                    before = "\n" if "\n" in path else " "  # a traceback begins its own line
                    self._fail(f"on rank {rank} of {ranks}:{before}{path}")
                with torch.serialization.safe_globals([Recording, Reference, Choice, Flip]):
                    results[rank] = torch.load(path, weights_only=True)
                os.unlink(path)
        return [results[rank] for rank in range(ranks)]

    def _fail(self, text: str) -> None:
        self.close()
        raise ProgramFailed(f"the program failed {text}" if text.startswith("on") else text)

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._running:
            pipe.close()
            process.kill()
        for process, _ in self._running:
            process.join()
        self._running = []


def _how(process: Any) -> str:
    """How a process ended that raised no error."""
    process.join(10)
    if process.exitcode == -signal.SIGKILL:
        return "by SIGKILL: the system may have had too little memory; use smaller shapes or fewer ranks"
    if process.exitcode is not None and process.exitcode < 0:
        return f"by {signal.Signals(-process.exitcode).name}, in code outside of Python"
    return f"with exit code {process.exitcode}, and no traceback: the program itself may have ended the process"


def _needs_gpu(error: BaseException) -> str:
    """Where a program asks for a GPU that this machine lacks, and what to change; empty after another error."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames, of_torch = traceback.extract_tb(error.__traceback__), Path(torch.__file__).parent
    asks = any(of_torch / "cuda" in Path(frame.filename).parents for frame in frames) or "CUDA" in str(error)
    if not asks or torch.cuda.is_available():
        return ""
    place = next(frame for frame in reversed(frames) if of_torch not in Path(frame.filename).parents)
    return (
        f"{place.filename}:{place.lineno} asks for a GPU ({place.line}), and none is visible: certify runs programs on "
        "a CPU; choose the device by torch.cuda.is_available()"
    )


def _refusal(error: BaseException) -> str:
    """The message of an error that certify itself raises about a program; empty after another error."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = {Path(__file__).parent, Path(user_function.__code__.co_filename).parent} & set(last.parents)
    return str(error) if ours and error.__cause__ is None and isinstance(error, (ValueError, TypeError)) else ""


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
    while True:
        try:
            rank, ranks, store, timeout, function, arguments = pipe.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        torch.manual_seed(0)
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
                timeout=timedelta(seconds=timeout),
            )  # fmt: skip
            path = f"{store}.{rank}"
            torch.save(function(*arguments), path)
            dist.barrier()
            answer = True, path
        except BaseException as error:
            answer = False, _needs_gpu(error) or _refusal(error) or traceback.format_exc()
        pipe.send(answer)
        if dist.is_initialized():
            dist.destroy_process_group()
