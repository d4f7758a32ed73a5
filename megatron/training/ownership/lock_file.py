# SPDX-License-Identifier: Apache-2.0
"""Locks: of all jobs that write the same folder or file, at most one has it.

Every job creates a lock file, with a random name: in the ``--save`` folder, or next to any other target. It says which
process wrote it, and the job rewrites it every few seconds with a counter. Then the job lists the lock files of the
target. It owns the target if no other lock file belongs to a job that may still be alive. Lock files of dead jobs are
removed. A job that was only stopped for a while, or cut off from the file system, notices from its missing lock file
that it has lost the target.

Of two jobs, the one that lists the lock files later sees the other's, so they can never both continue, whatever their
timing. The only requirement is that listing the folder shows files created before: no flock, no atomic exchange, no
rename and no synchronised clocks are needed. (The library filelock needs flock, or never takes over from a job that
died on another machine; and its job does not notice that its lock file is gone.)
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.system.processes import Process, is_alive, this_process
from megatron.training.refusal import Refusal, reason

RENEWAL = 2.0  # seconds between two renewals of a lock file
SILENCE = 20.0  # seconds without renewal after which a job counts as dead; some calls block all threads for seconds
POLL = 0.25  # seconds between two readings of other jobs' lock files
LOCK_FILES, SIZE = ".owner.*.json", 1024


def pattern_of(name: str) -> re.Pattern[str]:
    """The names of the lock files of a target; of its folder, if it has no name."""
    first, last = (re.escape(part) for part in LOCK_FILES.split("*"))
    return re.compile(f"{re.escape(f'.{name}') if name else ''}{first}[0-9a-f]{{32}}{last}")


class Lost(OSError):
    """Another job has taken over."""


class InUse(Refusal):
    """Another job has the target; ``state`` says which."""

    def __init__(self, state: str, advice: str) -> None:
        super().__init__(f"{state}: {advice}")
        self.state = state


@dataclass(frozen=True)
class LockFile:
    """The contents of a lock file."""

    process: Process  # the process that wrote it
    owns: bool  # whether its job owned the target; otherwise it was trying to take it
    since: str  # when it was created, for messages

    def __str__(self) -> str:
        return f"{self.process} since {self.since}"


class Owner:
    """A job's lock, taken by :func:`acquire`. Of a training job, only rank 0 has a lock file; other ranks do nothing.

    Args:
        folder: of the lock files: the ``--save`` folder, or the one that contains the target.
        token: identifies this lock, 32 hexadecimal digits; the same on all ranks.
        renewal: seconds between renewals of the lock file.
        name: of the target in the folder; empty if the target is the folder.

    Attributes:
        run: identity of the run, which is written to the lock file.
        lost: a message that another job has taken over; empty as long as this is not known.
        target: the target, for messages.
    """

    def __init__(self, folder: Path, token: str, renewal: float = RENEWAL, name: str = "") -> None:
        self.folder, self.token, self.renewal = folder, token, renewal
        self.run, self.lost = "", ""
        self.target, self.other = (str(folder / name), "name") if name else (f"--save {folder}", "folder to --save")
        self._pattern = pattern_of(name)
        self._lock_file = folder / f"{'.' if name else ''}{name}{LOCK_FILES.replace('*', token)}"
        self._process, self._since, self._count = this_process(), time.strftime("%F %T"), 0
        self._owns, self._created, self._place = False, False, (0, 0)
        self._writing, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Call it before anything is published or removed.

        Raises:
            Lost: another job has taken over.
            OSError: the folder cannot be reached, so the owner is unknown.
        """
        if self._thread is not None:
            self._access(self._lock_file.read_bytes)
        if self.lost:
            raise Lost(self.lost)

    def release(self) -> None:
        """Release the target. It may be called twice."""
        if not self._created:
            return
        self._end.set()
        try:  # a signal may end the program at any line of this file
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
        finally:
            self._thread = None
            with suppress(OSError):
                self._lock_file.unlink(missing_ok=True)

    def _begin(self) -> None:
        """Create the lock file and start to renew it. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._place = _place(self.folder)
        os.listdir(self.folder)  # raises before the first write if other jobs' lock files cannot be listed
        self._created = True
        os.close(os.open(self._lock_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        self._write()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"owner of {self.target}")
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
            self.lost = f"{self.target} is not this job's any more: {by}"


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


def acquire(owner: Owner, notes: list[str], silence: float = SILENCE) -> None:
    """Take the target, whose folder is created if necessary, for an owner that has no lock file yet.

    Whether a process of this machine is alive is known at once. The lock file of a process on another machine is
    watched until it is renewed, or has not been renewed for ``silence`` seconds by this machine's clock. After an error
    or a signal the owner has no lock file.

    Args:
        notes: receives a line about a job from which the target was taken over.

    Raises:
        InUse: another job has the target. Refusal: the folder cannot be listed and written to.
    """
    try:
        owner._begin()
        _wait_for_others(owner, notes, silence)
        owner._owns = True
        owner._write()
    except BaseException as error:
        owner.release()
        if isinstance(error, OSError):
            raise Refusal(f"{owner.target} cannot be listed and written to: {reason(error)}") from None
        raise


def _wait_for_others(owner: Owner, notes: list[str], silence: float) -> None:
    """Return once no other job can have the target. Raises InUse if another job has or gets it, or OSError."""
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
                    notes.append(f"took over {owner.target} from {lock}, which {sign}")
                continue
            # Of several jobs that begin at once, the one with the first lock file by name gets the target.
            late = time.monotonic() - begin > 2 * silence
            if alive and (lock is None or lock.owns or path.name < owner._lock_file.name or late):
                raise InUse(
                    f"{owner.target} is in use by {lock or 'another job'}",
                    f"wait for it to end, end it, or give another {owner.other}",
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
    listed = os.listdir(owner.folder)  # unlike a glob, it raises if the folder cannot be listed
    for name in sorted(name for name in listed if owner._pattern.fullmatch(name)):
        path = owner.folder / name
        if path == owner._lock_file:
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
