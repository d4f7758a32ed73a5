# SPDX-License-Identifier: Apache-2.0
"""The folder that holds checkpoints: how one appears in it, whole or not at all, and which ones leave it.

All of this is done by one rank. What is not a checkpoint yet, or not any more, has a name that begins with a dot.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.training.checkpoint.megatron_lm.places import TRACKER, checkpoints_in
from megatron.training.checkpoint.rank_file import write_bytes
from megatron.training.disk import sync_folder, sync_folders_up
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal

PARTIAL, REMOVED = ".partial", ".removed"
REPLACED = ".replaced"  # a checkpoint while another of its iteration takes its name, where the two cannot be exchanged
VALIDATION = "validation_loss.json"  # in a checkpoint whose iteration was evaluated
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def partial_of(final: Path, token: str = "") -> Path:
    """Where a checkpoint is written before it has its name.

    Args:
        token: of the job that owns the folder, so that not even a job that has lost it writes to the same files.
    """
    return final.with_name(f".{final.name}{token and '.'}{token[:8]}{PARTIAL}")


def check_writable(folder: str) -> None:
    """Refuse a ``--save`` that nothing can be written to, before hours of training; makes nothing."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise Refusal(f"--save {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise Refusal(f"--save {folder}: {there} cannot be written to")
    tracker, sticky = there / TRACKER, there.stat().st_mode & stat.S_ISVTX
    if sticky and tracker.exists() and os.geteuid() not in (0, there.stat().st_uid, tracker.stat().st_uid):
        raise Refusal(
            f"--save {folder}: {tracker} belongs to another user, who alone can replace it there (sticky bit)"
        )


def clear(folder: Path) -> None:
    """Remove what saves and removals that were cut off have left; for the owner of the folder. Raises OSError."""
    restore(folder)
    left = [path for suffix in (PARTIAL, REMOVED, REPLACED) for path in folder.glob(f".*{suffix}")]
    if left:
        sync_folder(folder)  # a power cut must not give a checkpoint its name back once some of its files are gone
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def restore(folder: Path) -> None:
    """Give a checkpoint its name back whose replacement was cut off before the new one had it. Raises OSError."""
    for path in folder.glob(f".*{REPLACED}"):
        final = path.with_name(path.name[1:].removesuffix(REPLACED))
        if not final.exists():
            path.rename(final)


def publish(final: Path, token: str = "") -> None:
    """Give a checkpoint that is whole its name, and make it the latest. Raises OSError.

    Args:
        token: as for :func:`partial_of`.
    """
    folder, partial = final.parent, partial_of(final, token)
    sync_folder(partial)
    if not (final.exists() and _exchange(partial, final)):
        if final.exists():  # no exchange on this file system
            final.rename(final.with_name(f".{final.name}{REPLACED}"))
        partial.rename(final)
    if (folder / TRACKER).exists():
        sync_folder(folder)
    else:  # the first one here: the folder may be new as well
        sync_folders_up(folder)
    beside = partial_of(folder / TRACKER, token)
    write_bytes(beside, (final.name.removeprefix("iter_").lstrip("0") or "0").encode(), {})
    beside.rename(folder / TRACKER)
    sync_folder(folder)
    clear(folder)  # what had the name before


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders' names at once, so that no kill finds neither; False where that cannot be done."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    return rename is not None and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0


def checkpoints_before(folder: Path, iteration: int) -> Iterator[tuple[int, Path]]:
    """(iteration, path) of what look like checkpoints of earlier iterations, the newest first."""
    for number, path in reversed(checkpoints_in(folder).items()):
        if number < iteration:
            yield number, path


def validation_loss(path: Path) -> float:
    """Of a checkpoint, as it was evaluated when it was saved; infinite where nobody can say."""
    try:
        loss = float(parse_json(read_bytes(path / VALIDATION))["validation_loss"])
    except (OSError, ValueError, TypeError, LookupError):
        return math.inf
    return loss if math.isfinite(loss) else math.inf


def best_of(paths: dict[int, Path], count: int) -> list[int]:
    """The iterations with the lowest validation losses, at most ``count`` of them, the best first; of equals the later.

    Args:
        paths: checkpoints by iteration.
    """
    losses = {iteration: validation_loss(path) for iteration, path in paths.items()}
    known = [iteration for iteration, loss in losses.items() if loss < math.inf]
    return sorted(known, key=lambda iteration: (losses[iteration], -iteration))[:count]


def remove_older(folder: str | Path, latest: int, keep: int, multiple_of: int | None, best: int | None = None) -> None:
    """Remove checkpoints before ``latest``, which is whole: all but the newest ``keep``, those at multiples, the best.

    Args:
        keep: how many stay, ``latest`` among them.
        multiple_of: iterations at multiples of this stay as well.
        best: so many with the lowest validation losses stay as well.

    Raises:
        OSError: those that were to go stay, under names that begin with a dot.
    """
    before = dict(checkpoints_before(Path(folder), latest))
    stay = best_of({latest: Path(folder) / f"iter_{latest:07d}", **before}, best or 0)
    for number, (iteration, path) in enumerate(before.items(), start=2):
        if number <= keep or (multiple_of and iteration % multiple_of == 0) or iteration in stay or path.is_symlink():
            continue
        gone = path.with_name(f".{path.name}{REMOVED}")
        try:
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)  # half of a checkpoint shall not look like one
        except OSError:
            continue  # told by a disk that fills up; training is worth more
    clear(Path(folder))
