# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of the whole job, or of one rank, at random moments: what goes on is the undisturbed run."""

import json
import os
import random
import shutil
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.distributed.test_program import FLAGS, PROGRAM
from tests.patience import patience
from tests.program import meeting, run_ranks, start_forked

KILLS = int(os.environ.get("KILLS", "2"))
ITERATIONS, INTERVAL, RANKS = 10, 2, 2
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def flags(folder: Path, more: str = "") -> list[str]:
    return (
        f"{FLAGS} --ring-parallel-size 2 --zero-stage 1 --train-iters {ITERATIONS} --eval-iters 0 "
        f"--save-interval {INTERVAL} --save {folder}/checkpoints --load {folder}/checkpoints "
        f"--log-jsonl {folder}/log.jsonl {more}"
    ).split()


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Of whole lines of a log: a kill may tear the last one."""
    file, found = folder / "log.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["iteration"]] = (row["lm_loss"], row["grad_norm"])
    return found


def saved(folder: Path) -> int:
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def text(file: Path) -> str:
    """Empty where its rank was killed before it opened it."""
    return file.read_text() if file.exists() else ""


def start_and_kill(folder: Path, logs: Path, draw: random.Random, seconds: float) -> tuple[str, str, float]:
    """What was killed, or "over", the errors that the ranks printed, and seconds until then.

    Args:
        seconds: that this start would take; the kill comes before.
    """
    with meeting(ENVIRONMENT, RANKS) as environments:
        said = flags(folder, draw.choice(("", "--async-save --keep-last-checkpoints 1")))
        ranks = [start_forked(PROGRAM, said, one, logs / str(rank)) for rank, one in enumerate(environments)]
        begin = time.monotonic()
        moment = begin + draw.uniform(0.05, seconds)
        while time.monotonic() < moment and any(rank.is_alive() for rank in ranks):
            time.sleep(0.01)
        taken = time.monotonic() - begin
        victims = ranks if draw.random() < 0.5 else [draw.choice(ranks)]
        over = not any(rank.is_alive() for rank in ranks)
        met = "ready after" in text(logs / "0" / "out")  # until then nobody but their launcher would notice
        for victim in victims:
            victim.kill()
        end = time.monotonic() + (patience(20) if met else 1.0)
        for rank in ranks:  # a survivor notices by itself
            rank.join(max(0.0, end - time.monotonic()))
        late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
            rank.join()
    errors = "".join(text(logs / str(rank) / "err") for rank in range(RANKS))
    assert not (late and met), f"ranks {late} outlived the others by {patience(20):.0f} s\n{errors}"
    return "over" if over else "job" if len(victims) > 1 else "rank", errors, taken


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
        what, errors, taken = start_and_kill(folder, tmp_path / f"logs{attempt}", draw, seconds[before])
        counts[what] += 1
        if what == "over":  # machines are busy and idle by turns
            seconds[before] = taken
        found = losses(folder)
        assert found == {iteration: reference[iteration] for iteration in found}, f"after {what} was killed\n{errors}"
        assert saved(folder) >= before and "Traceback" not in errors, errors
        assert "common state dict differs" not in errors, errors  # core, of what every rank should save alike
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
