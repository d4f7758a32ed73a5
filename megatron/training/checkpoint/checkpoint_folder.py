# SPDX-License-Identifier: Apache-2.0
"""The folder that holds checkpoints: publish a complete checkpoint under its name, and remove old ones.

One rank does all of this. Checkpoints that are incomplete or about to be removed have names that begin with a dot.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron.training.checkpoint.megatron_lm.file_list import VALIDATION, WRITTEN
from megatron.training.checkpoint.megatron_lm.places import TRACKER, checkpoints_in
from megatron.training.checkpoint.rank_file import write_bytes
from megatron.training.disk import sync_folder, sync_folders_up
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.ownership.own_files import remove_made
from megatron.training.refusal import Refusal, some

PARTIAL, REMOVED = ".partial", ".removed"
REPLACED = ".replaced"  # the old checkpoint of an iteration that is saved again, if the names cannot be exchanged
HIDDEN = re.compile(rf"\.(iter_\d+|{re.escape(TRACKER)})(\.\w+)?({PARTIAL}|{REMOVED}|{REPLACED})")
OTHERS = ".others"  # files that a user had put into a checkpoint that was removed
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def partial_of(final: Path, token: str = "") -> Path:
    """The temporary path of a checkpoint while it is written.

    Args:
        token: identifies the job that owns the folder; a job that has lost the folder then writes to other files.
    """
    return final.with_name(f".{final.name}{token and '.'}{token[:8]}{PARTIAL}")


def check_writable(folder: str) -> None:
    """Refuse a ``--save`` folder that cannot be written to, before training starts. Creates nothing."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise Refusal(f"--save {folder}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise Refusal(f"--save {folder}: {existing} cannot be written to")
    tracker, sticky = existing / TRACKER, existing.stat().st_mode & stat.S_ISVTX
    if sticky and tracker.exists() and os.geteuid() not in (0, existing.stat().st_uid, tracker.stat().st_uid):
        raise Refusal(
            f"--save {folder}: {tracker} belongs to another user, and only its owner can replace it (sticky bit)"
        )


def clear(folder: Path) -> list[str]:
    """Remove what interrupted saves and removals left behind. Only the folder's owner may call it. Raises OSError.

    Returns:
        A line for each removed checkpoint with files that this program did not write, which stay.
    """
    restore(folder)
    leftovers = sorted(path for path in folder.glob(".*") if HIDDEN.fullmatch(path.name))
    if leftovers:
        sync_folder(folder)  # otherwise a power cut could undo the renaming after some of the files are gone
    lines = []
    for path in leftovers:
        if path.is_dir():
            lines += _remove(path)
        else:
            path.unlink(missing_ok=True)
    return lines


def _remove(path: Path) -> list[str]:
    """Remove a hidden checkpoint. Files that this program did not write stay, in a folder with a visible name."""
    try:
        left = remove_made(path, WRITTEN)
        if not left:
            return []
        name, number = HIDDEN.fullmatch(path.name)[1] + OTHERS, 1
        while (others := path.with_name(f"{name}{'' if number == 1 else number}")).exists():
            number += 1
        path.rename(others)
    except OSError:
        return []  # it stays under its hidden name until the next time
    return [f"{others} has files that were in a checkpoint which was removed, and that others wrote: {some(left)}"]


def restore(folder: Path) -> None:
    """Undo a replacement that was interrupted before the new checkpoint got its name. Raises OSError."""
    for path in folder.glob(f".*{REPLACED}"):
        final = path.with_name(path.name[1:].removesuffix(REPLACED))
        if not final.exists():
            path.rename(final)


def publish(final: Path, token: str = "") -> list[str]:
    """Give a complete checkpoint its final name, and make it the latest; returns lines as :func:`clear`.

    Args:
        token: as for :func:`partial_of`.

    Raises:
        OSError: it is not published, or not the latest.
    """
    folder, partial = final.parent, partial_of(final, token)
    sync_folder(partial)
    if not (final.exists() and _exchange(partial, final)):
        if final.exists():  # the file system cannot exchange names
            final.rename(final.with_name(f".{final.name}{REPLACED}"))
        partial.rename(final)
    if (folder / TRACKER).exists():
        sync_folder(folder)
    else:  # the folder's first checkpoint: the folder may be new as well
        sync_folders_up(folder)
    new_tracker = partial_of(folder / TRACKER, token)
    write_bytes(new_tracker, (final.name.removeprefix("iter_").lstrip("0") or "0").encode(), {})
    new_tracker.rename(folder / TRACKER)
    sync_folder(folder)
    return clear(folder)  # removes the checkpoint that had the name before


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders' names atomically, so that a kill leaves one of them in place; False if not supported."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    return rename is not None and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0


def checkpoints_before(folder: Path, iteration: int) -> Iterator[tuple[int, Path]]:
    """(iteration, path) of folders named like checkpoints before ``iteration``, newest first."""
    for number, path in reversed(checkpoints_in(folder).items()):
        if number < iteration:
            yield number, path


def validation_loss(path: Path) -> float:
    """The validation loss stored in a checkpoint; infinite if there is none."""
    try:
        loss = float(parse_json(read_bytes(path / VALIDATION))["validation_loss"])
    except (OSError, ValueError, TypeError, LookupError):
        return math.inf
    return loss if math.isfinite(loss) else math.inf


def best_of(paths: dict[int, Path], count: int) -> list[int]:
    """At most ``count`` iterations with the lowest validation losses, best first; for equal losses, the later first."""
    losses = {iteration: validation_loss(path) for iteration, path in paths.items()}
    known = [iteration for iteration, loss in losses.items() if loss < math.inf]
    return sorted(known, key=lambda iteration: (losses[iteration], -iteration))[:count]


def remove_older(
    folder: str | Path, latest: int, keep: int, multiple_of: int | None, best: int | None = None
) -> list[str]:
    """Remove old checkpoints; ``latest`` must be complete. Returns lines as :func:`clear`.

    Args:
        keep: how many of the newest to keep, including ``latest``.
        multiple_of: iterations that are multiples of this are kept as well.
        best: this number of checkpoints with the lowest validation losses are kept as well.

    Raises:
        OSError: checkpoints that should be removed are left, under names that begin with a dot.
    """
    before = dict(checkpoints_before(Path(folder), latest))
    best_iterations = best_of({latest: Path(folder) / f"iter_{latest:07d}", **before}, best or 0)
    for number, (iteration, path) in enumerate(before.items(), start=2):
        if (
            number <= keep
            or (multiple_of and iteration % multiple_of == 0)
            or iteration in best_iterations
            or path.is_symlink()
        ):
            continue
        hidden = path.with_name(f".{path.name}{REMOVED}")
        with suppress(OSError):  # the old checkpoint may stay, and training continues
            path.rename(hidden)  # so that a half-removed checkpoint does not look like a complete one
    return clear(Path(folder))
