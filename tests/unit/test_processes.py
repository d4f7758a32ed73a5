# SPDX-License-Identifier: Apache-2.0
"""A process is known by boot, PID namespace, number and start time."""

import subprocess
import sys
from dataclasses import replace

import pytest

from megatron.platform.processes import is_alive, started, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_this_process_runs():
    assert is_alive(this_process())


def test_a_process_that_has_ended_does_not_run_also_while_nobody_has_waited_for_it():
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


def test_a_number_that_is_used_again_is_another_process():
    assert is_alive(replace(this_process(), started=1)) is False


@pytest.mark.parametrize("change", [{"boot": "other"}, {"boot": ""}, {"namespace": "pid:[1]"}])
def test_processes_of_another_machine_or_container_cannot_be_seen(change):
    assert is_alive(replace(this_process(), **change)) is None
