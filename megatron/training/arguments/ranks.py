# SPDX-License-Identifier: Apache-2.0
"""Ranks that a launcher hands over as flags, as scripts for mpirun do: into the environment, where all else looks."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence

from megatron.training.arguments.words import options
from megatron.training.refusal import Refusal

NAMES = {"--rank": "RANK", "--world-size": "WORLD_SIZE", "--local-rank": "LOCAL_RANK", "--local_rank": "LOCAL_RANK"}
URLS = ("--dist-url", "--dist_url")


def take_ranks(argv: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set what torchrun would set, from --rank, --world-size, --local-rank and --dist-url; nothing without --rank.

    Under torchrun the flags must agree with it. Values that are no numbers are left for the parser to refuse.

    Raises:
        Refusal: a flag and the environment differ, or --dist-url names no place.
    """
    given = {option[0]: option[1] for option in options(argv) if len(option) == 2}
    if not given.get("--rank", "").isdigit() or "--dry-run" in argv:
        return
    found = {name: (flag, given[flag]) for flag, name in NAMES.items() if given.get(flag, "").isdigit()}
    for flag in (flag for flag in URLS if given.get(flag, "env://") != "env://"):
        place = re.fullmatch(r"tcp://([^/:]+|\[[^\]]+\]):(\d+)/?", given[flag])
        if place is None:
            raise Refusal(f"{flag} {given[flag]}: give tcp://HOST:PORT, or set MASTER_ADDR and MASTER_PORT")
        found |= {"MASTER_ADDR": (flag, place[1].strip("[]")), "MASTER_PORT": (flag, place[2])}
    for name, (flag, value) in found.items():
        if environment.setdefault(name, value) != value:
            raise Refusal(f"{flag} {value} and {name}={environment[name]} of the environment differ: leave one out")
