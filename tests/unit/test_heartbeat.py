# SPDX-License-Identifier: Apache-2.0
"""Reports from two tables of heartbeats, and the place where a thread waits."""

from __future__ import annotations

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
from megatron.system.processes import Process, started, this_process
from megatron.training.features.heartbeat import Beat, Heartbeat, location_of, verdict
from megatron.training.settings.config import Config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

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
    group, here = object(), sys.modules["megatron.training.features.heartbeat"].PACKAGE
    frames = {
        "c10d": frame("/site/torch/distributed/distributed_c10d.py", "all_reduce", group=group),
        "torch": frame("/site/torch/functional.py", "einsum"),
        "attention": frame(f"{here}/context_parallel/attention/ring.py", "send"),
    }
    assert location_of([frames[name] for name in stack], {id(group): "TP"}) == (place, waits)


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
    assert location_of([result], {}) == ("outside the program's code", False)  # no frame of this program
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
    assert location_of([frame], {}) == ("outside the program's code", False)
    store = dist.HashStore()
    beats = Heartbeat(Grid(), 60, store, 0, 1)
    monkeypatch.setattr("megatron.training.features.heartbeat.location_of", lambda *_: 1 / 0)
    assert beats._beat().place == "an unknown place (its stack changed while it was read)" and beats._beat().count == 2


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
