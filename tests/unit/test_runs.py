# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is the latest, which run it is of, and which folders a run may save in."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpoint.megatron_lm.places import TRACKER, checkpoint_path, run_of, universal_path
from megatron.training.checkpoint.older_formats import _path
from megatron.training.checkpoint.owner import COPIES, identity
from megatron.training.refusal import Refusal

A, B = "a" * 32, "b" * 32


def folder_of(folder: Path, runs: dict[int, str | None], tracker: str | None = None) -> Path:
    """A folder of checkpoints, each of a run; None: of a program that gives runs no identity."""
    for iteration, run in runs.items():
        path = folder / f"iter_{iteration:07d}"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        progress = {"iteration": iteration, "consumed_train_samples": 1} | ({} if run is None else {"run": run})
        torch.save({"progress": progress}, path / "common.pt")
    folder.mkdir(exist_ok=True)
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
    return folder


def latest(folder: Path, notes: list[str] | None = None, whole: bool = True) -> str | None:
    path = checkpoint_path(folder, None, whole=whole, notes=notes)
    return path and path.name


def in_one_line(refused: pytest.ExceptionInfo, *words: str) -> bool:
    line = str(refused.value)
    return "\n" not in line and all(word in line for word in words)


def test_the_tracker_names_the_latest(tmp_path):
    notes: list[str] = []
    assert latest(folder_of(tmp_path / "c", {2: A, 4: A}, "4"), notes) == "iter_0000004" and not notes


@pytest.mark.parametrize("run", [A, None])
def test_a_kill_before_the_tracker_was_moved_on_loses_nothing(tmp_path, run):
    notes: list[str] = []
    assert latest(folder_of(tmp_path / "c", {2: run, 4: run, 6: run}, "4"), notes) == "iter_0000006"
    (note,) = notes
    assert "says 4" in note and "--ckpt-step 4 goes back" in note
    assert latest(folder_of(tmp_path / "first", {2: run}), notes) == "iter_0000002"
    assert "is missing, as after a kill" in notes[1]


@pytest.mark.parametrize("run", [A, None])
def test_a_tracker_that_was_set_back_is_refused_with_both_ways_out(tmp_path, run):
    folder, notes = folder_of(tmp_path, {number: run for number in (2, 4, 6, 8)}, "4"), []
    with pytest.raises(Refusal) as refused:
        latest(folder, notes)
    assert in_one_line(refused, f"{folder / TRACKER} says 4", "write 8 to it", "go back with --ckpt-step 4")
    assert checkpoint_path(folder, 4).name == "iter_0000004"
    assert latest(folder, notes, whole=False) == "iter_0000008"  # --skip-damaged-checkpoints: nobody may ask
    (folder / TRACKER).write_text("8")
    assert latest(folder) == "iter_0000008"


def test_newer_checkpoints_of_a_run_that_was_left_do_not_count(tmp_path):
    notes: list[str] = []
    assert latest(folder_of(tmp_path, {2: A, 4: A, 6: B, 8: A, 10: A}, "6"), notes) == "iter_0000006" and not notes


def test_a_copy_under_another_name_is_no_newer_checkpoint(tmp_path):
    folder = folder_of(tmp_path, {4: A, 6: A}, "4")
    (folder / "iter_0000006" / "common.pt").write_bytes((folder / "iter_0000004" / "common.pt").read_bytes())
    assert run_of(folder / "iter_0000006") is None and latest(folder) == "iter_0000004"


def test_without_a_tracker_nothing_starts_anew(tmp_path):
    folder = folder_of(tmp_path / "c", {2: A, 4: A, 6: A})
    with pytest.raises(Refusal) as refused:
        latest(folder)
    assert in_one_line(refused, "up to iteration 6", f"no {TRACKER}", "write 6 to it", "--ckpt-step")
    assert checkpoint_path(folder, 6).name == "iter_0000006"
    (tmp_path / "torch" / "iter_0000003" / "mp_rank_00").mkdir(parents=True)  # one, of another form
    with pytest.raises(Refusal, match="--ckpt-step"):
        latest(tmp_path / "torch")
    assert latest(folder_of(tmp_path / "empty", {})) is None


@pytest.mark.parametrize(
    "text",
    ["../c/iter_0000004", "/tmp/c/iter_0000004", "..", "iter_0000004/", "", " \n", "four", "4.0", "-4", "\u0664",
     "iter_0000004", "4" * 5000, "x" * 300, "4\n5", "4\0"],
)  # fmt: skip
def test_a_tracker_that_names_no_checkpoint_of_its_folder(tmp_path, text):
    folder = folder_of(tmp_path / "c", {4: A}, text)
    with pytest.raises(Refusal) as refused:
        latest(folder)
    assert in_one_line(refused, str(folder / TRACKER), "--ckpt-step") and len(str(refused.value)) < 600


@pytest.mark.parametrize("text", ["5", "release", "999999999999999"])
def test_a_tracker_that_names_what_is_not_there(tmp_path, text):
    with pytest.raises(Refusal, match="is missing or incomplete: choose another one with --ckpt-step"):
        latest(folder_of(tmp_path, {4: A}, text))


@pytest.mark.parametrize("name", ["../d/global_step7_universal", "/d", "..", "a/b"])
def test_deepspeeds_trackers_stay_in_their_folder(tmp_path, name):
    folder, outside = tmp_path / "c", tmp_path / "d" / "global_step7_universal" / "zero"
    folder.mkdir()
    outside.mkdir(parents=True)
    for tracker, load in (("latest_universal", universal_path), ("latest", _path)):
        (folder / tracker).write_text(name)
        with pytest.raises(Refusal) as refused:
            load(folder, None)
        assert in_one_line(refused, "not in its folder", "--ckpt-step")


def settled(found: Path | None, notes: list[str] | None = None, saves: bool = True, **flags) -> str:
    return identity(found, CheckpointConfig(**flags), [] if notes is None else notes, saves=saves)


def test_a_run_keeps_its_identity_and_a_new_one_gets_its_own(tmp_path):
    folder = str(folder_of(tmp_path, {2: A, 4: A}, "4"))
    found = checkpoint_path(tmp_path, None)
    assert settled(found, load=folder, save=folder) == A == settled(found, load=folder)
    assert settled(found, load=folder, save=str(tmp_path / "elsewhere")) == A
    new = {settled(None, save=str(tmp_path / "new")) for _ in range(3)}
    new |= {settled(found, load=folder, finetune=True), settled(found, load=folder, reset_iteration=True)}
    new.add(settled(found, pretrained_checkpoint=folder))
    assert len(new) == 6 and A not in new and all(len(run) == 32 for run in new)


def test_checkpoints_without_an_identity_get_one(tmp_path):
    folder = str(folder_of(tmp_path, {2: None}, "2"))
    assert len(settled(checkpoint_path(tmp_path, None), load=folder, save=folder)) == 32


def test_a_run_without_a_checkpoint_is_known_by_its_copies_in_memory(tmp_path):
    (tmp_path / COPIES).write_text(A)
    flags = {"load": str(tmp_path), "save": str(tmp_path), "non_persistent_save_interval": 1}
    assert settled(None, **flags) == A
    (tmp_path / COPIES).write_text("../../../etc/0123456789012345678")
    with pytest.raises(Refusal, match="remove it"):
        settled(None, **flags)


@pytest.mark.parametrize(
    "flags, way_out",
    [
        ({}, "--load {d},"),
        ({"finetune": True, "load": "{d}"}, "--load {d} without --finetune,"),
        ({"finetune": True, "load": "{x}"}, "--load {d} without --finetune,"),
        ({"reset_iteration": True, "load": "{d}"}, "--load {d} without --reset-iteration,"),
        ({"load": "{x}"}, "--load {d},"),
        ({"load": "{x}", "ckpt_step": 2}, "--load {d} without --ckpt-step,"),
        ({"load": "{empty}"}, "--load {d},"),
        ({"pretrained_checkpoint": "{x}"}, "--load {d},"),
        ({"pretrained_checkpoint": "{x}", "load": "{empty}"}, "--load {d},"),
    ],
)
def test_a_folder_of_another_run_is_refused_with_its_ways_out(tmp_path, flags, way_out):
    d = folder_of(tmp_path / "d", {2: A, 4: A}, "4")
    places = {"d": d, "x": folder_of(tmp_path / "x", {2: B, 6: B}, "6"), "empty": folder_of(tmp_path / "e", {})}
    flags = {name: value.format(**places) if isinstance(value, str) else value for name, value in flags.items()}
    folder = Path(flags.get("load") or flags.get("pretrained_checkpoint") or tmp_path / "none")
    if folder == places["empty"] and "pretrained_checkpoint" in flags:
        folder = places["x"]
    found = checkpoint_path(folder, flags.get("ckpt_step"))
    with pytest.raises(Refusal) as refused:
        settled(found, save=str(d), **flags)
    ways = (way_out.format(**places), "another folder to --save", "remove this one")
    assert in_one_line(refused, f"--save {d} holds checkpoints up to iteration 4", *ways)
    settled(found, save=str(d), saves=False, **flags)  # an evaluation saves nothing
    for path in d.iterdir():  # nothing was touched
        assert path.name in ("iter_0000002", "iter_0000004", TRACKER)


def test_the_same_run_in_two_folders_goes_on_only_in_the_one_that_is_further(tmp_path):
    first, second = folder_of(tmp_path / "first", {2: A, 4: A}, "4"), folder_of(tmp_path / "second", {4: A}, "4")
    found = checkpoint_path(first, None)
    assert settled(found, load=str(first), save=str(second)) == A
    folder_of(second, {6: A}, "6")
    with pytest.raises(Refusal, match=f"go on with that run by --load {second},"):
        settled(found, load=str(first), save=str(second))


def test_going_back_by_name_is_a_run_of_its_own_and_told_in_a_line(tmp_path):
    d = folder_of(tmp_path, {2: A, 4: A, 6: A}, "6")
    (d / COPIES).write_text(A)
    notes: list[str] = []
    flags = {"load": str(d), "save": f"{d}/../{d.name}", "ckpt_step": 2}
    run = settled(checkpoint_path(d, 2), notes, **flags)
    (note,) = notes
    assert run != A and "up to iteration 6" in note and "overwritten" in note
    assert not (d / COPIES).exists()
    folder_of(d, {3: run}, "3")  # its first checkpoint; a restart with or without --ckpt-step goes on from there
    assert latest(d) == "iter_0000003"
    assert settled(checkpoint_path(d, None), notes, load=str(d), save=str(d)) == run
    assert "are not of the run that goes on from iteration 3" in notes[1]
    assert settled(checkpoint_path(d, 6), load=str(d), save=str(d), ckpt_step=6) == A  # there is nothing newer


def test_every_pair_of_runs_and_places_either_goes_on_or_is_refused(tmp_path):
    """No start from 0, and none from an older checkpoint, is silent: all trackers over all folders of three."""
    for number, runs in enumerate(itertools.product([A, B, None, "-"], repeat=3)):
        for tracker in (None, "2", "4", "6"):
            there = {2 * (place + 1): run for place, run in enumerate(runs) if run != "-"}
            d, notes = folder_of(tmp_path / f"{number}-{tracker}", there, tracker), []
            try:
                found = checkpoint_path(d, None, notes=notes)
                settled(found, notes, load=str(d), save=str(d))
            except Refusal:
                continue
            assert (found is None) == (not there)
            if there and int(found.name[5:]) < max(there):
                assert notes, (runs, tracker)
