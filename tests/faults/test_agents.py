# SPDX-License-Identifier: Apache-2.0
"""A real torchrun with two agents: one is killed, the job continues with the other, and grows when a new one joins."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.distributed.test_program import PROGRAM, ROOT
from tests.faults.kills import logged
from tests.faults.test_kills import FLAGS
from tests.patience import patience
from tests.program import run_forked

AGENTS = int(os.environ.get("AGENTS", "0"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
               "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
WORKERS = 1  # of an agent
MORE = 8  # steps after each change


def flags(folder: Path) -> list[str]:
    return (
        (
            f"{FLAGS} --lr-decay-style constant --lr-warmup-iters 0 --train-iters 100000 --save-interval 4 "
            f"--save-retain-interval 1000 --log-jsonl {folder}/log.jsonl --save {folder}/c --load {folder}/c "
            "--distributed-timeout-minutes 1"
        )
        .replace("--lr-decay-style cosine --lr-warmup-iters 2 ", "")
        .split()
    )


class Agent:
    """``torchrun`` as on one of two machines; ``log`` is its output and that of its workers."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.log, self.begin = folder / f"{name}.log", time.monotonic()
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", str(WORKERS)]
        command += ["--max-restarts", "10", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
        command += ["--rdzv-id", "agents", "--rdzv-conf", "last_call_timeout=5", str(PROGRAM), *flags(folder)]
        command += ["--elastic-grids", "2: u2; 1: u1"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True, cwd=folder
            )

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


def until(condition: Callable[[], bool], seconds: float, agents: list[Agent]) -> float:
    """Wait until ``condition`` returns True; returns the seconds that this took."""
    begin = time.monotonic()
    while not condition():
        late = time.monotonic() - begin > patience(seconds)
        assert not late, "\n".join(agent.log.read_text()[-6000:] for agent in agents)
        time.sleep(0.2)
    return time.monotonic() - begin


def starts(agent: Agent) -> list[int]:
    """The number of processes of each start of the job."""
    return [int(number) for number in re.findall(r"elastic: (\d+) processes", agent.log.read_text())]


@pytest.mark.skipif(not AGENTS, reason="two torchruns, some minutes: bash tests/faults/run.sh")
@pytest.mark.parametrize("number", range(AGENTS))
def test_a_job_continues_with_one_agent_and_grows_again(tmp_path, number):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    last = lambda: max((row["iteration"] for row in logged(tmp_path)), default=0)  # noqa: E731
    first = Agent(tmp_path, "first", port)  # holds the agents' store
    agents = [first]
    try:
        time.sleep(3)
        agents.append(Agent(tmp_path, "second", port))
        until(lambda: starts(first) == [2] and last() >= MORE, 90, agents)

        orphans, before, begin = agents[1].workers(), time.time(), last()
        agents[1].process.kill()
        shrunk = until(lambda: starts(first)[-1] == 1 and (tmp_path / "log.jsonl").stat().st_mtime > before, 60, agents)
        until(lambda: last() >= begin + MORE, 60, agents)
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in orphans)

        before = last()
        agents.append(Agent(tmp_path, "back", port))
        grown = until(lambda: starts(first)[-1] == 2 and last() > before, 90, agents)
        until(lambda: last() >= before + 2 * MORE, 90, agents)
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.send_signal(signal.SIGTERM)
        for agent in agents:
            try:
                agent.process.wait(patience(40))
            except subprocess.TimeoutExpired:
                os.killpg(agent.process.pid, signal.SIGKILL)
    result = {row["iteration"]: row["lm_loss"] for row in logged(tmp_path)}
    count = max(result)
    assert sorted(result) == list(range(1, count + 1))
    whole = [*flags(tmp_path / "whole"), "--exit-interval", str(count)]
    done = run_forked(PROGRAM, whole, ENVIRONMENT, timeout=200)
    assert done.returncode == 0, done.stderr
    expected = {row["iteration"]: row["lm_loss"] for row in logged(tmp_path / "whole")}
    worst = max(abs(result[iteration] / expected[iteration] - 1) for iteration in result)
    assert worst < 1e-5
    print(
        f"\none of two agents killed: continued with the other after {shrunk:.0f} s, with both after {grown:.0f} s; "
        f"{count} losses within {worst:.1e} of one process"
    )
