# SPDX-License-Identifier: Apache-2.0
"""FPDT, chunked layers and host memory through the training program: the same run as on one process without them."""

from __future__ import annotations

import pytest

from tests.distributed.flags import DEVICE, FULL, HOST, P2, SP, STREAM, T2, V2, ZERO1, fpdt
from tests.distributed.test_training import GPT, GQA, MHA, MQA, check, cp
from tests.distributed.training_runs import run_training, run_training_with_fused_sums, schedules_that_differ
from tests.pairs import also_in_full, quick_too

TWO = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
FP16 = "--fp16 --initial-loss-scale 1024"


LLAMA_CASES = [
    (1, f"{GQA} --qk-layernorm", fpdt(16, "--micro-batch-size 4 --loss-chunks 7 --ffn-chunks 3")),
    (1, f"{GQA} --eod-mask-loss", fpdt(16, "--micro-batch-size 1", STREAM)),
    (2, GQA, f"{cp(2, 1)} {fpdt(22, STREAM)}"),
    (2, MQA, f"{cp(1, 2, 'contiguous')} {fpdt(32, FULL)}"),
    (2, GQA, f"{SP} --ffn-chunks 3 --loss-chunks 3"),
    (4, GQA, f"{P2} {V2} {cp(1, 2)} {fpdt(32, DEVICE)}"),
    (4, GQA, f"{cp(2, 1)} {ZERO1} {fpdt(32, HOST)} --overlap-grad-reduce"),
    (2, GQA, f"--zero-stage 2 {fpdt(22)}"),
    (
        2,
        MHA,
        f"--zero-stage 3 {cp(1, 2)} {fpdt(32)} --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
    ),
]
GPT_CASES = [
    (1, MHA, fpdt(22, STREAM, FULL)),
    (2, MHA, f"{cp(2, 1)} {fpdt(13, DEVICE, '--attention-mask full')}"),
    (2, GQA, f"{cp(1, 2)} {fpdt(32, FULL, HOST, '--attention-mask full')}"),
]


def steps(world: int, grid: str, long_runs: bool) -> int:
    """20 steps in full runs if that takes a few seconds; cases with many small messages take fewer."""
    if not long_runs:
        return 2
    few_messages = world == 2 and T2 not in grid and "--zero-stage" not in grid
    few_chunks = not any(f"--fpdt-chunk-size {size}" in grid for size in (8, 13, 16, 22))
    return 20 if world == 1 or (few_messages and few_chunks) else 5


@pytest.mark.parametrize("world, model, grid", quick_too(LLAMA_CASES, (2, GQA, f"{cp(2, 1)} {fpdt(22, STREAM)}")))
@pytest.mark.usual(0, 4, 7)
def test_llama_in_chunks_is_the_plain_run(pool, on_one_process, long_runs, world, model, grid):
    check(pool, on_one_process, world, model, grid, llama=True, steps=steps(world, grid, long_runs))


@pytest.mark.parametrize("world, model, grid", GPT_CASES)
@pytest.mark.usual(0)
def test_gpt_in_chunks_is_the_plain_run(pool, on_one_process, long_runs, world, model, grid):
    check(pool, on_one_process, world, f"{GPT} {model}", grid, llama=False, steps=steps(world, grid, long_runs))


@pytest.mark.parametrize(
    "world, grid",
    [
        (1, fpdt(22, STREAM)),
        *also_in_full((2, f"{SP} {fpdt(22, FULL)}"), (1, "--ffn-chunks 3")),
        *also_in_full((2, f"{SP} --zero-stage 1"), (2, "--pipeline-model-parallel-size 2 --zero-stage 1")),
    ],
)
def test_layers_that_add_to_the_buffers_themselves(pool, on_one_process, world, grid):
    model = f"{GQA} --num-layers 2 "
    losses, _, grads = on_one_process(model, True)
    for mine, _, my_grads in pool.run(run_training_with_fused_sums, world, f"{model} {grid}", 3):
        assert mine == pytest.approx(losses[:3], rel=1e-5)
        for name, grad in my_grads.items():
            assert float((grad - grads[name]).abs().max() / grads[name].abs().max()) < 1e-5, name


def offloads(case: tuple[int, str, str]) -> bool:
    """Whether anything is copied to the host."""
    return HOST in case[2] or ("--fpdt " in case[2] and DEVICE not in case[2])


@pytest.mark.parametrize(
    "world, model, grid, llama",
    [
        (1, GQA, f"{fpdt(13, FULL, HOST)}", True),
        (2, GQA, f"{cp(1, 2)} {fpdt(22, STREAM)}", True),
        *also_in_full(
            *((*case, True) for case in filter(offloads, LLAMA_CASES)),
            *((*case, False) for case in filter(offloads, GPT_CASES)),
        ),
    ],
)
@pytest.mark.usual(0)
def test_when_copies_happen_changes_no_gradient(pool, schedules, world, model, grid, llama):
    flags = f"{model if llama else f'{GPT} {model}'} --num-layers {4 if V2 in grid else 2} {grid}"
    for copies, differ in pool.run(schedules_that_differ, world, flags, llama, schedules, timeout=600):
        assert copies and not differ, differ


@pytest.mark.parametrize(
    "world, flags, dtype",
    [
        (1, fpdt(16, STREAM), "--bf16"),
        (1, fpdt(13, FULL, HOST), FP16),
        *also_in_full(
            (2, f"{cp(1, 2)} {fpdt(8)}", "--bf16"),
            (1, fpdt(13, FULL, HOST), "--bf16"),
            (1, fpdt(16, STREAM), FP16),
            (2, f"{cp(1, 2)} {fpdt(8)}", FP16),
        ),
    ],
)
@pytest.mark.usual(0)
def test_half_precision_in_chunks_is_as_near_to_fp32_as_the_plain_run(pool, on_one_process, world, flags, dtype):
    """Sums over chunks are in fp32, so chunks lose no precision."""
    exact, _, grads = on_one_process(f"{GQA} --num-layers 2 ", True)

    def distance(run):
        losses, _, mine = run
        apart = max(abs(a / b - 1) for a, b in zip(losses, exact))
        scale = 1024 if "fp16" in dtype else 1
        errors = [float((mine[name] / scale - grad).norm() / grad.norm()) for name, grad in grads.items()]
        return apart, max(errors)

    half = f"{GQA} --num-layers 2 {dtype}"
    chunks = pool.run(run_training, world, f"{half} {flags}", True, 5, timeout=120)[0]
    plain, chunked = distance(on_one_process(half, True, 5)), distance(chunks)
    assert chunked[0] < 2 * plain[0] + 1e-4 and chunked[1] < 1.5 * plain[1], (plain, chunked)


def planned(flags: str, fresh: bool) -> tuple[int, int]:
    """(tiles made, plans made since the first call) in a step."""
    from unittest.mock import patch

    from megatron.context_parallel.attention import ring_plan
    from tests.distributed.training_runs import make_job, train_job

    if fresh:
        ring_plan._attention_plan.cache_clear()
    with patch.object(ring_plan, "tiles", side_effect=ring_plan.tiles) as made:
        train_job(make_job(flags), 1)
    return made.call_count, ring_plan._attention_plan.cache_info().misses


@pytest.mark.full
def test_layers_after_the_first_plan_nothing(pool):
    """16 chunks on Ring 4, in all passes: whatever depends on layout and mask is made once."""
    flags = "--ring-parallel-size 4 --seq-length 512 --max-position-embeddings 512 --fpdt --fpdt-chunk-size 32"
    for made, plans in pool.run(planned, 4, f"{flags} --num-layers 1", True, timeout=120):
        assert made > 16 and plans == 1
    assert pool.run(planned, 4, f"{flags} --num-layers 3", False, timeout=120) == [(0, 1)] * 4
