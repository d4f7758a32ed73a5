# SPDX-License-Identifier: Apache-2.0
"""A job that loads while another one saves and removes checkpoints gets one of them or a refusal, never a mix."""

import os
import signal
import time

import pytest
import torch

from megatron.training.refusal import Refusal
from tests.distributed.pool import fork_server
from tests.distributed.training_runs import make_job, save_job
from tests.patience import patience

SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --hidden-dropout 0.1"


def fill(job, value):
    """Set every weight and every optimizer state to this number."""
    with torch.no_grad():
        for chunk in job.model_chunks:
            for parameter in chunk.parameters():
                parameter.fill_(value)
        for one in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
            for states in one.optimizer.state.values():
                for state in states.values():
                    state.fill_(value)


def numbers_in(job):
    """The distinct numbers among weights and states."""
    result = {float(number) for chunk in job.model_chunks for p in chunk.parameters() for number in p.detach().unique()}
    for one in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        for states in one.optimizer.state.values():
            for state in states.values():
                result |= {float(number) for number in state.unique()}
    return result


def save_again_and_again(folder, same_iteration):
    """One process that saves checkpoints in a row, each filled with one number, and removes older ones."""
    os.setsid()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    import torch.distributed as dist

    from megatron.training.checkpoint import checkpoint_folder
    from tests.distributed.training_runs import train_job

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job, number = make_job(SMALL), 0
    train_job(job, 1)
    while True:
        number += 1
        job.progress.iteration = 1 if same_iteration else number
        fill(job, number)
        save_job(folder, job)
        checkpoint_folder.remove_older(folder, job.progress.iteration, 1, None)


def loaded(folder):
    """(iteration, numbers) of the loaded checkpoint, or the refusal."""
    try:
        job = make_job(f"{SMALL} --load {folder}")
    except Refusal as refusal:
        return str(refusal)
    return job.progress.iteration, sorted(numbers_in(job))


def loaded_while_replaced(folder, others):
    """Replace the checkpoint by another one of the same iteration during a load; returns the refusal."""
    from megatron.training.checkpoint import checkpoint

    read = checkpoint.load_state

    def read_after_replacing(*args):
        os.rename(folder / "iter_0000001", folder / "before")
        os.rename(others / "iter_0000001", folder / "iter_0000001")
        return read(*args)

    checkpoint.load_state = read_after_replacing
    try:
        return loaded(folder)
    finally:
        checkpoint.load_state = read


def saved(folder, number):

    job = make_job(SMALL)
    job.progress.iteration = 1
    fill(job, number)
    save_job(folder, job)


@pytest.mark.lab
def test_a_checkpoint_that_is_replaced_in_the_middle_of_a_load(pool, tmp_path):
    for number in (1, 2):
        pool.run(saved, 1, str(tmp_path / str(number)), number)
    message = pool.run(loaded_while_replaced, 1, tmp_path / "1", tmp_path / "2")[0]
    assert f"{tmp_path}/1/iter_0000001 was removed or replaced while it was loaded" in message
    assert pool.run(loaded, 1, tmp_path / "1")[0][0] == 1


@pytest.mark.full
@pytest.mark.parametrize("same_iteration", [False, True], ids=["new ones", "the same one"])
def test_a_load_while_another_job_saves(pool, tmp_path, same_iteration):
    folder, times = tmp_path / "c", 50
    saver = fork_server().Process(target=save_again_and_again, args=(str(folder), same_iteration))
    saver.start()
    try:
        end = time.monotonic() + patience(60)
        while not (folder / "latest_checkpointed_iteration.txt").exists():
            assert saver.is_alive() and time.monotonic() < end
            time.sleep(0.05)
        whole, refused = [], []
        for _ in range(times):
            result = pool.run(loaded, 1, str(folder), timeout=60)[0]
            assert saver.is_alive()
            (refused if isinstance(result, str) else whole).append(result)
    finally:
        os.kill(saver.pid, signal.SIGKILL)
        saver.join()
    for iteration, numbers in whole:
        assert len(numbers) == 1 and (same_iteration or numbers == [iteration]), (iteration, numbers)
    for line in refused:
        assert str(folder) in line and "\n" not in line
    kinds = {line.replace(str(folder), "") for line in refused}
    print(f"\n{len(whole)} of {times} loaded one whole checkpoint, {len(refused)} were refused: {kinds}")
