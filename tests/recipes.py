# SPDX-License-Identifier: Apache-2.0
"""Published launch commands (`tests/unit/data/recipes.json`), by their repositories.

All start pretrain_gpt.py, or a fork's program, on a dense model. A recipe holds its flags as its script would pass
them with the script's defaults (with short names for paths), the number of processes, and our refusal if there is
one. ``stated_processes`` exists if the script does not give the number (null), or gives one that its own grid
does not fit; ``processes`` was then raised to the grid. A repository with ``drawn`` was new to us on that day. We took
at most eight of its scripts, those whose paths have the lowest SHA-1. They start without arguments, have no experts,
and do not copy the flags of a known recipe. Of the 50 recipes of the first draw, 11 were accepted before we changed
anything for them, and a twelfth wrongly. The second draw alternated between the repositories that an index of public
code lists for "Megatron-LM", "Megatron-DeepSpeed", "MindSpeed", pretrain_llama.py and pretrain_gpt.py. It gave 43
recipes of seven repositories, of which 17 were accepted unchanged, and 14 recipes of two more, of which 8 were.

Forks have flags for features that only they have, which we refuse rightly. Therefore the share is also counted
among the recipes whose flags are all in `tests/unit/data/upstream_flags.json`: names that the argument parsers of
Megatron-LM (core 0.12.0, 0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1), Megatron-DeepSpeed and DeepSpeed themselves know.

    python -m tests.recipes          # which are accepted, and why the others are not
    python -m tests.recipes --write  # updates the data after a change
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal, Refusals
from megatron.training.settings.models import LLAMA_DEFAULTS

RECIPES = Path(__file__).parent / "unit" / "data" / "recipes.json"
UPSTREAM = RECIPES.with_name("upstream_flags.json")


def recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every recipe, with its repository."""
    for document in json.loads(RECIPES.read_text()):
        for recipe in document["recipes"]:
            yield document["repository"], recipe


def refused(recipe: dict[str, Any]) -> list[str]:
    """The refusals of a recipe, as on a machine with Transformer Engine; empty if it is accepted."""
    installed = "megatron.training.arguments.validate.transformer_engine_installed"
    with _files(recipe.get("files", {})), patch(installed, lambda: True):
        try:
            parse(
                shlex.split(recipe["flags"]),
                LLAMA_DEFAULTS if recipe["program"] == "llama" else None,
                recipe["processes"],
            )
        except Refusal as refusal:
            return refusal.lines if isinstance(refusal, Refusals) else [str(refusal)]
    return []


def flags_of(recipe: dict[str, Any]) -> set[str]:
    """The names of a recipe's flags."""
    return {word.split("=")[0] for word in shlex.split(recipe["flags"]) if re.match("--?[A-Za-z]", word)}


@cache
def upstream_flags() -> frozenset[str]:
    """All flags of Megatron-LM and Megatron-DeepSpeed."""
    return frozenset(flag for flags in json.loads(UPSTREAM.read_text()).values() for flag in flags)


@contextmanager
def _files(files: dict[str, Any]) -> Iterator[None]:
    """Write the JSON files that a recipe names into the working directory."""
    if not files:
        yield
        return
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> None:
    """Print the accepted shares; with --write, store the refusals of the others."""
    reasons: Counter[str] = Counter()
    accepted: list[bool] = []
    upstream: list[bool] = []
    documents = json.loads(RECIPES.read_text())
    for document in documents:
        for recipe in document["recipes"]:
            lines = refused(recipe)
            accepted.append(not lines)
            if flags_of(recipe) <= upstream_flags():
                upstream.append(not lines)
            reasons.update(lines)
            recipe.pop("refused", None)
            if lines:
                recipe["refused"] = lines
    if "--write" in sys.argv:
        RECIPES.write_text(json.dumps(documents, indent=1) + "\n")
    for reason, count in reasons.most_common():
        print(f"{count:4d} {reason}")
    print(f"{sum(accepted)} of {len(accepted)} accepted")
    print(f"{sum(upstream)} of {len(upstream)} of those whose flags Megatron-LM or Megatron-DeepSpeed know")


if __name__ == "__main__":
    main()
