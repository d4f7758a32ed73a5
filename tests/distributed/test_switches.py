# SPDX-License-Identifier: Apache-2.0
"""--rampup-seq-length: a step equals one with shorter samples on every grid; and its counts of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.distributed.flags import LLAMA, RUN, SHAPE
from tests.distributed.training_runs import make_job, refusal_of, run_loop, save_job, train_job
from tests.errors import worst

RAMP = "--rampup-seq-length 16 8 6"  # 24, 32, 40, 48, 56, 64 of 64 tokens
LENGTHS = [24, 32, 40, 48, 56, 64, 64]


def one_step(flags, cut):
    """Loss and gradients of the first step with 24 of 64 tokens; the other tokens are masked or absent."""
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
    step.train_step = lambda *args, **more: train_step(*args, **more | ({} if cut else {"length": 24}))
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
@pytest.mark.usual(0, 2)
def test_a_step_is_that_of_shorter_samples(pool, shorter, world, flags):
    results = pool.run(one_step, world, flags, False, timeout=120)
    losses, norms, expected = shorter
    gradients = {name: value for _, _, result in results for name, value in result.items()}
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
    assert progress.consumed_train_samples == 28
    assert [length or 64 for length, _ in seen] == LENGTHS
    assert [rate for _, rate in seen] == pytest.approx([1e-3 * (1 - count / 2000) for count in tokens[:7]])


# Flags that switch something off or that only the loop reads, each in one short run on one process.


SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 4"


def loop(job):
    """Run the real loop; returns (whether it saved at the end, whether each garbage collection was automatic)."""
    import gc

    collected, collect = [], gc.collect
    gc.collect = lambda *args: collected.append(gc.isenabled()) or collect(*args)
    try:
        return run_loop(job), collected
    finally:
        gc.collect = collect


def save_some(folder):
    """Two steps, a checkpoint after each; without optimizer and random state."""
    flags = "--train-iters 2 --save-interval 1 --save-retain-interval 2 --no-save-optim --no-save-rng --manual-gc "
    saved, collected = loop(make_job(f"{SMALL} {flags} --manual-gc-interval 1 --peak-tflops 1 --save {folder}"))
    assert saved and collected.count(False) >= 2  # explicit, after each step


def contents(folder):
    from megatron.core.dist_checkpointing import load_common_state_dict

    return sorted(load_common_state_dict(folder))


def begin(flags):
    """(iteration, a number for the weights, the next random number) of a run that is about to start."""
    import torch

    job = make_job(f"{SMALL} {flags}")
    weights = sum(parameter.detach().double().abs().sum().item() for parameter in job.model_chunks[0].parameters())
    return job.progress.iteration, weights, torch.rand(1).item()


def save_and_draw(folder):
    """The next random number after a save."""
    import torch

    job = make_job(SMALL)
    torch.rand(7)
    save_job(folder, job)
    return torch.rand(1).item()


def not_a_number(flags):
    """A step whose weights hold a NaN."""
    import torch

    from megatron.training.step import Diverged

    job = make_job(f"{SMALL} {flags}")
    with torch.no_grad():
        next(job.model_chunks[0].parameters()).fill_(float("nan"))
    try:
        train_job(job, 1)
    except Diverged as error:
        return str(error.args[0])
    return "went on"


def test_saving_and_loading_in_part(pool, tmp_path: Path):
    pool.run(save_some, 1, str(tmp_path), timeout=120)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]
    there = pool.run(contents, 1, str(tmp_path / "iter_0000002"))[0]
    assert "optimizer" not in there and "schedule" not in there and "rng" not in there and "progress" in there
    fresh = pool.run(begin, 1, "")[0]
    started = pool.run(begin, 1, f"--load {tmp_path}/none --pretrained-checkpoint {tmp_path}")[0]
    resumed = pool.run(begin, 1, f"--load {tmp_path} --no-load-optim")[0]
    assert fresh[0] == started[0] == 0 and resumed[0] == 2
    assert fresh[1] != started[1] == resumed[1]
    assert "no optimizer state" in pool.run(refusal_of, 1, f"{SMALL} --load {tmp_path}")[0]


def test_the_random_state_is_left_where_it_is(pool, tmp_path: Path):
    saved = pool.run(save_and_draw, 1, str(tmp_path), timeout=120)[0]
    assert pool.run(begin, 1, f"--load {tmp_path}")[0][2] == saved
    assert pool.run(begin, 1, f"--load {tmp_path} --no-load-rng")[0][2] != saved


def test_a_nan_loss_ends_the_run_unless_unchecked(pool):
    assert pool.run(not_a_number, 1, "")[0] == "the loss is nan"
    assert pool.run(not_a_number, 1, "--no-check-for-nan-in-loss-and-grad")[0] == "went on"


def train_to_the_end(flags):
    job = make_job(f"{SMALL} --train-iters 4 --micro-batch-size 1 {flags}")
    assert loop(job)[0]
    return job.progress.iteration, job.progress.consumed_train_samples


@pytest.mark.lab
def test_going_on_with_a_smaller_batch(pool, tmp_path: Path):
    """Enough samples are built for both batch sizes, so that the data do not end early."""
    assert pool.run(train_to_the_end, 1, f"--exit-interval 2 --save {tmp_path}", timeout=120)[0] == (2, 8)
    flags = f"--global-batch-size 1 --load {tmp_path} --override-opt-param-scheduler"
    assert pool.run(train_to_the_end, 1, flags, timeout=120)[0] == (4, 10)


def evaluate_on_groups(folder, groups):
    """Losses of the validation data, by name."""
    import torch.distributed as dist

    from megatron.training.arguments.parser import parse
    from megatron.training.features.held_out import evaluate_held_out
    from megatron.training.job import prepare
    from megatron.training.report.reporter import Reporter
    from megatron.training.setup import start

    flags = f"{SHAPE} {RUN} {SMALL} --num-layers 2 --eval-iters 1 --train-iters 1 --data-cache-path {folder}/cache"
    words = [*flags.replace("--mock-data", "").split(), "--pipeline-model-parallel-size", "2"]
    words += ["--train-weighted-split-paths", f"T: 1 0:0.5 {folder}/a", "--valid-weighted-split-paths", *groups]
    config = parse(words, None, dist.get_world_size())
    job = prepare(config, start(config))
    reporter = Reporter(config, active=False, first_iteration=0, last_iteration=1)
    return evaluate_held_out(job, reporter, "validation")


def test_several_validation_sets_by_name(pool, tmp_path: Path):
    """Each loss is that of a run that has this set alone."""
    from tests.unit.test_data import write

    write(tmp_path / "a", documents=100, high=300)
    groups = [f"ONE: 1 0.5:0.7 {tmp_path}/a", f"TWO: 1 0.7:1 {tmp_path}/a"]
    both, one, two = (
        pool.run(evaluate_on_groups, 2, str(tmp_path), chosen, timeout=120)[0]
        for chosen in (groups, groups[:1], groups[1:])
    )
    assert both == {"validation_ONE_loss": one["validation_loss"], "validation_TWO_loss": two["validation_loss"]}
    assert len(set(both.values())) == 2


# --keep-best-checkpoints: the checkpoint with the lowest validation loss stays, after a restart too.


def trained(flags, losses):
    """Run the real loop with the given validation losses by iteration."""
    from megatron.training.features import held_out

    def evaluate(job, reporter, name, dataset):
        return {f"{name}_loss": losses[job.progress.iteration - 1]}

    job = make_job(f"{SMALL} {flags}")
    with patch.object(held_out, "evaluate_on", evaluate):
        return job.progress.iteration, run_loop(job)


@pytest.mark.lab
def test_the_best_stays_over_restarts(pool, tmp_path):
    flags = (
        f"--train-iters 7 --save {tmp_path} --load {tmp_path} --save-interval 1 --eval-interval 1 --eval-iters 1 "
        "--async-save --keep-last-checkpoints 1 --keep-best-checkpoints 1 --zero-stage 1"
    )
    losses = [3.0, 1.0, 2.0, 4.0, 1.5, float("nan"), 5.0]

    def there():
        return sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*"))

    assert pool.run(trained, 2, f"{flags} --exit-interval 4", losses, timeout=120)[0] == (0, True)
    assert there() == [2, 4]
    assert json.loads((tmp_path / "iter_0000002" / "validation_loss.json").read_text()) == {"validation_loss": 1.0}
    assert "validation_loss.json" in json.loads((tmp_path / "iter_0000002" / "checksums.json").read_text())["files"]
    assert pool.run(trained, 2, flags, losses, timeout=120)[0] == (4, True)
    assert there() == [2, 7]


# Counts after loading: each of Adam's steps counts once; with --reset-iteration iterations start at 0.


RESET_RUN = "--lr-decay-style linear --train-iters 50"


def train_and_save(flags, folder):
    """Three steps, a save, and the learning rate and the first gradient of the fourth step."""
    job = make_job(flags)
    train_job(job, 3)
    save_job(folder, job)
    return job.optimizer.param_groups[0]["lr"], float(job.optimizer.optimizer.state_dict()["state"][0]["step"])


def go_on(flags, folder):
    job = make_job(f"{flags} --load {folder}")
    rate, state = job.optimizer.param_groups[0]["lr"], job.optimizer.optimizer.state_dict()["state"][0]
    before, steps = dict(vars(job.progress)), float(state["step"])
    return before, job.iterations, rate, steps, train_job(job, 1)[0][0], job.config.notes


@pytest.mark.parametrize("tokens", [False, True])
def test_counts_begin_anew(pool, tmp_path, tokens):
    flags = f"{RESET_RUN} --lr-decay-tokens 12800" if tokens else RESET_RUN
    rate, steps = pool.run(train_and_save, 1, flags, str(tmp_path))[0]
    going, _, their_rate, their_steps, loss, _ = pool.run(go_on, 1, flags, str(tmp_path))[0]
    assert (going["iteration"], their_rate, their_steps) == (3, rate, steps)
    again, iterations, new_rate, new_steps, new_loss, notes = pool.run(
        go_on, 1, f"{flags} --reset-iteration", str(tmp_path)
    )[0]
    assert again.pop("run") != going["run"]
    assert set(again.values()) == {0} and iterations == 50 and new_steps == steps
    assert new_rate == (pytest.approx(1e-3) if tokens else rate) and rate == pytest.approx(0.94e-3)
    assert new_loss < 5.5 and new_loss != loss  # trained weights on the first batch again
    assert any("--reset-iteration" in note for note in notes)


def steps_of(flags, folder):
    """Adam's counts after loading and after one more step, and how many tensors they are."""
    job = make_job(f"{flags} --load {folder}")
    parts = [part.optimizer for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer])]
    states, result = [state for part in parts for state in part.state.values()], []
    for _ in range(2):
        result.append({float(state["step"]) for state in states})
        train_job(job, 1)
    return *result, len(states) - len({state["step"].data_ptr() for state in states})


@pytest.mark.parametrize("stage", [0, 1])
def test_every_parameter_counts_its_own_steps_after_loading(pool, tmp_path, stage):
    """A shared tensor would be incremented by every parameter."""
    flags = f"{RESET_RUN} --zero-stage {stage}"
    pool.run(train_and_save, 1, flags, str(tmp_path))
    assert pool.run(steps_of, 1, flags, str(tmp_path)) == [({3.0}, {4.0}, 0)]
