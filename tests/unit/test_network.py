# SPDX-License-Identifier: Apache-2.0
"""Reports from two tables of heartbeats, the place of a thread, network interfaces, and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megatron.context_parallel.layout.grid import Grid
from megatron.platform import network
from megatron.platform.network import FLAG, GLOO, NCCL, Place, Unusable, agree, choose, look, nccl_takes, try_link
from megatron.platform.processes import Process, is_alive, started, this_process
from megatron.training.arguments.config import Config
from megatron.training.features.heartbeat import Beat, Heartbeat, verdict, whereabouts
from tests.patience import patience

RING = "the wait for a message at ring.py:194 (wait)"
WAITS = Beat(Process("a", "boot 1", "pid:[1]", 11, 7), 5, 20, RING, True, 50.0)
WORKS = Beat(Process("b", "boot 2", "pid:[1]", 12, 7), 5, 20, "training/data/files.py:8 (read)", False, 50.0)


def later(beat: Beat) -> Beat:
    return replace(beat, count=beat.count + 2, since=beat.since + 5)


def test_a_rank_whose_counter_stops_is_named():
    before = {0: WAITS, 1: WAITS, 2: WORKS}
    lines = verdict(before, {0: later(WAITS), 1: later(WAITS), 2: WORKS}, reporter=0)
    assert lines == [
        "error: rank 2 on b does not answer: it is stopped, dead or cut off; last seen in iteration 21, "
        "training/data/files.py:8 (read)",
        f"       waiting in iteration 21, {RING}: ranks 0-1",
    ]


def test_the_reporting_rank_is_not_silent():
    lines = verdict({0: WAITS, 1: WORKS}, {0: WAITS, 1: later(WORKS)}, reporter=0)
    assert lines == [
        "error: rank 1 on b is alive and does not wait: iteration 21, training/data/files.py:8 (read), for 55 s",
        f"       waiting in iteration 21, {RING}: rank 0",
    ]


def test_a_rank_that_failed_gives_its_reason_and_one_without_reports_is_missing():
    failed = replace(later(WORKS), failed="OutOfMemoryError: no room")
    lines = verdict({0: WAITS, 1: WORKS, 2: None}, {0: later(WAITS), 1: failed, 2: None}, reporter=0)
    assert lines[0] == "error: rank 1 on b failed in iteration 21, training/data/files.py:8 (read): " + failed.failed
    assert lines[1].strip().startswith("rank 2 never reported")


def test_ranks_that_wait_for_each_other_in_different_places():
    other = replace(WAITS, place="all_reduce over TP at step.py:3 (train)")
    lines = verdict({0: WAITS, 1: other, 3: other}, {0: later(WAITS), 1: later(other), 3: later(other)}, reporter=0)
    assert lines[0] == "error: all ranks answer and wait, but in different places: they wait for each other"
    assert lines[-1].endswith("all_reduce over TP at step.py:3 (train): ranks 1, 3")


def frame(path: str, name: str, **variables: object) -> types.SimpleNamespace:
    code = types.SimpleNamespace(co_filename=path, co_name=name)
    return types.SimpleNamespace(f_code=code, f_lineno=7, f_locals=variables)


@pytest.mark.parametrize(
    "stack, place, waits",
    [
        (["c10d", "attention"], "all_reduce over TP at context_parallel/attention/ring.py:7 (send)", True),
        (["attention"], "context_parallel/attention/ring.py:7 (send)", False),
        (["torch", "attention"], "context_parallel/attention/ring.py:7 (send)", False),
        (["torch"], "outside the program's code", False),
        (["c10d"], "all_reduce over TP", True),
    ],
)
def test_where_a_thread_is(stack, place, waits):
    group, here = object(), sys.modules["megatron.training.features.heartbeat"].HERE
    frames = {
        "c10d": frame("/site/torch/distributed/distributed_c10d.py", "all_reduce", group=group),
        "torch": frame("/site/torch/functional.py", "einsum"),
        "attention": frame(f"{here}/context_parallel/attention/ring.py", "send"),
    }
    assert whereabouts([frames[name] for name in stack], {id(group): "TP"}) == (place, waits)


def test_a_wait_without_a_frame_is_detected():
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    result = sys._current_frames()[thread.ident]
    while result.f_code.co_name != "work":
        result = result.f_back
    assert whereabouts([result], {}) == ("outside the program's code", False)  # no frame of this program
    go_on.set()
    thread.join()


@pytest.fixture
def sigterm_as_before() -> Iterator[None]:
    """Restore the handler of SIGTERM, which a failed rank ignores."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_as_before")
def test_other_ranks_learn_of_an_error_and_its_rank_keeps_the_traceback():
    store = dist.HashStore()
    beats = Heartbeat(Grid(), 600, store, rank=0, ranks=2, every=0.01)
    beats._beat()
    try:
        raise ValueError("a bad\nnumber")
    except ValueError as error:
        assert beats.failed(error) is None
    assert beats.table()[0].failed == "ValueError: a bad number"
    assert beats.table()[1] is None


@pytest.mark.usefixtures("sigterm_as_before")
def test_the_first_rank_that_ends_the_job_says_why_and_the_others_say_nothing(capsys):
    store = dist.HashStore()
    first, second, third = (Heartbeat(Grid(), 600, store, rank, 3, every=0.01) for rank in range(3))
    assert not third._ending()
    first.end("error: bad data")
    second.end("error: bad data as well")
    assert capsys.readouterr().err == f"error: bad data (rank 0 on {this_process().host})\n"
    assert third.failed(RuntimeError("[gloo] connection closed by peer")) == []  # another rank reports it
    assert store.add("heartbeat/left", 0) == 2


def test_a_stack_that_moves_while_it_is_read(monkeypatch):
    """A frame between two lines has no line number; the beat continues in any case."""
    code = types.SimpleNamespace(co_filename=__file__, co_name="step")
    frame = types.SimpleNamespace(f_code=code, f_lineno=None, f_locals={})
    assert whereabouts([frame], {}) == ("outside the program's code", False)
    store = dist.HashStore()
    beats = Heartbeat(Grid(), 60, store, 0, 1)
    monkeypatch.setattr("megatron.training.features.heartbeat.whereabouts", lambda *_: 1 / 0)
    assert beats._beat().place == "a place that moved while it was read" and beats._beat().count == 2


def test_a_rank_that_ends_before_all_have_met(monkeypatch, capsys):
    """If a rank is killed while groups are made, the others print one line. Any other error is raised."""
    from megatron.training import pretrain, setup

    def fail(_):
        raise RuntimeError(output)

    monkeypatch.setattr(setup, "start", fail)
    monkeypatch.delenv("RANK", raising=False)
    output = "Gloo connectFullMesh failed with [pair.cc:152]\n timed out connecting: Connection refused"
    assert pretrain.run(Config()) == pretrain.EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error on rank 0: the processes could not connect") and "Connection refused" in line
    output = "a fault of ours"
    with pytest.raises(RuntimeError, match=output):
        pretrain.run(Config())


@pytest.mark.usefixtures("sigterm_as_before")
@pytest.mark.skipif(sys.platform != "linux", reason="a process is known by /proc, and held by a pidfd")
@pytest.mark.parametrize(
    "change, killed",
    [
        ({}, True),
        ({"boot": "of another node with the same host name"}, False),
        ({"namespace": "pid:[1]"}, False),  # in another container
        ({"started": 1}, False),  # the rank has ended, and its PID was reused
    ],
)
def test_a_silent_rank_is_killed_only_if_its_process_is_certainly_that_rank(change, killed):
    with subprocess.Popen(["sleep", "300"]) as other:
        try:
            silent = replace(this_process(), pid=other.pid, started=started(other.pid))
            store = dist.HashStore()
            beat = replace(WAITS, process=replace(silent, **change))
            store.set("heartbeat/1", json.dumps(asdict(beat)))
            beats = Heartbeat(Grid(), 600, store, rank=0, ranks=2, every=0.05)
            beats._beat()
            lines = beats.failed(RuntimeError("gloo: timed out"))
            assert "rank 1 on" in lines[0] and "does not answer" in lines[0]
            if killed:
                assert other.wait(60) == -signal.SIGKILL
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    other.wait(0.2)
        finally:
            other.kill()


# The network interface of each rank, refusals, and the agreement of ranks through a store.


LO = {"lo": ["127.0.0.1", "::1"]}


def node(number: int, **change) -> Place:
    """A rank on its own node: eth0 leads to the master, docker0 has the same address everywhere."""
    address = f"10.0.0.{number}"
    interfaces = {**LO, "docker0": ["172.17.0.1"], "eth0": [address, "fe80::1%eth0"]}
    return replace(Place(f"node{number}", f"boot {number}", interfaces, "10.0.0.1", address), **change)


def test_one_node_uses_the_loopback_under_any_hostname():
    assert choose([node(1), node(1)]) == [["lo"], ["lo"]]
    assert choose([node(1, interfaces={"lo0": ["127.0.0.1"], "en0": ["10.0.0.1"]})]) == [["lo0"]]
    assert choose([node(1, interfaces={})]) == [[]]  # gloo then chooses


def test_on_several_nodes_it_is_the_route_to_the_master():
    other = node(2, interfaces={**LO, "ens3": ["10.0.0.2"]})
    assert choose([node(1), node(1), other]) == [["eth0"], ["eth0"], ["ens3"]]


def test_a_master_whose_hostname_means_loopback_uses_the_address_that_others_use():
    itself = node(1, master="127.0.1.1", source="127.0.0.1")
    assert choose([itself, node(2)]) == [["eth0"], ["eth0"]]


def test_the_interface_that_the_user_names_is_used():
    named = [node(number, wanted="eth0", by=GLOO) for number in (1, 2)]
    assert choose(named) == [["eth0"], ["eth0"]]
    alone = node(1, wanted="docker0,eth0", by=FLAG)
    assert choose([alone]) == [["docker0", "eth0"]]


@pytest.mark.parametrize(
    "changes, words",
    [
        ([{}, {"wanted": "eht0", "by": FLAG}], f"{FLAG} names 'eht0', but node2 has no network interface of that name"),
        ([{"wanted": "lo", "by": GLOO}] * 2, f"rank 0 on node1 would listen at 127.0.0.1 (lo, by {GLOO})"),
        ([{}, {"wanted": "lo", "by": GLOO}], f"rank 1 on node2 would listen at 127.0.0.1 (lo, by {GLOO})"),
        (
            [{"wanted": "docker0", "by": FLAG}] * 2,
            "rank 1 on node2 would listen at 172.17.0.1 (docker0), as rank 0 on node1 does",
        ),
        (
            [{"master": "127.0.0.1", "source": "127.0.0.1"}] * 2,
            "rank 0 on node1 would listen at 127.0.0.1 (lo, MASTER_ADDR leads to 127.0.0.1 there)",
        ),
        ([{}, {"master": "", "source": ""}], "no network interface of node2 leads to MASTER_ADDR"),
        ([{}, {"problem": "one and two differ"}], "one and two differ"),
    ],
)
def test_a_network_that_cannot_work_is_refused_with_rank_address_and_flag(changes, words):
    places = [node(number, **change) for number, change in enumerate(changes, 1)]
    with pytest.raises(Unusable, match=re.escape(words)) as refused:
        choose(places)
    if "differ" not in words:
        assert "it has docker0 (172.17.0.1), eth0 (10.0.0." in str(refused.value) and FLAG in str(refused.value)
    both = len(changes) == 2 and changes[0] == changes[1] and "as rank 0" not in words
    assert ("(and 1 more ranks)" in str(refused.value)) == both


def test_network_facts_of_one_rank():
    place = look(None, {"MASTER_ADDR": "localhost"})
    assert place.source in ("127.0.0.1", "::1") and place.problem == place.wanted == place.by == ""
    assert any("127.0.0.1" in addresses for addresses in place.interfaces.values())
    assert look("lo", {GLOO: "lo", NCCL: "=lo"}) == replace(place, wanted="lo", by=FLAG, master="", source="")
    assert look(None, {GLOO: "eth0,eth1"}).wanted == "eth0,eth1"
    assert f"{FLAG} a and {GLOO}=b of the environment differ" in look("a", {GLOO: "b"}).problem
    assert f"{FLAG} a and {NCCL}=b of the environment differ" in look("a", {NCCL: "b"}).problem
    assert look(None, {"MASTER_ADDR": "no.such.host.invalid"}).source == ""


@pytest.mark.parametrize(
    "value, name, takes",
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("ib,eth", "eth0", True),
        ("^eth", "eth0", False),
        ("^lo,docker", "eth0", True),
        ("^=eth", "eth0", True),
    ],
)
def test_names_as_nccl_reads_them(value, name, takes):
    assert nccl_takes(value, name) == takes


def on_all(places: list[Place], store: dist.Store, seconds: float = 60.0) -> tuple[list, list[dict[str, str]]]:
    """The result of `agree` on each rank, and the variables that it sets; a rank whose place is None takes no part."""
    output: list = [None] * len(places)
    variables: list[dict[str, str]] = [{} for _ in places]

    def one(rank: int) -> None:
        try:
            output[rank] = agree(store, rank, len(places), timedelta(seconds=seconds), places[rank], variables[rank])
        except (Unusable, RuntimeError) as error:
            output[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank, place in enumerate(places) if place]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    return output, variables


def local(number: int, **change) -> Place:
    """A node with an address of this machine, to which others can connect; see ``no_loopback``."""
    return replace(node(number, interfaces={"eth0": [f"127.0.0.{number}"]}, source=f"127.0.0.{number}"), **change)


@pytest.fixture
def no_loopback(monkeypatch):
    """Treat this machine's addresses as those of other machines."""
    monkeypatch.setattr("megatron.platform.network.is_loopback", lambda address: False)


def test_ranks_of_one_node_agree_on_the_loopback_and_leave_nccl_alone():
    output, variables = on_all([node(1)] * 3, dist.HashStore())
    assert output == [""] * 3 and variables == [{GLOO: "lo"}] * 3


@pytest.mark.skipif(not os.path.exists("/proc/net"), reason="Linux has all addresses of 127.0.0.0/8")
@pytest.mark.usefixtures("no_loopback")
def test_nodes_that_reach_each_other_agree_and_say_what_they_use():
    places = [local(1), local(1), local(2), local(3, wanted="eth0", by=GLOO)]
    store = dist.HashStore()
    for _ in range(2):  # a restarted job uses the same store
        output, variables = on_all(places, store)
        assert set(output) == {
            "network by the route to MASTER_ADDR: node1, eth0 (127.0.0.1); node2, eth0 (127.0.0.2); node3, eth0 "
            "(127.0.0.3)"
        }
        assert variables == [{GLOO: "eth0", NCCL: "=eth0"}] * 4


def test_a_refusal_comes_to_all_ranks():
    output, variables = on_all([node(1), node(2, wanted="lo", by=GLOO), node(3)], dist.HashStore())
    assert all(isinstance(one, Unusable) and "rank 1 on node2" in str(one) for one in output), output
    assert variables == [{}] * 3


def test_a_rank_that_does_not_come_is_named_to_the_others():
    output, _ = on_all([node(1), None, node(1)], dist.HashStore(), seconds=1.0)
    assert [str(one) for one in output] == ["timed out after 1 s: rank 1 did not arrive", "None"] + [str(output[0])]


def test_an_answer_to_an_earlier_start_is_not_taken(monkeypatch):
    monkeypatch.setattr(network, "POLL", 0.2)
    store = dist.HashStore()
    store.set("start", "an earlier one")
    output, _ = on_all([node(1), node(1)], store)
    assert output == ["", ""]


def linked(pairs: list[tuple[str, str]], monkeypatch) -> list[dict[str, str]]:
    """Results of `try_link` in a ring of ranks, given as (own address, address used by others)."""
    monkeypatch.setattr(network, "CONNECT", 1.0)
    monkeypatch.setattr(network, "LATE", 0.2)
    store, count = dist.HashStore(), len(pairs)
    output: list = [None] * count

    def one(rank: int) -> None:
        after = (rank + 1) % count
        output[rank] = try_link(store, rank, pairs[rank][0], after, pairs[after][1], f"node{after}, eth0")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    return output


def test_two_that_cannot_connect_are_named(monkeypatch):
    """192.0.2.0/24 is reserved. First only rank 0 has such an address for rank 1; then rank 1 also listens there."""
    fine = ("127.0.0.1", "127.0.0.1")
    assert linked([fine, fine], monkeypatch) == [{"connect": "", "accept": ""}] * 2
    output = linked([fine, ("127.0.0.1", "192.0.2.1")], monkeypatch)
    assert output[0]["connect"].startswith("rank 0 at 127.0.0.1 cannot connect to rank 1 on node1, eth0: ")
    assert FLAG in output[0]["connect"] and output[1] == {"connect": "", "accept": ""}
    output = linked([fine, ("192.0.2.1", "192.0.2.1")], monkeypatch)
    assert output[0]["connect"] == "" and output[1]["connect"].startswith("rank 1 cannot listen at 192.0.2.1: ")


def test_another_host_at_the_same_address_is_noticed(monkeypatch):
    """Rank 0 connects to a process that is not rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        connect = socket.create_connection

        def misled(address, timeout):
            port = stranger.getsockname()[1] if address[0] == "127.0.0.9" else address[1]
            return connect(("127.0.0.1", port), timeout)

        monkeypatch.setattr(network.socket, "create_connection", misled)
        output = linked([("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.9")], monkeypatch)
    assert output[0] == {"connect": "", "accept": ""}
    assert output[1]["accept"].startswith(
        "rank 0 does not reach rank 1 at 127.0.0.1, and may have reached another host"
    )


# No process survives the end of the launcher, the kill of a worker, or a repeated signal.


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


def started_parent(launched: bool) -> tuple[subprocess.Popen, list[psutil.Process]]:
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_all_go_when_the_launcher_is_killed():
    launcher, processes = started_parent(launched=True)
    launcher.kill()
    launcher.wait()
    assert gone(processes, patience(5)) == [True] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_forks_go_when_the_worker_is_killed_and_a_run_by_hand_outlives_its_shell():
    launcher, (worker, fork, spawned) = started_parent(launched=False)
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
print("not reached", flush=True)
"""


def test_the_same_signal_again_ends_at_once():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n")
    assert "a second SIGTERM: ended at once, nothing saved" in done.stderr


# A process is identified by boot id, PID namespace, PID and start time.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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


def test_a_number_that_is_used_again_is_another_process():
    assert is_alive(replace(this_process(), started=1)) is False


@pytest.mark.parametrize("change", [{"boot": "other"}, {"boot": ""}, {"namespace": "pid:[1]"}])
def test_processes_of_another_machine_or_container_cannot_be_seen(change):
    assert is_alive(replace(this_process(), **change)) is None
