# SPDX-License-Identifier: Apache-2.0
"""The lock of a save folder: of all jobs that are given the same ``--save`` at most one writes there.

Every job puts a card of its own into the folder, a small file with a random name that says which process wrote it, and
rewrites it every few seconds with a counter. Then it lists the cards. It owns the folder if no other card belongs to a
job that may still live. Cards of dead jobs are removed, which is also how their writers learn that they have lost the
folder, should they turn out not to be dead but stopped for a while or cut off from the file system.

Of two jobs, the one that lists the cards later sees the card of the other: so never do both go on, whatever their
timing. That needs a folder in which a new file is seen by whoever lists it afterwards, and nothing else: no flock, no
atomic exchange, no rename, and no clocks that agree.
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

# Which run a job goes on with, and whether it may save where it is told to.
#
# A run has an identity, which its checkpoints keep. A job goes on with the run of the checkpoint that it loads, or
# begins a new one. It may save in a folder that holds checkpoints only if these are of its run and not newer than
# its start; otherwise the folder would become a mixture of two runs, or lose what one of them has saved. Going back
# in a folder, by ``--ckpt-step``, begins a new run: checkpoints of the one that is left are overwritten when the new
# one reaches them.


COPIES = "copies_in_memory.txt"  # in --save: the run whose copies in memory belong to it
ANEW = (("finetune", "--finetune"), ("reset_iteration", "--reset-iteration"))


def identity(found: Path | None, settings: CheckpointConfig, notes: list[str], *, saves: bool = True) -> str:
    """Identity of the run that a job with the checkpoint ``found`` goes on with, or begins: 32 hexadecimal digits.

    Args:
        found: what is loaded, None where the job starts without a checkpoint.
        notes: where a line goes about checkpoints that will be overwritten.
        saves: whether the job saves in ``--save``.

    Raises:
        Refusal: ``--save`` holds checkpoints of another run, or newer ones.
    """
    start = iteration_of(found)
    if settings.finetune or settings.reset_iteration or _pretrained(found, settings):
        start = 0
    goes_on = start > 0
    run = (run_of(found) or "") if goes_on else ""
    if not run and settings.non_persistent_save_interval is not None:
        run = run_of_copies(settings.save)  # of a run that has no checkpoint yet, or a damaged one
    there = checkpoints_in(Path(settings.save)) if settings.save and saves else {}
    newest = max(there, default=0)
    here = bool(there) and goes_on and _same(found.parent, settings.save)
    if there and not here and not (goes_on and run and newest <= start and run_of(there[newest]) == run):
        raise Refusal(_other_run(settings, newest))
    if here and newest > start:
        notes.append(
            f"newer checkpoints in {settings.save}, up to iteration {newest}, are not of the run that goes on from "
            f"iteration {start}: each is overwritten when this run comes to it"
        )
    if goes_on and settings.ckpt_step is not None and max(checkpoints_in(found.parent)) > start:
        if here:
            (Path(settings.save) / COPIES).unlink(missing_ok=True)  # they are of the run that is left
        return uuid.uuid4().hex
    return run or uuid.uuid4().hex


def _other_run(settings: CheckpointConfig, newest: int) -> str:
    flags = [flag for name, flag in ANEW if getattr(settings, name)]
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
        f"continue from there, and could overwrite: go on with that run by {go_on}, give another folder to --save, or "
        "remove this one"
    )


def _pretrained(found: Path | None, settings: CheckpointConfig) -> bool:
    """Whether the checkpoint is that of --pretrained-checkpoint."""
    first = settings.pretrained_checkpoint
    return found is not None and first is not None and Path(first) == found.parent


def _same(folder: Path, other: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def run_of_copies(save: str) -> str:
    """The run whose copies in memory belong to this folder; empty where there are none. Raises Refusal."""
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


RENEWAL = 2.0  # seconds between two renewals of a card
SILENCE = 20.0  # a card that was not renewed for so long is a dead job's; some calls hold up all threads for seconds
LOOK = 0.25  # seconds between two looks at the cards of others
CARDS, SIZE = ".owner.*.json", 1024


class Lost(OSError):
    """Another job has taken over the folder."""


@dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        process: who wrote it.
        owns: whether its job had the folder; otherwise it was about to take it.
        since: when it was made, for messages.
    """

    process: Process
    owns: bool
    since: str

    def __str__(self) -> str:
        return f"{self.process} since {self.since}"


class Owner:
    """A job's hold on a folder, made by :func:`own` on every rank. Only rank 0 has a card; only its calls do anything.

    Args:
        folder: of ``--save``.
        token: names this hold, 32 hexadecimal digits; the same on all ranks.
        run: identity of the run, for who reads the card.

    Attributes:
        lost: in words, that another job has the folder now; empty as long as this is not known.
    """

    def __init__(self, folder: Path, token: str, renewal: float = RENEWAL) -> None:
        self.folder, self.token, self.renewal = folder, token, renewal
        self.run, self.lost = "", ""
        self._card = folder / CARDS.replace("*", token)
        self._process, self._since, self._count = this_process(), time.strftime("%F %T"), 0
        self._owns = False
        self._writing, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """To be called before anything in the folder is published or removed.

        Raises:
            Lost: another job has taken over.
            OSError: the folder cannot be reached, so nobody can tell.
        """
        if self._thread is not None:
            self._ask(self._card.read_bytes)
        if self.lost:
            raise Lost(self.lost)

    def release(self) -> None:
        """Give the folder up. It may be called twice."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        self._thread = None
        with suppress(OSError):
            self._card.unlink(missing_ok=True)

    def _begin(self) -> None:
        """Make the card and renew it from now on. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._card, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        self._write()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="owner of --save")
        self._thread.start()

    def _write(self) -> None:
        """Write the card anew in its place, never creating it: what another job has removed stays removed.

        The file is opened and closed each time. On NFS that asks the server whether it is still there, and makes other
        clients see what was written.
        """
        with self._writing:
            self._count += 1
            about = {"owns": self._owns, "since": self._since, "run": self.run, "renewed": self._count}
            data = json.dumps({"process": asdict(self._process), **about}).encode().ljust(SIZE)
            number = os.open(self._card, os.O_WRONLY)
            try:
                os.pwrite(number, data, 0)
            finally:
                os.close(number)

    def _renew(self) -> None:
        while not self._end.wait(self.renewal) and not self.lost:
            with suppress(OSError):  # a file system that cannot be reached may come back
                self._ask(self._write)

    def _ask(self, for_card: Callable[[], Any]) -> None:
        """Read or write the card, and note if it is gone. Raises OSError where nobody can tell."""
        try:
            for_card()
        except FileNotFoundError:
            if not self.folder.is_dir():  # a file system that is not mounted for a moment
                raise
            others = [str(card.process) for card in map(_parsed, _cards(self).values()) if card and card.owns]
            by = f"{others[0]} has taken it over" if others else "another job has taken it over, or somebody removed it"
            self.lost = f"--save {self.folder} is not this job's any more: {by}"


class _Watched:
    """The card of another job, watched until it is known whether that job lives."""

    def __init__(self, data: bytes) -> None:
        self.data, self.quiet, self.moved, self.seen = data, 0.0, False, time.monotonic()

    def look(self, data: bytes) -> None:
        now = time.monotonic()
        if data != self.data:
            self.data, self.quiet, self.moved = data, 0.0, True
        else:  # a file system that answers late has not shown that a job is silent
            self.quiet += min(now - self.seen, 2 * LOOK)
        self.seen = now

    def lives(self, card: Card | None, silence: float) -> bool | None:
        """Whether its job lives; None: not known yet."""
        alive = None if card is None else is_alive(card.process)
        if alive is not None:
            return alive
        return False if self.quiet >= silence else self.moved or None


def own(folder: str, notes: list[str]) -> Owner:
    """Take the save folder for this job; it is made where it is not there. All ranks call it.

    Args:
        notes: where a line goes that says from whom it was taken over.

    Raises:
        Refusal: on every rank; another job has it, or it cannot be written to.
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
    """What rank 0 does for :func:`own`.

    Whether a process of this machine lives is seen at once; of another one's, the card is watched by this machine's
    clock until it moves, or has not moved for ``silence`` seconds.

    Args:
        renewal: seconds between renewals of this job's card.
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
    """Return once no other job may have the folder. Raises Refusal: another one has it, or gets it; OSError."""
    watched: dict[Path, _Watched] = {}
    begin = time.monotonic()
    while True:
        waiting = False
        for path, data in _cards(owner).items():
            card = _parsed(data)
            watch = watched.setdefault(path, _Watched(data))
            watch.look(data)
            earlier = card is not None and card.process.boot != "" and card.process == owner._process
            lives = False if earlier else watch.lives(card, silence)  # a process has one job at a time
            if lives is False:
                path.unlink(missing_ok=True)
                if card is not None and card.owns and not earlier:
                    ended = is_alive(card.process) is False
                    sign = "has ended" if ended else f"has given no sign of life for {silence:g} s"
                    notes.append(f"took over --save {owner.folder} from {card}, which {sign}")
                continue
            # Of several that begin at once the first by name gets the folder, when the others have seen its card.
            late = time.monotonic() - begin > 2 * silence
            if lives and (card is None or card.owns or path.name < owner._card.name or late):
                raise Refusal(
                    f"--save {owner.folder} is in use by {card or 'another job'}: wait for it to end, end it, or give "
                    "another folder to --save"
                )
            waiting = True
        if not waiting:
            return
        time.sleep(LOOK)


def _cards(owner: Owner) -> dict[Path, bytes]:
    """The cards of other jobs, as they are written. Raises OSError."""
    found = {}
    for name in sorted(os.listdir(owner.folder)):  # a glob would pass over a folder that cannot be listed
        path = owner.folder / name
        if path == owner._card or not fnmatch(name, CARDS):
            continue
        with suppress(FileNotFoundError):  # removed since
            try:
                found[path] = path.read_bytes()
            except PermissionError:  # another user's, which can be seen to change
                found[path] = str(path.stat().st_mtime_ns).encode()
    return found


def _parsed(data: bytes) -> Card | None:
    """None where a card cannot be read, as when its writer was killed before it had written it."""
    try:
        said = json.loads(data)
        process = Process(**said["process"])
        return Card(process, bool(said["owns"]), str(said["since"]))
    except (ValueError, TypeError, KeyError):
        return None
