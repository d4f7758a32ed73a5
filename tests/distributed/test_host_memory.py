# SPDX-License-Identifier: Apache-2.0
"""Host memory of whole runs: what was estimated before the first step, what was used, and that nothing leaks."""

from __future__ import annotations

import gc

import pytest

from megatron.training.arguments import parse
from megatron.training.host_memory import check_host_memory, host_bytes
from megatron.training.refusal import Refusal
from tests.distributed.test_fpdt import DEVICE, HOST, STREAM, TWO, fpdt
from tests.distributed.test_training import FULL, GQA, MHA, P2, SP, T2, cp
from tests.distributed.training_runs import LLAMA, RUN, SHAPE, make_job, train_job


def host_memory_of_a_run(flags, steps):
    """(estimated, most in use, in use after the run, allocated after 3 steps, allocated at the end) of this rank."""
    job = make_job(flags)
    pool = job.runtime.offload.pool
    train_job(job, 3)
    early = pool.allocated
    if steps > 3:
        train_job(job, steps - 3)
    gc.collect()
    return host_bytes(job.config).total, pool.peak, pool.in_use, early, pool.allocated


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


@pytest.mark.parametrize("world, flags", CASES)
def test_the_estimate_holds_and_is_not_far_off(pool, world, flags):
    ranks = pool.run(host_memory_of_a_run, world, flags, 3, timeout=120)
    estimate, used = ranks[0][0], max(rank[1] for rank in ranks)
    assert used <= estimate <= 1.4 * used, f"estimated {estimate}, used {used}"


@pytest.mark.parametrize("flags", [fpdt(16, FULL, HOST), fpdt(13, STREAM)])
def test_buffers_are_allocated_in_the_first_steps_and_reused_ever_after(pool, flags):
    ((_, _, in_use, early, late),) = pool.run(host_memory_of_a_run, 1, f"{GQA} --num-layers 2 {flags}", 20)
    assert early == late > 0 and in_use == 0


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
