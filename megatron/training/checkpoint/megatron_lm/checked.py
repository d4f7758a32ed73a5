# SPDX-License-Identifier: Apache-2.0
"""Check a checkpoint's files against their checksums before anything reads them.

Every function that reads weights takes a :class:`Checked` and asks it for files by name. Only :func:`examine` creates
one. It compares the files with the sizes and sums in ``checksums.json``, which our checkpoints and the Hugging Face
folders that we write have. For files of other programs it uses the sums that ``torch.save`` puts into them. Files that
do not belong to the checkpoint, for example an extra ``.distcp``, are never read.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.file_list import (
    CHECKSUMS,
    HUGGING_FACE,
    Damaged,
    check_integrity,
    crc32_of_file,
    how_to_list,
    read_list,
)
from megatron.training.checkpoint.megatron_lm.places import (
    COMMON,
    METADATA,
    common_state,
    files_of_state,
    is_hugging_face,
    place_of_state,
)
from megatron.training.checkpoint.megatron_lm.torch_saved import Window
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, reason, refusing, short
from megatron.training.settings.config import AttentionConfig, ModelConfig
from megatron.training.untrusted.largest_numbers import LARGEST, MOST, most
from megatron.training.untrusted.links import file_in

# The common state holds settings and progress. Their types and ranges are checked here, so readers can rely on them.
SECTIONS = ("model", "data", "optimizer", "attention")  # sections of the settings that are read


def read_common(path: Path) -> dict[str, Any]:
    """The state of the checkpoint ``path`` apart from its tensors, of ``common.pt`` or where else it lies.

    Raises:
        Refusal: it cannot be read, or a setting in it has an impossible value.
    """
    common = common_state(path)
    if not isinstance(common, dict) or not all(isinstance(name, str) for name in common):
        raise Refusal(f"checkpoint {path}: common.pt does not contain a dictionary of a checkpoint's state")
    if "config" in common:
        sections = common["config"]
        if not isinstance(sections, dict) or not all(isinstance(sections.get(name, {}), dict) for name in SECTIONS):
            raise Refusal(f"checkpoint {path}: common.pt holds no settings of its run")
        fitting(sections.get("model", {}), path)
        fitting(sections.get("attention", {}), path, AttentionConfig)
        if not isinstance(common.get("progress", {}), dict):
            raise Refusal(f"checkpoint {path} does not contain the progress of its run")
    for where, name in ((common.get("progress", {}), "iteration"), (common, "iteration"), (common, "vocab_size")):
        if name in where and where[name] is not None and not _is_count(where[name]):
            raise Refusal(f"checkpoint {path}: {name} {short(where[name])} is not an integer")
    return common


def fitting(settings: Mapping[str, Any], where: object, section: type = ModelConfig) -> Mapping[str, Any]:
    """Check the types of the settings that ``section`` has, and return ``settings``.

    Raises:
        Refusal: a setting has another type or is too large; the message names it.
    """
    for name, is_valid in _kinds(section).items():
        if name in settings and not is_valid(settings[name]):
            raise Refusal(f"checkpoint {where}: {name} {short(settings[name])} is not a value for --{_flag(name)}")
        if name in MOST and (settings.get(name) or 0) > most(name):
            raise Refusal(f"checkpoint {where}: {name} {settings[name]} is more than {most(name):,}")
    return settings


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < LARGEST


_TYPE_CHECKS: dict[Any, Callable[[Any], bool]] = {
    type(None): lambda value: value is None,
    bool: lambda value: type(value) is bool,
    int: _is_count,
    float: _number,
    str: lambda value: type(value) is str and len(value) < 1000,
    tuple[int, int]: lambda value: (
        type(value) in (tuple, list) and len(value) == 2 and all(type(x) is int and abs(x) < LARGEST for x in value)
    ),
    list[str]: lambda value: type(value) is list and all(type(item) is str for item in value),
    list[int]: lambda value: type(value) is list and all(map(_is_count, value)),
    list[float]: lambda value: type(value) is list and all(map(_number, value)),
}


@cache
def _kinds(section: type) -> dict[str, Callable[[Any], bool]]:
    """For each setting of a section, a function that checks a value: its type, and that it is one of the choices."""

    def one_of(hint: Any, choices: Collection[Any] | None) -> Callable[[Any], bool]:
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        return lambda value: (
            any(_TYPE_CHECKS[kind](value) for kind in kinds) and (not choices or value is None or value in choices)
        )

    hints = get_type_hints(section)
    return {field.name: one_of(hints[field.name], field.metadata.get("choices")) for field in fields(section)}


# Files of ``torch.save`` are zip archives with a CRC-32 of each record, which ``torch.load`` does not check.
MAGIC = b"PK\x03\x04"


def check_torch_file(path: Path, places: Sequence[tuple[int, int]] = ()) -> bool:
    """Compare the records of a file of ``torch.save`` with their sums; False if it has none.

    Args:
        places: (offset, length) in bytes of files inside ``path``; then False if any has no sums.

    Raises:
        Damaged: a record differs from its sum.
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as raw:
        places = places or [(0, path.stat().st_size)]
        windows = (Window(length, partial(_read_into, raw, offset)) for offset, length in places)
        return all([_check(path, window) for window in windows])


def _read_into(file: io.FileIO, offset: int, buffer: memoryview, at: int) -> int:
    file.seek(offset + at)
    return file.readinto(buffer)


def _check(path: Path, part: Window) -> bool:
    """Compare a file's records with their sums; False if it has none (torch before 1.6, or sums switched off)."""
    is_zip = part.read(len(MAGIC)) == MAGIC or zipfile.is_zipfile(part)
    if not is_zip:
        return False
    try:
        with zipfile.ZipFile(part) as archive:
            records = [record for record in archive.infolist() if record.file_size]
            if (
                any(record.compress_type for record in records)
                or sum(record.file_size for record in records) > part.length
            ):
                raise ValueError("it is compressed, which torch.save never does")  # it could expand without limit
            if not any(record.CRC for record in records):
                return False
            wrong = archive.testzip()
    except Exception as error:  # zipfile raises many kinds if the archive's directory is damaged
        raise Damaged(f"{path} is not what was written ({reason(error)})") from None
    if wrong is not None:
        raise Damaged(f"{path} is not what was written (the CRC-32 of its record {wrong} differs)")
    return True


FORM = "metadata.json"
TORCH_FILES = (  # files that are read from Megatron-LM's format torch and DeepSpeed's universal checkpoints
    "mp_rank_*/model_optim_rng.pt",
    "mp_rank_00_model_states.pt",
    "zero/*/*.pt",
    "zero/optimizer_state.pt",
)


@dataclass(frozen=True)
class Checked:
    """The folder of a checkpoint or Hugging Face model, and those of its files that were checked."""

    path: Path
    files: frozenset[str]  # their paths relative to the folder
    # whether some of them had no sums, so that at most their sizes could be checked
    unchecked: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return str(self.path)

    def file(self, name: str) -> Path:
        """Path of a file of the checkpoint. Raises Refusal if it was not checked, or is a link out of the folder."""
        if name not in self.files:
            why = f"it is not in {CHECKSUMS}" if os.path.exists(self.path / name) else "no such file"
            raise Refusal(f"{self.path / name}: {why}")
        with refusing(f"{self.path / name}", OSError):
            return file_in(self.path, name)

    def common(self) -> dict[str, Any]:
        """The state apart from tensors, which is the same on all ranks. Raises Refusal if it cannot be read."""
        try:
            names = files_of_state(self.path)
        except OSError:
            names = (COMMON,)
        for name in names:
            self.file(name)
        return read_common(self.path)

    def metadata(self) -> Any:
        """torch's list of the tensors. Raises Refusal if one of them lies in a file that was not checked."""
        metadata = unpickle.read_metadata(self.file(METADATA))
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            self.file(name)
        return metadata


def examine(path: Path, share: int = 0, shares: int = 1, only: Collection[str] = ()) -> Checked:
    """Compare the files of a folder with their checksums.

    Args:
        share, shares: compare the sizes of all files, and the contents of every ``shares``-th file from number
            ``share`` on; other ranks compare the rest.
        only: compare only these files, and give access to no others. The common state may lie in other files than
            ``common.pt``; then these take its place.

    Raises:
        Damaged: a file is damaged; the message names the first.
    """
    try:
        if (path / CHECKSUMS).exists():
            file_in(path, CHECKSUMS)
            return _listed(path, share, shares, only)
        if is_hugging_face(path):
            names = {file.name for file in path.iterdir() if file.is_file()}
            return _opened(path, names, only, any(name.endswith(".safetensors") for name in names))
        if names := [file.relative_to(path).as_posix() for part in TORCH_FILES for file in path.glob(part)]:
            summed = [check_torch_file(file_in(path, name)) for name in sorted(names)[share::shares]]
            return _opened(path, names, only, not all(summed))
        return _torch_dist(path, share, shares, only)
    except FileNotFoundError as error:
        raise Damaged(f"{error.filename} is missing") from None
    except OSError as error:
        raise Damaged(f"{error.filename or path}: {error.strerror or error}") from None
    except Refusal as refusal:  # a file cannot be unpickled
        raise Damaged(str(refusal)) from None


def open_unchecked(path: Path, name: str) -> Checked:
    """Access to one small file of a folder, without checking the others; for callers that read only settings.

    Raises:
        Refusal: that file or the list of files is damaged.
    """
    try:
        return examine(path, only=(name,))
    except Damaged as damage:
        raise Refusal(f"checkpoint {path} is damaged: {damage}; {way_out(path)}") from None


def way_out(path: Path) -> str:
    """What to do about a damaged checkpoint if there is no older one."""
    return f"restore the file; {how_to_list(path)}" if is_hugging_face(path) else "choose another one with --ckpt-step"


def _opened(path: Path, names: Iterable[str], only: Collection[str], unchecked: bool) -> Checked:
    files = frozenset(names)
    return Checked(path, files & frozenset(only) if only else files, unchecked)


def _listed(path: Path, share: int, shares: int, only: Collection[str]) -> Checked:
    """A folder with ``checksums.json``, written by this program."""
    listed = read_list(path / CHECKSUMS)
    common = () if listed.form == HUGGING_FACE else files_of_state(path)
    needed = (*common, METADATA, FORM) if common else ("config.json",)
    if missing := [name for name in needed if name not in listed.files]:
        raise Damaged(f"{path / CHECKSUMS} does not name {missing[0]}")
    if listed.folder not in (None, path.name):
        of_run = f" of run {listed.run}" if listed.run else ""
        raise Damaged(f"it was written as {listed.folder}{of_run}: give the folder this name again")
    only = _in_place(only, common)
    names = [name for name in listed.files if name in only or not only]
    for name in names:
        size = file_in(path, name).stat().st_size
        if size != listed.files[name].size:
            raise Damaged(f"{path / name} has {size} bytes, {listed.files[name].size} were written")
    partly = common[1:] if only else ()  # unchecked, a file that holds the state among tensors is not read whole
    for name in partly:
        check_torch_file(path / name, [place_of_state(path)[1:]])
    for name in names[share::shares]:
        if name not in partly and crc32_of_file(path / name) != listed.files[name].crc32:
            raise Damaged(f"{path / name} is not what was written (its CRC-32 differs)")
    # A list of version 1 has no checksum of its own, so entries may be missing.
    if listed.version == 1 and not only and share == 0:
        if missing := sorted(files_of(path) - listed.files.keys()):
            raise Damaged(f"{path / CHECKSUMS} does not name {missing[0]}")
    return _opened(path, listed.files, only, False)


def _torch_dist(path: Path, share: int, shares: int, only: Collection[str]) -> Checked:
    """A ``torch_dist`` folder without a list, from Megatron-LM or from an old version of this program.

    Our files without a list have the sums of ``torch.save``; those with a list do not.
    """
    common, (name, *place) = files_of_state(path), place_of_state(path)
    for needed in sorted(_in_place(only, common)) if only else (FORM, METADATA, *common):
        file_in(path, needed).stat()
    summed = check_torch_file(path / name, [place])
    if only:
        return _opened(path, common, _in_place(only, common), False)
    _check_json(path / FORM)
    state = common_state(path)
    files: dict[str, list[tuple[int, int]]] = {}
    for place in unpickle.read_metadata(path / METADATA).storage_data.values():
        files.setdefault(place.relative_path, []).append((place.offset, place.length))
    for name, places in files.items():
        size, end = file_in(path, name).stat().st_size, max(offset + length for offset, length in places)
        if size < end:
            raise Damaged(f"{path / name} has {size} bytes, at least {end} were written")
    names = {FORM, METADATA, *common, *files}
    if check_integrity(path, names, share, shares):
        return _opened(path, names, only, False)
    for name in sorted(files)[share::shares]:
        if not check_torch_file(path / name, files[name]):
            if isinstance(state, dict) and "config" in state:
                raise Damaged(f"{path / CHECKSUMS} is missing (the list of its files); {how_to_list(path)}")
            summed = False
    return _opened(path, names, only, not summed)


def _in_place(only: Collection[str], common: Collection[str]) -> set[str]:
    """``only``, with the files of the common state in place of ``common.pt``."""
    return {file for name in only for file in (common if name == COMMON else (name,))}


def files_of(path: Path) -> set[str]:
    """The names of the files of a ``torch_dist`` checkpoint. Raises Refusal if they cannot be read."""
    places = unpickle.read_metadata(path / METADATA).storage_data.values()
    return {METADATA, FORM, *files_of_state(path)} | {place.relative_path for place in places}


def _check_json(path: Path) -> None:
    try:
        readable = isinstance(parse_json(read_bytes(path)), dict)
    except (ValueError, RecursionError):
        readable = False
    if not readable:
        raise Damaged(f"{path} cannot be read")
