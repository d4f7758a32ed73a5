# SPDX-License-Identifier: Apache-2.0
"""Host memory of complete runs: the estimate, the use, and the absence of leaks."""

from __future__ import annotations

import gc
import time
from functools import cache
from typing import Any

import pytest

from benchmarks.memory import MODES, measure
from megatron.training.arguments.parser import parse
from megatron.training.arguments.validate.host_memory import check_host_memory, host_bytes
from megatron.training.refusal import Refusal
from tests.distributed.flags import DEVICE, FULL, HOST, LLAMA, P2, RUN, SHAPE, SP, STREAM, fpdt
from tests.distributed.test_fpdt import TWO
from tests.distributed.test_training import GQA, MHA, cp
from tests.distributed.training_runs import make_job, run_loop, train_job
from tests.pairs import by_pairs, settings

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0]+[1]*3"


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
    (1, f"{GQA} {EXPERTS} {fpdt(16, STREAM)}"),
    (1, f"{GQA} {EXPERTS} {fpdt(16, STREAM, FULL)}"),
    (1, f"{GQA} {EXPERTS} {fpdt(16, FULL, HOST)}"),
    (1, f"{GQA} {EXPERTS} {fpdt(16, STREAM)} --recompute-granularity full --recompute-num-layers 2"),
    (2, f"{GQA} {cp(2, 1)} {fpdt(16, FULL, HOST)}"),
    (2, f"{GQA} {cp(1, 2)} {fpdt(16)}"),
    (2, f"{GQA} {SP} {fpdt(16, HOST)}"),
    (2, f"{GQA} {P2} --micro-batch-size 1 {fpdt(16, HOST)}"),
]


@pytest.mark.parametrize(
    "world, flags",
    by_pairs(CASES, lambda _, flags: settings(flags) - {"--tensor-model-parallel-size"}, lambda world, _: world),
)
@pytest.mark.usual(0, 1)
def test_the_estimate_holds_and_is_not_far_off(pool, world, flags):
    ranks = pool.run(host_memory_of_a_run, world, flags, 2, timeout=120)
    estimate, used = ranks[0][0], max(rank[1] for rank in ranks)
    assert used <= estimate <= 1.4 * used, f"estimated {estimate}, used {used}"


def bytes_after(flags, *steps):
    """(device bytes, host bytes in use, host bytes allocated) after some steps and after more steps."""
    job, result = make_job(flags), []
    for count in steps:
        train_job(job, count)
        gc.collect()
        result.append((steady_bytes(), job.runtime.offload.pool.in_use, job.runtime.offload.pool.allocated))
    return result


def steady_bytes() -> int:
    """Device bytes once they have not changed for 0.2 s.

    A thread of gloo drops its reference to a reduced tensor only after the wait for the reduction has returned, on a
    busy machine some milliseconds later.
    """
    from megatron.training.report.tensor_memory import TensorMeter

    before = -1
    while True:
        with TensorMeter() as meter:
            now = meter.now
        if now == before:
            return now
        before = now
        time.sleep(0.2)


@pytest.mark.parametrize(
    "flags",
    [*(pytest.param(fpdt(16, *how), marks=pytest.mark.full) for how in ((), (FULL, HOST))), fpdt(13, STREAM)],
)
@pytest.mark.lab
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


# Device and host bytes of a step in chunks, model states excluded, counted tensor by tensor (benchmarks/memory.py).


WIDTH, CHUNK = 64, 256
FPDT_SHAPE = f"""--num-layers 4 --hidden-size {WIDTH} --num-attention-heads 4 --vocab-size 3999 --micro-batch-size 1
--train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 --device cpu
--hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope --normalization RMSNorm
--untie-embeddings-and-output-weights"""


@pytest.fixture(scope="module")
def bytes_of(pool):
    """Device and host bytes of a mode at a length."""

    @cache
    def measured(mode: str, length: int, chunk: int = CHUNK) -> dict[str, int]:
        flags = (
            f"{FPDT_SHAPE} --seq-length {length} --max-position-embeddings {length} {MODES[mode].format(chunk=chunk)}"
        )
        flags += f" --loss-chunks {length // 16}" if "--fpdt" in flags else ""
        return pool.run(measure, 1, flags.split(), timeout=120)[0]

    return measured


@pytest.mark.full
def test_chunks_need_a_fraction_of_what_recompute_and_plain_layers_hold(bytes_of):
    fpdt, recompute, plain = (bytes_of(mode, 2048, 256)["device"] for mode in ("fpdt-inputs", "recompute", "plain"))
    assert recompute > 10 * fpdt and plain > 20 * fpdt, (fpdt, recompute, plain)


@pytest.mark.parametrize("mode", [pytest.param("fpdt-inputs", marks=pytest.mark.full), "fpdt-recompute"])
def test_at_a_fixed_chunk_at_most_four_hidden_states_grow_with_the_sequence(bytes_of, mode):
    growth = bytes_of(mode, 2048)["device"] - bytes_of(mode, 1024)["device"]
    hidden = 1024 * WIDTH * 4
    assert growth <= 4.15 * hidden, f"{growth / hidden:.2f} hidden states"  # 0.15: token ids, labels, positions


@pytest.mark.parametrize("mode", [pytest.param("stream", marks=pytest.mark.full), "stream-recompute"])
@pytest.mark.lab
def test_streamed_hidden_states_leave_nothing_that_grows_on_the_device(bytes_of, mode):
    short, long = bytes_of(mode, 1024), bytes_of(mode, 2048)
    assert long["device"] < 1.05 * short["device"]
    assert long["host"] == pytest.approx(2 * short["host"], rel=0.05)


def test_without_offload_nothing_is_in_host_memory(bytes_of):
    assert bytes_of("fpdt-device", 1024)["host"] == 0
    assert bytes_of("fpdt", 1024)["host"] > 0
    assert bytes_of("fpdt", 1024)["device"] < bytes_of("fpdt-device", 1024)["device"]


# --profile-memory on several ranks: bytes of parameters, gradients and optimizer states are correct.


def train_and_count(flags: str, folder: str) -> dict[str, Any]:
    """Train two steps with --profile-memory on a rank, and compute the expected values independently."""
    job = make_job(f"{flags} --exit-interval 2 --profile-memory {folder}")
    assert run_loop(job)
    parameters = [parameter for chunk in job.model_chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in job.model_chunks for buffer in chunk.buffers]
    padded = [buffer.param_data.nbytes for buffer in buffers if buffer.param_data is not None]
    inner = job.optimizer.optimizer
    mine = [parameter for group in inner.param_groups for parameter in group["params"]]
    return {
        "numbers": sum(parameter.numel() for parameter in parameters),
        "parameters": sum(padded) if padded else sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(buffer.numel * 4 for buffer in buffers),
        "optimized": sum(parameter.numel() for parameter in mine),
        "counters": 4 * len(inner.state),
    }


@pytest.mark.parametrize(
    "flags, bytes_a_number",
    [
        pytest.param("--bf16", 12, marks=pytest.mark.full),
        pytest.param("--zero-stage 1", 8, marks=pytest.mark.full),
        ("--zero-stage 1 --bf16 --pipeline-model-parallel-size 2", 12),
    ],
)
@pytest.mark.lab
def test_bytes_by_kind_are_those_of_the_buffers(pool, tmp_path, flags, bytes_a_number):
    from megatron.training.report.memory_picture import peak_of, read

    ranks = 2 * (1 + ("pipeline" in flags))
    counted = pool.run(train_and_count, ranks, flags, str(tmp_path))
    profiles = [read(tmp_path / f"memory_rank{rank}.json") for rank in range(ranks)]
    for rank, (truth, profile) in enumerate(zip(counted, profiles)):
        start = profile["start"]
        assert (tmp_path / f"memory_rank{rank}.png").read_bytes().startswith(b"\x89PNG")
        assert profile["rank"] == rank and profile["iteration"] == 2
        assert start["parameters"] == truth["parameters"] >= truth["numbers"] * (2 if "bf16" in flags else 4)
        assert start["gradients"] == truth["gradients"] >= truth["numbers"] * 4
        assert start["optimizer"] == bytes_a_number * truth["optimized"] + truth["counters"]
        assert peak_of(profile)[1]["activations"] > 64 * 64 * 4
        names = [name for name, _ in profile["phases"]]
        assert names[0] == "forward" and names[-1] == "optimizer" and "backward" in names
    if "zero" in flags:  # states are split over two ranks, and none is missing
        for first, second in zip(counted[::2], counted[1::2]):
            assert first["optimized"] + second["optimized"] == first["numbers"] == second["numbers"]
