# SPDX-License-Identifier: Apache-2.0
"""No process stays behind: when the launcher goes, when a worker is killed, when the same signal comes twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
# As torchrun does, the launcher starts a worker in a session of its own. That has a child by fork and one by exec.
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


def started(launched: bool) -> tuple[subprocess.Popen, list[psutil.Process]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, WORKER.format(launched=launched)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    return launcher, [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]


def gone(processes: list[psutil.Process], seconds: float) -> list[bool]:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, processes)):
        time.sleep(0.05)
    return [not alive(one) for one in processes]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux'")
def test_all_go_when_the_launcher_is_killed():
    launcher, processes = started(launched=True)
    launcher.kill()
    launcher.wait()
    assert gone(processes, patience(5)) == [True] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux'")
def test_forks_go_when_the_worker_is_killed_and_a_run_by_hand_outlives_its_shell():
    launcher, (worker, fork, spawned) = started(launched=False)
    launcher.kill()
    launcher.wait()
    time.sleep(1.5)
    assert alive(worker) and alive(fork)
    worker.kill()
    assert gone([worker, fork], patience(5)) == [True, True]
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
print("not here", flush=True)
"""


def test_the_same_signal_again_ends_at_once():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n")
    assert "a second SIGTERM: ended at once, nothing saved" in done.stderr
