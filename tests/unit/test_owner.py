# SPDX-License-Identifier: Apache-2.0
"""The lock of a save folder: one owner at a time, whenever jobs begin, stop, die or continue."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron.system import processes
from megatron.system.processes import this_process
from megatron.training.ownership import lock_file
from megatron.training.ownership.lock_file import Lost, Owner, acquire
from megatron.training.refusal import Refusal
from tests.pairs import also_in_full
from tests.patience import patience

ROUNDS = int(os.environ.get("OWNER_ROUNDS", "3"))
RENEWAL, SILENCE = 0.1, 1.5
CONTEXT = multiprocessing.get_context("fork")


def take(folder: Path, notes: list[str], silence: float = lock_file.SILENCE) -> Owner:
    acquire(owner := Owner(folder, uuid.uuid4().hex, RENEWAL), notes, silence)
    return owner


def serve(pipe, machine: Path | None) -> None:
    """A job in a separate process that executes commands."""
    if machine is not None:
        processes.BOOT = machine
        processes._boot.cache_clear()
    owned: Owner | None = None
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "take":
                notes: list[str] = []
                owned = take(Path(arguments[0]), notes, patience(SILENCE))
                pipe.send(("has it", notes))
            elif command == "check":
                owned.check()
                pipe.send(("has it", []))
            elif command == "release":
                owned = owned.release() if owned else None
                pipe.send(("released", []))
        except Refusal as refusal:
            pipe.send(("refused", str(refusal)))
        except Lost as lost:
            pipe.send(("lost", str(lost)))


class Worker:
    """A job in another process; the file ``machine``, if given, holds the boot id of another machine."""

    def __init__(self, machine: Path | None = None) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, machine), daemon=True)
        self.process.start()

    def send_command(self, *command: str) -> None:
        self.pipe.send([str(one) for one in command])

    def answer(self) -> tuple:
        assert self.pipe.poll(patience(60)), "no answer"
        return self.pipe.recv()

    def ask(self, *command: str) -> tuple:
        self.send_command(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator:
    made = []

    def make(machine: str = "") -> Worker:
        file = tmp_path / machine if machine else None
        if file:
            file.write_text(machine)
        made.append(Worker(file))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def lock_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(lock_file.LOCK_FILES))


def dead_lock_file(folder: Path, machine: str = "") -> Path:
    """The lock file of a job that has ended, on this machine or on the one that is named."""
    child = CONTEXT.Process(target=time.sleep, args=(0,))
    child.start()
    process = replace(this_process(), pid=child.pid, started=processes.started(child.pid) or 1)
    child.join()
    if machine:
        process = replace(process, boot=machine, host=machine)
    folder.mkdir(exist_ok=True)
    lock = folder / lock_file.LOCK_FILES.replace("*", "0" * 32)
    output = {"process": asdict(process), "owns": True, "since": "2026-11-23 09:00:00", "run": "", "renewed": 7}
    lock.write_bytes(json.dumps(output).encode().ljust(lock_file.SIZE))
    return lock


def test_a_second_job_is_refused_in_a_line_that_names_the_first_and_the_remedies(tmp_path, worker):
    first, second, folder = worker(), worker(), tmp_path / "c"
    assert first.ask("take", folder) == ("has it", [])
    for _ in range(3):
        message, line = second.ask("take", folder)
        assert message == "refused" and "\n" not in line
        assert f"--save {folder} is in use by process {first.process.pid} on " in line
        assert "wait for it to end, end it, or give another folder to --save" in line
    assert first.ask("check") == ("has it", []) and len(lock_files(folder)) == 1
    first.ask("release")
    assert not lock_files(folder)
    assert second.ask("take", folder) == ("has it", [])


def test_the_successor_of_a_killed_job_starts_at_once_with_one_line(tmp_path, worker):
    first, second, folder = worker(), worker(), tmp_path / "c"
    first.ask("take", folder)
    first.kill()
    begin = time.monotonic()
    message, (note,) = second.ask("take", folder)
    assert message == "has it" and time.monotonic() - begin < patience(SILENCE) / 2
    assert note.startswith(f"took over --save {folder} from process {first.process.pid} on ")
    assert note.endswith("which has ended")
    assert len(lock_files(folder)) == 1


def test_a_job_on_another_machine_is_recognized_only_by_its_counter(tmp_path, worker):
    first, second, folder = worker("elsewhere"), worker(), tmp_path / "c"
    first.ask("take", folder)
    message, line = second.ask("take", folder)
    assert message == "refused" and f"process {first.process.pid} on " in line
    first.kill()
    begin = time.monotonic()
    message, (note,) = second.ask("take", folder)
    assert message == "has it" and time.monotonic() - begin >= SILENCE * 0.9
    assert "has given no sign of life for" in note


def test_a_stopped_owner_that_continues_learns_that_it_lost_the_folder(tmp_path, worker):
    first, second, folder = worker("elsewhere"), worker(), tmp_path / "c"
    first.ask("take", folder)
    os.kill(first.process.pid, signal.SIGSTOP)
    assert second.ask("take", folder)[0] == "has it"
    os.kill(first.process.pid, signal.SIGCONT)
    message, line = first.ask("check")
    assert message == "lost" and f"--save {folder} is not this job's any more: process {second.process.pid} on " in line
    assert "has taken it over" in line
    time.sleep(3 * RENEWAL)  # the first job's thread continues
    assert second.ask("check") == ("has it", []) and len(lock_files(folder)) == 1
    first.ask("release")
    assert second.ask("check") == ("has it", []) and len(lock_files(folder)) == 1
    second.ask("release")
    assert not lock_files(folder)


def test_a_stopped_job_of_this_machine_still_has_the_folder(tmp_path, worker):
    first, second, folder = worker(), worker(), tmp_path / "c"
    first.ask("take", folder)
    os.kill(first.process.pid, signal.SIGSTOP)
    assert second.ask("take", folder)[0] == "refused"
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.ask("check") == ("has it", [])


@pytest.mark.parametrize("stale", ["dead here", *also_in_full("", "dead elsewhere")])
def test_of_several_jobs_that_start_at_once_exactly_one_gets_the_folder(tmp_path, worker, stale):
    jobs = [worker(), worker(), worker("north"), worker("south")]
    rounds = ROUNDS if stale != "dead elsewhere" else max(1, ROUNDS // 10)
    for number in range(rounds):
        folder = tmp_path / f"c{number}"
        if stale:
            dead_lock_file(folder, "elsewhere" if "elsewhere" in stale else "")
        for job in jobs:
            job.send_command("take", folder)
        answers = [job.answer() for job in jobs]
        winners = [job for job, (message, _) in zip(jobs, answers) if message == "has it"]
        assert len(winners) == 1, answers
        assert winners[0].ask("check") == ("has it", []) and len(lock_files(folder)) == 1
        assert {message for message, _ in answers} == {"has it", "refused"}
        winners[0].ask("release")
        assert not lock_files(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 10, b'{"process": {"pid": 1}}'])
def test_an_unreadable_lock_file_is_waited_for_and_then_removed(tmp_path, content):
    (tmp_path / lock_file.LOCK_FILES.replace("*", "f" * 32)).write_bytes(content)
    begin, notes = time.monotonic(), []
    owned = take(tmp_path, notes, 0.5)
    assert time.monotonic() - begin >= 0.4 and not notes
    owned.release()
    assert not lock_files(tmp_path)


def test_a_slow_file_system_is_not_mistaken_for_a_dead_owner(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lock_file.time, "monotonic", lambda: now[0])
    watched = lock_file._Watched(b"1")
    now[0] += 600.0
    watched.update(b"1")
    assert watched.alive(None, SILENCE) is None
    for _ in range(8):
        now[0] += lock_file.POLL
        watched.update(b"1")
    assert watched.alive(None, SILENCE) is False
    watched.update(b"2")
    assert watched.alive(None, SILENCE) is True


@pytest.mark.parametrize("mount_point", [False, True], ids=["no folder", "an empty folder"])
def test_a_folder_out_of_reach_for_a_moment_is_not_lost(tmp_path, mount_point):
    """Where a file system is not mounted, its mount point is an empty folder."""
    folder = tmp_path / "save"
    owned = take(folder, [])
    folder.rename(tmp_path / "away")
    if mount_point:
        folder.mkdir()
    with pytest.raises(OSError, match="is its file system mounted" if mount_point else "No such file") as error:
        owned.check()
    assert not isinstance(error.value, Lost)
    time.sleep(3 * RENEWAL)
    if mount_point:
        folder.rmdir()
    (tmp_path / "away").rename(folder)
    owned.check()
    lock_files(folder)[0].unlink()  # the folder was cleared and may belong to another job
    with pytest.raises(Lost, match="another job has taken it over, or somebody removed it"):
        owned.check()
    owned.release()
    assert not list(folder.iterdir())


def test_a_folder_that_comes_back_during_the_check_is_not_lost(tmp_path):
    owned = take(tmp_path, [])

    def before_it_came_back():
        raise FileNotFoundError(owned._lock_file)

    with pytest.raises(OSError, match="was out of reach for a moment") as error:
        owned._access(before_it_came_back)
    assert not isinstance(error.value, Lost) and not owned.lost
    owned.check()
    owned.release()


def test_files_that_own_nothing_do_not_say_who_has_the_folder(tmp_path, monkeypatch):
    owned = take(tmp_path, [])
    other, message = tmp_path / lock_file.LOCK_FILES.replace("*", "0" * 32), f"{tmp_path} is not the folder that it was"
    monkeypatch.setattr(lock_file, "_place", lambda _: (0, 0))

    def gone():
        raise FileNotFoundError(owned._lock_file)

    data = json.loads(owned._lock_file.read_bytes())
    for content in (b"damaged", json.dumps(data | {"owns": False}).encode()):
        other.write_bytes(content)
        owned._lock_file.unlink(missing_ok=True)
        with pytest.raises(OSError, match=message):
            owned._access(gone)
        assert not owned.lost
    other.write_bytes(json.dumps(data).encode())
    owned._access(gone)
    assert str(data["process"]["pid"]) in owned.lost


def test_no_lock_of_the_system_and_no_renaming_is_needed(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise OSError("not on this file system")

    dead_lock_file(tmp_path)
    for name in ("rename", "replace", "link", "symlink"):
        monkeypatch.setattr(os, name, missing)
    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, missing)
    notes: list[str] = []
    owned = take(tmp_path, notes)
    time.sleep(3 * RENEWAL)
    owned.check()
    (lock,) = lock_files(tmp_path)
    output = json.loads(lock.read_bytes())
    assert output["owns"] and output["renewed"] > 2 and processes.Process(**output["process"]) == this_process()
    owned.release()
    assert len(notes) == 1 and not lock_files(tmp_path)


def test_a_process_has_one_job_at_a_time(tmp_path):
    first, notes = take(tmp_path, []), []
    second = take(tmp_path, notes)
    second.check()
    with pytest.raises(Lost):
        first.check()
    first.release()
    second.check()
    second.release()
    assert not notes


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="--save .* cannot be listed and written to: "):
        take(tmp_path / "file", [])
