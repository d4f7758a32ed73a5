# SPDX-License-Identifier: Apache-2.0
"""What tools/plan.py says beside plans: lengths to pad to, margins that none leaves, uncertainty, parts of nodes."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.explain import padded_length, padding_words, uncertain_words
from megatron.simulator.planner.plans import Problem
from megatron.simulator.planner.request import Request
from megatron.simulator.planner.search import search
from megatron.training.arguments.parser import parse
from tools import plan, plan_options

LLAMA = "--model llama3-8b --gpu H100-80G".split()


def told(capsys: pytest.CaptureFixture, options: str, code: int = 0) -> str:
    assert plan.main([*LLAMA, *options.split()]) == code
    printed = capsys.readouterr()
    return " ".join((printed.err if code else printed.out).split())


def test_a_length_that_divides_badly_is_told_what_to_pad_to(capsys: pytest.CaptureFixture) -> None:
    text = told(capsys, "--gpus 8 --seq-length 12345")
    assert "--seq-length 12345 divides badly: padded to --seq-length 12352, " in text
    assert "divides badly" not in told(capsys, "--gpus 8 --seq-length 12352")
    said = told(capsys, "--gpus 8 --seq-length 12345 --pipeline 1", code=2)
    assert "pad to --seq-length 12352, a multiple of 16, or leave an option out" in said
    said = told(capsys, "--gpus 24 --seq-length 99999 --global-batch 7", code=2)
    assert "pad to --seq-length 100032, a multiple of 48" in said


def test_padding_is_short_and_worth_it() -> None:
    def problem(length: int, gpus: int) -> Problem:
        return Problem(Request(("--model", "llama3-8b"), gpus).workload(length), gpus, load("H100-80G"))

    assert padded_length(problem(12345, 8)) == 12352 and padded_length(problem(8192, 8)) == 8192
    assert padded_length(problem(4100, 512)) == 4224  # to 1,024 would be a quarter more
    even = problem(4100, 8)  # a sample for each GPU: nothing is to be split
    assert padding_words(even, search(even, 1).plans[0]) == ""


def test_a_margin_that_no_plan_leaves_is_refused(capsys: pytest.CaptureFixture) -> None:
    said = told(capsys, "--gpus 8 --seq-length 8K --margin 99%", code=2)
    assert "--margin 99%: no plan leaves that much memory; " in said and " or more --gpus" in said
    least = said.split("use --margin ")[1].split(",")[0]
    assert "Start it" in told(capsys, f"--gpus 8 --seq-length 8K --margin {least}")


def test_twelve_gpus_are_six_on_each_of_two_nodes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    text = told(capsys, f"--gpus 12 --seq-length 8K --global-batch 12 --json {file}")
    assert "12 x H100-80G, global batch 12, 6 of a node's 8 in use" in text
    for row in json.loads(file.read_text()):
        words = shlex.split(row["command"])
        assert words[words.index("--nproc-per-node") + 1] == "6" and words[words.index("--nnodes") + 1] == "2"
        parse(words[words.index("pretrain_llama.py") + 1 :], None, 12)


@pytest.mark.parametrize("gpus, used", [(3, 8), (8, 8), (24, 8), (12, 6), (20, 5), (14, 7), (9, None), (13, None)])
def test_how_many_gpus_of_a_node_are_used(gpus: int, used: int | None) -> None:
    machine = load("H100-80G")
    if used is None:
        with pytest.raises(plan.Refusal, match="cannot be spread evenly"):
            plan_options.on_nodes(str(gpus), machine)
    else:
        assert plan_options.on_nodes(str(gpus), machine) == (gpus, replace(machine, gpus=used))


def test_the_fewest_gpus_are_whole_nodes_again(capsys: pytest.CaptureFixture) -> None:
    said = told(capsys, "--gpus 12 --seq-length 8K --num-layers 200 --hidden-size 8192 --recompute full", code=2)
    assert int(said.split("would do is --gpus ")[1]) % 8 == 0


def test_uncertain_constants_make_a_step_uncertain(capsys: pytest.CaptureFixture) -> None:
    text = told(capsys, "--gpus 8 --seq-length 8K --global-batch 8")
    assert "Published runs on H100-80G reach different shares of its benchmark rates (gemm 0.76 to 0.84" in text
    problem = Problem(Request(("--model", "llama3-8b"), 8).workload(8192), 8, load("H100-80G"))
    best = search(problem, 1).plans[0]
    assert uncertain_words(best, problem)
    sure = replace(problem, machine=replace(problem.machine, uncertain={}))
    assert uncertain_words(best, sure) == ""


def test_three_heads_are_planned_as_the_program_takes_them(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    sizes = "--num-layers 8 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 3 --vocab-size 5000"
    asked = f"{sizes} --gpus 8 --gpu H100-80G --seq-length 8K --json {file}"
    assert plan.main(asked.split()) == 0
    for row in json.loads(file.read_text()):
        assert row["tensor"] == row["ulysses"] == 1
        words = shlex.split(row["command"])
        parse(words[words.index("pretrain_llama.py") + 1 :], None, 8)
