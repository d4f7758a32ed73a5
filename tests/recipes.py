# SPDX-License-Identifier: Apache-2.0
"""Published launch commands, as data: `tests/unit/data/recipes.json`, by the repositories they come from.

All start pretrain_gpt.py, or what a fork calls it, on a dense model. A recipe holds its flags as its script would pass
them with the script's own defaults (paths became plain names), the number of processes, and, where we refuse it, what
we say. ``stated_processes`` is there where the script leaves the number open (null), or states one that its own grid
does not fit; ``processes`` was raised to the grid then. A repository with ``drawn`` holds a draw of that day:
repositories that were not here, of each at most eight scripts that start without arguments, by the lowest SHA-1 of
their paths; no experts, no copies of flags that were here. They were read once before anything was changed for them:
11 of 50 were taken, and a twelfth wrongly. The second draw went by turns through the repositories that the index of
public code lists for "Megatron-LM", "Megatron-DeepSpeed", "MindSpeed", pretrain_llama.py and pretrain_gpt.py, to 43
recipes of seven, of which 17 were taken at first sight, and 14 of two more, of which 8 were.

Forks invent flags for what their programs alone can do, and those are rightly refused. So the share is counted once
more among the recipes whose flags are all in `tests/unit/data/upstream_flags.json`: names that the argument parsers of
Megatron-LM (core 0.12.0, 0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1), Megatron-DeepSpeed and DeepSpeed themselves know.

    python -m tests.recipes          # which are taken, and why the others are not
    python -m tests.recipes --write  # after a change that takes more of them: brings the data up to date
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

from megatron.training.arguments.models import LLAMA_DEFAULTS
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal, Refusals

RECIPES = Path(__file__).parent / "unit" / "data" / "recipes.json"
UPSTREAM = RECIPES.with_name("upstream_flags.json")


def recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every recipe, with its repository."""
    for document in json.loads(RECIPES.read_text()):
        for recipe in document["recipes"]:
            yield document["repository"], recipe


def refused(recipe: dict[str, Any]) -> list[str]:
    """What we say against a recipe; nothing where it is taken. As on a machine with Transformer Engine."""
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
    """Every flag that Megatron-LM or Megatron-DeepSpeed know."""
    return frozenset(flag for flags in json.loads(UPSTREAM.read_text()).values() for flag in flags)


@contextmanager
def _files(files: dict[str, Any]) -> Iterator[None]:
    """The JSON files that a recipe names lie in the working directory."""
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
    """Print the shares that are taken; with --write, store what is said against the others."""
    reasons: Counter[str] = Counter()
    taken: list[bool] = []
    upstream: list[bool] = []
    documents = json.loads(RECIPES.read_text())
    for document in documents:
        for recipe in document["recipes"]:
            lines = refused(recipe)
            taken.append(not lines)
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
    print(f"{sum(taken)} of {len(taken)} taken")
    print(f"{sum(upstream)} of {len(upstream)} of those whose flags Megatron-LM or Megatron-DeepSpeed know")


if __name__ == "__main__":
    main()
