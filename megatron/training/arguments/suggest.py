# SPDX-License-Identifier: Apache-2.0
"""From refusals to a command line that would be accepted.

Refusals carry their fixes as data (:class:`megatron.training.refusal.Fix`). Each fix is tried by reading the changed
command line: it is used if its refusal disappears and none appears about the flags that it added. Refusals that were
hidden behind the first ones are listed too. No command line is proposed if a refusal leaves a choice to the user.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from megatron.training.arguments.argv import flat, options
from megatron.training.refusal import SUBJECT, Fix, Refusal, Refusals

ROUNDS = 12

Options = list[list[str]]
Read = Callable[[list[str]], object]


def explained(refusal: Refusal, words: list[str], read: Read) -> Refusal:
    """``refusal`` of ``words`` with whatever else is refused, and with the command line that would be accepted.

    Args:
        read: raises a :class:`Refusal` if it does not accept a command line.
    """
    repair = _Repair(words, read)
    listed = pending = refusal.parts
    for _ in range(ROUNDS):
        for part in pending:
            repair.answer(part)
        remaining = repair.refused()
        own = [part for part in remaining if not repair.caused(part)]
        pending = [part for part in own if not _among(part, listed)]
        repair.open |= len(pending) < len(remaining)
        listed = [*listed, *pending]
        if not pending:
            break
    else:
        repair.open = True
    if len(listed) == 1:
        return listed[0]
    if repair.open:
        return Refusals(listed)
    return Refusals(listed, shlex.join(flat(repair.options)), _changes(options(words), repair.options))


class _Repair:
    """A command line that is changed until it is accepted."""

    def __init__(self, words: list[str], read: Read) -> None:
        self.options = options(words)
        self.open = False  # whether a choice is left to the user, or no fix helped
        self._read = read
        self._given = _names(self.options)
        self._gone: set[str] = set()  # removed although no fix says so, to see what else is refused

    def refused(self, edited: Options | None = None) -> list[Refusal]:
        """The refusals of the command line as it is, or of ``edited``."""
        try:
            self._read(flat(self.options if edited is None else edited))
        except Refusal as refusal:
            return refusal.parts
        return []

    def caused(self, part: Refusal) -> bool:
        """Whether a refusal comes from the repair, and not from what was given."""
        return bool(set(part.about) & (self._gone | (_names(self.options) - self._given)))

    def answer(self, part: Refusal) -> None:
        """Apply the first fix that helps. If none does, remove the flags at fault to see what else is refused."""
        for fix in part.fixes:
            edited = _fixed(self.options, fix, part.about)
            if edited == self.options:
                continue
            left, brought = self.refused(edited), _names(edited) - self._given
            if not _among(part, left) and not any(set(other.about) & brought for other in left):
                self.options = edited
                return
        self.open = True
        self._gone.update(_names(self.options) & set(part.about))
        self.options = _without(self.options, part.about)


def _among(part: Refusal, others: Iterable[Refusal]) -> bool:
    return str(part) in map(str, others)


def _names(given: Options) -> set[str]:
    return {option[0] for option in given}


def _fixed(given: Options, fix: Fix, about: Iterable[str]) -> Options:
    """``given`` with a fix; unchanged if the new name of a flag is given already with another value."""
    if fix.rename:
        old, new = fix.rename
        renamed = [[new, *option[1:]] if option[0] == old else option for option in given]
        if len({tuple(option) for option in renamed if option[0] == new}) > 1:
            return given
        given = [option for at, option in enumerate(renamed) if option not in renamed[:at]]
    dropped = about if fix.drop == SUBJECT else fix.drop.split()
    used = options(fix.use.split())
    return [*_without(given, {*dropped, *_names(used)}), *used]


def _without(given: Options, flags: Iterable[str]) -> Options:
    return [option for option in given if option[0] not in flags]


def _changes(before: Options, after: Options) -> str:
    """How two command lines differ, for the user to read."""
    kept = _names(after)
    gone = dict.fromkeys(option[0] for option in before if option[0] not in kept)
    new = [" ".join(option) for option in after if option not in before]
    parts = [f"without {', '.join(gone)}"] if gone else []
    parts += [f"with {', '.join(new)}"] if new else []
    return ", ".join(parts) or "in this notation"
