# SPDX-License-Identifier: Apache-2.0
"""What a run that is loaded counts: Adam's steps, each once; and with --reset-iteration, the iterations anew."""

import pytest

from tests.distributed.training_runs import make_job, train_job

RUN = "--lr-decay-style linear --train-iters 50"


def train_and_save(flags, folder):
    """Three steps, a save, and what the fourth has: its learning rate, and the gradient that it reads first."""
    from megatron.training.checkpoint import checkpoint

    job = make_job(flags)
    train_job(job, 3)
    checkpoint.save(folder, job.progress, job.chunks, job.optimizer, job.schedule, job.config)
    return job.optimizer.param_groups[0]["lr"], float(job.optimizer.optimizer.state_dict()["state"][0]["step"])


def go_on(flags, folder):
    job = make_job(f"{flags} --load {folder}")
    rate, state = job.optimizer.param_groups[0]["lr"], job.optimizer.optimizer.state_dict()["state"][0]
    before, steps = dict(vars(job.progress)), float(state["step"])
    return before, job.iterations, rate, steps, train_job(job, 1)[0][0], job.config.notes


@pytest.mark.parametrize("tokens", [False, True])
def test_counts_begin_anew(pool, tmp_path, tokens):
    flags = f"{RUN} --lr-decay-tokens 12800" if tokens else RUN
    rate, steps = pool.run(train_and_save, 1, flags, str(tmp_path))[0]
    going, _, their_rate, their_steps, loss, _ = pool.run(go_on, 1, flags, str(tmp_path))[0]
    assert (going["iteration"], their_rate, their_steps) == (3, rate, steps)
    again, iterations, new_rate, new_steps, new_loss, notes = pool.run(
        go_on, 1, f"{flags} --reset-iteration", str(tmp_path)
    )[0]
    assert again.pop("run") != going["run"]
    assert set(again.values()) == {0} and iterations == 50 and new_steps == steps
    assert new_rate == (pytest.approx(1e-3) if tokens else rate) and rate == pytest.approx(0.94e-3)
    assert new_loss < 5.5 and new_loss != loss  # trained weights, and the first batch once more
    assert any("--reset-iteration" in note for note in notes)


def steps_of(flags, folder):
    """Adam's counts after loading and after one more step, and how many tensors they are."""
    job = make_job(f"{flags} --load {folder}")
    parts = [part.optimizer for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer])]
    states, found = [state for part in parts for state in part.state.values()], []
    for _ in range(2):
        found.append({float(state["step"]) for state in states})
        train_job(job, 1)
    return *found, len(states) - len({state["step"].data_ptr() for state in states})


@pytest.mark.parametrize("stage", [0, 1])
def test_every_parameter_counts_its_own_steps_after_loading(pool, tmp_path, stage):
    """One tensor for all would be counted up by each of them."""
    flags = f"{RUN} --zero-stage {stage}"
    pool.run(train_and_save, 1, flags, str(tmp_path))
    assert pool.run(steps_of, 1, flags, str(tmp_path)) == [({3.0}, {4.0}, 0)]
