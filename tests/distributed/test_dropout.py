# SPDX-License-Identifier: Apache-2.0
"""Dropout by position: losses and all gradients do not depend on the grid, on chunks or on recompute."""

import pytest

from tests.distributed.flags import FULL, P2, SELECTIVE, SP, V2, ZERO1, ZERO3
from tests.distributed.test_training import BLOCK, GPT, GQA, MHA, check, cp
from tests.distributed.training_runs import data_of, evaluated_loss, make_job, run_training, take_steps
from tests.pairs import quick_too

BOTH = "--hidden-dropout 0.1 --attention-dropout 0.1"
HIDDEN = "--hidden-dropout 0.3 --attention-dropout 0"
WEIGHTS = "--hidden-dropout 0 --attention-dropout 0.3"
FPDT = "--fpdt --fpdt-chunk-size 13"
STREAM = "--fpdt --fpdt-chunk-size 22 --fpdt-stream-hidden"

LLAMA_CASES = [
    (2, f"{GQA} {BOTH}", cp(2, 1)),
    (4, f"{GQA} {BOTH}", f"{P2} {V2} {cp(2, 1)} {SELECTIVE}"),
    (2, f"{GQA} {HIDDEN}", f"{SP} --ffn-chunks 3 --loss-chunks 3"),
    (2, f"{GQA} {BOTH} --window-size 15,0", f"{cp(1, 2)} --fpdt --fpdt-chunk-size 32 --fpdt-stream-hidden"),
    (2, f"{GQA} {WEIGHTS}", f"{cp(2, 1)} --fpdt --fpdt-chunk-size 32 {FULL} --offload-checkpoints"),
    (2, f"{GQA} {BOTH} --position-embedding-type alibi", f"{cp(1, 2)} {ZERO3} --attention-kernel math"),
    (2, f"{GQA} {BOTH} --attention-mask document --micro-batch-size 1", f"--ring-parallel-size 2 {ZERO1} {BLOCK}"),
]
PARTITION = "--partition-position-embedding"
GPT_CASES = [
    (2, f"{MHA} {BOTH}", cp(2, 1)),
    (2, f"{MHA} {BOTH}", f"{SP} {PARTITION}"),
    (2, f"{MHA} {BOTH}", f"{cp(1, 2)} {STREAM} {PARTITION}"),
    (2, f"{MHA} {BOTH}", f"{P2} {FULL}"),
]


@pytest.mark.parametrize("world, model, grid", quick_too(LLAMA_CASES, (2, f"{GQA} {BOTH}", cp(2, 1))))
@pytest.mark.usual(0, 2, 3)
def test_llama_with_dropout_does_not_depend_on_the_grid(pool, on_one_process, world, model, grid):
    check(pool, on_one_process, world, model, grid, llama=True, steps=2)


@pytest.mark.parametrize("world, model, grid", GPT_CASES)
@pytest.mark.usual(1, 3)
def test_gpt_with_dropout_does_not_depend_on_the_grid(pool, on_one_process, world, model, grid):
    check(pool, on_one_process, world, f"{GPT} {model}", grid, llama=False, steps=2)


@pytest.mark.parametrize("world, grid", [(2, cp(1, 2)), (1, FPDT)])
@pytest.mark.usual(1)
def test_packed_documents_of_several_samples(pool, on_one_process, world, grid):
    """Each sample has separate tiles, and draws dropout by its own sample number."""
    model = f"{GQA} {BOTH} --attention-mask document --micro-batch-size 2"
    check(pool, on_one_process, world, model, grid, llama=True, steps=2)


def test_each_dropout_changes_the_loss(on_one_process):
    result = {
        flags: on_one_process(f"{GQA} --num-layers 2 {flags}", True, 2)[0][0]
        for flags in ("", BOTH, HIDDEN, WEIGHTS, "--hidden-dropout 0.1", "--attention-dropout 0.1")
    }
    assert len({round(loss, 7) for loss in result.values()}) == len(result), result
    assert all(abs(loss / result[""] - 1) < 0.05 for loss in result.values()), result


def test_the_smallest_dropout_changes_little(on_one_process):
    """One element of 32768 is dropped; the others are those of the model without dropout."""
    plain, least = (
        on_one_process(f"{GQA} --num-layers 2 {flags}", True, 2)
        for flags in ("", "--hidden-dropout 3.1e-5 --attention-dropout 3.1e-5")
    )
    for mine, whole in zip(least[:2], plain[:2]):
        assert mine == pytest.approx(whole, rel=1e-3) and mine != whole


def evaluation_losses(flags):
    """The loss of an evaluation before training, and of the first training step."""
    job = make_job(f"{flags} --eval-iters 1")
    return evaluated_loss(job, data_of(job, 1)), take_steps(job)[0].lm_loss


@pytest.mark.parametrize("memory", ["", FPDT])
def test_nothing_is_dropped_in_evaluation(pool, memory):
    plain, dropped = (pool.run(evaluation_losses, 1, f"{GQA} {memory} {flags}")[0] for flags in ("", BOTH))
    assert plain[0] == dropped[0] and plain[1] != dropped[1]


def test_half_precision(pool):
    """Compare two grids up to rounding."""
    flags = f"{GQA} --num-layers 2 --bf16 {BOTH}"
    one, two = (pool.run(run_training, 2, f"{flags} {grid}", True, 3)[0] for grid in (cp(2, 1), cp(1, 2)))
    assert one[0] == pytest.approx(two[0], rel=2e-4)
