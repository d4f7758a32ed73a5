# SPDX-License-Identifier: Apache-2.0
"""Files that a program may remove, and locks of files and folders at any path."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.system.processes import this_process
from megatron.training.ownership import own_files
from megatron.training.ownership.atomic import atomic_files
from megatron.training.ownership.lock_file import InUse
from megatron.training.ownership.own_files import (
    one_job,
    one_job_of_ranks,
    remove_left,
    remove_listed,
    remove_made,
    temporary_name,
    unfinished,
)
from megatron.training.refusal import Refusal

CONTEXT = multiprocessing.get_context("fork")


def test_only_listed_files_are_removed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "made"
    for one in (outside, folder / "inner", folder / "empty"):
        one.mkdir(parents=True)
    for file in (outside / "a", folder / "a", folder / "inner" / "b", folder / "thesis.tex"):
        file.write_text("x")
    (folder / "link").symlink_to(outside)
    names = ["a", "inner/b", "missing", "link/a", "../outside/a", str(outside / "a"), "empty", "."]
    assert remove_listed(folder, names) == ["empty", "link", "thesis.tex"]
    assert (outside / "a").exists()
    (folder / "empty").rmdir()
    assert remove_listed(folder, ["link", "thesis.tex"]) == [] and not folder.exists() and outside.exists()
    assert remove_listed(folder, ["a"]) == []


def hold(target: str, pipe) -> None:
    with one_job(target):
        pipe.send(os.getpid())
        pipe.recv()


def test_one_target_has_one_job(tmp_path: Path, capsys, monkeypatch) -> None:
    """The second is refused or waits, other targets in the folder do not matter, and the dead are followed at once."""
    monkeypatch.setattr(own_files, "SILENT", 0.0)
    target, (pipe, theirs) = str(tmp_path / "corpus[1]*"), CONTEXT.Pipe()
    other = CONTEXT.Process(target=hold, args=(target, theirs))
    other.start()
    number = pipe.recv()
    with pytest.raises(InUse, match=f"is in use by process {number} on .*: wait for it to end, end it, or give"):
        with one_job(target):
            pass
    assert not capsys.readouterr().err
    with pytest.raises(InUse), one_job(target, wait=0.3):
        pass
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"by process {number} on " in line and "waiting for it, for up to 0.3 s" in line
    with one_job(tmp_path / "corpus1x"), one_job(tmp_path / "corpus[1]"), one_job(f"{target}.bin"):
        pass
    other.kill()
    other.join()
    with one_job(target) as owner:
        for name in (temporary_name(target, owner), f"{target}.{'0' * 32}.tmp", f"{target}.tmp", f"{target}x"):
            Path(name).write_text("")
        owner.check()
        assert unfinished(target) == sorted([temporary_name(target, owner), f"{target}.{'0' * 32}.tmp"])
    assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob(".*"))


def test_a_signal_at_any_line_of_taking_a_lock_leaves_no_lock_file(tmp_path: Path) -> None:
    """A signal's handler raises wherever the program is."""
    at, passed = 0, False
    while not passed:
        at, left = at + 1, at

        def trace(frame, event: str, _: object):
            nonlocal left
            name = frame.f_code.co_filename
            if not name.endswith(("own_files.py", "lock_file.py")) or frame.f_code.co_name == "release":
                return None
            left -= event == "line"
            if left < 0:
                left = 10**9
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with one_job(tmp_path / "a"):
                sys.settrace(None)
                passed = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert not os.listdir(tmp_path), f"interrupted at line {at} of taking it"
    assert at > 50


def test_what_a_killed_job_left_at_a_complete_file_is_removed(tmp_path: Path) -> None:
    names = (f".a.owner.{'0' * 32}.json", f"a.{'0' * 32}.tmp", "a", ".a.owner.mine.json", f".b.owner.{'0' * 32}.json")
    for name in names:
        (tmp_path / name).touch()
    dead = asdict(this_process()) | {"pid": 2**22 + 1}
    (tmp_path / names[0]).write_text(json.dumps({"process": dead, "owns": True, "since": "then"}))
    remove_left(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == set(names[2:])


@pytest.mark.parametrize("overwrite", [True, False])
def test_only_files_are_replaced(tmp_path: Path, overwrite: bool) -> None:
    """A device or a pipe at a file's name stays one, and the files next to it stay what they were."""
    os.mkfifo(tmp_path / "a.idx")
    (tmp_path / "b.idx").mkdir()
    for name in "ab":
        (tmp_path / f"{name}.bin").write_text("old")
        with pytest.raises(Refusal, match=rf"{name}.idx is not a file: give another|{name}.bin exists"):
            with atomic_files([str(tmp_path / f"{name}.{end}") for end in ("bin", "idx")], overwrite) as names:
                for one in names:
                    Path(one).write_text("new")
        assert (tmp_path / f"{name}.bin").read_text() == "old"
    assert (tmp_path / "a.idx").is_fifo() and (tmp_path / "b.idx").is_dir()
    assert len(os.listdir(tmp_path)) == 4


def test_only_files_of_known_names_are_removed(tmp_path: Path) -> None:
    (made := tmp_path / "made").mkdir()
    (outside := tmp_path / "outside").mkdir()
    for file in (outside / "a.json", made / "a.json", made / "in" / "b.json", made / "thesis.tex", made / "also" / "c"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    (made / "link").symlink_to(outside)
    assert remove_made(made, ["*.json"]) == ["also/c", "link", "thesis.tex"]
    assert (outside / "a.json").exists() and not (made / "in").exists()
    assert remove_made(made / "link", ["*.json"]) == [""] and (outside / "a.json").exists()
    assert remove_made(made, ["[tlc]*"]) == [] and not made.exists() and (outside / "a.json").exists()


def test_the_first_rank_has_the_lock_of_an_output(tmp_path: Path) -> None:
    (left := tmp_path / f"a.{'0' * 32}.tmp").touch()
    with one_job_of_ranks(tmp_path / "a", False), one_job_of_ranks(None, True), one_job_of_ranks(os.devnull, True):
        assert [*tmp_path.iterdir()] == [left]
    with one_job_of_ranks(tmp_path / "a", True):
        (lock,) = tmp_path.iterdir()
        assert lock.name.startswith(".a.owner.")
    pipe, theirs = CONTEXT.Pipe()
    other = CONTEXT.Process(target=hold, args=(str(tmp_path / "a"), theirs))
    other.start()
    pipe.recv()
    with pytest.raises(InUse, match="is in use by process"), one_job_of_ranks(tmp_path / "a", True):
        pass
    pipe.send(None)
    other.join()
