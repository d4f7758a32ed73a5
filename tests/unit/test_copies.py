# SPDX-License-Identifier: Apache-2.0
"""Where copies in memory go, and whose they are."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.in_memory import copies
from megatron.training.refusal import Refusal
from tests.unit.test_refusals import GOOD, MOCK


def settings(flags: str, world: int = 1, folder: str = "a"):
    config = parse(
        f"{GOOD} {MOCK} --global-batch-size {world} --save {folder} --load {folder} --non-persistent-save-interval 1 "
        f"--non-persistent-ckpt-type local {flags}".split(),
        world_size=world,
    )
    return config.checkpoint, config.notes


@pytest.mark.parametrize(
    "flags, ranks, local, distances",
    [
        ("", 16, 8, []),
        ("--replication", 16, 8, [8]),
        ("--replication", 24, 8, [8]),  # around a ring: no number of nodes is odd
        ("--replication --replication-factor 3", 24, 8, [8, 16]),
        ("--replication --replication-jump 1", 4, 1, [1]),
        ("--replication --replication-jump 5", 12, 4, [5]),
        ("--replication --replication-jump 16", 24, 8, [16]),
    ],
)
def test_each_copy_goes_to_another_node(monkeypatch, flags, ranks, local, distances):
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert copies._distances(settings(flags, ranks)[0]) == (distances, [])
    for distance in distances:
        assert all((rank + distance) % ranks // local != rank // local for rank in range(ranks))


@pytest.mark.parametrize(
    "flags, ranks, local, words",
    [
        ("--replication", 8, 8, "--replication-jump 8 its own node 8 of the 8 ranks"),
        ("--replication --replication-jump 4", 16, 8, "--replication-jump 4 its own node"),
        ("--replication --replication-factor 3", 16, 8, "--replication-factor 3 its own node"),
        ("--replication --replication-jump 12", 16, 8, "--replication-jump 12 its own node"),
    ],
)
def test_a_copy_on_its_own_node_is_none(monkeypatch, flags, ranks, local, words):
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    distances, (note,) = copies._distances(settings(flags, ranks)[0])
    assert distances == [] and "no effect here: --replication" in note and all(word in note for word in words.split())


def test_one_process_has_no_neighbour():
    found, notes = settings("--replication")
    assert not found.replication and any("no effect here: --replication" in note for note in notes)


def test_a_folder_is_this_runs_alone(tmp_path: Path, monkeypatch):
    save, memory = tmp_path / "c", tmp_path / "memory"
    save.mkdir()
    run = copies._id(str(save), "0" * 32)
    assert run == copies._id(str(save), "1" * 32) == "0" * 32
    found, _ = settings(f"--non-persistent-local-ckpt-dir {memory}", folder=str(save))
    folder = copies._folder(found, run)
    assert folder == memory / f"run-{run}" and folder.stat().st_mode & 0o777 == 0o700
    (save / copies.COPIES).unlink()  # somebody cleared the folder: a new run, which old copies are not of
    assert copies._id(str(save), "1" * 32) != run
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(Refusal, match="belongs to somebody else"):
        copies._folder(found, run)
    (memory / "run-x").symlink_to(tmp_path)
    with pytest.raises(Refusal, match="belongs to somebody else"):
        copies._folder(found, "x")
    (save / copies.COPIES).write_text("../../../etc/0123456789012345678")
    with pytest.raises(Refusal, match="remove it"):
        copies._id(str(save), run)
    found.non_persistent_local_ckpt_dir = str(save / copies.COPIES)
    with pytest.raises(Refusal, match="--non-persistent-local-ckpt-dir .* cannot be written to"):
        copies._folder(found, "y")
