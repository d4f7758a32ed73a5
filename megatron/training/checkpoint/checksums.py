# SPDX-License-Identifier: Apache-2.0
"""Compare a checkpoint's files with their checksums before it is loaded, and fall back to an older one if allowed.

The comparison itself is in ``megatron_lm/checked.py``. If there are several ranks, they share the work.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.platform.collectives import gathered_objects
from megatron.training.checkpoint.checkpoint_folder import VALIDATION, checkpoints_before
from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import HEADERS
from megatron.training.checkpoint.megatron_lm.checked import Checked, examine, files_of, way_out
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS, HUGGING_FACE, Damaged, FileList, sum_of
from megatron.training.checkpoint.megatron_lm.places import common_state, is_hugging_face
from megatron.training.checkpoint.rank_file import write_bytes
from megatron.training.refusal import Refusal
from megatron.training.settings.config import CheckpointConfig


def write_list(path: Path, listed: FileList) -> None:
    """Write ``checksums.json`` into the folder ``path``. Raises OSError."""
    write_bytes(path / CHECKSUMS, listed.packed(), {})


def list_files(path: Path) -> FileList:
    """Write ``checksums.json`` for the files of our checkpoint, or of a Hugging Face folder, as they are now.

    In a Hugging Face folder only weights and settings are listed, so the tokenizer may be changed. The caller syncs
    the list to the disk; converters sync their complete folder.

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
        common = common_state(path)
        progress = common.get("progress") if isinstance(common, dict) else None
        run = progress.get("run", "") if isinstance(progress, dict) else ""
        about = {"folder": path.name, "iteration": int(number) if number.isdigit() else None, "run": run}
    listed = FileList({name: sum_of(path / name) for name in names}, **about)
    (path / CHECKSUMS).write_bytes(listed.packed())
    return listed


def choose_whole(path: Path, settings: CheckpointConfig, notes: list[str]) -> Checked:
    """``path`` if it is undamaged; else the next older undamaged one, if ``settings`` permit that.

    All ranks call it, and each reads its share of the files.

    Args:
        notes: receives a line about a checkpoint that was skipped or could not be checked.

    Raises:
        Refusal: on every rank; ``path`` is damaged. The message says how to load the next older undamaged one.
    """
    checked = _examine_together(path)
    if isinstance(checked, str):
        checked = _older(path, checked, settings, notes)
    if checked.unchecked:
        notes.append(f"not checked: {checked} has no checksums")
    return checked


def check(path: Path, notes: list[str]) -> Checked:
    """Like :func:`choose_whole`, for a program that converts ``path``: no other checkpoint takes its place.

    Raises:
        Refusal: it is damaged.
    """
    return choose_whole(path, CheckpointConfig(), notes)


def _older(path: Path, damaged: str, settings: CheckpointConfig, notes: list[str]) -> Checked:
    """The next older undamaged checkpoint. Raises Refusal if there is none, or ``settings`` do not permit it.

    Args:
        damaged: what is wrong with ``path``.
    """
    number = path.name.removeprefix("iter_")
    earlier = [list(checkpoints_before(path.parent, int(number)) if number.isdigit() else ())]
    if dist.is_initialized():
        dist.broadcast_object_list(earlier)  # ranks may see different contents of a network folder
    older = ((iteration, _examine_together(older_path)) for iteration, older_path in earlier[0])
    iteration, checked = next((pair for pair in older if isinstance(pair[1], Checked)), (0, None))
    line = f"checkpoint {path} is damaged: {damaged}"
    if checked is None:
        none_older = f"there is no older complete one in {path.parent}; " if number.isdigit() else ""
        refusal = Refusal(f"{line}; {none_older}{way_out(path)}")
    elif settings.skip_damaged_checkpoints and settings.load and path.parent == Path(settings.load):
        notes.append(
            f"WARNING: {line}; --skip-damaged-checkpoints: continuing from {checked}, {int(number) - iteration} "
            "iterations are repeated"
        )
        return checked
    else:
        skip = ", or load it with --skip-damaged-checkpoints" if settings.load else ""
        line += f"; the next older complete one is {checked}: load it with --ckpt-step {iteration}{skip}"
        refusal = Refusal(line)
    refusal.everywhere = dist.is_initialized()
    raise refusal


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Check that all ranks have read the same checkpoint in this block. All ranks enter it.

    Another job that saves in the folder may remove the checkpoint, or replace it by another of the same iteration.

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
    seen = gathered_objects((before, _fingerprint(path)))
    if len({fingerprint for pair in seen for fingerprint in pair}) > 1:
        refusal = Refusal(changed)
        refusal.everywhere = True
        raise refusal


def _fingerprint(path: Path) -> int | None:
    """Identifies a checkpoint among others of the same name, by its list of checksums; None without one."""
    try:
        return zlib.crc32((path / CHECKSUMS).read_bytes())
    except OSError:
        return None


def _examine_together(path: Path) -> Checked | str:
    """The checkpoint, if every rank found its share undamaged, or else the first error; the same on all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    checked, damaged = None, None
    try:
        checked = examine(path, rank, ranks)
    except Damaged as error:
        damaged = str(error)
    results = gathered_objects((damaged, checked is not None and checked.unchecked))
    first_error = next((line for line, _ in results if line), None)
    return first_error or replace(checked, unchecked=any(unchecked for _, unchecked in results))
