# SPDX-License-Identifier: Apache-2.0
"""The lock of a save folder: of all jobs with the same ``--save``, at most one writes there.

Every job creates a lock file in the folder, with a random name. It says which process wrote it, and the job rewrites it
every few seconds with a counter. Then the job lists the lock files. It owns the folder if no other lock file belongs to
a job that may still be alive. Lock files of dead jobs are removed. A job that was only stopped for a while, or cut off
from the file system, notices from its missing lock file that it has lost the folder.

Of two jobs, the one that lists the lock files later sees the other's, so they can never both continue, whatever their
timing. The only requirement is that listing the folder shows files created before: no flock, no atomic exchange, no
rename and no synchronised clocks are needed.

A run has an identity, which is stored in its checkpoints. A job continues the run of the checkpoint that it loads, or
begins a new one. It may save in a folder with checkpoints only if these belong to its run and are not newer than its
start; otherwise the folder would mix two runs, or one would overwrite the other. Going back in a folder with
``--ckpt-step`` begins a new run, which overwrites the abandoned run's checkpoints when it reaches their iterations.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.platform.processes import Process, is_alive, this_process
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpoint.checkpoint_folder import check_writable
from megatron.training.checkpoint.megatron_lm.places import checkpoints_in, iteration_of, run_of
from megatron.training.refusal import Refusal, reason, together

COPIES = "copies_in_memory.txt"  # in --save: the identity of the run whose copies in memory belong to this folder
NEW_RUN_FLAGS = (("finetune", "--finetune"), ("reset_iteration", "--reset-iteration"))


def identity(loaded: Path | None, settings: CheckpointConfig, notes: list[str], *, saves: bool = True) -> str:
    """Identity of the run that a job continues or begins: 32 hexadecimal digits.

    Args:
        loaded: the checkpoint that is loaded; None if the job starts without one.
        notes: receives a line about checkpoints that will be overwritten.
        saves: whether the job saves in ``--save``.

    Raises:
        Refusal: ``--save`` holds checkpoints of another run, or newer ones.
    """
    start = iteration_of(loaded)
    if settings.finetune or settings.reset_iteration or is_pretrained(loaded, settings):
        start = 0
    resumes = start > 0
    run = (run_of(loaded) or "") if resumes else ""
    if not run and settings.non_persistent_save_interval is not None:
        run = run_of_copies(settings.save)  # of a run whose checkpoint is damaged or not written yet
    saved = checkpoints_in(Path(settings.save)) if settings.save and saves else {}
    newest = max(saved, default=0)
    same_folder = bool(saved) and resumes and _same(loaded.parent, settings.save)
    if saved and not same_folder and not (resumes and run and newest <= start and run_of(saved[newest]) == run):
        raise Refusal(_other_run(settings, newest))
    if same_folder and newest > start:
        notes.append(
            f"newer checkpoints in {settings.save}, up to iteration {newest}, belong to another run than this one from "
            f"iteration {start}: each is overwritten when this run reaches its iteration"
        )
    if resumes and settings.ckpt_step is not None and max(checkpoints_in(loaded.parent)) > start:
        if same_folder:
            (Path(settings.save) / COPIES).unlink(missing_ok=True)  # the copies belong to the abandoned run
        return uuid.uuid4().hex
    return run or uuid.uuid4().hex


def _other_run(settings: CheckpointConfig, newest: int) -> str:
    flags = [flag for name, flag in NEW_RUN_FLAGS if getattr(settings, name)]
    if settings.universal_checkpoint:
        flags.append("--universal-checkpoint")
    without = f" without {' and '.join(flags)}" if flags else ""
    if settings.load and settings.ckpt_step is not None:
        without += f"{' and' if flags else ' without'} --ckpt-step"
    go_on = f"--load {settings.save}{without}"
    if settings.load and _same(Path(settings.load), settings.save) and not without:
        go_on += f" and --ckpt-step {newest}"
    return (
        f"--save {settings.save} holds checkpoints up to iteration {newest}, of a run that this job does not "
        f"continue from there and could overwrite: continue that run with {go_on}, give another folder to --save, or "
        "remove this one"
    )


def is_pretrained(path: Path | None, settings: CheckpointConfig) -> bool:
    """Whether ``path`` is the checkpoint that --pretrained-checkpoint gives."""
    folder = settings.pretrained_checkpoint
    return path is not None and folder is not None and Path(folder) == path.parent


def _same(folder: Path, other: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def run_of_copies(save: str) -> str:
    """Identity of the run whose copies in memory belong to this folder; empty if there are none. Raises Refusal."""
    path = Path(save) / COPIES
    try:
        run = path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} cannot be read ({reason(error)}): remove it") from None
    if run and not (len(run) == 32 and run.isalnum()):
        raise Refusal(f"{path} is not what was written: remove it")
    return run


RENEWAL = 2.0  # seconds between two renewals of a lock file
SILENCE = 20.0  # seconds without renewal after which a job counts as dead; some calls block all threads for seconds
POLL = 0.25  # seconds between two readings of other jobs' lock files
LOCK_FILES, SIZE = ".owner.*.json", 1024


class Lost(OSError):
    """Another job has taken over the folder."""


@dataclass(frozen=True)
class LockFile:
    """The contents of a lock file."""

    process: Process  # the process that wrote it
    owns: bool  # whether its job owned the folder; otherwise it was trying to take it
    since: str  # when it was created, for messages

    def __str__(self) -> str:
        return f"{self.process} since {self.since}"


class Owner:
    """A job's lock on a folder, made by :func:`own` on every rank. Only rank 0 has a lock file; other ranks do nothing.

    Args:
        folder: the ``--save`` folder.
        token: identifies this lock, 32 hexadecimal digits; the same on all ranks.
        renewal: seconds between renewals of the lock file.

    Attributes:
        run: identity of the run, which is written to the lock file.
        lost: a message that another job has taken over the folder; empty as long as this is not known.
    """

    def __init__(self, folder: Path, token: str, renewal: float = RENEWAL) -> None:
        self.folder, self.token, self.renewal = folder, token, renewal
        self.run, self.lost = "", ""
        self._lock_file = folder / LOCK_FILES.replace("*", token)
        self._process, self._since, self._count = this_process(), time.strftime("%F %T"), 0
        self._owns, self._place = False, (0, 0)
        self._writing, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Call it before anything in the folder is published or removed.

        Raises:
            Lost: another job has taken over.
            OSError: the folder cannot be reached, so the owner is unknown.
        """
        if self._thread is not None:
            self._access(self._lock_file.read_bytes)
        if self.lost:
            raise Lost(self.lost)

    def release(self) -> None:
        """Release the folder. It may be called twice."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        self._thread = None
        with suppress(OSError):
            self._lock_file.unlink(missing_ok=True)

    def _begin(self) -> None:
        """Create the lock file and start to renew it. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._place = _place(self.folder)
        os.listdir(self.folder)  # raises before the first write if other jobs' lock files cannot be listed
        os.close(os.open(self._lock_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        self._write()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="owner of --save")
        self._thread.start()

    def _write(self) -> None:
        """Rewrite the lock file in place. If another job has removed it, it is not created again.

        The file is opened and closed each time: on NFS this asks the server whether it still exists, and makes the
        new contents visible to other clients.
        """
        with self._writing:
            self._count += 1
            about = {"owns": self._owns, "since": self._since, "run": self.run, "renewed": self._count}
            data = json.dumps({"process": asdict(self._process), **about}).encode().ljust(SIZE)
            number = os.open(self._lock_file, os.O_WRONLY)
            try:
                os.pwrite(number, data, 0)
            finally:
                os.close(number)

    def _renew(self) -> None:
        while not self._end.wait(self.renewal) and not self.lost:
            with suppress(OSError):  # a file system that cannot be reached may come back
                self._access(self._write)

    def _access(self, access: Callable[[], Any]) -> None:
        """Read or write the lock file, and set ``lost`` if it is gone. Raises OSError if that cannot be determined."""
        try:
            access()
        except FileNotFoundError:
            others = [str(lock.process) for lock in map(_parsed, _lock_files(self).values()) if lock and lock.owns]
            if not others and _place(self.folder) != self._place:  # its file system may be unmounted for a moment
                raise OSError(f"{self.folder} is not the folder that it was: is its file system mounted?") from None
            if self._lock_file.exists():  # the file system came back after the lock file could not be accessed
                raise OSError(f"{self.folder} was out of reach for a moment") from None
            by = f"{others[0]} has taken it over" if others else "another job has taken it over, or somebody removed it"
            self.lost = f"--save {self.folder} is not this job's any more: {by}"


class _Watched:
    """The lock file of another job, watched until it is known whether that job is alive."""

    def __init__(self, data: bytes) -> None:
        self.data, self.quiet, self.renewed, self.seen = data, 0.0, False, time.monotonic()

    def update(self, data: bytes) -> None:
        now = time.monotonic()
        if data != self.data:
            self.data, self.quiet, self.renewed = data, 0.0, True
        else:  # limited, because a slow answer of the file system does not mean that the job is silent
            self.quiet += min(now - self.seen, 2 * POLL)
        self.seen = now

    def alive(self, lock: LockFile | None, silence: float) -> bool | None:
        """Whether its job is alive; None: not known yet."""
        alive = None if lock is None else is_alive(lock.process)
        if alive is not None:
            return alive
        return False if self.quiet >= silence else self.renewed or None


def own(folder: str, notes: list[str]) -> Owner:
    """Take the save folder for this job, and create it if necessary. All ranks call it.

    Args:
        notes: receives a line about a job from which the folder was taken over.

    Raises:
        Refusal: on every rank; another job has the folder, or it cannot be written to.
    """
    first = dist.get_rank() == 0

    def take_it() -> Owner | None:
        if not first:
            return None
        check_writable(folder)
        return take(Path(folder), notes)

    owner = together(take_it)
    token = [owner.token if owner else ""]
    dist.broadcast_object_list(token)
    return owner or Owner(Path(folder), token[0])


def take(folder: Path, notes: list[str], renewal: float = RENEWAL, silence: float = SILENCE) -> Owner:
    """Take the folder on rank 0, for :func:`own`.

    Whether a process of this machine is alive is known at once. The lock file of a process on another machine is
    watched until it is renewed, or has not been renewed for ``silence`` seconds by this machine's clock.

    Args:
        renewal: seconds between renewals of this job's lock file.
    """
    owner = Owner(folder, uuid.uuid4().hex, renewal)
    try:
        owner._begin()
        _wait_for_others(owner, notes, silence)
        owner._owns = True
        owner._write()
    except Refusal:
        owner.release()
        raise
    except OSError as error:
        owner.release()
        raise Refusal(f"--save {folder} cannot be listed and written to: {reason(error)}") from None
    return owner


def _wait_for_others(owner: Owner, notes: list[str], silence: float) -> None:
    """Return once no other job can have the folder. Raises Refusal if another job has or gets it, or OSError."""
    watched: dict[Path, _Watched] = {}
    begin = time.monotonic()
    while True:
        waiting = False
        for path, data in _lock_files(owner).items():
            lock = _parsed(data)
            watch = watched.setdefault(path, _Watched(data))
            watch.update(data)
            ours = lock is not None and lock.process.boot != "" and lock.process == owner._process
            alive = False if ours else watch.alive(lock, silence)  # an earlier job of this process has ended
            if alive is False:
                path.unlink(missing_ok=True)
                if lock is not None and lock.owns and not ours:
                    ended = is_alive(lock.process) is False
                    sign = "has ended" if ended else f"has given no sign of life for {silence:g} s"
                    notes.append(f"took over --save {owner.folder} from {lock}, which {sign}")
                continue
            # Of several jobs that begin at once, the one with the first lock file by name gets the folder.
            late = time.monotonic() - begin > 2 * silence
            if alive and (lock is None or lock.owns or path.name < owner._lock_file.name or late):
                raise Refusal(
                    f"--save {owner.folder} is in use by {lock or 'another job'}: wait for it to end, end it, or give "
                    "another folder to --save"
                )
            waiting = True
        if not waiting:
            return
        time.sleep(POLL)


def _place(folder: Path) -> tuple[int, int]:
    """Device and inode of a folder. Raises OSError."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _lock_files(owner: Owner) -> dict[Path, bytes]:
    """The raw contents of other jobs' lock files. Raises OSError."""
    contents = {}
    for name in sorted(os.listdir(owner.folder)):  # unlike a glob, it raises if the folder cannot be listed
        path = owner.folder / name
        if path == owner._lock_file or not fnmatch(name, LOCK_FILES):
            continue
        with suppress(FileNotFoundError):  # removed in the meantime
            try:
                contents[path] = path.read_bytes()
            except PermissionError:  # another user's lock file: its modification time shows that it is renewed
                contents[path] = str(path.stat().st_mtime_ns).encode()
    return contents


def _parsed(data: bytes) -> LockFile | None:
    """A lock file's contents; None if it cannot be read, for example because its writer was killed too early."""
    try:
        table = json.loads(data)
        process = Process(**table["process"])
        return LockFile(process, bool(table["owns"]), str(table["since"]))
    except (ValueError, TypeError, KeyError):
        return None
