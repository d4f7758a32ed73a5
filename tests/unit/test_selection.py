# SPDX-License-Identifier: Apache-2.0
"""Which tests run: pairs that are covered, what --quick and --full leave out, what is made once."""

from __future__ import annotations

import multiprocessing
from itertools import product
from pathlib import Path

import pytest

from tests import pairs
from tests.conftest import SLOW
from tests.distributed import test_fpdt, test_training
from tests.shared import Shared


def test_settings_of_a_command_line() -> None:
    flags = "--ulysses-parallel-size 1 --ring-parallel-size 4 --zero-stage 3 --fpdt --fpdt-chunk-size 22 --bf16"
    assert pairs.settings(flags) == {"--ring-parallel-size", "--zero-stage 3", "--fpdt-chunk-size", "--bf16"}


def test_every_pair_stays_and_few_cases_do() -> None:
    axes = ("--tensor", "--ulysses", "--ring", "--zero")
    cases = [frozenset(f"{axis} {n}" for axis, n in zip(axes, levels)) for levels in product(range(3), repeat=4)]
    assert len(pairs.pairs({"--tensor 2", "--zero 1", "--bf16"})) == 5  # none, each, and the two axes
    held = [pairs.pairs(levels) for levels in cases]
    kept = pairs.covering(held, [1.0] * len(cases))
    assert set().union(*(held[index] for index in kept)) == set().union(*held)
    assert 9 <= len(kept) <= 16  # of 81: nine would do, were the choice not greedy
    assert kept == pairs.covering(held, [1.0] * len(cases))


@pytest.mark.parametrize("cases", [test_training.LLAMA_CASES, test_fpdt.LLAMA_CASES], ids=["training", "fpdt"])
def test_no_pair_of_settings_is_left_for_full_alone(cases: list[tuple[int, str, str]]) -> None:
    def held(some: list[tuple]) -> set:
        return set().union(*(pairs.pairs(pairs.settings(f"{model} {grid}")) for _, model, grid in some))

    usual = [one.values for one in pairs.grid_pairs(cases) if not one.marks]
    assert held(usual) == held(cases) and len(usual) < len(cases) / 2


def test_slow_files_are_there() -> None:
    assert SLOW <= {path.name for path in Path(__file__).parent.glob("test_*.py")}


def make_and_count(folder: Path) -> int:
    def make() -> int:
        with open(folder / "made", "a") as file:
            file.write("x")
        return 3

    return Shared(folder / "shared")("key", make)


def test_processes_make_a_value_once(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=make_and_count, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert make_and_count(tmp_path) == 3 and (tmp_path / "made").read_text() == "x"
