# SPDX-License-Identifier: Apache-2.0
"""A rank that is slow by itself is named, and not those that wait for it."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import time
from contextlib import redirect_stdout
from datetime import timedelta
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel.layout.grid import make_grid
from megatron.training.features.heartbeat import Heartbeat, silent_ranks, verdict
from megatron.training.features.measuring import stragglers
from megatron.training.features.measuring.stragglers import LEAST_STEPS as LEAST
from megatron.training.features.measuring.stragglers import (
    PAUSE,
    SlowLinks,
    Stragglers,
    describe_slow,
    edges_by_phase,
    slow_ranks,
)
from tests.distributed.training_runs import make_job, run_loop
from tests.patience import patience


def steps(slow: int | None, count: int, least: int) -> tuple[str, float, float]:
    """Lines after some steps in which one rank works twice as long; milliseconds of own work and of a step."""
    usual, stragglers.LEAST = stragglers.LEAST, least
    clock = Stragglers(make_job("--global-batch-size 8").runtime)
    begin = time.perf_counter()
    for _ in range(count):
        clock.begin()
        time.sleep(0.08 if dist.get_rank() == slow else 0.04)
        dist.all_reduce(torch.ones(8))
        clock.end()
    whole = 1000 * (time.perf_counter() - begin) / count
    own = clock.clock.result()[0]
    line = clock.report()
    clock.stop()
    stragglers.LEAST = usual
    return line, own, whole


def slowest(line: str) -> int:
    """The slowest named rank; a busy machine may also slow down others, but less."""
    named = {int(rank): float(ms) for rank, ms in re.findall(r"rank (\d+) on \S+ takes (\S+) ms", line)}
    worst = max(named, key=named.get)
    assert all(ms < 0.8 * named[worst] for rank, ms in named.items() if rank != worst), line
    return worst


def test_the_slow_rank_is_named_and_waits_are_no_work(pool):
    results = pool.run(steps, 4, 2, 20, 50)
    lines, own, whole = zip(*results)
    assert len(set(lines)) == 1
    assert slowest(lines[0]) == 2 and " for its own work in a step; the median is " in lines[0], results
    assert max(own[:2] + own[3:]) < 0.8 * own[2] and own[2] < 1.1 * min(whole), results


def train(flags: str, slow: int) -> str:
    """The console of a run in which one rank sleeps after each layer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron.training.report.reporter import Reporter

    usual, stragglers.LEAST = stragglers.LEAST, 40
    job = make_job(f"{flags} --train-iters 6 --log-straggler --log-interval 6")
    for module in job.model_chunks[0].modules():
        if isinstance(module, TransformerLayer) and dist.get_rank() == slow:
            module.register_forward_hook(lambda *_: time.sleep(0.05))
    console = io.StringIO()
    with redirect_stdout(console):
        run_loop(job, Reporter(job.config, active=True, first_iteration=0, last_iteration=6))
    stragglers.LEAST = usual
    return console.getvalue()


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--ring-parallel-size 2 --zero-stage 1",
        "--tensor-model-parallel-size 2 --ulysses-parallel-size 2",
        "--zero-stage 3 --micro-batch-size 1",
    ],
)
def test_a_slow_rank_is_named_in_training(pool, flags: str):
    for console in pool.run(train, 4, flags, 1):
        (line,) = [line for line in console.splitlines() if "--log-straggler" in line]
        assert slowest(line) == 1, line


def test_no_rank_is_named_if_all_are_equally_fast_or_measured_too_briefly(pool):
    assert {line for line, _, _ in pool.run(steps, 2, 1, 4, 300)} == {""}
    assert slow_ranks([100.0, 119.0, 100.0, 98.0]) == [] and slow_ranks([100.0, 121.0, 100.0, 98.0]) == [1]


# A link between nodes that becomes slow is named. Over real links: tests/faults/test_nodes.py.


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_every_neighbouring_pair_of_nodes_has_edges_and_no_node_does_two_things_at_once(nodes):
    ranks = [[2 * node, 2 * node + 1] for node in range(nodes)]
    phases = edges_by_phase(ranks)
    for phase in phases:
        sends, receives = ([{rank // 2 for rank in end}] for end in zip(*phase))
        busy = sorted(chain(*({a // 2, b // 2} for a, b in phase[::2])))
        assert busy == sorted(set(busy)) and not sends[0] & receives[0]
    assert sorted(chain(*phases)) == sorted(
        (2 * node + place, (2 * node + 2 + place) % (2 * nodes)) for node in range(nodes) for place in (0, 1)
    )
    assert edges_by_phase([[0, 1, 2]]) == []


def test_links_are_named_by_how_much_slower_they_are_than_usual():
    edges, hosts = [(0, 2), (1, 3), (2, 0), (3, 1)], ["a", "a", "b", "b"]
    assert describe_slow(edges, [0.004, 0.004, 0.004, 0.004], [0.004] * 4, hosts) == ""
    line = describe_slow(edges, [0.004, 0.0432, 0.004, 0.2], [0.004] * 4, hosts)
    assert line == (
        "--log-straggler: the link from rank 3 on b to rank 1 on a takes 200 ms for 256 KiB (usually 4 ms); "
        "the link from rank 1 on a to rank 3 on b takes 43.2 ms for 256 KiB (usually 4 ms)"
    )
    assert describe_slow(edges, [1e-3, 1e-5, 1e-5, 1e-5], [1e-5] * 4, hosts) == ""  # a short moment, not a slow link
    many = [(rank, rank + 8) for rank in range(8)]
    assert describe_slow(many, [1.0] * 8, [0.1] * 8, ["a"] * 8 + ["b"] * 8).endswith("; and 4 more")


def watch(slow_from: int | None) -> tuple[list[str], int, float]:
    """(lines after each step, number of measurements, number of edges); steps are slow from the eighth on.

    Four ranks stand for two nodes. From the eighth step on, messages of ``slow_from`` take 50 ms longer.
    """
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    links, lines, measured = SlowLinks(torch.device("cpu")), [], 0
    hop, measure = links._hop, links._measure

    def slow_hop(edge: tuple[int, int], data: torch.Tensor) -> float:
        if edge[0] == slow_from and dist.get_rank() == edge[1] and step >= 8:
            time.sleep(0.05)
            return hop(edge, data) + 0.05
        return hop(edge, data)

    def counted() -> list[float]:
        nonlocal measured
        measured += 1
        return measure()

    links._hop, links._measure = slow_hop, counted
    for step in range(8 + PAUSE + 3):
        slow = torch.tensor([int(links.is_slow(1.0 if step < 8 else 1.6))])
        dist.all_reduce(slow, dist.ReduceOp.MAX)
        lines.append(links.report(bool(slow)))
    return lines, measured, len(links.edges)


@pytest.mark.parametrize("slow_from", [3, None])
def test_the_slow_link_is_named_when_steps_become_slow(pool, slow_from, monkeypatch):
    """A busy machine may make other links slow too, so only the slow link is checked."""
    results = pool.run(watch, 4, slow_from)
    lines, measured, edges = results[0]
    assert all(one == results[0] for one in results) and edges == 4
    assert measured == 3  # at the start, at the first slow step and after the rest
    assert not any(lines[: LEAST - 1] + lines[LEAST:8])
    message = [
        number for number, line in enumerate(lines) if f"from rank 3 on {socket.gethostname()} to rank 1" in line
    ]
    assert message == ([8, 8 + PAUSE + 1] if slow_from else []), lines


def one_node() -> list[str]:
    os.environ.pop("GROUP_RANK", None)
    links = SlowLinks(torch.device("cpu"))
    links._measure = lambda: 1 / 0
    return [links.report(links.is_slow(seconds)) for seconds in [1.0] * 8 + [9.0] * 3]


def test_on_one_node_nothing_is_measured(pool):
    assert pool.run(one_node, 2) == [[""] * 11] * 2
    assert stragglers.LEAST > 2


# A rank that hangs is named by the ranks that wait for it, wherever it hangs.


EVERY = 0.2


def hang(port: int):
    """The report of rank 0 after rank 3 has stopped, while rank 1 waits in a ring and rank 2 in Ulysses."""
    stopped = 3
    grid = make_grid(ulysses=2, ring=2)
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    beats = Heartbeat(grid, 600, store, rank, 4, EVERY).start()
    beats.iteration = lambda: 6
    dist.barrier()
    output = None
    if rank == stopped:
        beats._done.set()  # like SIGSTOP, which would end the pool: no more beats
        beats._thread.join()
        store.wait(["over"], timedelta(seconds=60))
    if rank == 0:
        time.sleep(5 * EVERY)
        before = beats.table()
        time.sleep(10 * EVERY)
        after = beats.table()
        output = silent_ranks(before, after, 0), verdict(before, after, 0)
        store.set("over", "yes")
    for who, axis in ((1, grid.ring), (2, grid.ulysses)):  # rank, and the axis on which it waits for rank 3
        if rank in (who, stopped):
            dist.all_reduce(torch.ones(1), group=axis.group)
    beats.stop()
    return output


def test_the_rank_that_does_not_answer_is_named_and_the_axis_that_waits(pool):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    silent, lines = pool.run(hang, 4, store.port, timeout=patience(60))[0]
    assert silent == [3]
    assert lines[0].startswith("error: rank 3 on ") and "does not answer" in lines[0], lines
    assert any("all_reduce over Ring" in line and line.endswith("rank 1") for line in lines), lines
    assert any("all_reduce over Ulysses" in line and line.endswith("rank 2") for line in lines), lines


def stopped_by(numbers: list[int]):
    """The reaction of a Stopper to signals."""
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
        ([signal.SIGUSR1, signal.SIGTERM], "SIGUSR1"),  # a scheduler's warning and its SIGTERM: one stop
        ([signal.SIGTERM, signal.SIGTERM], "SIGTERM"),  # from launcher and scheduler within a moment
    ):
        assert pool.run(stopped_by, 1, numbers)[0] == reason
