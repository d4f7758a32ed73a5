# SPDX-License-Identifier: Apache-2.0
"""Published launch commands run here as they are: how many, and what is said against the others."""

from __future__ import annotations

import re

import pytest

from megatron.training.arguments.parser import supported_flags
from tests.recipes import recipes, refused

AT_LEAST = 341  # of those in the data; it only grows
ALL = [pytest.param(recipe, id=f"{repository}:{recipe['name']}") for repository, recipe in recipes()]


def test_the_collection_is_broad():
    repositories = [repository for repository, _ in recipes()]
    assert len(repositories) >= 150 and len(set(repositories)) >= 8
    assert len({recipe["flags"] for _, recipe in recipes()}) == len(repositories)


def test_the_share_that_is_taken_does_not_shrink():
    assert sum("refused" not in recipe for _, recipe in recipes()) >= AT_LEAST


@pytest.mark.parametrize("recipe", ALL)
def test_recipe(recipe: dict):
    """Taken, or refused for the reasons in the data; each names a flag, of the recipe or of ours, or its file."""
    lines = refused(recipe)
    assert lines == recipe.get("refused", []), "python -m tests.recipes --write, where this is what was wanted"
    known = {word.split("=")[0] for word in recipe["flags"].split()} | set(supported_flags())
    files = recipe.get("files", {})
    for line in lines:
        assert "\n" not in line
        assert known & set(re.findall(r"--?[A-Za-z][\w-]*", line)) or any(file in line for file in files), line
