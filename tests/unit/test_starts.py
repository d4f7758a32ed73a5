# SPDX-License-Identifier: Apache-2.0
"""What is taken, starts: published recipes go through tokenizer, data and a simulated step, on stand-ins for files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import recipes
from tests.starts import make, start


def kind(recipe: dict[str, Any]) -> str:
    """How a recipe names its tokenizer and its data."""
    words = shlex.split(recipe["flags"])
    named = words[words.index("--tokenizer-type") + 1] if "--tokenizer-type" in words else "none"
    return named + next((word for word in words if "weighted" in word or word == "--train-data-path"), "")


TAKEN = [(f"{repository}:{recipe['name']}", recipe) for repository, recipe in recipes() if "refused" not in recipe]
FIRST = {kind(recipe): name for name, recipe in reversed(TAKEN)}.values()  # one of each kind
CASES = [pytest.param(recipe, id=name, marks=() if name in FIRST else pytest.mark.full) for name, recipe in TAKEN]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("stand-ins"))


@pytest.mark.parametrize("recipe", CASES)
def test_the_data_of_a_recipe_that_is_taken_are_built(recipe: dict[str, Any], stand_ins: Path, tmp_path: Path) -> None:
    start(recipe, tmp_path, stand_ins, step=False)


QUICK = "Ascend/MindSpeed-LLM:pretrain_llama2_13b_ms"


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, id=name, marks=() if name == QUICK else pytest.mark.full) for name, recipe in TAKEN],
)
def test_a_recipe_that_is_taken_starts(recipe: dict[str, Any], stand_ins: Path, tmp_path: Path) -> None:
    start(recipe, tmp_path, stand_ins)
