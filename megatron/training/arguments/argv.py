# SPDX-License-Identifier: Apache-2.0
"""Splits a command line into options, each a flag with its values, and reads other programs' notations of values."""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping, Sequence

from megatron.training.refusal import Refusal

FLAG = re.compile(r"--?[A-Za-z]")


def options(words: Iterable[str]) -> list[list[str]]:
    """Words as options: each is a flag with its values, or a word before the first flag. ``--flag=value`` is split."""
    result: list[list[str]] = []
    for word in words:
        if FLAG.match(word):
            flag, equals, value = word.partition("=")
            result.append([flag, value] if equals else [flag])
        elif result and result[-1][0].startswith("-"):
            result[-1].append(word)
        else:
            result.append([word])
    return result


def flat(split: Iterable[list[str]]) -> list[str]:
    """The options as one list of words. A value that looks like a flag is joined to its flag by ``=``."""
    words = []
    for flag, *values in split:
        if len(values) == 1 and re.match(r"-(?!\d+$|\d*\.\d+$)", values[0]):
            words.append(f"{flag}={values[0]}")
        else:
            words += [flag, *values]
    return words


def plain(
    words: list[str], switches: set[str], defaults: set[str], numbers: set[str], lists: set[str], pairs: set[str]
) -> list[str]:
    """The same command line in the notation of this program.

    ``--bf16 true`` becomes ``--bf16``, and ``--bf16 false`` disappears. ``[2,4]`` and ``2,4`` are lists of numbers. A
    pair is ``4095,0``, ``(4095, 0)`` or two words.

    Args:
        switches: flags without a value.
        defaults: the switches that state the default; a ``false`` after them stays, so that it is refused.
        numbers: flags with a list of numbers.
        lists: flags with a list of words; a single word is split only if it is in brackets.
        pairs: flags with two numbers.
    """
    result = []
    for flag, *values in options(words):
        word = values[0].lower() if flag in switches and len(values) == 1 else ""
        if word == "true":
            result.append([flag])
        elif word == "false" and flag not in defaults:
            continue
        elif flag in pairs and values:
            result.append([flag, ",".join(re.split(r"[\s,]+", " ".join(values).strip("()[] ")))])
        elif flag in numbers and values or flag in lists and values and values[0].startswith("["):
            result.append([flag, *(part.strip("'\"") for part in re.split(r"[\s,]+", " ".join(values).strip("()[] ")))])
        else:
            result.append([flag, *values])
    return flat(result)


NAMES = {"--rank": "RANK", "--world-size": "WORLD_SIZE", "--local-rank": "LOCAL_RANK", "--local_rank": "LOCAL_RANK"}
URLS = ("--dist-url", "--dist_url")


def take_ranks(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from --rank, --world-size, --local-rank and --dist-url, which scripts for mpirun pass.

    Nothing is set without --rank, or in a dry run. Variables that are set already, as torchrun does, must agree with
    the flags. Values that are not numbers are left to the parser.

    Raises:
        Refusal: a flag and the environment differ, or --dist-url is not tcp://HOST:PORT.
    """
    given = {option[0]: option[1] for option in options(argv) if len(option) == 2}
    if not given.get("--rank", "").isdigit() or "--dry-run" in argv:
        return
    settings = {name: (flag, given[flag]) for flag, name in NAMES.items() if given.get(flag, "").isdigit()}
    for flag in (flag for flag in URLS if given.get(flag, "env://") != "env://"):
        address = re.fullmatch(r"tcp://([^/:]+|\[[^\]]+\]):(\d+)/?", given[flag])
        if address is None:
            raise Refusal(f"{flag} {given[flag]}", ": give tcp://HOST:PORT, or set MASTER_ADDR and MASTER_PORT")
        settings |= {"MASTER_ADDR": (flag, address[1].strip("[]")), "MASTER_PORT": (flag, address[2])}
    for name, (flag, value) in settings.items():
        if environment.setdefault(name, value) != value:
            raise Refusal(f"{flag} {value}", f"and {name}={environment[name]} of the environment differ: leave one out")
