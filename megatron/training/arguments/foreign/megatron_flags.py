# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM and DeepSpeed that are not settings here: some are ignored, the others are refused.

A *hint* cannot change the result: it is accepted with a note. Any other flag is *refused* with the reason or the flag
to use instead, unless its value is Megatron-LM's default. An entry of a table is a reason, a colon and flags, which may
continue in indented lines. A flag reads ``--flag [values] [default]``: the number of values (none, 1, 3, + or *) and
Megatron-LM's default. The default ``same`` marks a flag without values that asks for what is the default anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, NamedTuple

from megatron.training.arguments.argv import options
from megatron.training.arguments.foreign import fork_flags, ignored_flags, newer_flags, refused_flags
from megatron.training.arguments.foreign.refused_flags import Advice
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, nearest, raise_all
from megatron.training.settings.config import ModelConfig

OF_EXPERTS = "a dense model has no experts"  # reason of a hint in `fork_flags.py`
SWITCH = re.compile("^--(enable-|disable-|use-|no-)?")
TYPO = 0.86  # similarity of two flags from which one counts as a misspelling of the other


def entries(table: str) -> Iterator[tuple[str, str]]:
    """(reason, flags) of each entry of a table."""
    for entry in filter(None, re.split(r"\n(?! )", table)):
        reason, _, flags = " ".join(entry.split()).rpartition(": ")
        yield reason, flags


REFUSED = (refused_flags.REFUSED, newer_flags.REFUSED, fork_flags.REFUSED, refused_flags.OTHER_NAMES)
GROUPS: dict[str, list[tuple[Advice, str]]] = {
    "hint": [
        (Advice(reason), flags) for reason, flags in entries(ignored_flags.HINTS + newer_flags.HINTS + fork_flags.HINTS)
    ],
    "refused": [
        (advise(reason), flags)
        for tables in REFUSED
        for advise, text in tables.items()
        for reason, flags in entries(text)
    ],
}


class Row(NamedTuple):
    """One flag of the tables."""

    flag: str
    values: str
    default: str | None
    verdict: str
    advice: Advice

    @property
    def reason(self) -> str:
        return self.advice.reason


@cache
def rows() -> dict[str, Row]:
    """The rows of all tables, by flag."""
    table = {}
    for verdict, groups in GROUPS.items():
        for advice, flags in groups:
            for words in map(str.split, flags.removeprefix("--").split(" --")):
                flag = "--" + words[0]
                values = words[1] if len(words) > 1 else "0"
                table[flag] = Row(flag, values, words[2] if len(words) > 2 else None, verdict, advice)
    return table


def judge(given: list[tuple[str, list[str]]]) -> list[str]:
    """Notes on the hints among the given flags and their values, one line per reason.

    Raises:
        Refusal: a refused flag has a value other than Megatron-LM's default.
    """
    table, hints, refused = rows(), {}, {}
    for flag, values in given:
        row = table[flag]
        if row.default is not None and _same(values, row.default):
            continue
        flags = (hints if row.verdict == "hint" else refused).setdefault(row.advice, [])
        if flag not in flags:
            flags.append(flag)
    raise_all(
        Refusal(", ".join(flags), f": {advice.reason}", *advice.fixes(flags)) for advice, flags in refused.items()
    )
    return [f"no effect here: {', '.join(flags)} ({advice.reason})" for advice, flags in hints.items()]


def refuse_with_experts(given: list[tuple[str, list[str]]], experts: int | None) -> None:
    """Refuse flags of Megatron-DeepSpeed's mixtures of experts, which have no effect on a dense model alone.

    Raises:
        Refusal: the model has experts, and such a flag is given.
    """
    flags = [flag for flag, _ in given if experts not in (None, 1) and rows()[flag].reason.startswith(OF_EXPERTS)]
    if flags:
        raise Refusal(
            ", ".join(dict.fromkeys(flags)),
            "describes experts as Megatron-DeepSpeed does: use Megatron-LM's --moe-... flags, which --help lists",
            LEAVE_OUT,
        )


def refuse_other_weights(given: list[tuple[str, list[str]]], model: ModelConfig) -> None:
    """Refuse MindSpeed's --norm-topk-prob where the weights of the chosen experts do not add up to 1.

    Raises:
        Refusal: the flag is given, and would change the result.
    """
    if "--norm-topk-prob" in dict(given) and model.num_experts:
        for flag in ("--moe-router-pre-softmax", "--moe-router-topk-scaling-factor"):
            if getattr(model, flag[2:].replace("-", "_")):
                raise Refusal(
                    f"--norm-topk-prob and {flag}", "contradict each other: leave one out, or both", LEAVE_OUT
                )


def refuse_unknown(words: list[str], supported: list[str], given: list[str] | None = None) -> None:
    """Refuse words that no table knows, and name the nearest flag that is known.

    Args:
        words: words that argparse could not place.
        supported: flags that set a setting.
        given: the complete command line.

    Raises:
        Refusal: ``words`` is not empty.
    """
    flags = [word.split("=")[0] for word in words if word.startswith("-") and word.strip("-")]
    if words and not flags:
        before = next((flag for flag, *values in options(given or []) if words[0] in values), None)
        after = f" after {before}" if before else ""
        line = f"{words[0]!r}{after} belongs to no flag: quote values that hold spaces"
        raise Refusal(line, about=[*words, before or ""])
    raise_all(_refusal(flag, tuple(supported)) for flag in dict.fromkeys(flags))


@cache
def _refusal(flag: str, supported: tuple[str, ...]) -> Refusal:
    """The refusal of a flag that no table knows. It suggests a similar flag, but never a refused one."""
    problem = "is not a known flag"
    word, table = flag.strip("-").replace("_", "-").lower(), rows()
    for row in (table.get("--" + word), table.get("--" + word.replace("-", "_"))):
        if row is not None and row.verdict == "refused":
            return Refusal(flag, f"{problem}: {row.reason}", *row.advice.fixes([flag]))
    own = [name[2:] for name in supported]
    known = own + [name[2:] for name, row in table.items() if row.verdict == "hint"]
    if (similar := _similar(word, own, known)) is not None:
        name = f"--{similar}"
        misspelt = SequenceMatcher(None, flag, name).ratio() >= TYPO or name.startswith(flag)
        fix = Fix(rename=(flag, name)) if misspelt else LEAVE_OUT
        return Refusal(flag, f"{problem}: did you mean {name}?", fix)
    refused = {SWITCH.sub("", name): name for name, row in table.items() if row.verdict == "refused"}
    for near in get_close_matches(SWITCH.sub("", f"--{word}"), refused, 1, 0.85):
        return Refusal(flag, f"{problem}, and {refused[near]} is refused: {table[refused[near]].reason}", LEAVE_OUT)
    return Refusal(flag, f"{problem}; the nearest is --{nearest(word, own)}, and --help lists all", LEAVE_OUT)


def _similar(word: str, own: list[str], known: list[str]) -> str | None:
    """The name among ``known`` that a misspelt word probably means, first among ``own``."""
    longer = [name for name in known if name.startswith(f"{word}-") and len(word) > 7]
    if word in known:
        return word
    similar = get_close_matches(word, own, 1, 0.9) or longer if len(longer) == 1 else []
    similar = similar or get_close_matches(word, own, 1, 0.8) or get_close_matches(word, known, 1, 0.8)
    if not similar:  # the same words in another order, or one word more or less
        parts = set(word.split("-"))
        likeness = {name: len(parts & set(name.split("-"))) / len(parts | set(name.split("-"))) for name in known}
        similar = [name for name in likeness if likeness[name] == max(likeness.values()) >= 0.6]
    return similar[0] if similar else None


def _same(values: list[str], default: str) -> bool:
    if not values:
        return default == "same"
    try:
        return [float(value) for value in values] == [float(default)]
    except ValueError:
        return values == [default]


# Other flags that store a value in a setting: flag -> (section.field, value).
SPELLINGS: dict[str, tuple[str, Any]] = {
    "--use-rotary-position-embeddings": ("model.position_embedding_type", "rope"),
    "--RMSNorm": ("model.normalization", "RMSNorm"),
    "--fp8-e4m3": ("model.fp8_format", "e4m3"),
    "--fp8-hybrid": ("model.fp8_format", "hybrid"),
    "--fpdt-offload": ("chunks.fpdt_offload", True),
    "--ds-sequence-parallel-fpdt-offloading": ("chunks.fpdt_offload", True),
}
