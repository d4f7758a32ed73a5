# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of the whole job, or of one rank, at random moments: what goes on is the undisturbed run."""

import os
import random
import shutil
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.distributed.test_program import FLAGS, PROGRAM
from tests.faults.kills import ENVIRONMENT, losses, run_and_kill
from tests.program import run_ranks

KILLS = int(os.environ.get("KILLS", "1"))
ITERATIONS, INTERVAL, RANKS = 6 if KILLS == 1 else 10, 2, 2


def flags(folder: Path, more: str = "") -> list[str]:
    return (
        f"{FLAGS} --ring-parallel-size 2 --zero-stage 1 --train-iters {ITERATIONS} --eval-iters 0 "
        f"--save-interval {INTERVAL} --save {folder}/checkpoints --load {folder}/checkpoints "
        f"--log-jsonl {folder}/log.jsonl {more}"
    ).split()


def saved(folder: Path) -> int:
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def test_kills_at_random_moments(tmp_path):
    draw, counts, repeated = random.Random(1), Counter(), 0
    begin = time.monotonic()
    whole = tmp_path / "whole"
    done = run_ranks(PROGRAM, flags(whole), ENVIRONMENT, RANKS)
    assert [one.returncode for one in done] == [0] * RANKS, done[0].stderr
    seconds, reference = defaultdict(lambda whole=time.monotonic() - begin: whole), losses(whole)
    assert list(reference) == list(range(1, ITERATIONS + 1))

    folder, attempt = tmp_path / "killed", 0
    while counts["job"] + counts["rank"] < KILLS:
        attempt += 1
        before = saved(folder)
        said = flags(folder, draw.choice(("", "--async-save --keep-last-checkpoints 1")))
        end = run_and_kill([said] * RANKS, tmp_path / f"logs{attempt}", draw, (0.05, seconds[before]))
        counts[end.what] += 1
        if end.what == "over":  # machines are busy and idle by turns
            seconds[before] = end.seconds
        found = losses(folder)
        assert found == {one: reference[one] for one in found}, f"after {end.what} was killed\n{end.errors}"
        assert saved(folder) >= before, end.errors
        assert "common state dict differs" not in end.errors, end.errors  # core, of what every rank should save alike
        repeated = max(repeated, max(found, default=0) - saved(folder))
        if saved(folder) >= ITERATIONS - INTERVAL:
            shutil.rmtree(folder)
            counts["runs"] += 1
    done = run_ranks(PROGRAM, flags(folder), ENVIRONMENT, RANKS)
    assert [one.returncode for one in done] == [0] * RANKS, done[0].stderr
    assert losses(folder) == reference
    # The last step may be logged while its save is cut off, or, beside training, while the save before is written.
    assert repeated <= 2 * INTERVAL
    print(f"\n{dict(counts)} in {attempt} starts; at most {repeated} steps repeated; every loss and norm the same")
