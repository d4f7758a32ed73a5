# SPDX-License-Identifier: Apache-2.0
"""A rank that hangs is named by those who wait for it, wherever it hangs."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.context_parallel.layout.grid import make_grid
from megatron.training.features.heartbeat import Heartbeat, silent_ranks, verdict
from tests.patience import patience

EVERY = 0.2


def hang(port: int):
    """Rank 3 stops while rank 1 waits for it in a ring and rank 2 in Ulysses: what rank 0 finds out."""
    stopped = 3
    grid = make_grid(ulysses=2, ring=2)
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    beats = Heartbeat(grid, 600, store, rank, 4, EVERY).start()
    beats.iteration = lambda: 6
    dist.barrier()
    said = None
    if rank == stopped:
        beats._done.set()  # stands for SIGSTOP, which would end the pool: no beat comes any more
        beats._thread.join()
        store.wait(["over"], timedelta(seconds=60))
    if rank == 0:
        time.sleep(5 * EVERY)
        before = beats.table()
        time.sleep(10 * EVERY)
        after = beats.table()
        said = silent_ranks(before, after, 0), verdict(before, after, 0)
        store.set("over", "yes")
    for who, axis in ((1, grid.ring), (2, grid.ulysses)):  # who waits for rank 3 there
        if rank in (who, stopped):
            dist.all_reduce(torch.ones(1), group=axis.group)
    beats.stop()
    return said


def test_the_rank_that_does_not_answer_is_named_and_the_axis_that_waits(pool):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    silent, lines = pool.run(hang, 4, store.port, timeout=patience(60))[0]
    assert silent == [3]
    assert lines[0].startswith("error: rank 3 on ") and "does not answer" in lines[0], lines
    assert any("all_reduce over Ring" in line and line.endswith("rank 1") for line in lines), lines
    assert any("all_reduce over Ulysses" in line and line.endswith("rank 2") for line in lines), lines


def stopped_by(numbers: list[int]):
    """What a Stopper makes of signals that this process gets."""
    from megatron.training.features.stopping import Stopper

    stopper = Stopper(torch.device("cpu"), None)
    stopper.begin()
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
        stopper.agree()
        return stopper.reason
    finally:
        stopper.restore()


def test_signals_that_save_and_stop(pool):
    for numbers, reason in (
        ([], ""),
        ([signal.SIGTERM], "SIGTERM"),
        ([signal.SIGUSR1], "SIGUSR1"),
        ([signal.SIGUSR1, signal.SIGTERM], "SIGUSR1"),  # the scheduler's warning, then its end: still one stop
        ([signal.SIGTERM, signal.SIGTERM], "SIGTERM"),  # from launcher and scheduler within a moment
    ):
        assert pool.run(stopped_by, 1, numbers)[0] == reason
