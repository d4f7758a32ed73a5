# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are saved in the background or on a full disk are complete or absent; damaged ones are refused."""

import contextlib
import errno
import json
import os
import pickle
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron.training.checkpoint.arguments_of import shape_of
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS, read_list, sum_of
from megatron.training.refusal import Refusal
from tests.distributed.training_runs import damage, make_job, refusal_of, run_loop, save_job, train_job

SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 4"
TRACKER = "latest_checkpointed_iteration.txt"


class Lines:
    """Replaces a reporter and keeps its lines."""

    def __init__(self):
        self.said = []

    def say(self, line):
        self.said.append(line)

    def step(self, *_, **__):
        pass

    evaluation = step


def trained(flags, full_at=()):
    """Run the real loop; returns (its lines, whether the last checkpoint was saved, the losses after it).

    ``full_at``: iterations whose checkpoints find the disk full.
    """
    from megatron.training.checkpoint import rank_file

    job, lines, names = make_job(f"{SMALL} {flags}"), Lines(), [f"iter_{number:07d}" for number in full_at]
    write = rank_file._Summed.write
    rank_file._Summed.write = lambda file, data: (
        full_disk() if any(name in str(file.name) for name in names) else write(file, data)
    )
    try:
        whole = run_loop(job, lines)
    finally:
        rank_file._Summed.write = write
        job.owner.release()
    return lines.said, whole, train_job(job, 2)[0]


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def going_on(flags):
    job = make_job(f"{SMALL} {flags}")
    return job.progress.iteration, train_job(job, 2)[0], job.config.notes


@pytest.mark.parametrize(
    "world, flags",
    [
        (1, "--bf16"),
        (2, "--zero-stage 1 --hidden-dropout 0.1"),
        pytest.param(2, "--zero-stage 3 --micro-batch-size 1", marks=pytest.mark.full),
    ],
)
@pytest.mark.usual(0)
def test_a_checkpoint_saved_during_training_continues_exactly(pool, tmp_path, world, flags):
    """Each save runs while the next step changes all tensors; the newest checkpoints stay."""
    save = (
        f"--train-iters 9 --exit-interval 3 --save-interval 1 --save {tmp_path} --async-save --keep-last-checkpoints 2"
    )
    output, whole, after = pool.run(trained, world, f"{flags} {save}", timeout=120)[0]
    assert whole and sum(" while training went on, except for " in line for line in output) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000002", "iter_0000003", TRACKER}
    goes_on = f"{flags} --train-iters 9 --load {tmp_path}"
    iteration, losses, _ = pool.run(going_on, world, goes_on, timeout=120)[0]
    assert iteration == 3 and losses == after


@pytest.mark.lab
def test_a_disk_that_is_full_meanwhile_costs_one_line_and_one_checkpoint(pool, tmp_path):
    flags = "--train-iters 9 --exit-interval 4 --save-interval 1 --async-save --zero-stage 1"
    output, whole, _ = pool.run(trained, 2, f"{flags} --save {tmp_path}", (2, 3), timeout=120)[0]
    warnings = [line for line in output if "WARNING" in line]
    assert whole and len(warnings) == 2 and all("No space left on device" in line for line in warnings)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000004", TRACKER}
    _, whole, _ = pool.run(trained, 2, f"{flags} --save {tmp_path}/more", (4,), timeout=120)[0]
    assert not whole  # the program's exit code


def saves_with(folder, refused):
    """A save, then one for each (rank, file) that cannot be written; returns the lines and the remaining files."""
    import torch.distributed as dist

    from megatron.training.checkpoint import checkpoint_folder, rank_file

    job = make_job(f"{SMALL} --zero-stage 1")
    train_job(job, 1)
    write, mkdir = rank_file._Summed.write, Path.mkdir
    save_job(folder, job)
    job.progress.iteration, message = 2, []
    for rank, name in refused:
        if dist.get_rank() == rank:
            rank_file._Summed.write = lambda file, data, at=name: (
                full_disk() if Path(file.name).name == at else write(file, data)
            )
            Path.mkdir = lambda path, *args, at=name, **more: (
                full_disk() if path.name == at else mkdir(path, *args, **more)
            )
        try:
            save_job(folder, job)
            message.append(None)
        except OSError as error:
            dist.barrier()  # the first rank removes partial files
            message.append((str(error), sorted(path.name for path in Path(folder).iterdir())))
        finally:
            rank_file._Summed.write, Path.mkdir = write, mkdir
        dist.barrier()
    assert checkpoint_folder.partial_of(Path(folder) / "iter_0000002").exists() is False
    return message


def test_a_disk_that_fills_up_in_any_phase_keeps_earlier_checkpoints(pool, tmp_path):
    names = ["common.pt", "__0_0.distcp", ".metadata", "metadata.json", "checksums.json", ".iter_0000002.partial"]
    refused = [(0, name) for name in names] + [(1, "__1_0.distcp")]
    for messages in pool.run(saves_with, 2, str(tmp_path), refused, timeout=120):
        for (rank, name), (line, left) in zip(refused, messages):
            assert f"(rank {rank}: " in line and "No space left on device" in line and "\n" not in line, name
            assert left == ["iter_0000001", TRACKER], name
    assert (tmp_path / TRACKER).read_text() == "1"


def saved_twice(folder):
    job = make_job(SMALL)
    for _ in range(2):
        train_job(job, 1)
        save_job(folder, job)


@pytest.fixture(scope="module")
def two(pool, shared, tmp_path_factory):
    """A folder with two checkpoints, to be copied."""

    def make():
        folder = str(tmp_path_factory.mktemp("two"))
        pool.run(saved_twice, 1, folder, timeout=120)
        return folder

    return Path(shared("saved twice", make))


@pytest.fixture
def folder(two, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(two, tmp_path / "c"))


def refused(flags):
    return refusal_of(f"{SMALL} {flags}")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_damaged_file_is_named_and_an_older_checkpoint_is_used_only_on_request(pool, folder):
    newest = folder / "iter_0000002"
    flip(newest / "__0_0.distcp", -200)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert f"checkpoint {newest} is damaged: {newest}/__0_0.distcp is not what was written" in message
    assert f"the next older complete one is {folder}/iter_0000001" in message and "--ckpt-step 1" in message
    iteration, _, notes = pool.run(going_on, 1, f"--load {folder} --skip-damaged-checkpoints")[0]
    assert iteration == 1
    assert any(note.startswith("WARNING") and "1 iterations are repeated" in note for note in notes)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    shutil.rmtree(newest)
    assert pool.run(going_on, 1, f"--load {folder} --skip-damaged-checkpoints")[0][0] == 1
    os.unlink(folder / "iter_0000001" / "common.pt")
    (message,) = pool.run(refused, 1, f"--load {folder} --skip-damaged-checkpoints")
    assert "there is no older complete one" in message and "\n" not in message


def test_a_run_saves_neither_over_another_one_nor_over_its_own_later_state(pool, two, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for flags in ("", f"--load {folder} --finetune", f"--load {two}/none", f"--load {folder} --reset-iteration"):
        (message,) = pool.run(refused, 1, f"--save {folder} {flags}")
        assert f"--save {folder} holds checkpoints up to iteration 2" in message and f"--load {folder}" in message
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    iteration, _, notes = pool.run(going_on, 1, f"--load {folder} --save {folder} --ckpt-step 1")[0]
    assert iteration == 1 and any("each is overwritten when this run reaches its iteration" in note for note in notes)
    (folder / TRACKER).unlink()
    (message,) = pool.run(refused, 1, f"--load {folder} --save {folder}")
    assert f"no {TRACKER}, which names the latest: write 2 to it" in message


@pytest.mark.parametrize("name", [b"", b"\xff\xfe2", b"1\n2", "\u00b2".encode()])
def test_a_tracker_that_names_nothing(pool, folder, name):
    (folder / "latest_checkpointed_iteration.txt").write_bytes(name)
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert str(folder) in message and "--ckpt-step" in message and "\n" not in message
    assert pool.run(going_on, 1, f"--load {folder} --ckpt-step 2")[0][0] == 2


def relist(path):
    """Update a checkpoint's list of files after they were changed."""
    listed = read_list(path / CHECKSUMS)
    files = {name: sum_of(path / name) for name in listed.files}
    (path / CHECKSUMS).write_bytes(replace(listed, files=files).packed())


def without_list(path):
    """Turn our checkpoint into one of Megatron-LM: without the list of files and without our settings."""
    common = unpickle.read(path / "common.pt")
    del common["config"]
    torch.save(common, path / "common.pt")
    os.unlink(path / CHECKSUMS)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff{}"])
def test_a_broken_description_of_a_checkpoint_without_sums(pool, folder, content):
    newest = folder / "iter_0000002"
    without_list(newest)
    assert damage(newest) is None
    (newest / "metadata.json").write_bytes(content)
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert f"{newest}/metadata.json cannot be read" in message and f"{folder}/iter_0000001" in message


def test_every_file_is_checked(two, tmp_path):
    path = Path(shutil.copytree(two / "iter_0000002", tmp_path / "iter_0000002"))
    assert damage(path) is None
    names = sorted(file.name for file in path.iterdir())
    assert names == [".metadata", "__0_0.distcp", "checksums.json", "common.pt", "metadata.json"]
    for name in names:
        whole = (path / name).read_bytes()
        for at in (0, len(whole) // 2, -1):
            flip(path / name, at)
            assert name in damage(path)
            (path / name).write_bytes(whole)
        (path / name).write_bytes(whole[:-1])
        assert name in damage(path)
        os.unlink(path / name)
        assert f"{path / name} is missing" in damage(path)
        (path / name).write_bytes(whole)
    assert damage(path) is None
    shares = [damage(path, share, 3) for share in range(3)]
    flip(path / "__0_0.distcp", 100)
    assert shares == [None] * 3 and sum(damage(path, share, 3) is not None for share in range(3)) == 1


def delete_the_list(folder):
    os.unlink(folder / "iter_0000002" / CHECKSUMS)
    return "iter_0000002/checksums.json is missing (the list of its files)"


def empty_the_list(folder):
    (folder / "iter_0000002" / CHECKSUMS).write_text("{}")
    return "iter_0000002/checksums.json names no files"


def shorten_an_older_list(folder):
    write_version_1(folder / "iter_0000002", without="__0_0.distcp")
    return "iter_0000002/checksums.json does not name __0_0.distcp"


def rename_an_older_one(folder):
    shutil.rmtree(folder / "iter_0000002")
    shutil.copytree(folder / "iter_0000001", folder / "iter_0000002")
    return "iter_0000002 is damaged: it was written as iter_0000001 of run "


def exchange_files(folder):
    shutil.copy(folder / "iter_0000001" / "__0_0.distcp", folder / "iter_0000002" / "__0_0.distcp")
    return "iter_0000002/__0_0.distcp is not what was written"


def exchange_lists(folder):
    shutil.copy(folder / "iter_0000001" / CHECKSUMS, folder / "iter_0000002" / CHECKSUMS)
    return "it was written as iter_0000001"


def write_version_1(path, without=None):
    """A list as it was written in November 2026."""
    files = {name: asdict(one) for name, one in read_list(path / CHECKSUMS).files.items() if name != without}
    (path / CHECKSUMS).write_text(json.dumps(files, indent=1))


HARM = [delete_the_list, empty_the_list, shorten_an_older_list, rename_an_older_one, exchange_files, exchange_lists]


@pytest.mark.parametrize("harm", HARM)
def test_a_checkpoint_is_refused_whose_list_is_not_its_own(pool, folder, harm):
    """A flipped bit is never loaded, whatever happened to the list."""
    expected = harm(folder)
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert expected in message and "\n" not in message
    assert f"the next older complete one is {folder}/iter_0000001: load it with --ckpt-step 1" in message
    message, _ = pool.run(refused, 2, f"--load {folder} --micro-batch-size 1 --skip-damaged-checkpoints --finetune")
    assert message == ""


def test_copies_under_their_own_names_and_other_files_are_no_damage(pool, two, tmp_path):
    shutil.copytree(two / "iter_0000002", tmp_path / "other" / "iter_0000002")
    (tmp_path / "other" / TRACKER).write_text("2")
    path = tmp_path / "other" / "iter_0000002"
    shutil.copy(path / "__0_0.distcp", path / "__7_0.distcp")
    flip(path / "__7_0.distcp", -200)
    assert pool.run(going_on, 1, f"--load {tmp_path / 'other'}")[0][0] == 2
    write_version_1(path)
    assert pool.run(going_on, 1, f"--load {tmp_path / 'other'}")[0][0] == 2
    flip(path / "__0_0.distcp", -200)
    assert "__0_0.distcp is not what was written" in damage(path)


def test_the_list_names_run_iteration_and_folder(pool, two):
    listed = read_list(two / "iter_0000002" / CHECKSUMS)
    assert (listed.form, listed.folder, listed.iteration, listed.version) == ("torch_dist", "iter_0000002", 2, 2)
    assert listed.run == unpickle.read(two / "iter_0000002" / "common.pt")["progress"].get("run", "")


def test_a_file_that_the_metadata_names_and_the_list_does_not_is_not_read(pool, folder):
    path = folder / "iter_0000002"
    metadata = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"__0_1.distcp"))
    shutil.copy(path / "__0_0.distcp", path / "__0_1.distcp")
    relist(path)
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert f"{path}/__0_1.distcp: it is not in checksums.json" in message and "\n" not in message


def test_settings_are_taken_from_files_that_were_compared(folder):
    flip(folder / "iter_0000002" / "__0_0.distcp", -200)  # not noticed, because only common.pt is read
    assert shape_of(folder)["num_layers"] == 1
    flip(folder / "iter_0000002" / "common.pt", 300)
    with pytest.raises(Refusal, match="common.pt is not what was written"):
        shape_of(folder)
    assert shape_of(folder, skip=True)["num_layers"] == 1
    (folder / "iter_0000001" / CHECKSUMS).write_text("{}")
    with pytest.raises(Refusal, match="iter_0000002 is damaged"):
        shape_of(folder, skip=True)


def rolled_back(folder, skip):
    """Save twice, damage the newer one, and roll back as after a bad batch; returns the iteration and the lines."""
    from megatron.training.features.bad_batches import roll_back

    job, output = make_job(f"{SMALL} --save {folder} --load {folder}{' --skip-damaged-checkpoints' * skip}"), []
    for _ in range(2):
        train_job(job, 1)
        save_job(folder, job)
    flip(Path(folder) / "iter_0000002" / "__0_0.distcp", -200)
    try:
        return roll_back(job, output.append), output
    except Refusal as refusal:
        return str(refusal), output


def test_a_run_does_not_roll_back_to_a_damaged_checkpoint(pool, tmp_path):
    (message, _), *_ = pool.run(rolled_back, 1, str(tmp_path / "a"), False)
    assert "iter_0000002/__0_0.distcp is not what was written" in message
    (iteration, (line,)), *_ = pool.run(rolled_back, 1, str(tmp_path / "b"), True)
    assert iteration == 1 and line.startswith("WARNING") and "iter_0000002 is damaged" in line


def test_a_foreign_checkpoint_without_sums_has_its_sizes_compared_and_a_note(pool, folder):
    newest = folder / "iter_0000002"
    without_list(newest)
    iteration, _, notes = pool.run(going_on, 1, f"--load {folder}")[0]
    assert iteration == 2 and [note for note in notes if "not checked" in note] == [
        f"not checked: {newest} has no checksums"
    ]
    file = newest / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert f"{file} has" in message and "were written" in message
    os.unlink(newest / ".metadata")
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert str(newest) in message and ".metadata" in message and "\n" not in message


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def save_harm(folder, harm):
    """A checkpoint with correct checksums and malicious random states."""
    from megatron.training.checkpoint import checkpoint

    job, states = make_job(SMALL), checkpoint.random_state
    checkpoint.random_state = lambda: {"python": Harmful(harm)}
    try:
        save_job(folder, job)
    finally:
        checkpoint.random_state = states


@pytest.mark.parametrize("place", ["common.pt", ".metadata", "among tensors"])
def test_a_checkpoint_that_would_run_code_is_refused(pool, two, tmp_path, place):
    folder, harm = tmp_path / "c", tmp_path / "harm"
    if place == "among tensors":
        pool.run(save_harm, 1, str(folder), str(harm))
    else:
        shutil.copytree(two, folder)
        path = folder / "iter_0000002"
        if place == ".metadata":
            (path / place).write_bytes(pickle.dumps(Harmful(harm)))
        else:
            common = unpickle.read(path / place)
            torch.save({**common, "more": Harmful(harm)}, path / place)
        relist(path)
    (message,) = pool.run(refused, 1, f"--load {folder}")
    assert message and "\n" not in message and str(folder) in message
    assert not harm.exists()


def test_states_of_engine_layers_are_tensors_and_numbers_or_refused(tmp_path):
    harm = tmp_path / "harm"
    plain = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 3), "extra_fp8_variables": {"steps": 3}}
    unpickle.check_engine_state(b"", "x")
    unpickle.check_engine_state(pickle.dumps(plain), "x")
    with pytest.raises(Refusal, match="could run code"):
        unpickle.check_engine_state(pickle.dumps({**plain, "more": Harmful(harm)}), "x")
    inner = tmp_path / "inner.pt"
    torch.save(Harmful(harm), inner)

    class Storage:  # as tensors are pickled: with a pickle inside
        def __reduce__(self):
            return torch.storage._load_from_bytes, (inner.read_bytes(),)

    with pytest.raises(Refusal, match="could run code"):
        unpickle.check_engine_state(pickle.dumps(Storage()), "x")
    assert not harm.exists()
    with contextlib.suppress(pickle.UnpicklingError):  # core 0.19 has made this function safe
        pickle.loads(pickle.dumps(Storage()))
        assert harm.exists()  # unpickling without the check runs the code


@pytest.mark.parametrize("folder", ["file/c", "file"])
def test_a_folder_that_cannot_be_saved_in_is_refused_at_the_start(pool, tmp_path, folder):
    (tmp_path / "file").write_text("")
    (message,) = pool.run(refused, 1, f"--save {tmp_path / folder}")
    assert message == f"--save {tmp_path / folder}: {tmp_path / 'file'} is not a folder"
