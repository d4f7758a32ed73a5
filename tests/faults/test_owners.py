# SPDX-License-Identifier: Apache-2.0
"""Two jobs that save in one folder, and a job that takes over from one that was killed: nothing is damaged or mixed."""

import os
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron.training.checkpoint.checkpoint_folder import check_writable
from megatron.training.checkpoint.megatron_lm.places import TRACKER, checkpoints_in, run_of
from megatron.training.ownership.lock_file import LOCK_FILES, Owner, acquire
from megatron.training.refusal import Refusal
from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.distributed.training_runs import damage
from tests.faults.bad_inputs import TOOLS
from tests.faults.kills import ENVIRONMENT, losses, run_and_kill, text
from tests.patience import patience
from tests.program import meeting, run_forked, run_ranks, start_forked

OWNERS = int(os.environ.get("OWNERS", "2"))
ITERATIONS, RANKS = 12, 2


def flags(folder: Path, more: str = "") -> list[str]:
    return (
        f"{FLAGS} --train-iters {ITERATIONS} --eval-iters 0 --save-interval 1 --save {folder}/c --load {folder}/c "
        f"{more}"
    ).split()


def undisturbed(folder: Path, more: str, ranks: int) -> tuple[dict, float]:
    """Losses and seconds of an undisturbed run."""
    begin = time.monotonic()
    done = run_ranks(PROGRAM, flags(folder, f"{more} --log-jsonl {folder}/log.jsonl"), ENVIRONMENT, ranks)
    assert [one.returncode for one in done] == [0] * ranks, done[0].stderr
    return losses(folder), time.monotonic() - begin


def assert_whole(folder: Path) -> None:
    """Check that all checkpoints of the folder are undamaged and of one run, and that no other file is left."""
    checkpoints = checkpoints_in(folder / "c")
    assert list(checkpoints) == list(range(1, ITERATIONS + 1))
    assert [damage(path) for path in checkpoints.values()] == [None] * ITERATIONS
    runs = {run_of(path) for path in checkpoints.values()}
    assert len(runs) == 1 and len(runs.pop()) == 32
    assert (folder / "c" / TRACKER).read_text() == str(ITERATIONS)
    assert {path.name for path in (folder / "c").iterdir()} == {TRACKER, *(path.name for path in checkpoints.values())}


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
        message = [line for line in errors[refused].splitlines() if "error: " in line]
        assert len(message) == 1 and f"error: --save {folder}/c is in use by process " in message[0], errors
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
        message = re.findall(r"took over --save \S+ from process \d+ on \S+ since .*, which has ended", done.stdout)
        # A job that was killed before it owned the folder leaves nothing to take over.
        assert len(message) == len(owned) or (not message and "ready after" not in killed.output), done.stdout
        assert losses(folder) == whole
        assert_whole(folder)
        counts["taken over" if message else "killed before or after"] += 1
    print(f"\n{dict(counts)} in {rounds} rounds; every checkpoint whole and of one run, every loss the same")


def until(condition, job) -> None:
    end = time.monotonic() + patience(60)
    while not condition():
        assert job.is_alive() and time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.lab
def test_a_job_that_has_lost_its_folder_ends_and_changes_nothing_there(tmp_path):
    """Take the folder over as a job on another machine does when this job has stopped for long."""
    folder, logs = tmp_path / "c", tmp_path / "logs"
    words = [*flags(tmp_path, "--async-save"), "--train-iters", "1000000", "--keep-last-checkpoints", "2"]
    with meeting(ENVIRONMENT, 1) as (environment,):
        job = start_forked(PROGRAM, words, environment, logs)
        try:
            until(lambda: (folder / TRACKER).exists(), job)
            next(folder.glob(LOCK_FILES)).unlink()  # the first action of a job that takes over
            acquire(owner := Owner(folder, "0" * 32), [])
            job.join(patience(60))
            assert job.exitcode == 1
        finally:
            job.kill()
            job.join()
    printed = [line for line in text(logs / "out").splitlines() if "any more" in line]
    assert any("stopped after iteration" in line for line in printed) and "Traceback" not in text(logs / "err")
    # The job may look at the folder after the lock file is gone and before the new one is there.
    reasons = (f"process {os.getpid()} on ", "another job has taken it over, or somebody removed it")
    assert any(f"--save {folder} is not this job's any more: {reason}" in printed[-1] for reason in reasons)
    assert len(printed) <= 3, printed  # one line for a save that was in progress or due
    owner.check()
    owner.release()
    assert all(damage(path) is None for path in checkpoints_in(folder).values())


# Owners and modes: a file that may not be read or written gives one line, and nothing changes; other files work.


needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can make files of another user"
)
OTHER = 65534  # the id of another user
RUN = f"{FLAGS} --train-iters 2 --eval-iters 0"
OWNED_TRACKER = "latest_checkpointed_iteration.txt"


def run(words, umask="022", program=PROGRAM):
    """The result of a program without root's privileges."""
    wrapper = ROOT / "tests" / "without_privileges.py"
    return run_forked(wrapper, [umask, str(program), *words.split()], ENVIRONMENT)


def give_away(path, mode=None):
    """Give a path and everything in it to another user."""
    for one in (path, *path.rglob("*")):
        os.chown(one, OTHER, -1)
    if mode is not None:
        path.chmod(mode)


def state_of(folder):
    return {path: (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def refused(folder, words, program=PROGRAM):
    """The one line."""
    before = state_of(folder)
    done = run(words, program=program)
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert state_of(folder) == before
    return lines[0]


@needs_root
def test_files_of_another_user(tmp_path):
    kept, save = tmp_path / "kept", tmp_path / "c"
    done = run(f"{RUN} --save {save}", umask="077")
    assert done.returncode == 0, done.stderr
    assert {path.stat().st_mode & 0o777 for path in save.rglob("*")} == {0o700, 0o600}
    kept.mkdir()
    give_away(kept)
    give_away(save, 0o700)
    assert f"{save}/{OWNED_TRACKER}: permission denied" in refused(tmp_path, f"{RUN} --load {save}")
    assert f"--save {kept}/x: {kept} cannot be written to" in refused(tmp_path, f"{RUN} --save {kept}/x")


@needs_root
@pytest.mark.full
def test_everything_else_that_belongs_to_another_user(tmp_path):
    save, text, data = tmp_path / "c", tmp_path / "text.jsonl", tmp_path / "d_text_document"
    assert run(f"{RUN} --save {save}", umask="077").returncode == 0
    text.write_text('{"text": "some words to read"}\n' * 400)
    give = f"--input {text} --tokenizer-type ByteLevelTokenizer --append-eod --workers 1 --output-prefix"
    preprocess = TOOLS / "preprocess_data.py"
    assert run(f"{give} {tmp_path}/d", program=preprocess).returncode == 0
    read = RUN.replace("--mock-data --tokenizer-type NullTokenizer --vocab-size 100", "")
    read = f"{read} --tokenizer-type ByteLevelTokenizer --data-path {data}"
    assert run(read).returncode == 0
    count = 0
    give_away(save, 0o700)
    for words, program in (
        (f"{RUN} --load {save} --use-checkpoint-args", PROGRAM),
        (f"{RUN} --load {save} --ckpt-step 2", PROGRAM),
        (f"{RUN} --save {save}/inside", PROGRAM),
        (f"--from {save} --to-hf {tmp_path}/hf", TOOLS / "convert_hf.py"),
        (f"--load {save} --prompt 1 --max-new-tokens 2", TOOLS / "generate.py"),
        (f"--load {save} --seq-length 32 --eval-tasks perplexity", TOOLS / "evaluate.py"),
        (f"{give} {save}/d", preprocess),
    ):
        assert "ermission denied" in refused(tmp_path, words, program)
        count += 1
    save.chmod(0o755)
    for path in (save / OWNED_TRACKER, save / "iter_0000002"):  # with modes 600 and 700
        line = refused(tmp_path, f"{RUN} --load {save}")
        assert "ermission denied" in line and str(path) in line
        path.chmod(0o755)
        count += 1
    (cache,) = (tmp_path / "index-cache").iterdir()
    for path in (*cache.glob("*.npy"), cache, Path(f"{data}.bin"), Path(f"{data}.idx"), text):
        mode = path.stat().st_mode
        give_away(path, 0o600)
        words, program = (f"{give} {tmp_path}/e", preprocess) if path == text else (read, PROGRAM)
        assert "ermission denied" in refused(tmp_path, words, program), path
        path.chmod(mode)
        count += 1
    give_away(cache.parent, 0o700)  # indices are then built in memory
    done = run(read)
    assert done.returncode == 0 and "every rank builds in memory" in done.stderr
    print(f"\n{count} files and folders of another user: a line each, nothing changed")


@needs_root
@pytest.mark.full
def test_groups_masks_and_older_checkpoints_of_others(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, -1, OTHER)
    shared.chmod(0o2775)
    assert run(f"{RUN} --save {shared}/c", umask="027").returncode == 0
    result = [path.stat() for path in (shared / "c", *(shared / "c").rglob("*"))]
    assert {one.st_gid for one in result} == {OTHER} and {one.st_mode & 0o7777 for one in result} == {0o2750, 0o640}

    give_away(shared / "c" / "iter_0000002", 0o755)  # in a folder of ours
    for path in (shared / "c" / "iter_0000002").iterdir():
        path.chmod(0o644)
    more = f"{RUN} --override-opt-param-scheduler --save {shared}/c --load {shared}/c --keep-last-checkpoints 1"
    done = run(more.replace("--train-iters 2", "--train-iters 3"))
    assert done.returncode == 0 and (shared / "c" / OWNED_TRACKER).read_text() == "3", done.stderr
    assert [path.name for path in (shared / "c").glob("iter_*")] == ["iter_0000003"]

    blind = tmp_path / "blind"
    blind.mkdir(mode=0o333)  # nobody can list it, so nobody can tell whether another run owns it
    assert "cannot be listed" in refused(tmp_path, f"{RUN} --save {blind}")


def test_a_tracker_that_cannot_be_replaced_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / OWNED_TRACKER).write_text("2")
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Refusal, match="belongs to another user"):
        check_writable(str(tmp_path))
    tmp_path.chmod(0o777)
    check_writable(str(tmp_path))
