# SPDX-License-Identifier: Apache-2.0
"""The one error that settings end in, and how all ranks end in it together."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST = 1000  # characters of a line that quotes a file
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def one_line(error: object, most: int | None = None) -> str:
    """What an error says without its line breaks, at most so many characters of it; its kind if it says nothing."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most]


def reason(error: BaseException) -> str:
    """What went wrong, in one line of at most 300 characters; a file's error without the file, which others name."""
    return one_line(getattr(error, "strerror", None) or error, 300)


def short(value: Any) -> str:
    """What a value looks like, in some hundred characters however large and deep it is."""
    return _SHORT.repr(value)


def printable(text: str) -> str:
    """A text as one line that moves no cursor and sends a terminal no command; of a long one, both ends."""
    if not text.isprintable():
        text = text if len(text) <= 4 * LONGEST else text[: 2 * LONGEST] + text[-2 * LONGEST :]
        text = " ".join(text.splitlines())
        text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 305]} ... {text[-300:]}"


def near(value: int, unit: int) -> str:
    """The multiples of ``unit`` around ``value``, as words."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else f"{above}"


class Refusal(ValueError):
    """Settings that cannot run: one line that names the options and the way out. Entry points print it and exit 2."""

    everywhere = False  # whether every rank has raised it; then rank 0 tells it for all

    def __str__(self) -> str:
        """One line, whatever the settings and files that it quotes hold."""
        return printable(super().__str__())

    def told(self) -> str:
        """What is printed."""
        return str(self)


@contextmanager
def permitted() -> Iterator[None]:
    """Turn an error of missing permission into a Refusal that names the file. Serves as a decorator as well."""
    try:
        yield
    except PermissionError as error:
        raise Refusal(f"{error.filename}: permission denied: ask its owner for access, or give another path") from None


class Refusals(Refusal):
    """Several at once, in order; as a string, still one line.

    Args:
        lines: one or more.
        command: the flags of a command line that would be taken, where there is one.
        changes: how it differs from what was given.
    """

    def __init__(self, lines: Sequence[str], command: str | None = None, changes: str = "") -> None:
        super().__init__("; ".join(lines))
        self.lines, self.command, self.changes = list(lines), command, changes

    def __str__(self) -> str:
        return "; ".join(map(printable, self.lines))

    def told(self) -> str:
        """One refusal a line, then the command line that would be taken."""
        text = [f"{len(self.lines)} settings cannot run"]
        text += [f"  {number}. {printable(line)}" for number, line in enumerate(self.lines, 1)]
        if self.command is not None:
            text += [f"taken would be, {printable(self.changes)}:", f"  {self.command}"]
        return "\n".join(text)


class Gather:
    """Runs checks one after the other and keeps what each refuses, in place of stopping at the first."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._failed: set[str] = set()

    def check(self, name: str, action: Callable[[], T], *needs: str) -> T | None:
        """Run ``action``, unless one of the checks it ``needs`` was refused or left out; None where it was not run."""
        if self._failed.intersection(needs):
            self._failed.add(name)
            return None
        try:
            return action()
        except Refusal as refusal:
            self._failed.add(name)
            self.lines += refusal.lines if isinstance(refusal, Refusals) else [str(refusal)]
            return None

    def finish(self) -> None:
        """Raise what was gathered.

        Raises:
            Refusal: there was one. Refusals: several.
        """
        lines = list(dict.fromkeys(self.lines))
        if len(lines) == 1:
            raise Refusal(lines[0])
        if lines:
            raise Refusals(lines)


def together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it is refused on any, it is refused on all, and nobody waits for anybody.

    Raises:
        Refusal: of the first rank that refused; ``everywhere`` is set, so that one rank tells it for all.
    """
    import torch.distributed as dist  # not for those who only refuse

    result, told = None, None
    try:
        with permitted():
            result = action()
    except Refusal as refusal:
        told = str(refusal)
    lines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, told)
    refused = [(index, line) for index, line in enumerate(lines) if line]
    if refused:
        index, line = refused[0]
        refusal = Refusal(line if index == 0 else f"{line} (rank {index})")
        refusal.everywhere = True
        raise refusal
    return result
