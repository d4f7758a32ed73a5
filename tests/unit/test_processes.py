# SPDX-License-Identifier: Apache-2.0
"""No process survives its launcher; a process is identified by boot, PID namespace, PID and start time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron.system.processes import is_alive, started, this_process
from tests.patience import patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).resolve().parents[2]
# Like torchrun, the launcher starts a worker in a new session; the worker has a forked and an executed child.
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True).wait()
"""
WORKER = """
import multiprocessing, os, subprocess, sys, time
from megatron.training.launcher import follow_launcher
follow_launcher({launched})
fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
fork.start()
spawned = subprocess.Popen(["sleep", "300"])
print(os.getpid(), fork.pid, spawned.pid, flush=True)
time.sleep(300)
"""


def start_launcher(launched: bool) -> tuple[subprocess.Popen, list[psutil.Process]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, WORKER.format(launched=launched)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    return launcher, [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]


def ended_within(processes: list[psutil.Process], seconds: float) -> list[bool]:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, processes)):
        time.sleep(0.05)
    return [not alive(one) for one in processes]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_processes_end_when_the_launcher_is_killed():
    launcher, processes = start_launcher(launched=True)
    launcher.kill()
    launcher.wait()
    assert ended_within(processes, patience(5)) == [True] * 3


def test_forks_end_when_the_worker_is_killed_and_a_run_by_hand_outlives_its_shell():
    launcher, (worker, fork, spawned) = start_launcher(launched=False)
    launcher.kill()
    launcher.wait()
    time.sleep(1.5)
    assert alive(worker) and alive(fork)
    worker.kill()
    assert ended_within([worker, fork], patience(5)) == [True, True]
    spawned.kill()


TWICE = """
import os, signal, time, torch
from megatron.training.features.stopping import Stopper
Stopper.MOMENT = 0.2
stopper = Stopper(torch.device("cpu"), None)
stopper.begin()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGUSR1)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached", flush=True)
"""


def test_a_second_equal_signal_ends_the_process_at_once():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n")
    assert "a second SIGTERM: ended at once, nothing saved" in done.stderr


# A process is identified by boot id, PID namespace, PID and start time.


def test_this_process_runs():
    assert is_alive(this_process())


def test_a_process_that_has_ended_counts_as_dead_before_and_after_it_is_waited_for():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = replace(this_process(), pid=child.pid, started=started(child.pid))
    assert is_alive(ended)
    child.stdin.close()
    with open(f"/proc/{child.pid}/stat") as stat:
        while stat.seek(0) == 0 and stat.read().rpartition(")")[2].split()[0] != "Z":
            pass
    assert is_alive(ended) is False
    child.wait()
    assert is_alive(ended) is False


def test_a_pid_that_is_used_again_is_another_process():
    assert is_alive(replace(this_process(), started=1)) is False


@pytest.mark.parametrize("change", [{"boot": "other"}, {"boot": ""}, {"namespace": "pid:[1]"}])
def test_processes_of_another_machine_or_container_cannot_be_seen(change):
    assert is_alive(replace(this_process(), **change)) is None
