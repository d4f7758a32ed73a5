# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files can be read only after they were compared with what was written.

Whatever reads weights takes a :class:`Checked` and asks it for files by name. Only :func:`examine` makes one. It
compares the files with the sizes and sums in ``checksums.json`` where there is such a list: in our checkpoints and in
the Hugging Face folders that we write. In files of other programs it uses the sums that ``torch.save`` puts into them.
Files that belong to no checkpoint, an extra ``.distcp`` for instance, are not read, and do not matter.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.common_file import read_common
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
from megatron.training.checkpoint.megatron_lm.torch_file import check_torch_file, check_torch_files_in
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal

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
