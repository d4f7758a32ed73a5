# SPDX-License-Identifier: Apache-2.0
"""A rank that is slow by itself is named, and not those that wait for it."""

import io
import re
import time
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist

from megatron.training.features import stragglers
from megatron.training.features.stragglers import Stragglers, slow_ranks
from tests.distributed.training_runs import make_job


def steps(slow: int | None, count: int, least: int) -> tuple[str, float, float]:
    """What is said after some steps in which one rank works twice as long; a step's own and whole milliseconds."""
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
    """The slowest rank of those named: a busy machine may slow down others too, though not by as much."""
    named = {int(rank): float(ms) for rank, ms in re.findall(r"rank (\d+) on \S+ takes (\S+) ms", line)}
    worst = max(named, key=named.get)
    assert all(ms < 0.8 * named[worst] for rank, ms in named.items() if rank != worst), line
    return worst


def test_the_slow_rank_is_named_and_waits_are_no_work(pool):
    results = pool.run(steps, 4, 2, 20, 50)
    lines, own, whole = zip(*results)
    assert len(set(lines)) == 1
    assert slowest(lines[0]) == 2 and " for a step of its own work; the median is " in lines[0], results
    assert max(own[:2] + own[3:]) < 0.8 * own[2] and own[2] < 1.1 * min(whole), results


def train(flags: str, slow: int) -> str:
    """The console of a run in which one rank sleeps after each layer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron.training.features.stopping import Stopper
    from megatron.training.loop import training_loop
    from megatron.training.report.reporter import Reporter

    usual, stragglers.LEAST = stragglers.LEAST, 40
    job = make_job(f"{flags} --train-iters 6 --log-straggler --log-interval 6")
    for module in job.chunks[0].modules():
        if isinstance(module, TransformerLayer) and dist.get_rank() == slow:
            module.register_forward_hook(lambda *_: time.sleep(0.05))
    stopper, console = Stopper(job.runtime.device, None), io.StringIO()
    with redirect_stdout(console):
        training_loop(job, Reporter(job.config, active=True, first_iteration=0, last_iteration=6), stopper)
    stopper.restore()
    stragglers.LEAST = usual
    return console.getvalue()


@pytest.mark.parametrize(
    "flags",
    [
        "--ring-parallel-size 2 --zero-stage 1",
        pytest.param("--tensor-model-parallel-size 2 --ulysses-parallel-size 2", marks=pytest.mark.full),
        pytest.param("--zero-stage 3 --micro-batch-size 1", marks=pytest.mark.full),
    ],
)
def test_a_slow_rank_is_named_in_training(pool, flags: str):
    for console in pool.run(train, 4, flags, 1):
        (line,) = [line for line in console.splitlines() if "--log-straggler" in line]
        assert slowest(line) == 1, line


def test_nobody_is_named_where_all_are_alike_or_little_was_seen(pool):
    assert {line for line, _, _ in pool.run(steps, 2, 1, 4, 300)} == {""}
    assert slow_ranks([100.0, 119.0, 100.0, 98.0]) == [] and slow_ranks([100.0, 121.0, 100.0, 98.0]) == [1]
