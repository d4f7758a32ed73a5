# SPDX-License-Identifier: Apache-2.0
"""Two jobs that save in one folder, and a job that takes over from one that was killed: nothing is damaged or mixed."""

import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron.training.checkpoint.checksums import damage
from megatron.training.checkpoint.megatron_lm.places import TRACKER, checkpoints_in, run_of
from megatron.training.checkpoint.owner import CARDS, take
from tests.distributed.test_program import FLAGS, PROGRAM
from tests.faults.kills import ENVIRONMENT, losses, run_and_kill, text
from tests.patience import patience
from tests.program import meeting, run_ranks, start_forked

OWNERS = int(os.environ.get("OWNERS", "2"))
ITERATIONS, RANKS = 12, 2


def flags(folder: Path, more: str = "") -> list[str]:
    return (
        f"{FLAGS} --train-iters {ITERATIONS} --eval-iters 0 --save-interval 1 --save {folder}/c --load {folder}/c "
        f"{more}"
    ).split()


def undisturbed(folder: Path, more: str, ranks: int) -> tuple[dict, float]:
    """Losses of the run that nobody disturbs, and the seconds that it took."""
    begin = time.monotonic()
    done = run_ranks(PROGRAM, flags(folder, f"{more} --log-jsonl {folder}/log.jsonl"), ENVIRONMENT, ranks)
    assert [one.returncode for one in done] == [0] * ranks, done[0].stderr
    return losses(folder), time.monotonic() - begin


def assert_whole(folder: Path) -> None:
    """All checkpoints of the folder are undamaged and of one run, and nothing else is left."""
    there = checkpoints_in(folder / "c")
    assert list(there) == list(range(1, ITERATIONS + 1))
    assert [damage(path) for path in there.values()] == [None] * ITERATIONS
    runs = {run_of(path) for path in there.values()}
    assert len(runs) == 1 and len(runs.pop()) == 32
    assert (folder / "c" / TRACKER).read_text() == str(ITERATIONS)
    assert {path.name for path in (folder / "c").iterdir()} == {TRACKER, *(path.name for path in there.values())}


@pytest.mark.full
def test_of_two_jobs_in_one_folder_one_is_refused_and_nothing_is_damaged(tmp_path):
    draw, counts, more = random.Random(5), Counter(), "--ring-parallel-size 2 --zero-stage 1"
    whole, seconds = undisturbed(tmp_path / "whole", more, RANKS)
    rounds = 0
    while counts["refused"] < OWNERS:
        rounds += 1
        folder = tmp_path / f"{rounds}"
        wait = draw.choice((0.0, draw.uniform(0, 0.5), draw.uniform(0, seconds)))
        jobs = []
        with meeting(ENVIRONMENT, RANKS) as first, meeting(ENVIRONMENT, RANKS) as second:
            for number, (environments, pause) in enumerate(((first, wait), (second, 0.0))):
                logs, save = folder / f"logs{number}", draw.choice(("", "--async-save"))
                words = flags(folder, f"{more} {save} --log-jsonl {folder}/log{number}/log.jsonl")
                (folder / f"log{number}").mkdir(parents=True)
                ranks = [start_forked(PROGRAM, words, one, logs / str(rank)) for rank, one in enumerate(environments)]
                jobs.append((ranks, logs))
                time.sleep(pause)
            end = time.monotonic() + patience(100)
            for ranks, _ in jobs:
                for rank in ranks:
                    rank.join(max(0.0, end - time.monotonic()))
            codes = [[rank.exitcode for rank in ranks] for ranks, _ in jobs]
            for ranks, _ in jobs:
                for rank in ranks:
                    rank.kill()
                    rank.join()
        errors = ["".join(text(logs / str(rank) / "err") for rank in range(RANKS)) for _, logs in jobs]
        assert_whole(folder)
        assert [0] * RANKS in codes, (codes, errors)
        if codes == [[0] * RANKS] * 2:  # the first had ended before the second began
            counts["one after the other"] += 1
            seconds *= 0.9
            continue
        refused = codes.index([2] * RANKS)
        told = [line for line in errors[refused].splitlines() if "error: " in line]
        assert len(told) == 1 and f"error: --save {folder}/c is in use by process " in told[0], errors
        assert losses(folder / f"log{1 - refused}") == whole
        counts["refused"] += 1
        counts[f"job {refused} of the two"] += 1
    print(f"\n{dict(counts)} in {rounds} rounds; every checkpoint whole and of one run, every loss the same")


@pytest.mark.full
def test_a_killed_job_is_followed_by_the_next_one_at_once(tmp_path):
    draw, counts, rounds = random.Random(6), Counter(), 0
    whole, seconds = undisturbed(tmp_path / "whole", "", 1)
    while counts["taken over"] < OWNERS:
        rounds += 1
        folder = tmp_path / f"{rounds}"
        words = flags(folder, f"{draw.choice(('', '--async-save'))} --log-jsonl {folder}/log.jsonl")
        killed = run_and_kill([words], tmp_path / f"logs{rounds}", draw, (0.1 * seconds, seconds))
        owned = list((folder / "c").glob(".owner.*")) if killed.what != "over" else []
        (done,) = run_ranks(PROGRAM, words, ENVIRONMENT, 1)
        assert done.returncode == 0, done.stderr
        told = re.findall(r"took over --save \S+ from process \d+ on \S+ since .*, which has ended", done.stdout)
        # A job that was killed before it owned the folder has nothing that could be taken over.
        assert len(told) == len(owned) or (not told and "ready after" not in killed.said), done.stdout
        assert losses(folder) == whole
        assert_whole(folder)
        counts["taken over" if told else "killed before or after"] += 1
    print(f"\n{dict(counts)} in {rounds} rounds; every checkpoint whole and of one run, every loss the same")


def until(holds, job) -> None:
    end = time.monotonic() + patience(60)
    while not holds():
        assert job.is_alive() and time.monotonic() < end
        time.sleep(0.05)


def test_a_job_that_has_lost_its_folder_ends_and_changes_nothing_there(tmp_path):
    """As after a stop that was long enough for a job on another machine to take over."""
    folder, logs = tmp_path / "c", tmp_path / "logs"
    words = [*flags(tmp_path, "--async-save"), "--train-iters", "1000000", "--keep-last-checkpoints", "2"]
    with meeting(ENVIRONMENT, 1) as (environment,):
        job = start_forked(PROGRAM, words, environment, logs)
        try:
            until(lambda: (folder / TRACKER).exists(), job)
            next(folder.glob(CARDS)).unlink()  # what who takes over does first
            owner = take(folder, [])
            job.join(patience(60))
            assert job.exitcode == 1
        finally:
            job.kill()
            job.join()
    said = [line for line in text(logs / "out").splitlines() if "any more" in line]
    assert any("stopped after iteration" in line for line in said) and "Traceback" not in text(logs / "err")
    assert f"--save {folder} is not this job's any more: process {os.getpid()} on " in said[-1]
    assert len(said) <= 3, said  # a save that had begun, or one that was due before the loss was noticed, says so
    owner.check()
    owner.release()
    assert all(damage(path) is None for path in checkpoints_in(folder).values())
