# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files can be read only after they were compared with what was written.

Whatever reads weights takes a :class:`Checked` and asks it for files by name. Only :func:`examine` makes one. It
compares the files with the sizes and sums in ``checksums.json`` where there is such a list: in our checkpoints and in
the Hugging Face folders that we write. In files of other programs it uses the sums that ``torch.save`` puts into them.
Files that belong to no checkpoint, an extra ``.distcp`` for instance, are not read, and do not matter.
"""

from __future__ import annotations

import errno
import io
import math
import os
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from megatron.training.arguments.config import ModelConfig
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.file_list import (
    CHECKSUMS,
    HUGGING_FACE,
    Damaged,
    anew,
    crc32_of_file,
    outside,
    read_list,
)
from megatron.training.checkpoint.megatron_lm.places import is_hugging_face
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, reason, short

# ``common.pt``: what a checkpoint holds beside tensors, checked before anybody works with it.
#
# A file can say of its model, and of how far its run had come, whatever it likes. What is of another kind than the
# setting that it claims to be is refused here, so that those who read it need not ask.


MOST = {"num_layers": 100_000}  # layers are counted through one by one
SECTIONS = ("model", "data", "optimizer", "attention")  # of the settings, that are read
LARGEST = 1 << 40  # no width or vocabulary is near it


def read_common(path: Path) -> dict[str, Any]:
    """``common.pt`` of the checkpoint ``path``.

    Raises:
        Refusal: it cannot be read, or what it says of its run cannot be.
    """
    common = unpickle.read(path / "common.pt")
    if not isinstance(common, dict) or not all(isinstance(name, str) for name in common):
        raise Refusal(f"checkpoint {path}: common.pt does not hold what a checkpoint does")
    if "config" in common:
        sections = common["config"]
        if not isinstance(sections, dict) or not all(isinstance(sections.get(one, {}), dict) for one in SECTIONS):
            raise Refusal(f"checkpoint {path}: common.pt holds no settings of its run")
        fitting(sections.get("model", {}), path)
        if not isinstance(common.get("progress", {}), dict):
            raise Refusal(f"checkpoint {path} does not say how far its run had come")
    for where, name in ((common.get("progress", {}), "iteration"), (common, "iteration"), (common, "vocab_size")):
        if name in where and where[name] is not None and not _whole(where[name]):
            raise Refusal(f"checkpoint {path}: {name} {short(where[name])} is no whole number")
    return common


def fitting(settings: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """``settings``, in which each that :class:`ModelConfig` knows is of its kind; others are not looked at.

    Raises:
        Refusal: one is not; the message names it.
    """
    for name, right in _kinds().items():
        if name in settings and not right(settings[name]):
            raise Refusal(f"checkpoint {where}: {name} {short(settings[name])} is not what --{_flag(name)} can be")
        if name in MOST and (settings.get(name) or 0) > MOST[name]:
            raise Refusal(f"checkpoint {where}: {name} {settings[name]} is more than {MOST[name]}")
    return settings


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < LARGEST


_RIGHT: dict[Any, Callable[[Any], bool]] = {
    type(None): lambda value: value is None,
    bool: lambda value: type(value) is bool,
    int: _whole,
    float: _number,
    str: lambda value: type(value) is str and len(value) < 1000,
    list[str]: lambda value: type(value) is list and all(type(one) is str for one in value),
}


@cache
def _kinds() -> dict[str, Callable[[Any], bool]]:
    """For each setting of a model, whether a value can be one."""
    return {name: _one_of(hint) for name, hint in get_type_hints(ModelConfig).items()}


def _one_of(hint: Any) -> Callable[[Any], bool]:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return lambda value: any(_RIGHT[kind](value) for kind in kinds)


# Files of ``torch.save``: zip archives, which hold a CRC-32 of each record that ``torch.load`` does not look at.


MAGIC = b"PK\x03\x04"


def check_torch_file(path: Path) -> bool:
    """Compare the records of a file of ``torch.save`` with their sums; False where it has none.

    Raises:
        Damaged: a record is not what was written.
        OSError: the file cannot be read.
    """
    return check_torch_files_in(path, [(0, path.stat().st_size)])


def check_torch_files_in(path: Path, places: Sequence[tuple[int, int]]) -> bool:
    """The same of several such files that lie in one, each at (offset, length) in bytes; False where any has none."""
    with open(path, "rb", buffering=0) as raw:
        return all([_check(path, _Part(raw, offset, length)) for offset, length in places])


def _check(path: Path, part: _Part) -> bool:
    """False where there are no sums: before torch 1.6, and where ``torch.save`` was told to write none."""
    is_zip = part.read(len(MAGIC)) == MAGIC or zipfile.is_zipfile(part)
    if not is_zip:
        return False
    try:
        with zipfile.ZipFile(part) as archive:
            records = [record for record in archive.infolist() if record.file_size]
            if any(record.compress_type for record in records) or sum(one.file_size for one in records) > part.length:
                raise ValueError("it is compressed, which torch.save never does")  # and could expand without end
            if not any(record.CRC for record in records):
                return False
            wrong = archive.testzip()
    except Exception as error:  # whatever zipfile raises where the archive's directory is damaged
        raise Damaged(f"{path} is not what was written ({reason(error)})") from None
    if wrong is not None:
        raise Damaged(f"{path} is not what was written (the CRC-32 of its record {wrong} differs)")
    return True


class _Part(io.RawIOBase):
    """``length`` bytes of a file from ``offset`` on, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self.length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as zipfile expects
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self.length - self._at), 0)
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(view[:count])
        self._at += read
        return read


COMMON, METADATA, FORM = "common.pt", ".metadata", "metadata.json"
TORCH_FILES = (  # what is read of Megatron-LM's format torch, and of DeepSpeed's universal checkpoints
    "mp_rank_*/model_optim_rng.pt",
    "mp_rank_00_model_states.pt",
    "zero/*/*.pt",
    "zero/optimizer_state.pt",
)


@dataclass(frozen=True)
class Checked:
    """The folder of a checkpoint, or of a Hugging Face model, and those of its files that were compared.

    Attributes:
        files: their names; those in folders within it with a slash.
        unchecked: whether some of them had no sums to compare with, so that only sizes could be compared.
    """

    path: Path
    files: frozenset[str]
    unchecked: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return str(self.path)

    def file(self, name: str) -> Path:
        """Where a file of the checkpoint lies. Raises Refusal where it is none that was compared."""
        if name not in self.files:
            why = f"it is not in {CHECKSUMS}" if os.path.exists(self.path / name) else "no such file"
            raise Refusal(f"{self.path / name}: {why}")
        return self.path / name

    def common(self) -> dict[str, Any]:
        """What is no tensor, and the same on all ranks. Raises Refusal where it cannot be read."""
        self.file(COMMON)
        return read_common(self.path)

    def metadata(self) -> Any:
        """torch's list of the tensors, all of which lie in files that were compared. Raises Refusal."""
        found = unpickle.read_metadata(self.file(METADATA))
        for name in {place.relative_path for place in _places(found, self.path / METADATA)}:
            self.file(name)
        return found


def examine(path: Path, share: int = 0, shares: int = 1, only: Collection[str] = ()) -> Checked:
    """Compare the files of a folder with what was written.

    Args:
        share, shares: compare the sizes of all files, and the contents of one in ``shares``; other ranks do the others.
        only: compare these files alone, and give access to no others.

    Raises:
        Damaged: with the first file that is not as it was written.
    """
    try:
        if (path / CHECKSUMS).exists():
            return _listed(path, share, shares, only)
        if is_hugging_face(path):
            names = {file.name for file in path.iterdir() if file.is_file()}
            return _opened(path, names, only, any(name.endswith(".safetensors") for name in names))
        if names := [file.relative_to(path).as_posix() for part in TORCH_FILES for file in path.glob(part)]:
            summed = [check_torch_file(path / name) for name in sorted(names)[share::shares]]
            return _opened(path, names, only, not all(summed))
        return _torch_dist(path, share, shares, only)
    except FileNotFoundError as error:
        raise Damaged(f"{error.filename} is missing") from None
    except OSError as error:
        raise Damaged(f"{error.filename or path}: {error.strerror or error}") from None
    except Refusal as refusal:  # of a file that cannot be unpickled
        raise Damaged(str(refusal)) from None


def glance(path: Path, name: str) -> Checked:
    """Access to one small file of a folder, for those who read settings and no weights: only it is compared.

    Raises:
        Refusal: that file is damaged, or the list of files is.
    """
    try:
        return examine(path, only=(name,))
    except Damaged as damage:
        raise Refusal(f"checkpoint {path} is damaged: {damage}; {way_out(path)}") from None


def way_out(path: Path) -> str:
    """What to do about a damaged checkpoint of which there is no other one."""
    return f"restore the file; {anew(path)}" if is_hugging_face(path) else "choose another one with --ckpt-step"


def _opened(path: Path, names: Iterable[str], only: Collection[str], unchecked: bool) -> Checked:
    found = frozenset(names)
    return Checked(path, found & frozenset(only) if only else found, unchecked)


def _listed(path: Path, share: int, shares: int, only: Collection[str]) -> Checked:
    """A folder of ours."""
    found = read_list(path / CHECKSUMS)
    needed = ("config.json",) if found.form == HUGGING_FACE else (COMMON, METADATA, FORM)
    if missing := [name for name in needed if name not in found.files]:
        raise Damaged(f"{path / CHECKSUMS} does not name {missing[0]}")
    if found.folder not in (None, path.name):
        of_run = f" of run {found.run}" if found.run else ""
        raise Damaged(f"it was written as {found.folder}{of_run}: give the folder this name again")
    names = [name for name in found.files if name in only or not only]
    for name in names:
        size = (path / name).stat().st_size
        if size != found.files[name].size:
            raise Damaged(f"{path / name} has {size} bytes, {found.files[name].size} were written")
    for name in names[share::shares]:
        if crc32_of_file(path / name) != found.files[name].crc32:
            raise Damaged(f"{path / name} is not what was written (its CRC-32 differs)")
    if found.version == 1 and not only and share == 0:  # which has no sum of its own: a line may be gone
        if missing := sorted(files_of(path) - found.files.keys()):
            raise Damaged(f"{path / CHECKSUMS} does not name {missing[0]}")
    return _opened(path, found.files, only, False)


def _torch_dist(path: Path, share: int, shares: int, only: Collection[str]) -> Checked:
    """A folder in core's form without a list: of Megatron-LM, or of ours before there were lists.

    Ours had the sums of ``torch.save`` in its files then, and has not had them since there is a list.
    """
    for name in only or (FORM, COMMON, METADATA):
        (path / name).stat()
    summed = check_torch_file(path / COMMON)
    if only:
        return _opened(path, (COMMON,), only, False)
    _check_json(path / FORM)
    common = unpickle.read(path / COMMON)
    files: dict[str, list[tuple[int, int]]] = {}
    for place in _places_in(path):
        files.setdefault(place.relative_path, []).append((place.offset, place.length))
    for name, places in files.items():
        size, end = (path / name).stat().st_size, max(offset + length for offset, length in places)
        if size < end:
            raise Damaged(f"{path / name} has {size} bytes, at least {end} were written")
    for name in sorted(files)[share::shares]:
        if not check_torch_files_in(path / name, files[name]):
            if isinstance(common, dict) and "config" in common:
                raise Damaged(f"{path / CHECKSUMS} is missing, the list of its files; {anew(path)}")
            summed = False
    return _opened(path, (FORM, COMMON, METADATA, *files), only, not summed)


def files_of(path: Path) -> set[str]:
    """The names of the files that a folder in core's form consists of. Raises Refusal where they cannot be read."""
    return {COMMON, METADATA, FORM} | {place.relative_path for place in _places_in(path)}


def _places_in(path: Path) -> Iterator[Any]:
    return _places(unpickle.read_metadata(path / METADATA), path / METADATA)


def _places(metadata: Any, where: Path) -> Iterator[Any]:
    """Where each part of each tensor lies: ``relative_path``, ``offset`` and ``length``, in bytes."""
    try:
        places = list(metadata.storage_data.values())
        odd = outside({place.relative_path for place in places})
        whole = all(isinstance(number, int) for place in places for number in (place.offset, place.length))
    except (AttributeError, TypeError):
        raise Refusal(f"{where} cannot be read") from None
    if odd is not None or not whole:
        raise Refusal(f"{where} names {odd or 'a place'}, which is no part of a file in its folder")
    yield from places


def _check_json(path: Path) -> None:
    try:
        readable = isinstance(parse_json(read_bytes(path)), dict)
    except (ValueError, RecursionError):
        readable = False
    if not readable:
        raise Damaged(f"{path} cannot be read")
