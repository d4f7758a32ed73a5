# SPDX-License-Identifier: Apache-2.0
"""The time of day may jump, and files may be of tomorrow: durations go by a clock that does neither."""

import ast
import os
import time
from pathlib import Path

import pytest

from megatron.training.data.datasets import build_datasets
from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.faults.kills import ENVIRONMENT, losses
from tests.program import run_ranks
from tests.unit.test_data import NULL, configure, samples_of, write

HERE = Path(__file__).parent
TIME_OF_DAY = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


def test_no_program_measures_by_the_time_of_day():
    asked = []
    for path in [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node).removeprefix("datetime.datetime") in TIME_OF_DAY:
                asked.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                asked += [f"{path}:{node.lineno}" for name in node.names if name.name in ("time", "time_ns")]
    assert not asked


@pytest.mark.full
@pytest.mark.parametrize("more", ["", "--async-save --log-straggler --exit-duration-in-mins 5"])
def test_a_clock_that_jumps(tmp_path, more):
    runs = {}
    for name, program in (("jumping", HERE / "jumping_clock.py"), ("steady", PROGRAM)):
        flags = (
            f"{FLAGS} --ring-parallel-size 2 --train-iters 30 --eval-iters 0 --save-interval 3 "
            f"--save {tmp_path}/{name} --log-jsonl {tmp_path}/{name}/log.jsonl "
            f"--tensorboard-dir {tmp_path}/{name}/board --distributed-timeout-minutes 1 {more}"
        )
        done = run_ranks(program, flags.split(), ENVIRONMENT, 2)
        assert [one.returncode for one in done] == [0, 0], done[0].stderr
        runs[name] = losses(tmp_path / name)
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == "30"
    assert runs["jumping"] == runs["steady"] and len(runs["steady"]) == 30


@pytest.mark.parametrize("when", [0, 2**31 + 10**8, 2**32 + 10**8])
def test_data_of_another_time(tmp_path, when):
    """Written in 1970, 2041 or 2109: the cached index is taken the second time all the same."""
    prefix, _ = write(tmp_path / "corpus")
    for end in ("bin", "idx"):
        os.utime(f"{prefix}.{end}", (when, when))
    config = configure(data_path=[prefix], split="100,0,0")
    first = samples_of(build_datasets(config, NULL, (10, 0, 0))[0], 10)
    (folder,) = (tmp_path / "index-cache").iterdir()
    os.utime(folder, (when, when))
    for path in folder.iterdir():
        os.utime(path, (when, when))
    again = samples_of(build_datasets(config, NULL, (10, 0, 0))[0], 10)
    assert first == again and [path.name for path in (tmp_path / "index-cache").iterdir()] == [folder.name]
    assert all(path.stat().st_mtime == when for path in folder.iterdir())  # nothing was made anew
    os.utime(f"{prefix}.bin", (time.time(), time.time()))
    build_datasets(config, NULL, (10, 0, 0))
    assert len(list((tmp_path / "index-cache").iterdir())) == 2
