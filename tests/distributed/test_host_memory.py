# SPDX-License-Identifier: Apache-2.0
"""Host memory of whole runs: what was estimated before the first step, what was used, and that nothing leaks."""

from __future__ import annotations

import gc

import pytest

from megatron.training.arguments.parser import parse
from megatron.training.host_memory import check_host_memory, host_bytes
from megatron.training.refusal import Refusal
from tests.distributed.test_fpdt import DEVICE, HOST, STREAM, TWO, fpdt
from tests.distributed.test_training import FULL, GQA, MHA, P2, SP, T2, cp
from tests.distributed.training_runs import LLAMA, RUN, SHAPE, make_job, train_job
from tests.pairs import by_pairs, settings


def host_memory_of_a_run(flags, steps):
    """(estimated, most in use) on this rank."""
    job = make_job(flags)
    train_job(job, steps)
    return host_bytes(job.config).total, job.runtime.offload.pool.peak


CASES = [
    (1, f"{GQA} {fpdt(16)}"),
    (1, f"{MHA} {fpdt(16)}"),
    (1, f"{GQA} {fpdt(8, FULL)}"),
    (1, f"{GQA} {fpdt(16, HOST)}"),
    (1, f"{GQA} {fpdt(16, FULL, HOST)}"),
    (1, f"{GQA} {fpdt(16, DEVICE, HOST)}"),
    (1, f"{GQA} {fpdt(16, TWO, HOST)}"),
    (1, f"{GQA} {FULL} {HOST}"),
    (1, f"{GQA} {TWO} {HOST}"),
    (1, f"{GQA} {fpdt(16, STREAM)}"),
    (1, f"{GQA} {fpdt(16, STREAM, FULL)}"),
    (2, f"{GQA} {cp(2, 1)} {fpdt(16, FULL, HOST)}"),
    (2, f"{GQA} {cp(1, 2)} {fpdt(16)}"),
    (2, f"{GQA} {T2} {SP} {fpdt(16, HOST)}"),
    (2, f"{GQA} {P2} --micro-batch-size 1 {fpdt(16, HOST)}"),
]


@pytest.mark.parametrize(
    "world, flags", by_pairs(CASES, lambda _, flags: settings(flags), lambda world, _: world)
)
def test_the_estimate_holds_and_is_not_far_off(pool, world, flags):
    ranks = pool.run(host_memory_of_a_run, world, flags, 2, timeout=120)
    estimate, used = ranks[0][0], max(rank[1] for rank in ranks)
    assert used <= estimate <= 1.4 * used, f"estimated {estimate}, used {used}"


def bytes_after(flags, *steps):
    """(device bytes, host bytes in use, host bytes allocated) after so many steps, and after so many more."""
    from megatron.training.report.tensor_memory import TensorMeter

    job, found = make_job(flags), []
    for count in steps:
        train_job(job, count)
        gc.collect()
        with TensorMeter() as meter:
            found.append((meter.now, job.runtime.offload.pool.in_use, job.runtime.offload.pool.allocated))
    return found


@pytest.mark.parametrize(
    "flags",
    [*(pytest.param(fpdt(16, *how), marks=pytest.mark.full) for how in ((), (FULL, HOST))), fpdt(13, STREAM)],
)
def test_bytes_are_the_same_after_step_3_and_later(pool, long_runs, flags):
    later = 47 if long_runs else 6
    ((early, late),) = pool.run(bytes_after, 1, f"{GQA} --num-layers 2 --train-iters 50 {flags}", 3, later, timeout=120)
    assert early == late and late[1] == 0 < late[2]


def completed(flags: str, world: int = 1):
    return parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, world)


@pytest.mark.parametrize(
    "flags, flag, knob",
    [
        (fpdt(16), "--fpdt-offload", "--recompute-granularity full"),
        (fpdt(16, FULL), "--fpdt-offload", "--no-fpdt-offload"),
        (fpdt(16, FULL, STREAM), "--fpdt-stream-hidden", "--recompute-num-layers"),
        (f"{FULL} {HOST}", "--offload-checkpoints", "a higher --recompute-num-layers"),
    ],
)
def test_too_little_host_memory_is_refused_with_the_numbers_and_a_knob(flags, flag, knob, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    config = completed(f"{GQA} {flags} --seq-length 1048576 --max-position-embeddings 1048576")
    room = 8 * host_bytes(config).total
    check_host_memory(config, lambda: room)
    with pytest.raises(Refusal) as caught:
        check_host_memory(config, lambda: room - 1)
    message = str(caught.value)
    assert message.startswith(flag) and knob in message and "GiB" in message and "\n" not in message
