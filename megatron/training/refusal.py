# SPDX-License-Identifier: Apache-2.0
"""The error for settings and files that cannot be used, and how all ranks stop with it together."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST = 1000  # characters of a printed line


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write integers of more than about 4,300 digits."""
        bits = value.bit_length()
        return super().repr_int(value, level) if bits < 4000 else f"an integer of about {bits * 3 // 10} digits"


_SHORT = _Short()


def one_line(error: object, most: int | None = None) -> str:
    """The text of an error in one line of at most ``most`` characters; the name of its class if it has no text."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most]


def reason(error: BaseException) -> str:
    """The text of an error in one line of at most 300 characters; without the file's name, which the caller gives."""
    return one_line(getattr(error, "strerror", None) or error, 300)


def short(value: Any) -> str:
    """``repr`` of a value, shortened to about a hundred characters."""
    return _SHORT.repr(value)


def printable(text: str) -> str:
    """A text as one line without control characters; of a long one, only its start and end."""
    if not text.isprintable():
        text = text if len(text) <= 4 * LONGEST else text[: 2 * LONGEST] + text[-2 * LONGEST :]
        text = " ".join(text.splitlines())
        text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 305]} ... {text[-300:]}"


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that looks most like a word, in any case."""
    by_lower = {name.lower(): name for name in names}
    return by_lower[get_close_matches(word.lower(), by_lower, 1, 0.0)[0]]


def near(value: int, unit: int) -> str:
    """The multiples of ``unit`` below and above ``value``, as text."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


@dataclass(frozen=True)
class Fix:
    """A change of the command line that may answer a refusal."""

    use: str = ""  # flags to set, each with its values, as on a command line
    drop: str = ""  # flags to leave out, separated by spaces. SUBJECT stands for the flags that the refusal is about.
    rename: tuple[str, str] | None = None  # a flag, and the name that replaces it in the same place


SUBJECT = "SUBJECT"
LEAVE_OUT = Fix(drop=SUBJECT)


class Refusal(ValueError):
    """Settings that cannot run: one line that names the options and what to do. Entry points print it and exit 2.

    Args:
        subject: the flags at fault, with their values; or the complete message.
        reason: what is wrong with them, and what to do. It follows the subject after a space, or begins with ``: ``.
        fixes: what to do, as changes of the command line, best first; none if the user has to choose.
        about: more flags at fault, which the subject does not name.
    """

    everywhere = False  # whether every rank has raised it; then rank 0 prints it for all

    def __init__(self, subject: str, reason: str = "", *fixes: Fix, about: str | Iterable[str] = "") -> None:
        super().__init__(f"{subject}{' ' if reason and reason[0] not in ':,;' else ''}{reason}")
        self.about = tuple(about.split() if isinstance(about, str) else about)
        if reason:
            self.about += tuple(word.rstrip(",") for word in subject.split() if word.startswith("-"))
        self.fixes = fixes

    def __str__(self) -> str:
        """One printable line, even if it quotes settings or files with other characters."""
        return printable(super().__str__())

    @property
    def parts(self) -> list[Refusal]:
        """The single refusals that this one consists of."""
        return [self]

    def render(self) -> str:
        """The text to print."""
        return str(self)


def refuse_combinations(subject: str, others: Mapping[str, tuple[object, str]], fixes: Mapping[str, str] = {}) -> None:
    """Raise a Refusal for the first other setting that is in use.

    Args:
        subject: the flag that none of them works with yet.
        others: by flag, perhaps with its value or after the flag that it is combined with: whether it is in use, and
            why it is not supported.
        fixes: by flag, what to set; the others are to be left out.
    """
    for flag, (given, reason) in others.items():
        if given:
            name = flag.split()[-1] if flag.endswith(" --gpu") else flag.split()[0]
            fix = Fix(fixes[name]) if name in fixes else Fix(drop=name)
            raise Refusal(f"{subject} with {flag}", f"is not supported: {reason}", fix)


def needs_flag(flag: str, need: str, *, switch: bool = False) -> Refusal:
    """Refusal of ``flag``, which does nothing without ``need``; ``switch``: ``need`` takes no value."""
    reason = f"does nothing without {need}: add {need}, or leave it out"
    return Refusal(flag, reason, *([Fix(need)] if switch else []), LEAVE_OUT)


@contextmanager
def permitted() -> Iterator[None]:
    """Turn a PermissionError into a Refusal that names the file. Can be used as a decorator too."""
    try:
        yield
    except PermissionError as error:
        raise Refusal(f"{error.filename}: permission denied: ask its owner for access, or give another path") from None


@contextmanager
def refusing(what: object, *errors: type[Exception]) -> Iterator[None]:
    """Turn some errors into a Refusal: ``what`` they are about, a colon, and their text."""
    try:
        yield
    except errors as error:
        raise Refusal(f"{what}: {reason(error)}") from None


class Unreadable(Refusal):
    """A flag without a value, or with a value that cannot be read."""


class Refusals(Refusal):
    """Several refusals at once, in order; as a string, still one line.

    Args:
        parts: one or more.
        command: the flags of a command line that would be accepted, if there is one.
        changes: how it differs from the command line that was given.
    """

    def __init__(self, parts: Iterable[Refusal], command: str | None = None, changes: str = "") -> None:
        self._parts = list(parts)
        super().__init__("; ".join(self.lines))
        self.command, self.changes = command, changes

    @property
    def parts(self) -> list[Refusal]:
        return self._parts

    @property
    def lines(self) -> list[str]:
        return [str(part) for part in self._parts]

    def __str__(self) -> str:
        return "; ".join(self.lines)

    def __reduce__(self) -> tuple:
        return type(self), (self._parts, self.command, self.changes)

    def render(self) -> str:
        """One refusal a line, then the command line that would be accepted."""
        text = [f"{len(self.parts)} settings cannot run"]
        text += [f"  {number}. {line}" for number, line in enumerate(self.lines, 1)]
        if self.command is not None:
            text += [f"this would be accepted ({printable(self.changes)}):", f"  {self.command}"]
        return "\n".join(text)


class Gather:
    """Runs checks one after the other and keeps what each refuses, instead of stopping at the first."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self._failed: set[str] = set()

    def check(self, name: str, action: Callable[[], T], *needs: str) -> T | None:
        """Run ``action``, unless a check that it ``needs`` failed or did not run; None if it refused or did not run."""
        if self._failed.intersection(needs):
            self._failed.add(name)
            return None
        try:
            return action()
        except Refusal as refusal:
            self._failed.add(name)
            self.refusals += refusal.parts
            return None

    def finish(self) -> None:
        """Raise what was gathered.

        Raises:
            Refusal: one check refused. Refusals: several did.
        """
        raise_all(self.refusals)


def raise_all(refusals: Iterable[Refusal]) -> None:
    """Raise the only refusal, or :class:`Refusals` of several; do nothing if there are none. Equal lines count once."""
    distinct: dict[str, Refusal] = {}
    for refusal in refusals:
        distinct.setdefault(str(refusal), refusal)
    if distinct:
        raise next(iter(distinct.values())) if len(distinct) == 1 else Refusals(distinct.values())


def refuse_together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank. If one rank refuses, all do, so that no rank waits for another.

    Without process groups it only runs ``action``.

    Raises:
        Refusal: the one of the first rank that refused; ``everywhere`` is set, so that only rank 0 prints it.
    """
    import torch.distributed as dist  # slow to import, and not needed to refuse

    if not dist.is_initialized():
        return action()
    result, line = None, None
    try:
        with permitted():
            result = action()
    except Refusal as refusal:
        line = str(refusal)
    lines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    refused = [(index, line) for index, line in enumerate(lines) if line]
    if refused:
        index, line = refused[0]
        refusal = Refusal(line if index == 0 else f"{line} (rank {index})")
        refusal.everywhere = True
        raise refusal
    return result


def some(names: list[str]) -> str:
    """The first three of ``names``, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
