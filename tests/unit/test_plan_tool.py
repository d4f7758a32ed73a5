# SPDX-License-Identifier: Apache-2.0
"""tools/plan.py: what it prints and writes, what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.formulas.strategy import Strategy
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner import confirm as plan_confirm
from megatron.simulator.planner.explain import a, alternatives, count, failing, holding, losing
from megatron.simulator.planner.limits import nearest
from megatron.simulator.planner.plan_report import front
from megatron.simulator.planner.plans import Problem, priced
from megatron.simulator.planner.request import Request, tokens
from megatron.simulator.planner.search import search
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tools import plan

PAPER = "--model llama3-8b --gpus 16 --gpu A800-80G --seq-length 120K".split()


def told(capsys: pytest.CaptureFixture, *options: str, code: int = 0) -> str:
    """What the tool prints, its line breaks taken out."""
    assert plan.main(list(options)) == code
    printed = capsys.readouterr()
    return " ".join((printed.err if code else printed.out).split())


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(Request(("--model", "llama3-8b")).workload(120 * 1024), 16, load("A800-80G"))


def test_plans_as_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, picture = tmp_path / "plans.json", tmp_path / "folder" / "plans.png"
    text = told(capsys, *PAPER, "--top", "3", "--json", str(file), "--output", str(picture))
    rows = json.loads(file.read_text())
    assert picture.stat().st_size > 20_000
    assert [row["predicted_ms"] for row in rows] == sorted(row["predicted_ms"] for row in rows)
    first = rows[0]
    assert first["command"] in text and first["reason"] in text
    for row in rows:
        sizes = [row[name] for name in ("tensor", "ulysses", "ring", "data", "pipeline")]
        config = parse(program(row["command"]), None, 16)
        parallel = config.parallel
        assert sizes[:3] == [
            parallel.tensor_model_parallel_size,
            parallel.ulysses_parallel_size,
            parallel.ring_parallel_size,
        ]
        assert sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4] == 16
        assert (row["zero"], row["fpdt_chunk"]) == (
            parallel.zero_stage,
            config.chunks.fpdt * config.chunks.fpdt_chunk_size,
        )
        assert row["device_peak_bytes"] + row["margin_bytes"] <= load("A800-80G").usable_memory < 86e9
        assert sum(row["seconds_by_part"].values()) == pytest.approx(row["predicted_ms"] / 1e3)
        assert 0 < row["mfu"] < 1 and not row["offload"]


def program(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[words.index("torchrun") + 1 :][:4] == ["--nproc-per-node", "8", "--nnodes", "2"]
    return words[words.index("pretrain_llama.py") + 1 :]


def test_options_narrow_the_search(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "plans.json"
    options = "--zero 1 --recompute none --no-fpdt --no-offload --no-loss-chunks --no-overlap --pipeline 1 --tensor 4 8"
    told(capsys, *PAPER, *options.split(), "--json", str(file))
    rows = json.loads(file.read_text())
    assert {row["tensor"] for row in rows} == {4, 8} and {row["zero"] for row in rows} == {1}
    assert not any(row["fpdt_chunk"] or row["loss_chunks"] for row in rows)
    assert all("--overlap" not in row["command"] for row in rows)


def test_sizes_by_flags_and_one_node(capsys: pytest.CaptureFixture) -> None:
    sizes = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --vocab-size 32000"
    text = told(capsys, *f"{sizes} --gpus 4 --gpu L20-48G --seq-length 32K --global-batch 8".split())
    assert "a model at 32K tokens on 4 x L20-48G, global batch 8" in text
    command = shlex.split(text[text.index("PYTORCH_CUDA") :])
    assert "--nnodes" not in command
    config = parse(command[command.index("pretrain_llama.py") + 1 :], {"model.attention_dropout": 0.0}, 4)
    assert (config.model.num_layers, config.model.vocab_size, config.data.global_batch_size) == (8, 32000, 8)


def test_the_longest(capsys: pytest.CaptureFixture) -> None:
    text = told(capsys, *"--model gpt-2.7b --gpus 1 --gpu A100-80G --longest --no-fpdt --no-offload".split())
    power, length = re.findall(r"that fits is (\w+) tokens; in sixteenths of it, (\w+)\.", text)[0]
    assert f"--seq-length {tokens(length, '')}" in text and tokens(power, "") <= tokens(length, "") < 1024 * 1024


@pytest.mark.parametrize(
    "options, said",
    [
        (
            "--model llama4 --gpus 4 --gpu A100-80G --seq-length 1M",
            "--model llama4: not a known shape; choose from gpt",
        ),
        ("--model llama3-8b --gpus 4 --gpu A100 --seq-length 1M", "--gpu A100: unknown; known are A100-40G"),
        ("--model llama3-8b --gpus 13 --gpu A100-80G --seq-length 1M", "use 8 or 16"),
        ("--model llama3-8b --gpus 0 --gpu A100-80G --seq-length 1M", "--gpus 0: give a whole number above 0"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length long", "--seq-length long: give a whole number"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 1.3K", "--seq-length 1.3K: give a whole number"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 1K --top 0", "--top 0: give a whole number"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G", "either --seq-length N or --longest"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 1M --longest", "either --seq-length N or --longest"),
        ("--model llama3-8b --gpus 24 --gpu A100-80G --seq-length 99999 --global-batch 7", "--global-batch 7 of this"),
        (
            "--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 8K --tensor 3",
            "the options that narrow the search leave no plan",
        ),
        (
            "--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 8K --zero 2 --pipeline 4",
            "the options that narrow the search leave no plan",
        ),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 8K --lr 1", "--lr does not describe the model"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 8K --hidden-dropout 0.1", "does not know its time"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 8K --frobnicate", "--frobnicate"),
        (
            "--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 8K --seed 7",
            "--seed 7 has no effect without --jitter: add --jitter",
        ),
        ("--num-layers 8 --gpus 4 --gpu A100-80G --seq-length 8K", "missing: --vocab-size"),
        ("--model llama3-8b --gpus 4 --gpu A100-80G --seq-length 8K --no-fpdt --fpdt-chunk 1K", "leave one out"),
    ],
)
def test_refusals(options: str, said: str, capsys: pytest.CaptureFixture) -> None:
    text = told(capsys, *options.split(), code=2)
    assert text.startswith("error: ") and said in text


def test_what_fits_nowhere_gets_the_fewest_gpus(capsys: pytest.CaptureFixture) -> None:
    text = told(capsys, *"--model llama3-70b --gpus 4 --gpu A100-80G --seq-length 64K".split(), code=2)
    lack, gpus = re.findall(r"needs .*?, ([\d.]+) GiB more than an A100-80G has for it.* --gpus (\d+)$", text)[0]
    assert float(lack) > 100 and "optimizer states" in text
    assert plan.main(f"--model llama3-70b --gpus {gpus} --gpu A100-80G --seq-length 64K".split()) == 0


def test_what_fails_by_host_memory_says_so(problem: Problem, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    machine = tmp_path / "small-host.json"
    machine.write_text('{"extends": "A100-80G", "gpus": 4, "host_memory": 64e9}')
    text = told(capsys, *f"--model llama3-8b --gpus 4 --gpu {machine} --seq-length 2M --zero 3".split(), code=2)
    assert "of host memory per node" in text or "more than a small-host has" in text
    asked = Problem(Request(("--model", "llama3-8b")).workload(2 * 2**20), 4, load(machine))
    assert not nearest(asked).fits


# --- in words ---


def test_losing_names_what_takes_longer(problem: Problem) -> None:
    winner, other = (priced(problem, s) for s in (Strategy(ulysses=8, ring=2, zero=3), Strategy(tensor=8, ring=2)))
    lost = other.seconds - winner.seconds
    waits = other.estimate.parts["tp"]
    assert losing(other, winner).startswith(f"{1e3 * lost:.0f} ms" if lost < 1 else f"{lost:.2f} s")
    assert f"{1e3 * waits:.0f} ms more waiting for TP" in losing(other, winner)


def test_failing_names_what_is_held(problem: Problem) -> None:
    winner, other = (priced(problem, Strategy(ulysses=8, ring=2, zero=zero)) for zero in (3, 1))
    text = failing(other, winner, problem)
    assert f"{-other.margin / 2**30:.1f} GiB more than an A800-80G has for it" in text
    assert "more gradients" in text and "every rank holds the whole model" in text
    assert holding(Strategy(tensor=4, pipeline=2, zero=0)) == "every rank holds 1/8 of the model"


def test_alternatives_change_one_thing(problem: Problem) -> None:
    winner = search(problem).plans[0]
    lines = alternatives(winner, problem)
    assert 3 <= len(lines) <= 6 and len(set(lines)) == len(lines)
    assert any(line.startswith("Without ") for line in lines) and any(" slower: " in line for line in lines)
    longer = replace(problem, workload=replace(problem.workload, seq_length=192 * 1024))
    lines = alternatives(search(longer).plans[0], longer)
    assert any("GiB more than an A800-80G has" in line for line in lines)


def test_words() -> None:
    names = ("A100", "H100", "L20", "B200", "my")
    assert [a(name) for name in names] == ["an A100", "an H100", "an L20", "a B200", "a my"]
    assert (count(122880), count(2**21), count(1000)) == ("120K", "2M", "1,000")
    assert tokens("1.5M", "--n") == 1536 * 1024 and tokens("120k", "--n") == 122880
    with pytest.raises(Refusal, match="--n 1e9"):
        tokens("1e9", "--n")


def test_the_front_is_what_nothing_beats(problem: Problem) -> None:
    found = search(problem)
    best = front(found.fitting)
    for plan_ in found.fitting:
        beaten = [p for p in best if p.seconds <= plan_.seconds and p.memory.total <= plan_.memory.total]
        assert beaten
    assert [p.seconds for p in best] == sorted((p.seconds for p in best), reverse=True)


# --- confirmed ---


def small(*options: str) -> list[str]:
    sizes = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --vocab-size 999 --gpus 2 --gpu A100-80G"
    return [*sizes.split(), "--seq-length", "4K", "--top", "1", "--confirm", *options]


def test_where_the_dry_run_does_not_fit_another_plan_is_sought(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The first dry run takes 100 GiB; what that is more than planned, the second plan leaves free."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        rank = {"device_peak_bytes": 100 * 2**30 if len(commands) == 1 else 2**30, "host_peak_bytes": 0}
        found = {"ranks": [rank], "predicted_ms": 1000.0, "mfu": 0.5, "fits": len(commands) > 1}
        Path(command[command.index("--dry-run-json") + 1]).write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, int(len(commands) == 1), "", "")

    monkeypatch.setattr(plan_confirm.subprocess, "run", run)
    text = told(capsys, *PAPER, "--confirm", "--top", "1")
    assert len(commands) == 2 and commands[0] != commands[1]
    for command in commands:
        simulation = parse(command[2:]).simulation
        assert (simulation.dry_run, simulation.world_size, simulation.gpu) == (True, 16, "A800-80G")
    assert "does not fit" in text and " slower: " in text.split("does not fit")[1]
    peaks = [float(size) for size in re.findall(r"device memory │ ([\d.]+) GiB", text)]
    assert peaks[1] < load("A800-80G").usable_memory / 2**30 - (100 - peaks[0])


def test_a_dry_run_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 2, "", "note\nerror: --this is wrong")

    monkeypatch.setattr(plan_confirm.subprocess, "run", run)
    assert "--confirm: the dry run ended with code 2: --this is wrong" in told(capsys, *small(), code=2)
