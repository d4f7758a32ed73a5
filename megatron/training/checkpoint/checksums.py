# SPDX-License-Identifier: Apache-2.0
"""The way to a checkpoint that can be read: its files are compared with what was written, or an older one is taken.

The comparison is that of ``megatron_lm/checked.py``. Ranks share the work; a program of one process does it alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpoint.checkpoint_folder import VALIDATION, checkpoints_before
from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import HEADERS
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.checked import COMMON, Checked, examine, files_of, way_out
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS, HUGGING_FACE, Damaged, FileList, sum_of
from megatron.training.checkpoint.megatron_lm.places import is_hugging_face
from megatron.training.checkpoint.rank_file import write_bytes
from megatron.training.refusal import Refusal


def write_list(path: Path, listed: FileList) -> None:
    """Write ``checksums.json`` next to the files that it names, in the folder ``path``. Raises OSError."""
    write_bytes(path / CHECKSUMS, listed.packed(), {})


def list_files(path: Path) -> FileList:
    """List the files of a checkpoint of ours, or of a Hugging Face folder, as they are now: each is read for its sum.

    Of a Hugging Face folder only weights and settings are listed: a tokenizer may be changed. The caller syncs the list
    to the disk; converters sync their whole folder.

    Raises:
        Refusal: the checkpoint's own description of its files cannot be read.
        OSError: a file is missing or cannot be read, or the list cannot be written.
    """
    if is_hugging_face(path):
        names = {"config.json", safetensors_folder.INDEX, HEADERS} & {file.name for file in path.iterdir()}
        names |= {file.name for file in path.glob("*.safetensors")}
        about: dict[str, Any] = {"form": HUGGING_FACE}
    else:
        names, number = files_of(path), path.name.removeprefix("iter_")
        names |= {VALIDATION} & {file.name for file in path.iterdir()}
        common = unpickle.read(path / COMMON)
        progress = common.get("progress") if isinstance(common, dict) else None
        run = progress.get("run", "") if isinstance(progress, dict) else ""
        about = {"folder": path.name, "iteration": int(number) if number.isdigit() else None, "run": run}
    listed = FileList({name: sum_of(path / name) for name in names}, **about)
    (path / CHECKSUMS).write_bytes(listed.packed())
    return listed


def damage(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, in one line that names the first one; None if nothing is.

    Args:
        share, shares: as in :func:`examine`.
    """
    try:
        examine(path, share, shares)
    except Damaged as found:
        return str(found)
    return None


def choose_whole(found: Path, settings: CheckpointConfig, notes: list[str]) -> Checked:
    """``found`` if it is whole; else the next older one if that was asked for. All ranks call it, each reads its share.

    Args:
        notes: where a line goes that says what was passed over, or could not be checked.

    Raises:
        Refusal: on every rank; ``found`` is damaged, with the way to take the next older whole one.
    """
    checked = _together(found)
    if isinstance(checked, str):
        checked = _older(found, checked, settings, notes)
    if checked.unchecked:
        notes.append(f"not checked: {checked} has no checksums")
    return checked


def check(path: Path, notes: list[str]) -> Checked:
    """The same for a program that converts ``path``, and takes no other one in its place.

    Raises:
        Refusal: it is damaged.
    """
    return choose_whole(path, CheckpointConfig(), notes)


def _older(found: Path, wrong: str, settings: CheckpointConfig, notes: list[str]) -> Checked:
    """The next older whole checkpoint in place of ``found``. Raises Refusal where it is not to be taken, or not there.

    Args:
        wrong: what is damaged.
    """
    number = found.name.removeprefix("iter_")
    earlier = [list(checkpoints_before(found.parent, int(number)) if number.isdigit() else ())]
    if dist.is_initialized():
        dist.broadcast_object_list(earlier)  # a folder in a network may look different to each
    older = ((iteration, _together(path)) for iteration, path in earlier[0])
    iteration, checked = next(((one, path) for one, path in older if isinstance(path, Checked)), (0, None))
    line = f"checkpoint {found} is damaged: {wrong}"
    if checked is None:
        there = f"there is no older whole one in {found.parent}; " if number.isdigit() else ""
        refusal = Refusal(f"{line}; {there}{way_out(found)}")
    elif settings.skip_damaged_checkpoints and settings.load and found.parent == Path(settings.load):
        notes.append(
            f"WARNING: {line}; --skip-damaged-checkpoints: going on from {checked}, {int(number) - iteration} "
            "iterations are done again"
        )
        return checked
    else:
        skip = ", or have it taken with --skip-damaged-checkpoints" if settings.load else ""
        refusal = Refusal(f"{line}; the next older whole one is {checked}: take it with --ckpt-step {iteration}{skip}")
    refusal.everywhere = dist.is_initialized()
    raise refusal


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """See to it that all ranks read one and the same checkpoint meanwhile. All ranks enter it.

    Another job may save in that folder: remove this checkpoint, or put another of the same iteration in its place.

    Raises:
        Refusal: it was removed or replaced.
    """
    changed = f"checkpoint {path} was removed or replaced while it was loaded, by a job that saves there: start again"
    before = _fingerprint(path)
    try:
        yield
    except Refusal:
        if path.exists():
            raise
        raise Refusal(changed) from None
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (before, _fingerprint(path)))
    if len({one for pair in seen for one in pair}) > 1:
        refusal = Refusal(changed)
        refusal.everywhere = True
        raise refusal


def _fingerprint(path: Path) -> int | None:
    """What tells a checkpoint from another one under the same name: its list of sums. None without one."""
    try:
        return zlib.crc32((path / CHECKSUMS).read_bytes())
    except OSError:
        return None


def _together(path: Path) -> Checked | str:
    """A checkpoint that every rank found whole in its share, or the first rank's complaint: the same on all ranks."""
    alone = not dist.is_initialized()
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    checked, wrong = None, None
    try:
        checked = examine(path, rank, ranks)
    except Damaged as found:
        wrong = str(found)
    told: list[Any] = [(wrong, checked is not None and checked.unchecked)] * ranks
    if not alone:
        dist.all_gather_object(told, told[0])
    complaint = next((line for line, _ in told if line), None)
    return complaint or replace(checked, unchecked=any(unchecked for _, unchecked in told))
