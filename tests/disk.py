# SPDX-License-Identifier: Apache-2.0
"""A simulated power cut: a program's writes to a folder are recorded, and the record is then cut off anywhere.

A recorder notes the calls that a program makes in a folder, and the folder's contents before and after each. From that
record all states in which a power cut may leave the disk are derived:

- The data of a file is safe up to its last fsync. What was written later may be there, in part, as zeros, or not.
- The names in a folder (new, renamed, removed) are safe up to the folder's last fsync. Of later changes any subset may
  be there; a rename is one change. An fsync of a file says nothing about its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import random
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

CALLS = (
    "open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "truncate",
    "ftruncate", "fsync", "fdatasync",
)  # fmt: skip
SYNCS = ("fsync", "fdatasync")
MOST = 100  # states after one cut; if there are more, this many random ones are checked

Entry = tuple[int, str | None]  # inode, and the key of a file's content; None for a folder
Tree = dict[str, str | None]  # by path: the key of a file's content; None for a folder


@dataclass
class Event:
    """The effect of one call.

    Attributes:
        at: time in nanoseconds; all processes use the same clock.
        entries: the folder's contents, by path.
        synced: inode of the file or folder that the call brought to the disk.
        label: of a sync: the target and the caller; of a promise to the user: its text.
        promise: whether it is a promise.
    """

    at: int
    entries: dict[str, Entry]
    synced: int | None = None
    label: str = ""
    promise: bool = False


@dataclass
class Record:
    """All events of one process, or of several, in order; and the contents of files by their keys."""

    root: str
    events: list[Event] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)

    def __add__(self, other: Record) -> Record:
        events = sorted([*self.events, *other.events], key=lambda event: event.at)
        return Record(self.root, events, self.contents | other.contents)

    def without(self, number: int) -> Record:
        """The record without the sync of event ``number``."""
        events = list(self.events)
        events[number] = Event(events[number].at, events[number].entries)
        return Record(self.root, events, self.contents)


class Recorder:
    """Records what this process does in a folder, while its context lasts; other processes may record there as well."""

    def __init__(self, root: Path, lock: Path) -> None:
        """``lock``: a file outside of ``root``, which makes calls of several processes happen one after another."""
        self.record, self._lock, self._file = Record(str(root)), threading.RLock(), lock
        self._calls: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Recorder:
        self._number = os.open(self._file, os.O_RDWR | os.O_CREAT)
        self._calls = {name: getattr(os, name) for name in CALLS}
        self._depth = 0
        self._note()
        for name, call in self._calls.items():
            setattr(os, name, self._recorded(name, call))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._calls.items():
            setattr(os, name, call)
        self._note()
        os.close(self._number)

    def promise(self, words: str) -> None:
        """Record that the program has reported its work so far as saved."""
        with self._alone():
            self._note(label=words, promise=True)

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **more: Any) -> Any:
            with self._alone() as outermost:
                if not outermost:
                    return call(*args, **more)
                self._note()
                result = call(*args, **more)
                if name in SYNCS:
                    self._note_sync(args[0])
                else:
                    self._note()
                return result

        return recorded

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Serialize calls of all threads and processes; yields whether this call is not nested in another one."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                fcntl.flock(self._number, fcntl.LOCK_EX)
            try:
                yield self._depth == 1
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._number, fcntl.LOCK_UN)

    def _note_sync(self, file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        inside = os.path.relpath(path, self.record.root)
        if inside.startswith(".."):
            return self._note()
        frames = [frame for frame in traceback.extract_stack() if "/megatron/" in frame.filename]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[::-1][:4])
        self._note(os.fstat(number).st_ino, f"{re.sub('[0-9]+', 'N', inside)} by {where}")

    def _note(self, synced: int | None = None, label: str = "", promise: bool = False) -> None:
        entries = self._entries(self.record.root)
        last = self.record.events[-1].entries if self.record.events else None
        if synced is not None or promise or entries != last:
            self.record.events.append(Event(time.monotonic_ns(), entries, synced, label, promise))

    def _entries(self, root: str) -> dict[str, Entry]:
        """The folder's contents by path, without files that another process removes meanwhile."""
        results: dict[str, Entry] = {".": (os.stat(root).st_ino, None)}
        folders = [root]
        while folders:
            try:
                listed = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
                for entry in listed:
                    content = None if entry.is_dir(follow_symlinks=False) else self._content(entry.path)
                    results[os.path.relpath(entry.path, root)] = entry.inode(), content
                    folders += [entry.path] if content is None else []
            except FileNotFoundError:
                continue
        return results

    def _content(self, path: str) -> str:
        with open(path, "rb") as file:
            data = file.read()
        key = hashlib.sha1(data).hexdigest()
        self.record.contents[key] = data
        return key


# --- states after a cut

Place = tuple[int, str]  # a folder, by its number, and a name in it


@dataclass
class _Change:
    """The change by one call: the object that each name refers to afterwards; None: no object."""

    names: dict[Place, int | None]
    unsynced: set[int]  # folders


@dataclass(frozen=True)
class Cut:
    """A power cut at one moment.

    Attributes:
        number: the number of the last event before the cut.
        logical: the folder's contents as processes saw them.
        promises: earlier promises, each with the number of its event.
        states: the possible states of the disk.
    """

    number: int
    logical: Tree
    promises: list[tuple[int, str]]
    states: Iterable[Tree]


class Disk:
    """Follows a record and tracks what is safe at each moment.

    Attributes:
        busy: numbers of the sync events that had something to write.
    """

    def __init__(self, record: Record, seed: int = 0) -> None:
        self.record, self.draw = record, random.Random(seed)
        self.contents = dict(record.contents)
        first = record.events[0].entries
        self._numbers: dict[int, int] = {}  # by inode; an inode that is used again is another object
        self._count = 0
        self._names: dict[Place, int] = self._number(first)
        self._safe_names = dict(self._names)
        self._changes: list[_Change] = []
        self._data = {number: content for (_, content), number in self._objects(first)}
        self._safe_data = dict(self._data)
        self.busy: set[int] = set()

    def cuts(self) -> Iterator[Cut]:
        """Yields the cut after each event."""
        promises: list[tuple[int, str]] = []
        for number, event in enumerate(self.record.events):
            self._follow(number, event)
            if event.promise:
                promises.append((number, event.label))
            logical = {path: content for path, (_, content) in event.entries.items()}
            yield Cut(number, logical, list(promises), self._states())

    def _number(self, entries: Mapping[str, Entry]) -> dict[Place, int]:
        """The object of each name."""
        there = {inode for inode, _ in entries.values()}
        self._numbers = {inode: number for inode, number in self._numbers.items() if inode in there}
        for inode in there - set(self._numbers):
            self._count += 1
            self._numbers[inode] = self._count
        self._root = self._numbers[entries["."][0]]
        return {
            (self._numbers[entries[os.path.dirname(path) or "."][0]], os.path.basename(path)): self._numbers[inode]
            for path, (inode, _) in entries.items()
            if path != "."
        }

    def _objects(self, entries: Mapping[str, Entry]) -> list[tuple[Entry, int]]:
        return [(entry, self._numbers[entry[0]]) for entry in entries.values()]

    def _follow(self, number: int, event: Event) -> None:
        names = self._number(event.entries)
        for (_, content), one in self._objects(event.entries):
            self._data[one] = content
            self._safe_data.setdefault(one, None if content is None else self._key(b""))
        self._changes += self._calls_between(self._names, names)
        self._names = names
        synced = self._numbers.get(event.synced) if event.synced is not None else None
        if synced is None:
            return
        if self._safe_data[synced] != self._data[synced]:
            self._safe_data[synced] = self._data[synced]
            self.busy.add(number)
        for change in self._changes:
            if synced in change.unsynced:
                change.unsynced.discard(synced)
                self.busy.add(number)
        while self._changes and not self._changes[0].unsynced:
            self._apply(self._safe_names, self._changes.pop(0))

    def _calls_between(self, before: dict[Place, int], after: dict[Place, int]) -> list[_Change]:
        """Changes of names; those of one rename or exchange are grouped, because they happen together."""
        changed = {place for place in {*before, *after} if before.get(place) != after.get(place)}
        changes: list[_Change] = []
        while changed:
            group, more = set(), {min(changed)}
            while more:
                group |= more
                gone = {before[place] for place in group if place in before}
                come = {after[place] for place in group if place in after}
                more = {p for p in changed - group if before.get(p) in come or after.get(p) in gone}
            changed -= group
            changes.append(_Change({place: after.get(place) for place in group}, {folder for folder, _ in group}))
        return changes

    @staticmethod
    def _apply(names: dict[Place, int], change: _Change) -> None:
        for place, number in change.names.items():
            if number is None:
                names.pop(place, None)
            else:
                names[place] = number

    def _states(self) -> Iterator[Tree]:
        changes = list(self._changes)
        safe, data = dict(self._safe_names), dict(self._data)
        open_ = [number for number, change in enumerate(changes) if change.unsynced]
        results = {*safe.values(), *(number for change in changes for number in change.names.values())}
        choices = {
            number: self._versions(self._safe_data[number], key)
            for number, key in data.items()
            if number in results and key != self._safe_data[number]
        }
        many = 2 ** len(open_) * math.prod(map(len, choices.values()))
        for chosen, versions in self._all(open_, choices) if many <= MOST else self._some(open_, choices):
            names, present = dict(safe), set(chosen)
            for number, change in enumerate(changes):
                if not change.unsynced or number in present:
                    self._apply(names, change)
            yield self._tree(names, {**data, **versions})

    @staticmethod
    def _all(open_: list[int], choices: dict[int, list[str]]) -> Iterator[tuple[Iterable[int], dict[int, str]]]:
        subsets = chain.from_iterable(combinations(open_, size) for size in range(len(open_) + 1))
        for chosen, versions in product(subsets, list(product(*choices.values()))):
            yield chosen, dict(zip(choices, versions))

    def _some(self, open_: list[int], choices: dict[int, list[str]]) -> Iterator[tuple[Iterable[int], dict[int, str]]]:
        """Subsets: none, all, each alone, all but one, and random ones."""
        for kind in range(2):  # without later writes, and with all of them
            versions = {number: keys[-kind] for number, keys in choices.items()}
            yield [], versions
            yield open_, versions
            for one in open_:
                yield [one], versions
                yield [other for other in open_ if other != one], versions
        for _ in range(MOST):
            share = self.draw.random()
            yield (
                [one for one in open_ if self.draw.random() < share],
                {number: self.draw.choice(keys) for number, keys in choices.items()},
            )

    def _versions(self, safe: str, written: str) -> list[str]:
        """Possible contents of a file: as it was synced, as it was written, the first half, or zeros."""
        data = self.contents[written]
        torn = [data[: len(data) // 2], bytes(len(data)), data[: len(data) // 2] + bytes(len(data) - len(data) // 2)]
        return list(dict.fromkeys([safe, *(self._key(part) for part in torn), written]))

    def _key(self, data: bytes) -> str:
        key = hashlib.sha1(data).hexdigest()
        self.contents[key] = data
        return key

    def _tree(self, names: Mapping[Place, int], data: Mapping[int, str | None]) -> Tree:
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in names.items():
            inside.setdefault(folder, []).append((name, number))
        tree: Tree = {".": None}
        left = [("", self._root, frozenset())]
        while left:
            above, folder, seen = left.pop()
            for name, number in inside.get(folder, ()):
                path = f"{above}{name}"
                tree[path] = data[number]
                if data[number] is None and number not in seen:
                    left.append((f"{path}/", number, seen | {number}))
        return tree


def lay_out(tree: Tree, contents: Mapping[str, bytes], folder: Path) -> None:
    """Write a state as real files."""
    for path, key in sorted(tree.items()):
        if key is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).write_bytes(contents[key])


Judge = Callable[[Cut, Tree], str | None]


@dataclass(frozen=True)
class Verdict:
    """The result of checking all states after all cuts, up to the first bad one.

    Attributes:
        wrong: the error, and the place of the cut; None: no state is bad.
        state: the bad one.
        busy: as in :class:`Disk`.
    """

    cuts: int
    states: int
    wrong: str | None
    state: Tree | None
    busy: set[int]
    contents: dict[str, bytes]


def try_all_cuts(record: Record, judge: Judge, since: int = 0) -> Verdict:
    """Call ``judge`` on each state after each cut, until it reports an error.

    ``since``: the number of the first event to cut after.
    """
    disk, cuts, states = Disk(record), 0, 0
    for cut in disk.cuts():
        if cut.number < since:
            continue
        cuts += 1
        for state in cut.states:
            states += 1
            if wrong := judge(cut, state):
                wrong = f"cut {cut.number} (after {record.events[cut.number].label or 'a change of names'}): {wrong}"
                return Verdict(cuts, states, wrong, state, disk.busy, disk.contents)
    return Verdict(cuts, states, None, None, disk.busy, disk.contents)


def prove(records: Mapping[str, tuple[Record, Judge]]) -> list[str]:
    """Check that no cut of any record leaves a bad state, and that each sync is needed for that.

    A sync is needed if, without one of its calls, there is a bad state. (Not every call must be needed, because another
    call may write the same.) A sync that is not needed shows that the judge overlooks something, or that the program
    syncs for nothing. Returns a line for each record.
    """
    needed, needless, lines = set(), set(), []
    for name, (record, judge) in records.items():
        verdict = try_all_cuts(record, judge)
        assert verdict.wrong is None, f"{name}: {verdict.wrong}"
        for number in sorted(verdict.busy):
            results = try_all_cuts(record.without(number), judge, number).wrong is not None
            (needed if results else needless).add(record.events[number].label)
        lines.append(f"{name}: {verdict.cuts} cuts, {verdict.states:,} states, {len(verdict.busy)} syncs")
    assert not needless - needed, needless - needed
    return lines
