# SPDX-License-Identifier: Apache-2.0
"""Flags that switch something off, or that only the loop reads: each is seen in one short run on one process."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.training_runs import make_job, train_job

SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 4"


def loop(job):
    """The real loop, silent; (whether it saved at the end, how often garbage was collected, whether at will)."""
    import gc

    from megatron.training.features.stopping import Stopper
    from megatron.training.loop import training_loop
    from megatron.training.report.reporter import Reporter

    collected, collect = [], gc.collect
    gc.collect = lambda *args: collected.append(gc.isenabled()) or collect(*args)
    reporter = Reporter(job.config, active=False, first_iteration=0, last_iteration=job.iterations)
    stopper = Stopper(job.runtime.device, None)
    try:
        return training_loop(job, reporter, stopper), collected
    finally:
        gc.collect = collect
        stopper.restore()


def save_some(folder):
    """Two steps, a checkpoint after each; without optimizer and random state."""
    flags = "--train-iters 2 --save-interval 1 --save-retain-interval 2 --no-save-optim --no-save-rng --manual-gc "
    saved, collected = loop(make_job(f"{SMALL} {flags} --manual-gc-interval 1 --peak-tflops 1 --save {folder}"))
    assert saved and collected.count(False) >= 2  # by hand, after each step


def contents(folder):
    from megatron.core.dist_checkpointing import load_common_state_dict

    return sorted(load_common_state_dict(folder))


def begin(flags):
    """(iteration, a number for the weights, the next random number) of a run that is about to start, or its refusal."""
    import torch

    from megatron.training.refusal import Refusal

    try:
        job = make_job(f"{SMALL} {flags}")
    except Refusal as refusal:
        return str(refusal)
    weights = sum(parameter.detach().double().abs().sum().item() for parameter in job.chunks[0].parameters())
    return job.progress.iteration, weights, torch.rand(1).item()


def save_and_draw(folder):
    """The random number that follows upon a save."""
    import torch

    from megatron.training.checkpoint import checkpoint

    job = make_job(SMALL)
    torch.rand(7)
    checkpoint.save(folder, job.progress, job.chunks, job.optimizer, job.schedule, job.config)
    return torch.rand(1).item()


def not_a_number(flags):
    """A step whose weights hold a NaN."""
    import torch

    from megatron.training.step import Diverged

    job = make_job(f"{SMALL} {flags}")
    with torch.no_grad():
        next(job.chunks[0].parameters()).fill_(float("nan"))
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
    assert "no optimizer state" in pool.run(begin, 1, f"--load {tmp_path}")[0]


def test_the_random_state_is_left_where_it_is(pool, tmp_path: Path):
    saved = pool.run(save_and_draw, 1, str(tmp_path), timeout=120)[0]
    assert pool.run(begin, 1, f"--load {tmp_path}")[0][2] == saved
    assert pool.run(begin, 1, f"--load {tmp_path} --no-load-rng")[0][2] != saved


def test_going_on_with_a_loss_that_is_no_number(pool):
    assert pool.run(not_a_number, 1, "")[0] == "the loss is nan"
    assert pool.run(not_a_number, 1, "--no-check-for-nan-in-loss-and-grad")[0] == "went on"


def train_to_the_end(flags):
    job = make_job(f"{SMALL} --train-iters 4 --micro-batch-size 1 {flags}")
    assert loop(job)[0]
    return job.progress.iteration, job.progress.consumed_train_samples


def test_going_on_with_a_smaller_batch(pool, tmp_path: Path):
    """The data were built for as many samples as a run of small batches alone takes, and ended before it."""
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
    from tests.distributed.training_runs import RUN, SHAPE

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
