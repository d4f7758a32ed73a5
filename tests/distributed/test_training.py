# SPDX-License-Identifier: Apache-2.0
"""Grid invariance: losses over 20 steps and every parameter's gradient do not depend on the grid.

Each case is the real training program on 1, 2, 4 or 8 processes, compared with the same program on one process.
"""

from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.distributed import flags
from tests.distributed.flags import FULL, GQA, P2, SELECTIVE, SP, T2, V2, ZERO1, ZERO2, ZERO3
from tests.distributed.training_runs import compare_gradients, make_job, run_training, train_job
from tests.pairs import quick_too

MQA, MHA = "--group-query-attention --num-query-groups 1", ""
P4 = "--pipeline-model-parallel-size 4"
GPT = "--hidden-dropout 0 --attention-dropout 0"  # learned positions, LayerNorm, GELU, biases, tied embeddings
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
KEEP = "--keep-attention"
GATHER = "--cp-comm-type all_gather"
ACCOUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"

SMALL_BUCKETS = "--micro-batch-size 1 --ddp-bucket-size 5000"  # the output layer has a separate bucket
BATCH_6 = "--micro-batch-size 1 --global-batch-size 6"


def cp(ulysses: int, ring: int, balance: str = "zigzag") -> str:
    return flags.cp(ulysses, ring, balance)


# (processes, model flags, grid and memory flags)
LLAMA_CASES = [
    (1, GQA, BLOCK),
    (1, GQA, "--attention-kernel math"),
    (1, f"{GQA} --eod-mask-loss", "--loss-chunks 5"),
    (2, GQA, f"{ZERO1} --overlap-grad-reduce --overlap-param-gather {SMALL_BUCKETS} --loss-chunks 5"),
    (2, MHA, cp(1, 2, "contiguous")),
    (4, GQA, f"{SP} {cp(1, 2)} {GATHER} {ZERO1}"),
    (4, GQA, cp(2, 2)),
    (2, GQA, f"{ZERO3} {cp(1, 2)} {FULL}"),
    (2, GQA, f"{ZERO2} {cp(2, 1)} {FULL}"),
    (4, f"{GQA} --qk-layernorm", f"{ZERO3} {SP} {cp(2, 1)} {SELECTIVE}"),
    (4, GQA, f"{ZERO2} {SP} {cp(1, 2)} {FULL} --micro-batch-size 1"),
    (8, GQA, f"{SP} {P2} {cp(1, 2)} {FULL}"),
    (8, GQA, f"{P2} {cp(2, 2)} {ZERO1} --micro-batch-size 1"),
    (2, GQA, f"{P2} --decoder-first-pipeline-num-layers 3 {ZERO1}"),
    (4, GQA, f"{P2} --decoder-last-pipeline-num-layers 1 {cp(1, 2)} {FULL}"),
    (2, f"{GQA} --num-layers 7", f"{P2} {V2} --account-for-loss-in-pipeline-split"),
    (2, f"{GQA} --num-layers 6", f"{P2} {V2} {ACCOUNT}"),
    (2, GQA, f"{P2} --pipeline-model-parallel-layout Et|tt|t|L {ZERO1} --micro-batch-size 1"),
    (4, f"{GQA} --num-layers 5", f"{P4} --pipeline-model-parallel-layout E|(tt|)*2tL {FULL} --micro-batch-size 1"),
    (4, MQA, f"{SP} {cp(1, 2)} {FULL} {KEEP} --offload-checkpoints"),
]
GPT_CASES = [
    (4, GQA, f"{cp(2, 2)} {FULL} {ZERO1}"),
    (4, MHA, f"{P2} {ZERO1} --overlap-grad-reduce --overlap-param-gather {SMALL_BUCKETS} --loss-chunks 4"),
    (2, MHA, f"{ZERO2} --micro-batch-size 1 {FULL}"),
    (4, MHA, f"{ZERO3} {SP} {cp(2, 1)} --loss-chunks 4"),
    (2, MHA, f"{cp(2, 1)} --attention-mask full"),
    (2, MHA, f"{cp(1, 2)} --optimizer sgd --lr 0.03 --weight-decay 0.1"),
]
# These flags change the results on any grid, so the reference on one process has them too.
ALSO_IN_THE_REFERENCE = ("--attention-mask full", "--optimizer sgd --lr 0.03 --weight-decay 0.1", BATCH_6)


def steps(world: int, grid: str, long_runs: bool) -> int:
    """20 steps in full runs, except for FSDP, whose small messages take seconds; otherwise 3."""
    if not long_runs:
        return 3
    return 5 if "--zero-stage 2" in grid or "--zero-stage 3" in grid else 20


def check(pool, on_one_process, world, model, grid, llama, steps):
    if not any(flags in grid for flags in (P4, V2, BLOCK, "pipeline-num-layers", "parallel-layout")):
        model += " --num-layers 2"  # half the time; other cases need four layers
    changes = " ".join(flags for flags in ALSO_IN_THE_REFERENCE if flags in grid)
    losses, norms, grads = on_one_process(f"{model} {changes}", llama)
    assert losses[0] - losses[-1] > 0.1 * len(losses) / 20, "the reference does not learn"
    results = pool.run(run_training, world, f"{model} {grid}", llama, steps, timeout=180)
    for rank, (mine, my_norms, _) in enumerate(results):
        assert mine == pytest.approx(losses[:steps], rel=1e-5), f"losses of rank {rank}"
        assert my_norms[0] == pytest.approx(norms[0], rel=1e-6), f"first gradient norm of rank {rank}"
        # Later losses have a wider tolerance: Adam divides by the gradient's size, so if a gradient is zero except for
        # rounding (a key bias), its updates are noise. With --adam-eps 1e-4, or with SGD, they agree to 1e-7.
        assert my_norms == pytest.approx(norms[:steps], rel=1e-3), f"gradient norms of rank {rank}"
    compare_gradients([my_grads for *_, my_grads in results], grads)


@pytest.mark.parametrize(
    "world, model, grid", quick_too(LLAMA_CASES, (4, GQA, cp(2, 2)), (2, GQA, f"{ZERO3} {cp(1, 2)} {FULL}"))
)
@pytest.mark.usual(0, 1, 2, 3, 4, 7, 9, 14, 16, 18)
def test_llama_does_not_depend_on_the_grid(pool, on_one_process, long_runs, world, model, grid):
    check(pool, on_one_process, world, model, grid, llama=True, steps=steps(world, grid, long_runs))


@pytest.mark.parametrize("world, model, grid", GPT_CASES)
@pytest.mark.usual(0, 1, 4)
def test_gpt_does_not_depend_on_the_grid(pool, on_one_process, long_runs, world, model, grid):
    check(pool, on_one_process, world, f"{GPT} {model}", grid, llama=False, steps=steps(world, grid, long_runs))


@pytest.mark.lab
def test_larger_groups_of_micro_batches(pool, on_one_process):
    """Interleaved 1F1B with a group of five micro-batches and a group of the remaining two."""
    model, grid = f"{GQA} --micro-batch-size 1 --global-batch-size 7", f"{P2} {V2}"
    check(pool, on_one_process, 2, model, f"{grid} --microbatch-group-size-per-virtual-pipeline-stage 5", True, steps=3)


def counted(flags: str) -> tuple[int, int]:
    """What two steps count in the schedule of learning rates, and the samples that they consume."""
    job = make_job(f"{GQA} --num-layers 1 --micro-batch-size 1 {flags}")
    train_job(job, 2)
    return job.schedule.num_steps, job.progress.consumed_train_samples


def test_the_schedule_counts_samples_or_tokens_of_all_ranks(pool):
    assert pool.run(counted, 2, "--global-batch-size 4") == [(8, 8)] * 2
    assert pool.run(counted, 2, "--global-batch-size 4 --lr-decay-tokens 1000000") == [(8 * 64, 8)] * 2


def threads() -> int:
    """Threads of this rank; each process group of gloo has three, which wake up a hundred times per second."""
    return psutil.Process().num_threads()


@pytest.mark.parametrize(
    "flags", ["", ZERO1, f"{ZERO1} --overlap-grad-reduce --overlap-param-gather", f"{ZERO1} --fp16"]
)
def test_after_a_run_no_process_groups_and_no_model_remain(pool, flags):
    before = pool.run(threads, 2)
    pool.run(run_training, 2, f"{GQA} --num-layers 2 --micro-batch-size 1 {flags}", steps=1)
    assert pool.run(threads, 2) == before


# Masks and position schemes in whole training runs: losses and all gradients do not depend on the grid.
#
# The reference of each is the same run on one process without chunks, which
# `test_mask_attention.py` compares with dense attention.


STEPS = 2
DATA = Path(__file__).with_name("data")
MASK_FUNCTION = f"--attention-mask function --mask-function {DATA / 'mask_function.py'}:every_third"
BLOCKS = f"--attention-mask block-sparse --sparse-block-size 8 --sparse-pattern {DATA / 'blocks.json'}"
DOCUMENTS = "--attention-mask document"
RESET = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
WINDOW = "--window-size 15,0"
WIDE = "--window-size 39,0"
GLOBAL = "--attention-mask window --window-size 11,0 --window-global-tokens 4"
LONGFORMER = "--attention-mask block-sparse --sparse-block-size 8 --sparse-window-blocks 1"
BIGBIRD = f"{LONGFORMER} --sparse-pattern bigbird --sparse-random-blocks 2"
STRIDED = "--attention-mask block-sparse --sparse-block-size 4 --sparse-pattern strided --sparse-stride 3"
ALIBI = "--position-embedding-type alibi"
ONE = "--micro-batch-size 1 --global-batch-size 2"  # with the balance "documents"
FPDT = "--fpdt --fpdt-chunk-size 16"
FPDT_ALL = f"{FPDT} --fpdt-stream-hidden"

MASKS = (
    WINDOW, WIDE, f"{WINDOW} --reset-attention-mask", GLOBAL, LONGFORMER, BIGBIRD, STRIDED, BLOCKS, MASK_FUNCTION,
    DOCUMENTS, f"{DOCUMENTS} {ONE}", RESET, f"{RESET} {ONE}", f"{RESET} --attention-mask full {ONE}",
    "--reset-position-ids", ALIBI, f"{ALIBI} --attention-mask full", f"{ALIBI} {WINDOW} --reset-attention-mask",
    "--softmax-type learnable", "--softmax-type off-by-one",
)  # fmt: skip

# (processes, what is computed, grid)
LLAMA = [
    (2, WIDE, f"{FPDT_ALL} {cp(2, 1)}"),
    (2, GLOBAL, cp(1, 2)),
    (2, BIGBIRD, cp(2, 1)),
    (2, STRIDED, cp(1, 2, "contiguous")),
    (2, BLOCKS, cp(1, 2)),
    (4, MASK_FUNCTION, f"{cp(2, 2)} --mask-cpu-threshold 8"),
    (4, DOCUMENTS, f"{P2} {V2} {cp(1, 2)} {FULL}"),
    (2, f"{RESET} {ONE}", f"{P2} {SELECTIVE}"),
    (2, ALIBI, T2),
    (2, f"{ALIBI} --attention-mask full", cp(1, 2)),
    (4, f"{ALIBI} {WINDOW} --reset-attention-mask", f"{cp(2, 2)} {ZERO1}"),
    (4, "--softmax-type learnable", f"{ZERO3} {cp(2, 2)}"),
    (2, "--softmax-type off-by-one", cp(1, 2)),
]
LEARNED = [
    (2, RESET, cp(1, 2)),
    (2, f"{RESET} {ONE}", "--ring-parallel-size 2"),
    (2, f"{WINDOW} {DOCUMENTS}", f"{ZERO3} {cp(1, 2)}"),
]


@pytest.fixture(scope="module")
def few_steps_alone(on_one_process):
    """The reference run of a mask, a few steps long."""
    return partial(on_one_process, steps=STEPS)


@pytest.mark.parametrize("world, what, grid", LLAMA)
@pytest.mark.usual(1, 3, 4, 8, 9, 12)
def test_llama_with_a_mask_does_not_depend_on_the_grid(pool, few_steps_alone, world, what, grid):
    check(pool, few_steps_alone, world, f"{GQA} {what}", grid, llama=True, steps=STEPS)


@pytest.mark.parametrize("world, what, grid", LEARNED)
@pytest.mark.usual(0)
def test_learned_positions_do_not_depend_on_the_grid(pool, few_steps_alone, world, what, grid):
    check(pool, few_steps_alone, world, f"{GPT} {what}", grid, llama=False, steps=STEPS)


def test_each_mask_changes_the_loss(few_steps_alone):
    """The masks change the loss; otherwise the comparisons above would prove nothing."""
    result = {what: few_steps_alone(f"{GQA} {what} --num-layers 2", True)[0][0] for what in MASKS}
    result["causal"] = few_steps_alone(f"{GQA} --num-layers 2", True)[0][0]
    assert len({round(loss, 7) for loss in result.values()}) == len(result), result
