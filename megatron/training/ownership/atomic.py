# SPDX-License-Identifier: Apache-2.0
"""Files and folders that get their names only when they are complete, and that one job at a time writes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from megatron.training.disk import sync_file, sync_folder, sync_folders_up, sync_tree
from megatron.training.json_file import PART
from megatron.training.ownership.lock_file import Owner
from megatron.training.ownership.own_files import one_job, temporary_name, unfinished
from megatron.training.refusal import Refusal, reason

LIST = "files.json"  # {name: [bytes, SHA-256]} of the files in a cache folder, which shows whether they are the same
SAMPLE, SAMPLES = 1 << 16, 16  # of a file that is longer than all samples, only these parts are compared


@contextmanager
def atomic_files(paths: list[str], overwrite: bool, owner: Owner | None = None) -> Iterator[list[str]]:
    """Yields temporary names for some files. At the end all of them are put in place; after an error, none.

    Args:
        owner: a lock that this job has on the files already; by default it takes one for each name without its ending.

    Raises:
        InUse: another job writes these files. Refusal: one exists, and ``overwrite`` is not set; or one cannot be
            written.
    """
    refuse_existing(paths, overwrite)
    with ExitStack() as locks:
        if owner is None:
            names = sorted({os.path.splitext(os.path.abspath(path))[0] for path in paths})
            owner = [locks.enter_context(one_job(name)) for name in names][0]
            refuse_existing(paths, overwrite)  # the job that had the lock may have written them
        temporary = [temporary_name(path, owner) for path in paths]
        folders = sorted({os.path.dirname(os.path.abspath(path)) for path in paths})
        replacing = False
        try:
            for folder in folders:
                os.makedirs(folder, exist_ok=True)
            for path in unfinished(*paths):
                os.unlink(path)
            yield temporary
            owner.check()
            for path in temporary:
                sync_file(path)
            owner.check()
            refuse_existing(paths, overwrite)
            existing = [path for path in paths if os.path.exists(path)]
            if existing:
                for folder in folders:
                    sync_folder(folder)  # the new files are safe before the old ones are removed
                replacing = True
                for path in reversed(existing):  # a power cut leaves a missing file, never a wrong pair
                    os.unlink(path)
                for folder in folders:
                    sync_folder(folder)
            for source, target in zip(temporary, paths):
                os.rename(source, target)
            for folder in folders:
                sync_folders_up(folder)
        except OSError as error:
            name = error.filename or paths[0]
            full = "the disk is full" if error.errno == errno.ENOSPC else reason(error)
            raise Refusal(f"cannot write {name.removesuffix(temporary_name('', owner))}: {full}") from error
        finally:
            for path in temporary if not replacing else ():  # if the old files may be gone, the new ones stay
                with suppress(OSError):
                    os.unlink(path)


def refuse_existing(paths: list[str], overwrite: bool) -> None:
    """Refuse to replace files without ``overwrite``, and ever to replace a folder, a device or a pipe."""
    for path in (path for path in paths if os.path.exists(path)):
        if not os.path.isfile(path):
            raise Refusal(f"{path} is not a file: give another name for the output")
        if not overwrite:
            raise Refusal(f"{path} exists: give --overwrite to replace it")


@contextmanager
def atomic_folder(folder: str) -> Iterator[str]:
    """Yields a temporary folder to fill, which is renamed to ``folder`` at the end, or removed after an error.

    If several processes build the same folder, the first one wins. An interrupted process leaves no ``folder`` behind;
    the next one removes its temporary folder.

    Raises:
        OSError: the folder cannot be written, or ``folder`` exists because another run was faster.
    """
    temporary = f"{folder}.{uuid.uuid4().hex}.tmp"
    with ExitStack() as lock:
        try:
            lock.enter_context(one_job(temporary))
        except Refusal as error:
            raise OSError(errno.EIO, str(error)) from None
        try:
            os.makedirs(temporary)
            _remove_abandoned(folder, temporary)
            yield temporary
            files = {entry.name: [entry.stat().st_size, sample_of(entry.path)] for entry in os.scandir(temporary)}
            with open(os.path.join(temporary, LIST), "w", encoding="utf-8") as file:
                json.dump(files, file, indent=2, sort_keys=True)
            sync_tree(temporary)  # a folder of this name must be complete even after a power cut
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # its name is random


def _remove_abandoned(folder: str, ours: str) -> None:
    """Remove the temporary folders of jobs that have ended."""
    for path in unfinished(folder):
        if path != os.path.abspath(ours):
            with suppress(Refusal, OSError), one_job(path):  # refused: its job still builds it
                shutil.rmtree(path, ignore_errors=True)  # its name is random


def check_complete(folder: str) -> None:
    """Check that a cache folder still has all its files, unchanged: of a long file, its size and samples of it.

    Raises:
        Refusal: a file is missing, or is not the same.
    """
    name = LIST
    try:
        with open(os.path.join(folder, LIST), encoding="utf-8") as file:
            files = json.load(file)
        for name, (size, sample) in files.items():
            path = os.path.join(folder, name)
            if (actual := os.path.getsize(path)) != size:
                raise ValueError(f"{actual} bytes instead of {size}")
            if sample_of(path) != sample:
                raise ValueError("its content was changed")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(
            f"{folder} is no longer complete ({name}: {reason(error)}): remove it, and it is built again"
        ) from None


def sample_of(path: str, sample: int = SAMPLE, samples: int = SAMPLES) -> str:
    """The SHA-256 of a file; of a long one, of ``samples`` parts, the first and the last among them. Raises OSError."""
    digest, size = hashlib.sha256(), os.path.getsize(path)
    with open(path, "rb") as file:
        if size <= sample * samples:
            while part := file.read(PART):
                digest.update(part)
        else:
            for number in range(samples):
                file.seek((size - sample) * number // (samples - 1))
                digest.update(file.read(sample))
    return digest.hexdigest()
