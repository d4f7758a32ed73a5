# SPDX-License-Identifier: Apache-2.0
"""What a setting's field says of it alone: its range, what it needs, and when it is read."""

from __future__ import annotations

from dataclasses import Field
from functools import partial

from megatron.training.refusal import Gather, Refusal, needs_flag, raise_all
from megatron.training.settings.config import Config
from megatron.training.settings.flag import Range, every, name_of
from megatron.training.settings.read_with import Condition


def check_ranges(config: Config) -> None:
    """Refuse single numbers that are out of range."""
    gather = Gather()

    def check(setting: Field, number: float | None, allowed: Range) -> None:
        if number is not None and not allowed.holds(number):
            raise Refusal(f"--{setting.name.replace('_', '-')} {number:g}", allowed.text)

    for _, part, setting in config.settings():
        value = getattr(part, setting.name)
        for allowed in every(setting, "range"):
            for number in value if isinstance(value, list) else [value]:
                gather.check(setting.name, partial(check, setting, number, allowed))
    gather.finish()


def check_needs(config: Config) -> None:
    """Refuse flags that are given without one that they need."""
    by_name = {setting.name: setting for *_, setting in config.settings()}
    refused = []
    for _, part, setting in config.settings():
        needs = setting.metadata.get("needs", ()) if getattr(part, setting.name) not in (None, setting.default) else ()
        if lacks := next((other for other in needs if not getattr(config.part_with(other), other)), None):
            need = by_name[lacks]
            refused.append(needs_flag(name_of(setting), name_of(need), switch=need.type == "bool"))
    raise_all(refused)


def note_unused(config: Config) -> None:
    """Add a note to ``config.notes`` for settings that are not at their defaults and that nothing reads."""
    unused: dict[Condition, list[str]] = {}
    default = Config()
    for section, part, setting in config.settings():
        value, usual = (getattr(one, setting.name) for one in (part, getattr(default, section)))
        missing = [one for one in every(setting, "read_with") if not one.holds(config)]
        if value != usual and missing:
            unused.setdefault(missing[0], []).append(name_of(setting))
    for condition, flags in unused.items():
        config.notes.append(f"no effect here: {', '.join(flags)} ({condition.text})")
