# SPDX-License-Identifier: Apache-2.0
"""Copies in memory: their destinations and owners."""

import json
import os
import sys
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.training.arguments.parser import parse
from megatron.training.checkpoint import checkpoint_folder
from megatron.training.checkpoint.in_memory import copies, copy_file
from megatron.training.checkpoint.sharded_state import boxes
from megatron.training.refusal import Refusal
from tests.properties import examples
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
        ("--replication", 24, 8, [8]),  # copies go around a ring, so any number of nodes works
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
def test_a_copy_on_the_same_node_does_not_count(monkeypatch, flags, ranks, local, words):
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    distances, (note,) = copies._distances(settings(flags, ranks)[0])
    assert distances == [] and "no effect here: --replication" in note and all(word in note for word in words.split())


def test_one_process_has_no_rank_to_copy_to():
    result, notes = settings("--replication")
    assert not result.replication and any("no effect here: --replication" in note for note in notes)


def test_a_folder_belongs_to_one_run(tmp_path: Path):
    save, memory = tmp_path / "c", tmp_path / "memory"
    save.mkdir()
    run = copies._id(str(save), "0" * 32)
    assert run == copies._id(str(save), "1" * 32) == "0" * 32
    result, _ = settings(f"--non-persistent-local-ckpt-dir {memory}", folder=str(save))
    folder = copies._folder(result, run)
    assert folder.named == memory / f"run-{run}" and folder.named.stat().st_mode & 0o777 == 0o700
    assert memory.stat().st_mode & 0o777 == 0o700
    assert copies._folder(result, run).at.samefile(folder.named)  # another rank of this node
    (save / copies.COPIES).unlink()  # the folder was cleared: a new run, to which old copies do not belong
    assert copies._id(str(save), "1" * 32) != run
    (save / copies.COPIES).write_text("../../../etc/0123456789012345678")
    with pytest.raises(Refusal, match="remove it"):
        copies._id(str(save), run)
    result.non_persistent_local_ckpt_dir = str(save / copies.COPIES)
    with pytest.raises(Refusal, match="--non-persistent-local-ckpt-dir .* cannot be written to"):
        copies._folder(result, "y")


def a_link(scratch: Path, victim: Path) -> str:
    (scratch / "mine").symlink_to(victim)
    return "scratch/mine is a link, which is not followed"


def a_run_that_is_a_link(scratch: Path, victim: Path) -> str:
    (scratch / "mine").mkdir()
    (scratch / "mine" / "run-x").symlink_to(victim)
    return "scratch/mine/run-x is a link, which is not followed"


def writable_by_others(scratch: Path, victim: Path) -> str:
    scratch.chmod(0o777)
    return r"other users can replace what is in .*/scratch \(mode 777\)"


def writable_by_the_group(scratch: Path, victim: Path) -> str:
    scratch.chmod(0o770)
    return r"other users can replace what is in .*/scratch \(mode 770\)"


def readable_by_others(scratch: Path, victim: Path) -> str:
    (scratch / "mine" / "run-x").mkdir(parents=True)
    (scratch / "mine" / "run-x").chmod(0o755)
    return "scratch/mine/run-x has the mode 755"


def of_another_user(scratch: Path, victim: Path) -> str:
    (scratch / "mine").mkdir(mode=0o777)
    os.chown(scratch / "mine", 12345, 12345)
    return "scratch/mine belongs to user 12345"


def below_another_users(scratch: Path, victim: Path) -> str:
    (scratch / "mine" / "run-x").mkdir(parents=True, mode=0o700)
    os.chown(scratch, 12345, 12345)
    return "scratch belongs to user 12345"


def a_run_of_another_user(scratch: Path, victim: Path) -> str:
    (scratch / "mine" / "run-x").mkdir(parents=True, mode=0o700)
    os.chown(scratch / "mine" / "run-x", 12345, 12345)
    return "scratch/mine/run-x belongs to user 12345"


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")


@pytest.mark.parametrize(
    "attack",
    [
        a_link,
        a_run_that_is_a_link,
        writable_by_others,
        writable_by_the_group,
        readable_by_others,
        pytest.param(of_another_user, marks=ROOT),
        pytest.param(below_another_users, marks=ROOT),
        pytest.param(a_run_of_another_user, marks=ROOT),
    ],
)
def test_a_folder_that_another_user_could_change_is_refused(tmp_path: Path, attack):
    scratch, victim = tmp_path / "scratch", tmp_path / "victim"
    for folder in (scratch, victim):
        folder.mkdir()
    scratch.chmod(0o1777)  # as /dev/shm and /tmp are
    (victim / "iter_0000001.file").write_text("precious")
    words = attack(scratch, victim)
    result, _ = settings(f"--non-persistent-local-ckpt-dir {scratch}/mine")
    with pytest.raises(Refusal, match=f"--non-persistent-local-ckpt-dir .*{words}.* give --non-persistent") as refused:
        copies._folder(result, "x")
    assert "\n" not in str(refused.value)
    assert os.listdir(victim) == ["iter_0000001.file"]


def test_files_of_root_are_not_mistaken_for_this_users(tmp_path: Path, monkeypatch):
    result, _ = settings(f"--non-persistent-local-ckpt-dir {tmp_path}/memory")
    copies._folder(result, "x")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Refusal, match="belongs to user"):
        copies._folder(result, "x")


def test_in_the_default_folder_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(copies, "MEMORY", tmp_path)
    tmp_path.chmod(0o1777)
    (tmp_path / "victim").mkdir()
    result, _ = settings("")
    link = tmp_path / f"megatron-{os.geteuid()}"
    link.symlink_to("victim")
    with pytest.raises(Refusal, match="--non-persistent-save-interval: .*is a link.* give --non-persistent-local"):
        copies._folder(result, "x")
    link.unlink()
    assert copies._folder(result, "x").named == link / "run-x" and not os.listdir(tmp_path / "victim")
    assert link.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(sys.platform != "linux", reason="files are reached by a descriptor through /proc")
def test_a_link_that_is_put_in_place_of_the_folder_leads_nowhere(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(copies, "gathered", lambda value, group: [value])
    victim, result = tmp_path / "victim", settings(f"--non-persistent-local-ckpt-dir {tmp_path}/mine")[0]
    victim.mkdir()
    names = [f"iter_000000{number}.rank_00000.safetensors" for number in (1, 2)]
    kept = copies.Copies(copies._folder(result, "x"), [], {}, None, lambda: 2**40)
    for name in names:
        (victim / name).write_text("precious")
        (kept.folder.at / name).write_text("a copy")
    mine = kept.folder.named.rename(tmp_path / "elsewhere")
    kept.folder.named.symlink_to(victim)
    kept._clear_before(2)
    assert os.listdir(mine) == names[1:]
    kept.partial(3, 0).write_text("a new one")
    kept.partial(3, 0).rename(kept.path(3, 0))
    assert sorted(os.listdir(mine)) == [names[1], kept.path(3, 0).name]
    kept.clear(3)
    assert os.listdir(mine) == [kept.path(3, 0).name]
    kept.remove(str(tmp_path))
    assert not os.listdir(mine) and kept.folder.named.is_symlink()
    assert sorted(os.listdir(victim)) == names


# Damage to the file of a copy in memory is detected, and the best checkpoints are kept.


TENSORS = [
    ("bytes", torch.arange(7, dtype=torch.uint8)),
    ("number", torch.tensor(3.0)),
    ("columns", torch.arange(12.0).view(3, 4).t()),
    ("half", torch.randn(5).bfloat16()),
    ("none", torch.empty(0, 3)),
    ("long", torch.arange(3)),
]


def written(path):
    copy_file.write(path, TENSORS, {"iteration": "7"})
    assert not copy_file.intact(path)
    assert copy_file.seal(path) == path.stat().st_size
    return path


def test_any_reader_of_safetensors_reads_it(tmp_path):
    path = written(tmp_path / "a")
    assert copy_file.intact(path) and copy_file.about(path)["iteration"] == "7"
    result = load_file(path)
    assert result.keys() == dict(TENSORS).keys()
    for name, tensor in TENSORS:
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor)


def test_every_flipped_bit_and_every_missing_end_is_noticed(tmp_path):
    path = written(tmp_path / "a")
    data = path.read_bytes()
    about_sum = data.index(copy_file.FIELD)
    for at in {*range(0, len(data), 5), *range(about_sum, about_sum + 20), len(data) - 1}:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert not copy_file.intact(path), at
    for size in (0, 4, 8, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert not copy_file.intact(path) and not copy_file.about(path)
    assert not copy_file.intact(tmp_path / "b") and copy_file.about(tmp_path / "b") == {}


@examples(60)
@given(st.data())
def test_boxes_cover_the_elements_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    whole = torch.arange(prod(shape)).view(shape)
    start = data.draw(st.integers(-3, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel() + 3))
    result = list(boxes(shape, start, stop))
    for first, corner, inner in result:
        part = whole[tuple(slice(at, at + size) for at, size in zip(corner, inner))]
        assert part.shape == inner and part.flatten().tolist() == list(range(first, first + prod(inner)))
    assert sum(prod(inner) for _, _, inner in result) == max(0, min(stop, whole.numel()) - max(start, 0))
    assert len(result) <= max(1, 2 * len(shape) - 1)


def checkpoints(folder, losses):
    """Empty checkpoints 10, 20, ... with these validation losses."""
    for number, loss in enumerate(losses, start=1):
        path = folder / f"iter_{10 * number:07d}"
        path.mkdir()
        if loss is not None:
            (path / checkpoint_folder.VALIDATION).write_text(
                loss if isinstance(loss, str) else json.dumps({"validation_loss": loss})
            )


@pytest.mark.parametrize(
    "losses, keep, multiple, best, stay",
    [
        ([3.0, 1.0, 2.0, 4.0], 1, None, 1, [20, 40]),
        ([3.0, 1.0, 2.0, 4.0], 2, None, 2, [20, 30, 40]),
        ([3.0, 1.0, 2.0, 0.5], 1, None, 1, [40]),
        ([3.0, 1.0, 2.0, 0.5], 1, 30, 2, [20, 30, 40]),
        ([1.0, 1.0, 2.0], 1, None, 1, [20, 30]),  # the later of two equal losses is kept
        ([float("nan"), None, "torn", "[]", 5.0], 1, None, 3, [50]),
        ([1.0, 2.0, 3.0], 1, None, None, [30]),
    ],
)
def test_the_best_checkpoints_are_kept(tmp_path, losses, keep, multiple, best, stay):
    checkpoints(tmp_path, losses)
    checkpoint_folder.remove_older(tmp_path, 10 * len(losses), keep, multiple, best)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"iter_{iteration:07d}" for iteration in stay]
