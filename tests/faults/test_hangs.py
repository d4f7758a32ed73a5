# SPDX-License-Identifier: Apache-2.0
"""SIGSTOP of a random rank under a real torchrun: the job ends in time, and the log names that rank."""

import os
import random
import re
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed.test_program import FLAGS, PROGRAM, ROOT
from tests.patience import patience

HANGS = int(os.environ.get("HANGS", "0"))
TIMEOUT = 60  # seconds: the least that --distributed-timeout-minutes can say
GRIDS = ("--ulysses-parallel-size 2 --ring-parallel-size 2", "--tensor-model-parallel-size 2 --ring-parallel-size 2",
         "--pipeline-model-parallel-size 2 --ulysses-parallel-size 2", "--zero-stage 2")  # fmt: skip


@pytest.mark.skipif(not HANGS, reason="each waits a minute for its timeout: bash tests/faults/run.sh")
@pytest.mark.parametrize("number", range(HANGS))
def test_the_rank_that_hangs_is_named(number):
    draw = random.Random(number)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(PROGRAM)]
    command += FLAGS.replace("--global-batch-size 2", "--global-batch-size 4").split()
    command += draw.choice(GRIDS).split() + "--train-iters 100000 --eval-iters 0".split()
    command += ["--distributed-timeout-minutes", str(TIMEOUT // 60)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    text, last = "", draw.randint(3, 12)
    for line in launcher.stdout:
        text += line
        if re.search(rf"iteration +{last}/", line):
            break
    ranks = {int(one.environ()["RANK"]): one for one in psutil.Process(launcher.pid).children()}
    assert len(ranks) == 4, text
    time.sleep(draw.uniform(0, 0.3))
    victim = draw.choice(sorted(ranks))
    ranks[victim].suspend()
    begin = time.monotonic()
    text += launcher.communicate(timeout=TIMEOUT + patience(60))[0]
    seconds = time.monotonic() - begin
    blamed = re.findall(r"error: rank (\d+) on \S+ does not answer", text)
    assert launcher.returncode and blamed == [str(victim)], text
    assert seconds < TIMEOUT + patience(10), text
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ranks.values())
    print(f"\n{number + 1} of {HANGS}: rank {victim} named, over after {seconds:.0f} s")
