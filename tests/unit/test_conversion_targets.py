# SPDX-License-Identifier: Apache-2.0
"""Conversions remove only what they wrote, at most one writes a target, and an interrupted one leaves nothing half."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.training.checkpoint import checkpoint_folder
from megatron.training.checkpoint.converting.from_hugging_face import from_hugging_face
from megatron.training.checkpoint.converting.to_hugging_face import to_hugging_face
from megatron.training.checkpoint.hugging_face.safetensors_folder import COPIED, new_folder
from megatron.training.checkpoint.in_memory.copy_file import open_private
from megatron.training.refusal import Refusal
from tests.distributed.training_runs import damage
from tests.hugging_face import save_model

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
TOKEN = "0123456789abcdef" * 2
WHOLE = {"hf", "release", "latest_checkpointed_iteration.txt"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape with different weights."""
    folders = [tmp_path_factory.mktemp("models") / name for name in "ab"]
    for folder, theta in zip(folders, (10000.0, 20000.0)):
        save_model(folder, "llama", SIZES | {"rope_theta": theta, "tie_word_embeddings": False})
        (folder / "tokenizer.json").write_text(folder.name)
    for path in folders[1].glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    return folders


def slow(seconds: float) -> Callable[[int], Callable[[], Any]]:
    """A progress bar that takes this long for each tensor."""
    return lambda _: lambda: time.sleep(seconds)


def child(action: Callable[[], Any]) -> tuple[int, int]:
    """(process, pipe with its line) of a fork that converts and exits as the tools do."""
    receiving, sending = os.pipe()
    number = os.fork()
    if number == 0:
        code = 99
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            action()
            code = 0
        except Refusal as refusal:
            os.write(sending, str(refusal).encode())
            code = 2
        except (SystemExit, KeyboardInterrupt):
            code = 130
        except BaseException as error:
            os.write(sending, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(code)
    os.close(sending)
    return number, receiving


def ended(job: tuple[int, int]) -> tuple[int, str]:
    """(exit code, or minus the signal; its line)."""
    with os.fdopen(job[1], "rb") as pipe:
        line = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(job[0], 0)[1]), line


def is_from(target: Path, source: Path) -> bool:
    """Whether a complete, undamaged conversion is that of this model."""
    assert {path.name for path in target.iterdir()} == WHOLE and damage(target / "release") is None
    to_hugging_face(target, back := target.with_name(target.name + ".back"), None, slow(0.0))
    theirs = {k: v for path in source.glob("*.safetensors") for k, v in load_file(path).items()}
    ours = {k: v for path in back.glob("*.safetensors") for k, v in load_file(path).items()}
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return same and (back / "tokenizer.json").read_text() == source.name


@pytest.mark.parametrize("count", [1, pytest.param(50, marks=pytest.mark.full)])
def test_of_two_conversions_to_one_target_one_is_refused(models: list[Path], tmp_path: Path, count: int) -> None:
    chance, refused = random.Random(count), []
    for number in range(count):
        target, waits = tmp_path / f"t{number}", (0.0, chance.choice([0.0, chance.random() * 0.3]))

        def convert(source: Path, wait: float, target: Path = target, pause: float = chance.random() * 0.02) -> None:
            time.sleep(wait)
            from_hugging_face(source, target, None, slow(pause))

        jobs = [child(partial(convert, model, wait)) for model, wait in zip(models, waits)]
        results = [ended(job) for job in jobs]
        assert sorted(code for code, _ in results) == [0, 2], results
        assert is_from(target, models[[code for code, _ in results].index(0)])
        refused.append(next(line for code, line in results if code == 2))
    assert all("is in use by process" in line or "exists and is not empty" in line for line in refused), refused
    assert count == 1 or any("is in use by process" in line for line in refused)
    left = [path.name for path in tmp_path.iterdir() if not path.name.removesuffix(".back")[1:].isdigit()]
    assert not left  # neither a lock nor an unfinished folder


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.full)])
def test_an_interrupted_conversion_leaves_nothing_after_the_next(
    models: list[Path], tmp_path: Path, count: int
) -> None:
    chance, target, interrupted, before = random.Random(7), tmp_path / "t", 0, set()
    for number in range(count):
        how = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3]
        job = child(lambda: from_hugging_face(models[0], target, None, slow(0.03)))
        time.sleep(0.02 + chance.random() * 0.4)
        os.kill(job[0], how)
        code, line = ended(job)
        interrupted += code != 0
        assert code in (0, 130, 143, -how), (code, line)
        left = {path.name for path in tmp_path.iterdir()} - {"t"}
        assert left <= before or how == signal.SIGKILL, left - before
        before = left
        if target.exists():
            for path in sorted(target.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            target.rmdir()
    assert interrupted
    from_hugging_face(models[0], target, None, slow(0.0))
    assert {path.name for path in tmp_path.iterdir()} == {"t"} and is_from(target, models[0])


# Files that somebody put into folders where this program removes its own.


def interrupted_before(folder: Path) -> Path:
    """What a killed conversion to folder/t has left."""
    left = folder / f"t.{TOKEN}.tmp"
    for name in ("release/common.pt", "release/__0_0.distcp", "hf/config.json", "hf/a b.txt", "model.safetensors"):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_text("x")
    (left / COPIED).write_text('["a b.txt"]')
    return left


def convert_again(folder: Path) -> None:
    with new_folder(folder / "t"):
        pass


def failed_conversion(folder: Path) -> None:
    with pytest.raises(Refusal, match="nothing was written"), new_folder(folder / "t", [Path("a.json")]) as new:
        (new / "a.json").write_text("x")
        (new / "thesis.tex").write_text("mine")
        raise OSError("disk full")


def checkpoint_at(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("common.pt", ".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp", "checksums.json"):
        (path / name).write_text("x")
    (path / checkpoint_folder.VALIDATION).write_text('{"validation_loss": 1.0}')
    return path


def published_over(folder: Path) -> None:
    """Save an iteration again."""
    checkpoint_at(checkpoint_folder.partial_of(folder / "iter_0000003", TOKEN))
    assert "thesis.tex" in checkpoint_folder.publish(folder / "iter_0000003", TOKEN)[0]


PLACES: list[tuple[str, Callable[[Path], Path], Callable[[Path], Any], str]] = [
    # (what, makes the folder in which thesis.tex is put, what removes files, where thesis.tex is afterwards)
    ("a killed conversion", interrupted_before, convert_again, f"t.{TOKEN}.tmp"),
    ("a name of earlier versions", lambda at: at / ".t.partial", convert_again, ".t.partial"),
    ("a failed conversion", lambda at: at / "unused", failed_conversion, "t.*.tmp"),
    ("--keep-last-checkpoints", lambda at: checkpoint_at(at / "iter_0000001"),
     lambda at: checkpoint_folder.remove_older(at, 5, 1, None, None), "iter_0000001.others"),
    ("the iteration again", lambda at: checkpoint_at(at / "iter_0000003"), published_over, "iter_0000003.others"),
    ("an interrupted save", lambda at: checkpoint_at(at / ".iter_0000002.0123abcd.partial"), checkpoint_folder.clear,
     "iter_0000002.others"),
    ("an interrupted removal", lambda at: checkpoint_at(at / ".iter_0000002.removed"), checkpoint_folder.clear,
     "iter_0000002.others"),
    ("a hidden folder of the user", lambda at: at / ".thesis.partial", checkpoint_folder.clear, ".thesis.partial"),
    ("copies in memory", lambda at: at / "run", lambda at: open_private(at / "run").remove(), "run"),
]  # fmt: skip


@pytest.mark.parametrize("make, remove, where", [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_a_file_that_somebody_else_put_there_is_kept(tmp_path: Path, make, remove, where: str) -> None:
    (planted := make(tmp_path)).mkdir(parents=True, exist_ok=True, mode=0o700)
    (planted / "thesis.tex").write_text("mine")
    (planted / "iter_0000001.rank_00000.safetensors").write_text("a copy") if planted.name == "run" else None
    remove(tmp_path)
    (kept,) = tmp_path.glob(where)
    assert [path.name for path in kept.rglob("*") if path.is_file()] == ["thesis.tex"]
    assert (kept / "thesis.tex").read_text() == "mine"


def test_what_stays_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (interrupted_before(tmp_path) / "thesis.tex").write_text("mine")
    convert_again(tmp_path)
    assert (
        capsys.readouterr().err
        == f"{tmp_path}/t.{TOKEN}.tmp is left: it has files that no conversion wrote: thesis.tex\n"
    )
    for number in (1, 2):
        (checkpoint_at(tmp_path / "save" / "iter_0000001") / "notes.md").write_text("mine")
        lines = checkpoint_folder.remove_older(tmp_path / "save", 9, 1, None)
        others = tmp_path / "save" / f"iter_0000001.others{'' if number == 1 else number}"
        expected = "has files that were in a checkpoint which was removed, and that others wrote: notes.md"
        assert lines == [f"{others} {expected}"]
    assert checkpoint_folder.checkpoints_in(tmp_path / "save") == {}


def test_without_foreign_files_nothing_is_left(tmp_path: Path) -> None:
    interrupted_before(tmp_path)
    convert_again(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and not any((tmp_path / "t").iterdir())
    checkpoint_at(tmp_path / "save" / "iter_0000001")
    assert checkpoint_folder.remove_older(tmp_path / "save", 9, 1, None) == [] == [*(tmp_path / "save").iterdir()]


def test_a_link_in_place_of_a_leftover_is_not_followed(tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "config.json").write_text("mine")
    (tmp_path / f"t.{TOKEN}.tmp").symlink_to(outside)
    (tmp_path / "save").mkdir()
    (outside / "common.pt").write_text("mine")
    (tmp_path / "save" / ".iter_0000001.removed").symlink_to(outside)
    convert_again(tmp_path)
    checkpoint_folder.clear(tmp_path / "save")
    assert len([*outside.iterdir()]) == 2


def test_a_target_that_another_job_takes_over_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is not this job's any more.*nothing was written"), new_folder(tmp_path / "t"):
        for path in tmp_path.glob(".t.owner.*.json"):
            path.unlink()
    assert not any(tmp_path.iterdir())
