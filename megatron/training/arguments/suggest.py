# SPDX-License-Identifier: Apache-2.0
"""From refusals to the command line that would be taken.

A refusal ends with its way out: ``leave it out``, ``use --this 8``, ``add --that``. Here that sentence is read again
and done, until the command line is taken; what turns up on the way was refused as well. Where the sentences leave a
choice to the user, there is no such command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection
from difflib import SequenceMatcher

from megatron.training.arguments.argv import flat, options
from megatron.training.refusal import Refusal, Refusals

FLAGS = re.compile(r"--[A-Za-z][\w-]*")
SAID = re.compile(r"(?:for [\w ]+ )?(use|add|give|pass) (--.*)")
LISTED = re.compile(r"--[\w-]+(, --[\w-]+)*")
WORD = re.compile(r"[\w.,+-]+")
ROUNDS = 12
TYPO = 0.86  # likeness from which a flag is another one, misspelt

Options = list[list[str]]
Read = Callable[[list[str]], object]


def explained(refusal: Refusal, words: list[str], read: Read, switches: Collection[str]) -> Refusal:
    """``refusal`` of ``words`` with whatever else is refused, and with the command line that would be taken.

    Args:
        read: raises a :class:`Refusal` where it does not take a command line.
        switches: flags that take no value.
    """
    repair = _Repair(words, read, switches)
    lines = pending = _lines(refusal)
    for _ in range(ROUNDS):
        for line in pending:
            repair.follow(line)
        found = repair.refused()
        own = [line for line in found if not repair.caused(line)]
        repair.open |= len(own) < len(found)
        pending = [line for line in own if line not in lines]
        repair.open |= len(pending) < len(own)
        lines = [*lines, *pending]
        if not pending:
            break
    else:
        repair.open = True
    if len(lines) == 1:
        return Refusal(lines[0])
    if repair.open:
        return Refusals(lines)
    return Refusals(lines, shlex.join(flat(repair.options)), _changes(options(words), repair.options))


class _Repair:
    """A command line on its way to one that is taken."""

    def __init__(self, words: list[str], read: Read, switches: Collection[str]) -> None:
        self.options = options(words)
        self.open = False  # whether a choice is left to the user, or nothing helped
        self._read, self._switches = read, switches
        self._given = {option[0] for option in self.options}
        self._gone: set[str] = set()  # removed without its refusal saying so

    def refused(self, edited: Options | None = None) -> list[str]:
        """The refusals of the command line as it is, or as it would be."""
        try:
            self._read(flat(self.options if edited is None else edited))
        except Refusal as refusal:
            return _lines(refusal)
        return []

    def caused(self, line: str) -> bool:
        """Whether a refusal comes from the repair, and not from what was given."""
        if line.startswith(("'", '"', "missing", "give ")):
            return bool(self._gone) or line[0] in "'\""
        brought = {option[0] for option in self.options} - self._given
        return bool(set(FLAGS.findall(_subject(line))) & (self._gone | brought))

    def follow(self, line: str) -> None:
        """Do what a refusal says. Where it does not say, take out what it is about, to see what else is refused."""
        ways = [way for way in self._ways(line) if way != self.options]
        for way in ways:
            new = {flag for flag, *_ in way} - self._given
            left = self.refused(way)
            if line not in left and not any(
                other[0] in "'\"" or set(FLAGS.findall(_subject(other))) & new for other in left
            ):
                self.options = way
                return
        named = self._named(line)
        self.open = True
        self._gone.update(named)
        self.options = _without(self.options, named)

    def _named(self, line: str) -> list[str]:
        """The flags given that a refusal is about; a word that belongs to no flag is an option of its own."""
        if line[0] in "'\"":
            return [line.split(line[0])[1]]
        names = {option[0] for option in self.options}
        return [flag for flag in re.findall(r"--?[A-Za-z][\w-]*", _subject(line)) if flag in names]

    def _ways(self, line: str) -> list[Options]:
        """What a refusal's sentence says to do, in its order."""
        named, found = self._named(line), self.options
        if " is not a known flag" in line:
            meant = re.search(r"did you mean (--[\w-]+)\?", line)
            if meant and SequenceMatcher(None, named[0] if named else "", meant[1]).ratio() >= TYPO:
                return [_renamed(found, named, meant[1])]
            if meant or line.endswith(": --help lists them"):
                return [_without(found, named)]
        ways: list[Options] = []
        if only := re.fullmatch(r"(--[\w-]+) .*: not supported; choose from ([\w.-]+)", line):
            ways.append(_set(found, [[only[1], only[2]]]))
        for part in re.split(r",? or |, ", line.rpartition(": ")[2]):
            if re.fullmatch(r"leave (it|them) out.*", part):
                ways.append(_without(found, named[:1] if " with " in _subject(line) else named))
            elif re.fullmatch(r"leave --.* out", part):
                ways.append(_without(found, FLAGS.findall(part)))
            elif (bound := re.fullmatch(r"use at (?:most|least) (\d+)", part)) and FLAGS.search(line):
                ways.append(_set(found, [[FLAGS.findall(line)[0], bound[1]]]))
            elif part == "add it" and (needed := re.search(r" needs? (--[^:,;]+):", line)):
                ways += self._said([], needed[1])
            elif said := SAID.match(part):
                others = [] if said[1] == "add" else named if LISTED.fullmatch(_subject(line)) else named[:1]
                ways += self._said(others, said[2])
        return ways

    def _said(self, others: list[str], text: str) -> list[Options]:
        """Flags that a sentence says to use: beside ``others`` or in their place, with their value if it gives none."""
        found, wanted = self.options, options(re.sub(r"\(.*?\)", "", text).split())
        if not all(len(option) < 3 and WORD.fullmatch(option[-1]) for option in wanted):
            return []  # it goes on in words
        ways, replaced = [], [flag for flag in others if flag not in {option[0] for option in wanted}]
        if len(wanted) == 1 and len(wanted[0]) == 1 and len(replaced) == 1:
            ways.append(_renamed(found, replaced, wanted[0][0]))
        if all(len(option) > 1 or option[0] in self._switches for option in wanted):
            ways += [_set(found, wanted), _set(_without(found, replaced), wanted)]
        return ways


def _lines(refusal: Refusal) -> list[str]:
    return list(refusal.lines) if isinstance(refusal, Refusals) else [str(refusal)]


def _subject(line: str) -> str:
    """What a refusal is about: all before its reason."""
    return re.split(r": | is not a known flag| needs | does nothing without ", line)[0]


def _without(found: Options, flags: list[str]) -> Options:
    return [option for option in found if option[0] not in flags]


def _renamed(found: Options, flags: list[str], name: str) -> Options:
    """With another name; as it is where that flag is there too and says something else."""
    new = [[name, *option[1:]] if option[0] in flags else option for option in found]
    said = [option for option in new if option[0] == name]
    if any(option != said[0] for option in said):
        return found
    return [option for at, option in enumerate(new) if option not in new[:at]]


def _set(found: Options, wanted: Options) -> Options:
    names = {option[0] for option in wanted}
    return [*(option for option in found if option[0] not in names), *wanted]


def _changes(before: Options, after: Options) -> str:
    """How two command lines differ, in words."""
    kept = {option[0] for option in after}
    gone = dict.fromkeys(option[0] for option in before if option[0] not in kept)
    new = [" ".join(option) for option in after if option not in before]
    parts = [f"without {', '.join(gone)}"] if gone else []
    parts += [f"with {', '.join(new)}"] if new else []
    return ", ".join(parts) or "as it is written here"
