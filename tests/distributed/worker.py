# SPDX-License-Identifier: Apache-2.0
"""One worker of the pool: serves jobs from a pipe, each inside a process group of its own (see pool.py)."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

# Errors of ranks whose peer has failed: never the root cause if there is another candidate.
SECONDARY = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed", "Connection refused")

# PyTorch keeps a few groups between jobs. Each of their threads wakes up a hundred times per second, so that a cache of
# groups makes all later tests slow.
MOST_THREADS = 100


def serve(worker: int, conn: Connection, life: Connection, root: str, log: str, store_port: int) -> None:
    """Main function of a worker: answer each job with ("ok", value) or ("error", ...) until the pipe closes."""
    os.setpgid(0, 0)  # a separate group: processes that it starts end with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    faulthandler.enable(file=fd, all_threads=True)  # an abort inside gloo then prints the Python stack
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)
    threading.Thread(target=_exit_with_parent, args=(life,), daemon=True).start()
    if root not in sys.path:
        sys.path.insert(0, root)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=600))
    conn.send_bytes(pickle.dumps(("ready",)))
    while True:
        try:
            request = conn.recv_bytes()
        except (EOFError, OSError):
            return
        os.ftruncate(fd, 0)
        answer = _job(worker, request, store)
        keep_coverage()
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(answer)


def _job(rank: int, request: bytes, store: object) -> bytes:
    """Run one job and restore the process. Returns the pickled answer."""
    environment = dict(os.environ)
    try:
        number, world_size, timeout, payload = pickle.loads(request)
        _begin(rank, world_size, f"job{number}", timeout, store)
        fn, args, kwargs = pickle.loads(payload)
        # By value: the tensor reductions of torch.multiprocessing would pass file descriptors of shared memory.
        answer = pickle.dumps(("ok", fn(*args, **kwargs)))
    except BaseException as error:  # SystemExit too: a refusal is an error of the job, not the worker's end
        text = traceback.format_exc()
        secondary = isinstance(error, RuntimeError) and any(phrase in text for phrase in SECONDARY)
        answer = pickle.dumps(("error", secondary, time.monotonic(), text))
    try:
        _end(environment)
        if (threads := _gloo_threads()) > MOST_THREADS:
            raise RuntimeError(f"{threads} threads of process groups are left: which object or cache holds a group?")
    except BaseException:
        answer = pickle.dumps(("error", False, time.monotonic(), "while cleaning up:\n" + traceback.format_exc()))
    return answer


def _gloo_threads() -> int:
    """The threads of all process groups that still exist; 0 on a system without /proc."""
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("pt_gloo") for name in names)


def keep_coverage() -> None:
    """Save coverage data after a job, because workers are killed at the end."""
    if coverage := sys.modules.get("coverage"):
        if running := coverage.Coverage.current():
            running.save()


def _begin(rank: int, world_size: int, prefix: str, timeout: float, store: object) -> None:
    import numpy
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def _end(environment: dict[str, str]) -> None:
    """Forget the groups and every global that megatron-core, torch and the environment keep."""
    import torch
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel import random as core_random

    from megatron.platform import forget_meshes

    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():  # destroy_model_parallel leaves some of them
        if isinstance(value[0] if isinstance(value, list) and value else value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    core_random._CUDA_RNG_STATE_TRACKER = None
    core_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    if sdpa := sys.modules.get("megatron.context_parallel.sdpa"):
        sdpa._meanings.clear()  # graphs of this job, whose backward passes will not run any more
    gc.collect()  # frames of a failed job may hold groups, which must be freed before their world
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    gc.freeze()  # the rest are modules and caches, which later collections should skip


def _exit_with_parent(life: Connection) -> None:
    """End this process when the parent's end of ``life`` closes, even if the main thread hangs."""
    try:
        life.poll(None)
    finally:
        os.killpg(0, signal.SIGKILL)
