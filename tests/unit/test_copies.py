# SPDX-License-Identifier: Apache-2.0
"""Copies in memory: their destinations and owners."""

import io
import json
import os
import struct
import sys
import zlib
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from megatron.training.arguments.parser import parse
from megatron.training.checkpoint import checkpoint_folder
from megatron.training.checkpoint.in_memory import copies, copy_file, restart, state
from megatron.training.checkpoint.run_state import Progress
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
        ("--replication --replication-jump 20", 12, 4, [20]),  # the same as 8
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
    monkeypatch.setattr(copies, "gathered_objects", lambda value, group: [value])
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


def test_the_checksum_is_that_of_the_file_and_data_is_aligned(tmp_path):
    """By zlib alone, with zeros in the checksum's place. A dtype's data begins at a multiple of its size."""
    for number in range(8):
        path = tmp_path / str(number)
        copy_file.write(path, [*TENSORS, ("odd", torch.zeros(number, dtype=torch.bool))], {})
        copy_file.seal(path)
        data, (size,) = path.read_bytes(), struct.unpack("<Q", path.read_bytes()[:8])
        header = json.loads(data[8 : 8 + size])
        place = data.index(header["__metadata__"]["crc32"].encode())
        assert int(data[place : place + 8], 16) == zlib.crc32(data[:place] + b"0" * 8 + data[place + 8 :])
        starts = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
        assert size % 8 == 0 and all(starts[name] % tensor.element_size() == 0 for name, tensor in TENSORS)


def test_a_file_without_tensors_is_intact(tmp_path):
    copy_file.write(tmp_path / "a", [], {"iteration": "7"})
    copy_file.seal(tmp_path / "a")
    assert copy_file.intact(tmp_path / "a") and copy_file.about(tmp_path / "a")["iteration"] == "7"


@pytest.mark.parametrize("place, room", [("memory", 25), ("disk", 50)])
def test_ranks_of_a_node_share_the_room_for_copies(monkeypatch, place, room):
    """In memory, the room is also at most what the host has available."""
    mib = 2**20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * 50 * mib + 3))
    folder = SimpleNamespace(at=None, named=(copies.MEMORY if place == "memory" else Path("/data")) / "run")
    kept = SimpleNamespace(folder=folder, available=lambda: 4 * 25 * mib + 3)
    copies.Copies._check_space(kept, room * mib)
    with pytest.raises(
        OSError, match=f"{folder.named} has room for {room} MiB per rank, but {2 * room} MiB are needed"
    ):
        copies.Copies._check_space(kept, 2 * room * mib)
    with pytest.raises(OSError, match="has room for"):
        copies.Copies._check_space(kept, room * mib + 1)


def test_a_rank_needs_room_for_its_own_copy_and_those_of_others(tmp_path):
    needed, done = [], []
    progress = Progress(7)
    kept = SimpleNamespace(
        finish=lambda: None, partial=lambda *_: tmp_path / "a", rank=1, distances=[2, 4], about={},
        _check_space=needed.append, _replicate=lambda *arguments: done.append(arguments),
    )  # fmt: skip
    copies.Copies.begin(kept, progress, [("a", torch.zeros(5)), ("b", torch.zeros(3, dtype=torch.uint8))])
    kept._thread.join()
    assert needed == [3 * 23] and done[0][0] == 7 and 0 <= kept._waited < 100


def test_a_rank_sends_to_later_ranks_and_receives_from_earlier_ones(monkeypatch, tmp_path):
    swapped, gathered = [], iter([[(11, ""), (22, ""), (33, ""), (44, ""), (55, "")], [""] * 5, [None] * 5])
    monkeypatch.setattr(copies, "gathered_objects", lambda *_: next(gathered))
    monkeypatch.setattr(copies, "swap", lambda sent, wanted, _: swapped.append((sent[1], *wanted[1:])))
    monkeypatch.setattr(copies.copy_file, "seal", lambda _: 11)
    monkeypatch.setattr(copies.copy_file, "intact", lambda _: True)
    kept = copies.Copies.__new__(copies.Copies)
    vars(kept).update(folder=SimpleNamespace(at=tmp_path, named=tmp_path), distances=[1, 3], rank=1, ranks=5,
                      group=None, _lines=[], _first=True, _waited=0.0)  # fmt: skip
    for rank in (1, 0, 3):
        kept.partial(7, rank).touch()
    kept._replicate(7, "")
    assert swapped == [(2, 0, 11), (4, 3, 44)]
    assert {path.name for path in tmp_path.iterdir()} == {kept.path(7, rank).name for rank in (0, 1, 3)}
    assert kept._lines[0].startswith(f"copies of iteration 7 in {tmp_path}, and on rank n + 1, and on rank n + 3: ")


def test_notes_about_copies_are_those_of_the_run(monkeypatch, tmp_path):
    config = parse(
        f"{GOOD} {MOCK} --save {tmp_path} --load {tmp_path} --non-persistent-save-interval 1 "
        f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {tmp_path}/memory".split(),
        world_size=1,
    )
    group, used = object(), []
    for name, result in (("get_rank", 0), ("get_world_size", 1), ("is_initialized", True)):
        monkeypatch.setattr(dist, name, lambda *_, result=result: result)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda _: None)
    monkeypatch.setattr(dist, "new_group", lambda **_: group)
    monkeypatch.setattr(dist, "all_gather_object", lambda *_, group: used.append(group))
    monkeypatch.setattr(copies, "refuse_together", lambda function: function())
    monkeypatch.setattr(copies, "_distances", lambda _: ([], ["a note"]))
    opened = copies.open_copies(config, "one rank", lambda: 0, "0" * 32)
    copies.gathered_objects(None, opened.group)
    assert config.notes[-1] == "a note" and used == [group] and opened.about["grid"] == "one rank, ZeRO 0"


@pytest.mark.parametrize("on_disk, chosen", [(2, 5), (4, 5), (5, None), (6, None)])
def test_only_copies_newer_than_the_disk_are_loaded(monkeypatch, on_disk, chosen):
    files, cleared = {(step, "a"): {0: Path(str(step))} for step in (3, 5, 4)}, []
    monkeypatch.setattr(restart, "_list_files", lambda _: (files, set()))
    monkeypatch.setattr(restart, "gathered_objects", lambda value, _: [value])
    monkeypatch.setattr(
        restart, "_fetch", lambda copies, step, *_: (restart.CopyToLoad(Path("x"), Progress(step[0]), ""), "")
    )
    kept = SimpleNamespace(group=None, clear=cleared.append, about={})
    newest = restart.newest(kept, on_disk, [])
    assert (newest and newest.progress.iteration) == chosen and cleared == [chosen]


def test_identical_tensors_are_shared_out_by_size(monkeypatch):
    """The largest first, each to the rank that has least."""
    monkeypatch.setattr(state, "get_data_parallel_group", lambda **_: SimpleNamespace(size=lambda: 2))
    parts = [(state.Part(str(size), torch.empty(size)), True) for size in (4, 8, 5, 7, 6)]
    own = state.Part("own", torch.empty(9))
    shared = state.TrainingState._parts(SimpleNamespace(_all_tensors=lambda: [*parts, (own, False)]))
    assert {part.name: part.owner for part in shared} == {"8": 0, "7": 1, "6": 1, "5": 0, "4": 0, "own": None}


@pytest.mark.parametrize("algorithm", ["fully_parallel", "atomic"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_which_tensors_are_the_same_on_all_ranks(stage, algorithm):
    model, moment = nn.Linear(3, 2), torch.ones(2, 3)
    model.register_buffer("own", torch.zeros(1))
    main = torch.zeros(2, 3)
    config = SimpleNamespace(
        parallel=SimpleNamespace(zero_stage=stage),
        checkpoint=SimpleNamespace(non_persistent_local_ckpt_algo=algorithm),
    )
    states = [("optimizer0.0.0", main, {"exp_avg": moment, "step": 3}), ("optimizer1.0.0", main, {})]
    kept = SimpleNamespace(config=config, chunks=[model], _states=lambda: states)
    same = {part.name: same for part, same in state.TrainingState._all_tensors(kept)}
    share = algorithm == "fully_parallel"
    assert same == {
        "model0.weight": share and stage < 2, "model0.bias": share and stage < 2, "model0.own": False,
        "optimizer0.0.0.param": share and stage < 1, "optimizer0.0.0.exp_avg": share and stage < 1,
        "optimizer1.0.0.param": False,
    }  # fmt: skip


class WithState(nn.Linear):
    def get_extra_state(self):
        file = io.BytesIO()
        torch.save({"scale": 4.0}, file)
        return file

    def set_extra_state(self, value):
        self.loaded = torch.load(value)


def test_what_is_no_tensor_is_loaded_too(monkeypatch, tmp_path):
    monkeypatch.setattr(state, "set_random_state", lambda _: None)
    monkeypatch.setattr(state, "random_state", lambda: None)
    main, loaded = nn.Parameter(torch.zeros(2)), {}

    def job(rate, step):
        inner = torch.optim.SGD([main], rate)
        inner.state[main] = {"step": step, "exp_avg": torch.zeros(2)}
        part = SimpleNamespace(optimizer=inner, grad_scaler=SimpleNamespace(
            state_dict=lambda: {"scale": 8.0}, load_state_dict=loaded.update))  # fmt: skip
        monkeypatch.setattr(state, "parts_of", lambda optimizer: [optimizer])
        return state.TrainingState([nn.Sequential(WithState(2, 2))], part, None, None)

    before, after = job(0.25, 7), job(0.5, 0)
    objects = before._objects()
    assert objects["engine"].keys() == {"model0.0._extra_state"}
    after._load_objects(objects, tmp_path)
    (group,), numbers = after.optimizer.optimizer.param_groups, after.optimizer.optimizer.state[main]
    assert group["lr"] == 0.25 and numbers["step"] == 7 and "exp_avg" in numbers and loaded == {"scale": 8.0}
    assert after.chunks[0][0].loaded == {"scale": 4.0}


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
    assert len(result) <= max(1, 2 * len(shape) - 1) and all(prod(inner) for _, _, inner in result)


@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (2, 3, 4), (3, 1, 2)])
def test_boxes_of_all_parts_of_a_tensor(shape):
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(-1, whole.numel() + 1):
        for stop in range(start, whole.numel() + 2):
            found = []
            for first, corner, inner in boxes(shape, start, stop):
                part = whole[tuple(slice(at, at + size) for at, size in zip(corner, inner, strict=True))]
                assert part.shape == inner and part.numel() and int(part.flatten()[0]) == first
                found += part.flatten().tolist()
                assert len(corner) == len(shape)
            assert len([*boxes(shape, start, stop)]) <= max(1, 2 * len(shape) - 1)
            assert found == list(range(max(start, 0), min(stop, whole.numel())))


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
