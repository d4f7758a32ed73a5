# SPDX-License-Identifier: Apache-2.0
"""--rampup-seq-length: a step is that of shorter samples, on every grid; and what is counted along the way."""

from types import SimpleNamespace

import pytest

from tests.distributed.test_switches import loop
from tests.distributed.training_runs import LLAMA, RUN, SHAPE, make_job, train_job
from tests.errors import worst

RAMP = "--rampup-seq-length 16 8 6"  # 24, 32, 40, 48, 56, 64 of 64 tokens
LENGTHS = [24, 32, 40, 48, 56, 64, 64]


def one_step(flags, cut):
    """Loss and gradients of the first step at 24 of 64 tokens: the rest not counting, or not there."""
    from megatron.training import job as jobs
    from megatron.training import step
    from megatron.training.arguments.parser import parse
    from megatron.training.data.datasets import build_datasets
    from megatron.training.data.tokenizer import build_tokenizer

    flags = f"{flags} --hidden-dropout 0.1 --attention-dropout 0.1"
    made = make_job(f"{flags} --seq-length 24" if cut else flags)
    batches_for, train_step = jobs.batches_for, step.train_step

    def cut_batches(job, *_):
        config = parse(f"{SHAPE} {RUN}".split(), LLAMA, 1)
        whole, *_ = build_datasets(config, build_tokenizer(config.data, 301), (4, 0, 0))
        for batch in batches_for(job, whole, 0, 0):
            yield {name: value[:, :24].contiguous() if value.dim() == 2 else value for name, value in batch.items()}

    jobs.batches_for = cut_batches if cut else batches_for
    step.train_step = lambda *args: train_step(*args, length=None if cut else 24)
    try:
        return train_job(made, 1)
    finally:
        step.train_step, jobs.batches_for = train_step, batches_for


@pytest.fixture(scope="module")
def shorter(pool):
    return pool.run(one_step, 1, "", True, timeout=120)[0]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ""),
        (4, "--ulysses-parallel-size 2 --ring-parallel-size 2"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
        (2, "--ring-parallel-size 2 --fpdt --fpdt-chunk-size 16 --loss-chunks 2 --zero-stage 1"),
    ],
)
def test_a_step_is_that_of_shorter_samples(pool, shorter, world, flags):
    results = pool.run(one_step, world, flags, False, timeout=120)
    losses, norms, expected = shorter
    gradients = {name: value for _, _, found in results for name, value in found.items()}
    assert results[0][0] == pytest.approx(losses, rel=1e-5) and results[0][1] == pytest.approx(norms, rel=1e-5)
    assert set(gradients) == set(expected)
    for name, value in expected.items():
        assert worst((gradients[name] - value).abs().max().item()) <= 1e-5 * value.abs().max(), name


def whole_run(flags):
    from megatron.training import loop as loops

    job = make_job(flags)
    seen, plain = [], loops.train_step

    def watched(*args, **more):
        seen.append((more["length"], job.optimizer.param_groups[0]["lr"]))
        return plain(*args, **more)

    loops.train_step = watched
    try:
        assert loop(job)[0]
    finally:
        loops.train_step = plain
    return seen, SimpleNamespace(**vars(job.progress)), job.iterations


def test_what_a_run_counts(pool):
    """Steps of 4 samples; 1,100 tokens are reached in the 7th, the learning rate falls by tokens."""
    tokens = [4 * sum(LENGTHS[:step]) for step in range(8)]
    flags = f"{RAMP} --lr-decay-style linear --train-tokens 1100 --lr-decay-tokens 2000 --eval-iters 0"
    seen, progress, iterations = pool.run(whole_run, 1, flags, timeout=120)[0]
    assert iterations == progress.iteration == 7 and progress.consumed_train_tokens == tokens[7]
    assert [length or 64 for length, _ in seen] == LENGTHS
    assert [rate for _, rate in seen] == pytest.approx([1e-3 * (1 - count / 2000) for count in tokens[:7]])
