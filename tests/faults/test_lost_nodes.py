# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` at random moments of a run with copies in memory; every second time a node's memory is gone as well."""

import os
import random
import re
import shutil
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.distributed.test_program import FLAGS
from tests.faults.kills import Ended, losses, run_and_kill

LOST_NODES = int(os.environ.get("LOST_NODES", "0"))
ITERATIONS, ON_DISK, NODES = 12, 5, 2  # one rank a node
LOADED = re.compile(r"loaded iteration (\d+) from the copies in memory(, of rank)?")


def flags(folder: Path, node: int) -> list[str]:
    return (
        f"{FLAGS} --ring-parallel-size 2 --zero-stage 1 --bf16 --hidden-dropout 0.1 --train-iters {ITERATIONS} "
        f"--eval-iters 0 --save-interval {ON_DISK} --save {folder}/c --load {folder}/c --log-jsonl {folder}/log.jsonl "
        f"--async-save --non-persistent-save-interval 1 --non-persistent-ckpt-type local --replication "
        f"--non-persistent-local-ckpt-dir {folder}/memory{node}"
    ).split()


def start(folder: Path, logs: Path, draw: random.Random | None, seconds: float = 0.0) -> Ended:
    """Run until the end, or until something is killed."""
    argv = [flags(folder, node) for node in range(NODES)]
    return run_and_kill(argv, logs, draw, (0.2 * seconds, seconds), {"LOCAL_WORLD_SIZE": "1"})


@pytest.mark.skipif(not LOST_NODES, reason="LOST_NODES=20 runs it, as tests/faults/run.sh does")
def test_kills_and_lost_nodes(tmp_path):
    draw, counts, begin = random.Random(3), Counter(), time.monotonic()
    whole = tmp_path / "whole"
    end = start(whole, tmp_path / "logs", None)
    assert end.codes == [0] * NODES, end.said
    seconds, reference = defaultdict(lambda whole=time.monotonic() - begin: whole), losses(whole)
    assert list(reference) == list(range(1, ITERATIONS + 1))
    assert not list(whole.glob("memory*/*")) and not list(whole.glob("c/copies*"))  # the run ended well

    folder, attempt, most = tmp_path / "killed", 0, 0
    while counts["kills"] < LOST_NODES or folder.exists():
        attempt += 1
        before = max(losses(folder), default=0)
        last = counts["kills"] >= LOST_NODES
        end = start(folder, tmp_path / f"logs{attempt}", None if last else draw, seconds[before])
        found = losses(folder)
        assert found == {iteration: reference[iteration] for iteration in found}, end.said
        if "ready after" in end.said:
            loaded = LOADED.search(end.said)
            counts["from memory" if loaded else "from the disk or anew"] += 1
            counts["with a neighbour's copy"] += bool(loaded and loaded[2])
            if loaded:
                most = max(most, before - int(loaded[1]))
            assert loaded or before <= 2, end.said  # a whole step is there from the second one on
        if end.codes == [0] * NODES:
            assert found == reference and not list(folder.glob("memory*/*"))
            shutil.rmtree(folder)
            counts["runs"] += 1
            if not last:  # machines are busy and idle by turns
                seconds[before] = end.seconds
            continue
        counts["kills"] += 1
        if draw.random() < 0.5:
            shutil.rmtree(folder / f"memory{draw.randrange(NODES)}", ignore_errors=True)
            counts["lost nodes"] += 1
    assert most <= 2  # the copy of the last step may be on its way, and the one before as well
    print(f"\n{dict(counts)} in {attempt} starts; at most {most} steps repeated; every loss and norm the same")
