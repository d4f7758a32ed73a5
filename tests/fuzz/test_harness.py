# SPDX-License-Identifier: Apache-2.0
"""The harness detects forbidden actions: each of these readers is bad in one way."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import socket
import subprocess
import time
from pathlib import Path

import pytest

from megatron.system.own_process import in_own_process
from megatron.training.refusal import Refusal
from tests.fuzz import harness, mutations
from tests.fuzz.harness import Reader


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def reader_of(read, *, valid: bytes = b"0", **options) -> Reader:
    return Reader("control", "file", lambda: [valid], mutations.any_bytes, read, **options)


def only_failure(reader: Reader, data: bytes, folder: Path) -> str:
    """The failure that the harness reports for ``data``, which it reads between two harmless inputs."""
    inputs = [("before", reader.seeds()[0]), ("bad", data), ("after", reader.seeds()[0])]
    outcome = harness.run(reader, inputs, folder)
    assert [one.label for one in outcome.failures] == ["bad"] and outcome.failures[0].data == data
    return outcome.failures[0].what


def test_a_plain_unpickler_is_caught_before_anything_is_run(tmp_path):
    reader = reader_of(lambda folder: pickle.loads((folder / "file").read_bytes()), valid=pickle.dumps(1))
    message = only_failure(reader, pickle.dumps(Harmful(tmp_path / "harm")), tmp_path / "a")
    assert "pickle.find_class posix.system" in message and not (tmp_path / "harm").exists()


@pytest.mark.full
def test_a_plain_unpickler_is_caught_among_random_inputs(tmp_path):
    def read(folder):
        try:
            return pickle.loads((folder / "file").read_bytes())
        except Exception:
            raise Refusal("no pickle") from None

    reader = Reader("control", "file", lambda: [pickle.dumps({"a": [1, 2]})], mutations.pickled, read, seconds=0.1)
    outcome = harness.run(reader, harness.fresh(reader, 0, 40), tmp_path)
    assert any("pickle.find_class" in one.what for one in outcome.failures)
    again = harness.run(reader, harness.fresh(reader, 0, 40), tmp_path)
    assert [one.label for one in again.failures] == [one.label for one in outcome.failures]


def allocate(folder):
    try:
        bytearray(1 << 33)
    except MemoryError:
        raise Refusal("it is too large") from None


def write(folder):
    (folder.parent / "elsewhere").write_text("harm")


def nest(folder):
    return json.loads("[" * 100_000)


def die(folder):
    faulthandler._sigsegv()


class Unprintable(Refusal):
    """A refusal that quotes text without escaping it."""

    def __str__(self) -> str:
        return self.args[0]


def two_lines(folder):
    raise Unprintable("a\nb")


def colours(folder):
    raise Unprintable("\x1b[31m")


def endless(folder):
    raise Unprintable("x" * 10_000)


def spin(folder):
    while True:
        pass


def swallow(folder):
    try:
        subprocess.run(["true"])
    except BaseException:
        return 1


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda folder: os.system("true"), "os.system"),
        (lambda folder: subprocess.run(["true"]), "subprocess.Popen"),
        (swallow, "subprocess.Popen"),
        (lambda folder: os.fork(), "os.fork"),
        (lambda folder: socket.socket(), "socket."),
        (lambda folder: exec("1"), "compile"),
        (lambda folder: __import__("antigravity"), "antigravity"),
        (write, "writes"),
        (lambda folder: os.remove(folder.parent / "elsewhere"), "os.remove"),
        (lambda folder: os.rename(folder, folder.parent / "x"), "os.rename"),
        (lambda folder: Path("/etc/hostname").read_text(), "opens /etc/hostname"),
        (lambda folder: 1 / 0, "raises ZeroDivisionError"),
        (nest, "raises RecursionError"),
        (allocate, "memory"),
        (die, "ends the process"),
        (spin, "takes too long"),
        (two_lines, "not one short line"),
        (colours, "not one short line"),
        (endless, "not one short line"),
        (lambda folder: "two\nlines", "not one short line"),
    ],
)
def test_bad_readers_are_caught(tmp_path, act, message):
    reader = reader_of(lambda folder: act(folder) if (folder / "file").read_bytes() == b"1" else 0, seconds=0.3)
    assert message in only_failure(reader, b"1", tmp_path / "a")
    assert not (tmp_path / "a" / "elsewhere").exists()


AFTER_FORK = []  # what a library does in each forked process
os.register_at_fork(after_in_child=lambda: [act() for act in AFTER_FORK])


def load() -> str:
    return str(ctypes.CDLL(None))


@pytest.mark.parametrize("at_fork", [True, False])
def test_what_a_library_does_after_each_fork_is_permitted(tmp_path, monkeypatch, at_fork):
    """An iterator in a process of its own may not do the same."""

    def read(folder):
        items = [(1,)] if at_fork or (folder / "file").read_bytes() == b"0" else map(lambda _: (load(),), "1")
        return list(in_own_process(lambda: iter(items), memory=1 << 28, seconds=5))

    monkeypatch.setattr("tests.fuzz.test_harness.AFTER_FORK", [load] * at_fork)
    outcome = harness.Outcome()
    harness._run_child(reader_of(read), [("of its own", b"1")], 0, tmp_path, outcome, fork=True)
    assert bool(outcome.failures) == (not at_fork)


@pytest.mark.full
def test_a_child_that_does_not_answer_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "HUNG", 1.0)
    reader = reader_of(lambda folder: time.sleep(1000) if (folder / "file").read_bytes() == b"1" else 0)
    assert only_failure(reader, b"1", tmp_path) == "hangs"


def test_seeds_that_are_not_read_are_reported(tmp_path):
    def refuse(folder):
        raise Refusal("no")

    outcome = harness.run(reader_of(refuse), [], tmp_path)
    assert not outcome.failures  # there was no input
    outcome = harness.run(reader_of(refuse), [("a", b"1")], tmp_path)
    assert "a valid file is not read" in outcome.failures[0].what


def test_values_and_refusals_are_counted(tmp_path):
    def read(folder):
        if (folder / "file").read_bytes() == b"1":
            raise Refusal("number 1 is not wanted")
        return 5

    outcome = harness.run(reader_of(read), [("a", b"0"), ("b", b"1"), ("c", b"2")], tmp_path)
    assert (outcome.values, outcome.refusals, outcome.failures) == (2, 1, [])
    assert outcome.lines == {"number  is not wanted": 1}
