# SPDX-License-Identifier: Apache-2.0
"""tools/memory.py: the table, the files it writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from megatron.formulas.parameters import stage_parameters
from megatron.simulator.planner.memory_table import shape_of_size, size
from megatron.training.refusal import Refusal
from tools.memory import main


def test_table_rows_and_picture(tmp_path, capsys):
    rows, picture = tmp_path / "new" / "rows.json", tmp_path / "new" / "memory.png"
    words = "--model llama3-8b --seq-length 128K --gpus 8 --gpu A100-80G --papers".split()
    assert main([*words, "--json", str(rows), "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "131,072 tokens" in out and "8.03B" in out and "Qwen2 7B" in out and "3.9 + 4.0" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(rows.read_text())
    assert len(found) == 24 and {row["strategy"]["zero"] for row in found} == {0, 1, 2, 3}
    for row in found:
        kinds = ("parameters", "gradients", "optimizer", "activations", "temporary")
        assert row["total"] == sum(row[kind] for kind in kinds)
        assert row["fits"] == (row["total"] < 78 * 2**30)  # host memory is enough in all of them
    assert any(row["fits"] for row in found) and not all(row["fits"] for row in found)


def test_each_saving_saves(tmp_path):
    def totals(*words: str) -> list[dict]:
        path = tmp_path / "rows.json"
        assert main(["--params", "7B", "--seq-length", "512K", "--json", str(path), *words]) == 0
        return json.loads(path.read_text())

    one, eight = totals(), totals("--gpus", "8")
    assert len(one) == 16 and min(row["total"] for row in eight) < min(row["total"] for row in one) / 3
    by = {
        (row["strategy"]["zero"], row["strategy"]["recompute"], bool(row["strategy"]["fpdt_chunk"])): row["total"]
        for row in eight
        if row["strategy"]["data"] == 1
    }
    assert by[3, "full", True] < by[3, "full", False] < by[3, "none", False]
    assert by[3, "full", True] < by[2, "full", True] < by[1, "full", True] < by[0, "full", True]


@pytest.mark.parametrize("billions", [0.5, 7, 70])
def test_a_llama_of_a_size(billions):
    shape = shape_of_size(round(billions * 1e9))
    assert stage_parameters(shape, 1, 1, 0).numel == pytest.approx(billions * 1e9, rel=0.12)


def test_sizes():
    assert size("--x", "128K") == 131072 and size("--x", "1m") == 2**20 and size("--x", "1.5K") == 1536
    assert size("--x", "7B", binary=False) == 7_000_000_000 and size("--x", "4096") == 4096
    for text in ("", "K", "x", "-1K", "0", "1e99", "nan"):
        with pytest.raises(Refusal, match="--x .*not a size"):
            size("--x", text)


@pytest.mark.parametrize(
    "words, told",
    [
        ("--model llama4", "llama3-8b"),
        ("--model llama3-8b --seq-length long", "--seq-length long"),
        ("--model llama3-8b --gpu T1000", "A100-80G"),
        ("--model llama3-8b --gpus 6 --tensor 4", "--gpus 6 is not a multiple"),
        ("--model llama3-8b --gpus 7 --tensor 7", "--tensor 7 does not divide the 32 query heads"),
        ("--model llama3-8b --gpus 5 --pipeline 5", "--pipeline 5 does not divide the 32 layers"),
        ("--model llama3-8b --gpus 0", "at least 1"),
        ("--params 1K", "--params 1000"),
    ],
)
def test_refusals(words, told, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error and error.count("\n") == 1
