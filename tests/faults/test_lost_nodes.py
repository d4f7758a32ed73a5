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

from tests.distributed.test_program import FLAGS, PROGRAM
from tests.faults.test_kills import ENVIRONMENT, losses, text
from tests.patience import patience
from tests.program import meeting, start_forked

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


def start(folder: Path, logs: Path, draw: random.Random | None, seconds: float) -> tuple[str, list[int], float]:
    """Run until the end, or until something is killed; what rank 0 said, the exit codes, and seconds until then."""
    with meeting(ENVIRONMENT, NODES) as environments:
        ranks = [
            start_forked(PROGRAM, flags(folder, node), {**one, "LOCAL_WORLD_SIZE": "1"}, logs / str(node))
            for node, one in enumerate(environments)
        ]
        begin = time.monotonic()
        end, taken = begin + patience(60), 0.0
        if draw is not None:
            moment = begin + draw.uniform(0.2 * seconds, seconds)
            while time.monotonic() < moment and any(rank.is_alive() for rank in ranks):
                time.sleep(0.01)
            taken = time.monotonic() - begin
            for victim in ranks if draw.random() < 0.5 else [draw.choice(ranks)]:
                victim.kill()
            met = "ready after" in text(logs / "0" / "out")  # until then nobody but their launcher would notice
            end = time.monotonic() + (patience(20) if met else 1.0)
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
        late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
            rank.join()
    errors = "".join(text(logs / str(node) / "err") for node in range(NODES))
    assert not (late and (draw is None or met)), f"ranks {late} are still there\n{errors}"
    assert "Traceback" not in errors, errors
    return text(logs / "0" / "out"), [rank.exitcode for rank in ranks], taken


@pytest.mark.skipif(not LOST_NODES, reason="LOST_NODES=20 runs it, as tests/faults/run.sh does")
def test_kills_and_lost_nodes(tmp_path):
    draw, counts, begin = random.Random(3), Counter(), time.monotonic()
    whole = tmp_path / "whole"
    said, codes, _ = start(whole, tmp_path / "logs", None, 0)
    assert codes == [0] * NODES, said
    seconds, reference = defaultdict(lambda whole=time.monotonic() - begin: whole), losses(whole)
    assert list(reference) == list(range(1, ITERATIONS + 1))
    assert not list(whole.glob("memory*/*")) and not list(whole.glob("c/copies*"))  # the run ended well

    folder, attempt, most = tmp_path / "killed", 0, 0
    while counts["kills"] < LOST_NODES or folder.exists():
        attempt += 1
        before = max(losses(folder), default=0)
        last = counts["kills"] >= LOST_NODES
        said, codes, taken = start(folder, tmp_path / f"logs{attempt}", None if last else draw, seconds[before])
        found = losses(folder)
        assert found == {iteration: reference[iteration] for iteration in found}, said
        if "ready after" in said:
            loaded = LOADED.search(said)
            counts["from memory" if loaded else "from the disk or anew"] += 1
            counts["with a neighbour's copy"] += bool(loaded and loaded[2])
            if loaded:
                most = max(most, before - int(loaded[1]))
            assert loaded or before <= 2, said  # a whole step is there from the second one on
        if codes == [0] * NODES:
            assert found == reference and not list(folder.glob("memory*/*"))
            shutil.rmtree(folder)
            counts["runs"] += 1
            if not last:  # machines are busy and idle by turns
                seconds[before] = taken
            continue
        counts["kills"] += 1
        if draw.random() < 0.5:
            shutil.rmtree(folder / f"memory{draw.randrange(NODES)}", ignore_errors=True)
            counts["lost nodes"] += 1
    assert most <= 2  # the copy of the last step may be on its way, and the one before as well
    print(f"\n{dict(counts)} in {attempt} starts; at most {most} steps repeated; every loss and norm the same")
