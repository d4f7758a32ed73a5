# SPDX-License-Identifier: Apache-2.0
"""The pool: results by rank, failures with their cause, and a usable pool after each failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tests.distributed.pool import Pool, RankError
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


def sum_of_ranks(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    y = x * scale + dist.get_rank()
    dist.all_reduce(y)
    return y


def environment() -> dict[str, str]:
    os.environ["LEFT_BEHIND"] = "by a job"
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def model_parallel_groups() -> tuple[int, int, bool]:
    """Leaves all kinds of state behind that the pool has to clean up."""
    clean = "LEFT_BEHIND" not in os.environ and not parallel_state.is_initialized()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        context_parallel_size=4,
        hierarchical_context_parallel_sizes=[2, 2],
        order="tp-cp-ep-dp-pp",
    )
    torch.set_default_dtype(torch.float64)
    tensor_parallel.get_cuda_rng_tracker()
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        clean and torch.rand(1).dtype == torch.float64,
    )


def draw() -> torch.Tensor:
    return torch.rand(3)


def view_in_bf16() -> torch.Tensor:
    return torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()[1:]


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("said before the end")
        raise ValueError(f"the fault of rank {rank}")
    dist.all_reduce(torch.ones(1))


def leave_out(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def refuse() -> None:
    sys.exit("not supported")


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 2])
def test_results_by_rank(pool: Pool, world_size: int) -> None:
    results = pool.run(sum_of_ranks, world_size, torch.ones(3), scale=2.0)
    expected = torch.full((3,), 2.0 * world_size + sum(range(world_size)))
    assert len(results) == world_size and all(torch.equal(r, expected) for r in results)


def test_environment_and_rank(pool: Pool) -> None:
    results = pool.run(environment, 4)
    assert results == [{"RANK": str(r), "WORLD_SIZE": "4", "LOCAL_RANK": str(r)} for r in range(4)]
    assert "LEFT_BEHIND" not in os.environ


def test_a_job_starts_clean(pool: Pool) -> None:
    for _ in range(2):
        results = pool.run(model_parallel_groups, 8)
        assert results == [(r % 2, r // 2, True) for r in range(8)]
    first, second = pool.run(draw, 2), pool.run(draw, 2)
    assert first[0].dtype == torch.float32 and torch.equal(first[0], second[1])


def test_tensors_come_back_by_value(pool: Pool) -> None:
    results = pool.run(view_in_bf16, 2)
    assert all(torch.equal(r, view_in_bf16()) for r in results)


@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=pytest.mark.full)])
def test_exception_names_rank_and_line(pool: Pool, rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(raise_on, 4, rank)
    message = str(caught.value)
    assert f"raise_on failed on rank {rank} of 4" in message.splitlines()[0]
    assert f"ValueError: the fault of rank {rank}" in message and "in raise_on" in message
    assert "said before the end" in message
    assert time.monotonic() - started < patience(10)
    assert len(pool.run(sum_of_ranks, 4, torch.ones(1))) == 4


def test_hang_ends_at_the_timeout_with_stacks(pool: Pool) -> None:
    pool.run(draw, 4)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"no answer after \d+ s from ranks \[0, 1, 2, 3\]") as caught:
        pool.run(leave_out, 4, 2, timeout=1)
    assert "in leave_out" in str(caught.value)
    assert time.monotonic() - started < patience(10)
    assert len(pool.run(sum_of_ranks, 4, torch.ones(1))) == 4


@pytest.mark.parametrize(
    "fn, args, reason",
    [(exit_on, (1, 3), "exited with code 3"), (kill_on, (1,), "killed by SIGKILL")],
)
@pytest.mark.usual(1)
def test_death_of_a_rank(pool: Pool, fn: object, args: tuple[int, ...], reason: str) -> None:
    with pytest.raises(RankError, match="failed on rank 1 of 4") as caught:
        pool.run(fn, 4, *args)
    assert reason in str(caught.value)
    assert len(pool.run(sum_of_ranks, 4, torch.ones(1))) == 4


def test_system_exit_and_unpicklable_results_are_errors(pool: Pool) -> None:
    with pytest.raises(RankError, match="SystemExit: not supported"):
        pool.run(refuse, 2)
    with pytest.raises(RankError, match="(?i)pickle"):
        pool.run(unpicklable, 2)
    with pytest.raises(ValueError, match="does not fit"):
        pool.run(draw, 9)


ORPHANS = """
import os, signal, time
from tests.distributed import pool

if __name__ == "__main__":
    pool.PRELOAD = ["torch.distributed"]  # megatron-core takes seconds
    pool = pool.Pool()
    pool._start(2)
    print(*(worker.process.pid for worker in pool._workers.values()), flush=True)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.alarm(1)
    pool.run(time.sleep, 2, 1000)
"""


@pytest.mark.full
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, stdout=subprocess.PIPE, timeout=patience(120), text=True
    )
    assert done.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in done.stdout.split()]
    deadline = time.monotonic() + patience(5)
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, f"{workers} outlived their parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie has ended too
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
