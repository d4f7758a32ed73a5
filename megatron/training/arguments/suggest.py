# SPDX-License-Identifier: Apache-2.0
"""From refusals to a command line that would be accepted.

Refusals carry their fixes as data (:class:`megatron.training.refusal.Fix`). Each fix is tried by reading the changed
command line: it is used if its refusal disappears, no earlier one comes back and none appears about the flags that it
added. Refusals that were hidden behind the first ones are listed too; those that only the changes cause are answered
without being listed. No command line is proposed if a refusal leaves a choice to the user.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable

from megatron.training.arguments.argv import flat, options
from megatron.training.refusal import SUBJECT, Fix, Refusal, Refusals

ROUNDS = 12
FLAG = re.compile(r"--[\w-]+")

Options = list[list[str]]
Read = Callable[[list[str]], object]


def explained(refusal: Refusal, words: list[str], read: Read) -> Refusal:
    """All refusals of ``words``, with the command line that would be accepted if no choice is left to the user.

    Args:
        refusal: what ``read`` refused first.
        read: raises a :class:`Refusal` if it does not accept a command line.
    """
    listed, repair = _repaired(refusal, words, read)
    if len(listed) == 1:
        return listed[0]
    if repair.undecided:
        return Refusals(listed)
    return Refusals(listed, shlex.join(flat(repair.options)), _changes(options(words), repair.options))


def accepted(refusal: Refusal, words: list[str], read: Read) -> list[str] | None:
    """The command line that would be accepted in place of ``words``; None if a choice is left to the user."""
    _, repair = _repaired(refusal, words, read)
    return None if repair.undecided else flat(repair.options)


def _repaired(refusal: Refusal, words: list[str], read: Read) -> tuple[list[Refusal], _Repair]:
    """(All refusals of ``words``, the command line after their fixes)."""
    repair = _Repair(words, read)
    listed = pending = refusal.parts
    for _ in range(ROUNDS):
        for part in pending:
            repair.apply_fix(part)
        remaining = repair.refused()
        pending = [part for part in remaining if not _among(part, repair.answered)]
        repair.undecided |= len(pending) < len(remaining)
        listed = [*listed, *(part for part in pending if not repair.caused(part))]
        if not pending:
            break
    else:
        repair.undecided = True
    return listed, repair


class _Repair:
    """A command line that is changed until it is accepted."""

    def __init__(self, words: list[str], read: Read) -> None:
        self.options = options(words)
        self.undecided = False  # whether a choice is left to the user, or no fix helped
        self.answered: list[Refusal] = []  # each was given to apply_fix
        self._fixed: list[Refusal] = []  # those for which a fix helped
        self._read = read
        self._given = _names(self.options)

    def refused(self, edited: Options | None = None) -> list[Refusal]:
        """The refusals of the command line as it is, or of ``edited``."""
        try:
            self._read(flat(self.options if edited is None else edited))
        except Refusal as refusal:
            return refusal.parts
        return []

    def caused(self, part: Refusal) -> bool:
        """Whether a refusal comes from the repair, and not from what was given: it names a flag that is gone."""
        now = _names(self.options)
        named = {*part.about, *FLAG.findall(str(part))}
        return bool(set(part.about) & (now - self._given) or named & (self._given - now))

    def apply_fix(self, part: Refusal) -> None:
        """Apply the first fix that helps. If none does, remove the flags at fault to see what else is refused."""
        self.answered.append(part)
        for fix in part.fixes:
            edited = fixed(self.options, fix, part.about)
            if edited == self.options:
                continue
            still_refused, added = self.refused(edited), _names(edited) - self._given
            back = any(_among(other, [part, *self._fixed]) for other in still_refused)
            if not back and not any(set(other.about) & added for other in still_refused):
                self.options = edited
                self._fixed.append(part)
                return
        self.undecided = True
        self.options = _without(self.options, part.about)


def _among(part: Refusal, others: Iterable[Refusal]) -> bool:
    return str(part) in map(str, others)


def _names(given: Options) -> set[str]:
    return {option[0] for option in given}


def fixed(given: Options, fix: Fix, about: Iterable[str] = ()) -> Options:
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
    removed = dict.fromkeys(option[0] for option in before if option[0] not in kept)
    added = [" ".join(option) for option in after if option not in before]
    parts = [f"without {', '.join(removed)}"] if removed else []
    parts += [f"with {', '.join(added)}"] if added else []
    return "; ".join(parts) or "in this notation"
