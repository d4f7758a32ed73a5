# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files are read only after a comparison with checksums.json or with torch.save's checksums."""

from __future__ import annotations

import ast
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.training.checkpoint.megatron_lm import checked
from megatron.training.checkpoint.megatron_lm.checked import (
    MOST,
    check_torch_file,
    examine,
    fitting,
)
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS, Damaged, FileList, Sum, read_list
from megatron.training.refusal import Refusal

ROOT = Path(__file__).parents[2]
# Modules that open files of weights. Each either gets its path from a Checked object, which only checked.py makes, or
# compares the checksum itself.
READERS = {
    "certifying/processes_of_program.py",  # opens results of its own processes, not weights
    "training/checkpoint/megatron_lm/checked.py",
    "training/checkpoint/megatron_lm/places.py",  # reads only the common state
    "training/checkpoint/older_formats.py",
    "training/checkpoint/hugging_face/safetensors_folder.py",
    "training/checkpoint/in_memory/copy_file.py",
    "training/checkpoint/in_memory/state.py",
}
UNPICKLER = "training/checkpoint/megatron_lm/unpickle.py"  # called by these modules, and used for bytes in memory
CALLS = ("unpickle.read", "unpickle.read_metadata", "safe_open", "load_file", "torch.load", "Checked")


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_only_modules_that_compare_checksums_open_files_of_weights():
    uses = {
        path.relative_to(ROOT / "megatron").as_posix(): set(calls(path)) & set(CALLS)
        for path in (ROOT / "megatron").rglob("*.py")
        if "core" not in path.relative_to(ROOT / "megatron").parts[:1]
    }
    readers = {name for name, used in uses.items() if used}
    assert readers - {UNPICKLER} == READERS
    assert [name for name, used in uses.items() if "Checked" in used] == ["training/checkpoint/megatron_lm/checked.py"]
    for tool in (ROOT / "tools").glob("*.py"):
        assert not set(calls(tool)) & set(CALLS), tool


def flip_bit(path: Path, at: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def file_list(**about: object) -> FileList:
    return FileList({"a": Sum(3, 5), "b": Sum(2, 7)}, folder="iter_0000004", iteration=4, run="of today", **about)


def test_a_list_of_files_is_read_as_written_and_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / CHECKSUMS
    path.write_bytes(file_list().packed())
    assert read_list(path) == file_list()
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip_bit(path, at, at % 8)
        try:
            assert read_list(path) == file_list()  # a flipped bit may replace a blank by another white space
        except Damaged as damage:
            assert str(path) in str(damage) and "\n" not in str(damage)
        path.write_bytes(whole)
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(Damaged, match="cannot be read"):
            read_list(path)


def test_a_list_of_the_first_version_is_read(tmp_path):
    path = tmp_path / CHECKSUMS
    path.write_text(json.dumps({"a": {"size": 3, "crc32": 5}, "b": {"size": 2, "crc32": 7}}))
    assert read_list(path) == FileList(file_list().files)


def of_a_later_version(output: dict) -> None:
    output["version"] = 3


def without_files(output: dict) -> None:
    output["files"] = {}


def with_a_path_outside(output: dict) -> None:
    output["files"]["../c"] = output["files"]["a"]


def with_a_size_in_words(output: dict) -> None:
    output["files"]["a"]["size"] = "three"


@pytest.mark.parametrize(
    "change, message",
    [
        (of_a_later_version, "has version 3"),
        (without_files, "names no files"),
        (with_a_path_outside, "../c, which lies"),
        (with_a_size_in_words, "read"),
    ],
)
def test_a_list_with_a_correct_sum_and_invalid_content_is_refused(tmp_path, change: Callable, message: str):
    output = json.loads(file_list().packed())
    del output["crc32"]
    change(output)
    output["crc32"] = zlib.crc32(json.dumps(output, sort_keys=True, separators=(",", ":")).encode())
    (tmp_path / CHECKSUMS).write_text(json.dumps(output))
    with pytest.raises(Damaged, match=message):
        read_list(tmp_path / CHECKSUMS)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"a": 3}', '{"a": {"size": 3}}', "[" * 100_000])
def test_a_file_that_is_not_a_list_is_refused(tmp_path, text):
    (tmp_path / CHECKSUMS).write_text(text)
    with pytest.raises(Damaged, match="cannot be read.*--write-list"):
        read_list(tmp_path / CHECKSUMS)


WEIGHT = {"weight": torch.arange(40.0), "steps": 3}


NUMBERS = WEIGHT["weight"].numpy().tobytes()


def loaded(path: Path) -> list[float] | None:
    """The weight in a file; None if torch itself detects the damage."""
    try:
        return torch.load(path)["weight"].tolist()
    except (RuntimeError, OSError, EOFError):
        return None


def test_every_flipped_bit_of_a_record_of_torch_save_is_noticed(tmp_path, long_runs):
    path = tmp_path / "a.pt"
    torch.save(WEIGHT, path)
    assert check_torch_file(path)
    whole = path.read_bytes()
    records, step = 0, 1 if long_runs else 7  # 7 and 8 bits have no common divisor: each bit of a byte has its turn
    for at in range(0, len(whole), step):
        flip_bit(path, at, at % 8)
        try:
            assert check_torch_file(path)
            assert loaded(path) in (None, WEIGHT["weight"].tolist()), at
        except Damaged as damage:
            records += 1
            assert str(damage).startswith(f"{path} is not what was written (") and "\n" not in str(damage)
        path.write_bytes(whole)
    assert records > 500 // step
    for size in range(4, len(whole), 50):
        path.write_bytes(whole[:size])
        with pytest.raises(Damaged):
            check_torch_file(path)


def test_each_file_in_an_archive_is_compared(tmp_path):
    parts, places = b"", []
    for number in range(3):
        torch.save({**WEIGHT, "number": number}, tmp_path / "one")
        data = (tmp_path / "one").read_bytes()
        places.append((len(parts), len(data)))
        parts += data
    path = tmp_path / "parts"
    path.write_bytes(parts)
    assert check_torch_file(path, places)
    for offset, length in places:
        path.write_bytes(parts)
        flip_bit(path, offset + parts[offset : offset + length].index(NUMBERS) + 7)
        with pytest.raises(Damaged, match="record archive/data/0 differs|record one/data/0 differs"):
            check_torch_file(path, places)


def test_files_without_sums_are_distinguished(tmp_path):
    torch.save(WEIGHT, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert not check_torch_file(tmp_path / "old")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(WEIGHT, tmp_path / "without")
    finally:
        torch.serialization.set_crc32_options(True)
    assert not check_torch_file(tmp_path / "without")


def universal(folder: Path) -> Path:
    path = folder / "global_step2_universal"
    (path / "zero" / "w").mkdir(parents=True)
    torch.save(WEIGHT, path / "zero" / "w" / "fp32.pt")
    torch.save({"args": None}, path / "mp_rank_00_model_states.pt")
    return path


def test_every_file_of_other_formats_is_compared(tmp_path):
    path = universal(tmp_path)
    checked = examine(path)
    assert checked.files == {"zero/w/fp32.pt", "mp_rank_00_model_states.pt"} and not checked.unchecked
    file = path / "zero" / "w" / "fp32.pt"
    flip_bit(file, file.read_bytes().index(NUMBERS) + 7)
    with pytest.raises(Damaged, match=r"w/fp32\.pt is not what was written"):
        examine(path)
    assert sum(passes(path, share) for share in range(2)) == 1  # only one of two ranks reads this file
    torch.save(WEIGHT, file, _use_new_zipfile_serialization=False)
    assert examine(path).unchecked


def passes(path: Path, share: int) -> bool:
    try:
        return bool(examine(path, share, 2))
    except Damaged:
        return False


def test_only_checked_files_can_be_opened(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    checked = examine(tmp_path)
    assert checked.unchecked and checked.file("config.json") == tmp_path / "config.json"
    (tmp_path / "later.safetensors").write_text("weights")
    with pytest.raises(Refusal, match=r"later\.safetensors: it is not in checksums\.json"):
        checked.file("later.safetensors")
    with pytest.raises(Refusal, match="gone: no such file"):
        checked.file("gone")
    assert examine(tmp_path, only=("config.json",)).files == {"config.json"}


def test_a_setting_may_be_as_large_as_its_limit() -> None:
    (name, most), *_ = MOST.items()
    assert fitting({name: most}, "x") == {name: most}
    with pytest.raises(Refusal, match=f"more than {most:,}"):
        fitting({name: most + 1}, "x")


def test_an_older_list_may_not_lack_a_file(tmp_path, monkeypatch) -> None:
    """Lists of the first version have no checksum of their own, so a line may be missing."""
    names = ("common.pt", ".metadata", "metadata.json", "__0_0.distcp")
    monkeypatch.setattr(checked, "files_of", lambda _: set(names))
    entries = {name: {"size": 3, "crc32": zlib.crc32(b"abc")} for name in names}
    for name in names:
        (tmp_path / name).write_bytes(b"abc")
    (tmp_path / CHECKSUMS).write_text(json.dumps(entries))
    assert examine(tmp_path).files == set(names)
    del entries["__0_0.distcp"]
    (tmp_path / CHECKSUMS).write_text(json.dumps(entries))
    with pytest.raises(Damaged, match="does not name __0_0.distcp"):
        examine(tmp_path)
    assert examine(tmp_path, only=("common.pt",)).files == {"common.pt"}
