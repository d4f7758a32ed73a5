# SPDX-License-Identifier: Apache-2.0
"""What two looks at the table of heartbeats say, and where a thread is."""

import json
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from megatron.context_parallel.layout.grid import Grid
from megatron.platform.processes import Process, started, this_process
from megatron.training.arguments.config import Config
from megatron.training.features.heartbeat import Beat, Heartbeat, verdict, whereabouts

RING = "the wait for a message at ring.py:194 (wait)"
WAITS = Beat(Process("a", "boot 1", "pid:[1]", 11, 7), 5, 20, RING, True, 50.0)
WORKS = Beat(Process("b", "boot 2", "pid:[1]", 12, 7), 5, 20, "training/data/files.py:8 (read)", False, 50.0)


def later(beat: Beat) -> Beat:
    return replace(beat, count=beat.count + 2, since=beat.since + 5)


def test_a_rank_whose_count_stands_still_is_named():
    before = {0: WAITS, 1: WAITS, 2: WORKS}
    lines = verdict(before, {0: later(WAITS), 1: later(WAITS), 2: WORKS}, reporter=0)
    assert lines == [
        "error: rank 2 on b does not answer: it is stopped, dead or cut off; last seen in iteration 21, "
        "training/data/files.py:8 (read)",
        f"       waiting in iteration 21, {RING}: ranks 0-1",
    ]


def test_who_tells_is_not_silent_to_itself():
    lines = verdict({0: WAITS, 1: WORKS}, {0: WAITS, 1: later(WORKS)}, reporter=0)
    assert lines == [
        "error: rank 1 on b is alive and does not wait: iteration 21, training/data/files.py:8 (read), for 55 s",
        f"       waiting in iteration 21, {RING}: rank 0",
    ]


def test_a_rank_that_failed_says_why_and_one_that_never_told_is_missing():
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


def test_a_wait_in_the_code_is_seen_though_it_has_no_frame():
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    found = sys._current_frames()[thread.ident]
    while found.f_code.co_name != "work":
        found = found.f_back
    assert whereabouts([found], {}) == ("outside the program's code", False)  # none of ours
    go_on.set()
    thread.join()


@pytest.fixture
def sigterm_as_before() -> Iterator[None]:
    """What fails does not heed SIGTERM any more, nor what it would start."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_as_before")
def test_an_error_of_its_own_is_told_to_the_others_and_keeps_its_traceback():
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
    assert third.failed(RuntimeError("[gloo] connection closed by peer")) == []  # a rank that did not wait has ended
    assert store.add("heartbeat/left", 0) == 2


def test_a_stack_that_moves_while_it_is_read(monkeypatch):
    """A frame between two lines has no number; whatever a look meets, the beat goes on."""
    code = types.SimpleNamespace(co_filename=__file__, co_name="step")
    frame = types.SimpleNamespace(f_code=code, f_lineno=None, f_locals={})
    assert whereabouts([frame], {}) == ("outside the program's code", False)
    store = dist.HashStore()
    beats = Heartbeat(Grid(), 60, store, 0, 1)
    monkeypatch.setattr("megatron.training.features.heartbeat.whereabouts", lambda *_: 1 / 0)
    assert beats._beat().place == "a place that moved while it was read" and beats._beat().count == 2


def test_a_rank_that_ends_before_all_have_met(monkeypatch, capsys):
    """One is killed while process groups are made: the others say so in a line. What is their own fault is raised."""
    from megatron.training import pretrain, setup

    def fail(_):
        raise RuntimeError(said)

    monkeypatch.setattr(setup, "start", fail)
    monkeypatch.delenv("RANK", raising=False)
    said = "Gloo connectFullMesh failed with [pair.cc:152]\n timed out connecting: Connection refused"
    assert pretrain.run(Config()) == pretrain.EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error on rank 0: the processes could not connect") and "Connection refused" in line
    said = "a fault of ours"
    with pytest.raises(RuntimeError, match=said):
        pretrain.run(Config())


@pytest.mark.usefixtures("sigterm_as_before")
@pytest.mark.skipif(sys.platform != "linux", reason="a process is known by /proc, and held by a pidfd")
@pytest.mark.parametrize(
    "change, killed",
    [
        ({}, True),
        ({"boot": "of another node with the same host name"}, False),
        ({"namespace": "pid:[1]"}, False),  # of another container
        ({"started": 1}, False),  # the rank has ended, and its number was used again
    ],
)
def test_a_silent_rank_is_killed_where_it_surely_is_that_process(change, killed):
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
