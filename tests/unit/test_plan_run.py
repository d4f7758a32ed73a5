# SPDX-License-Identifier: Apache-2.0
"""Complete runs, prices, failures, margins, packed documents: the cost of a plan, and the choice within limits."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.context_parallel.layout.masks import Causal, Documents, Window
from megatron.context_parallel.layout.tree import Tree
from megatron.formulas.device_memory import device_memory
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.explain import losing, padded_length, padding_words, uncertain_words, winning
from megatron.simulator.planner.limits import best_of, offers, offers_table
from megatron.simulator.planner.plans import Problem, priced
from megatron.simulator.planner.request import Request, packed, read_lengths
from megatron.simulator.planner.run_cost import (
    Prices,
    Rates,
    Terms,
    best_interval,
    checkpoint_bytes,
    chosen,
    interrupted,
    run_of,
)
from megatron.simulator.planner.search import search
from megatron.simulator.planner.search_space import Limits
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tests.unit.test_planner import flags_of, message
from tools import plan, plan_options

K, GIB = 1024, 2**30
A100 = load("A100-80G")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def eight() -> Problem:
    return Problem(Request(("--model", "llama3-8b"), 8).workload(64 * K), 8, A100, Limits(pipeline=(1,), tensor=(1,)))


# --- memory that plans leave, and memory savings ---


def test_plans_with_little_memory_to_spare_rank_last(eight: Problem) -> None:
    winner = search(eight).plans[0]
    problem = replace(eight, spare=winner.margin + GIB)
    result = search(problem)
    assert all(plan.margin >= problem.spare for plan in result.plans)
    assert result.tight and all(0 <= plan.margin < problem.spare for plan in result.tight)
    assert result.tight[0].seconds <= result.plans[0].seconds
    assert losing(result.tight[0], result.plans[0]).endswith("%) faster")


def test_an_ffn_in_runs_fits_where_no_other_saving_does() -> None:
    """Without recompute, offload and FPDT."""
    plain = Limits(recompute=("none",), offload=False, fpdt_chunk=(0,), micro_batch=(1,), ffn_chunks=False)
    problem = Problem(Request(("--model", "llama3-8b"), 1).workload(128 * K), 8, A100, plain)
    assert not search(problem, near=1.0).plans
    result = search(replace(problem, limits=replace(plain, ffn_chunks=True)), near=1.0)
    assert result.plans and all(plan_.strategy.ffn_chunks for plan_ in result.plans)
    assert result.plans[0].fits and min(plan_.memory.total for plan_ in result.plans) < 60 * GIB


def test_as_few_layers_are_recomputed_as_fit() -> None:
    limits = Limits(tensor=(1,), ulysses=(8,), data=(1,), zero=(3,), fpdt_chunk=(0,), recompute=("block",))
    limits = replace(limits, ffn_chunks=False)
    problem = Problem(Request(("--model", "llama3-8b"), 1).workload(160 * K), 8, A100, limits)
    best = search(problem, near=1.0).plans[0]
    s = best.strategy
    assert (s.recompute_method, best.fits) == ("block", True) and 0 < s.recompute_layers < 32
    assert not priced(problem, replace(s, recompute_layers=s.recompute_layers - 1)).fits


def test_some_layers_recomputed_lie_between_none_and_all() -> None:
    workload = Workload(Request(("--model", "llama3-8b")).workload(64 * K).shape, 64 * K)
    block = Strategy(ulysses=8, recompute="full", recompute_method="block", recompute_layers=12)
    none, full = replace(block, recompute="none"), replace(block, recompute_method="uniform", recompute_layers=1)
    times = [estimate(workload, strategy, A100).seconds for strategy in (none, block, full)]
    assert times[1] == pytest.approx(times[0] + 12 / 32 * (times[2] - times[0]))
    sizes = [device_memory(workload, strategy).total for strategy in (full, block, none)]
    assert sizes == sorted(sizes)


def test_streamed_hidden_states_take_less_of_the_device_and_more_of_the_host() -> None:
    workload = Workload(Request(("--model", "llama3-8b")).workload(64 * K).shape, 1024 * K)
    kept = Strategy(ulysses=8, zero=3, fpdt_chunk=64 * K, recompute="full", offload_checkpoints=True)
    streamed = replace(kept, offload_checkpoints=False, stream_hidden=True)
    ours, theirs = device_memory(workload, streamed), device_memory(workload, kept)
    assert ours.total < theirs.total and ours.host > theirs.host
    assert estimate(workload, streamed, A100).seconds >= estimate(workload, kept, A100).seconds


# --- documents and windows ---


def test_keys_of_packed_documents_are_counted() -> None:
    """Compared with a sample packed token by token, with documents of two lengths."""
    assert packed("", 1000).keys == 500.5 and packed("", 1000).spread == 0
    assert packed("", 1000, 10).keys == (55 + 990 * 10) / 1000
    one = packed("mean:1K", 1 << 20)
    # Exponential lengths have a mean square of twice the squared mean, so a token sees the mean length.
    assert one.keys == pytest.approx(1024, rel=0.1) and one.spread < 0.2
    assert packed("mean:256K", 1 << 20).spread > one.spread
    assert (
        packed("mean:8K,sigma:1.5", 1 << 17).keys
        > packed("mean:8K", 1 << 17).keys
        > packed("mean:8K", 1 << 17, 999).keys
    )


@pytest.mark.parametrize("window", [0, 9])
def test_keys_of_trees_are_counted(window: int) -> None:
    """Those of the mask that trains them; a tree that is longer than a sequence is refused."""
    tree = Tree((12, 19, 26, 33), (-1, 0, 0, 0))
    mask = Documents(tree, Window(window - 1) if window else Causal())
    at = torch.arange(33)
    pairs = int(mask.allowed(at[:, None], at[None]).sum())
    assert packed("prompt:12,answers:3,answer:7", 33, window).keys == pytest.approx(pairs / 33)
    for text, words in (("prompt:12,answers:3,answer:8", "36 tokens"), ("prompt:12,answers:3", "give prompt")):
        with pytest.raises(Refusal, match=words):
            packed(text, 33)


def test_a_reference_has_weights_and_forward_passes(eight: Problem) -> None:
    """As a dry run of --dpo counts them (tests/distributed/test_preferences.py)."""
    both = replace(eight.workload, reference=True)
    for strategy in (Strategy(ulysses=8, zero=1, recompute="full"), Strategy(ring=4, pipeline=2, recompute="full")):
        alone, copy = (estimate(workload, strategy, A100) for workload in (eight.workload, both))
        assert 1.2 < copy.seconds / alone.seconds < 1.3 and copy.flops == alone.flops
        assert copy.parts["gemm"] / alone.parts["gemm"] == pytest.approx(5 / 4, rel=0.02)  # forward runs twice already
        alone, copy = (device_memory(workload, strategy) for workload in (eight.workload, both))
        assert copy.parameters == 2 * alone.parameters
        assert copy.total - copy.parameters == alone.total - alone.parameters


def test_a_zigzag_ring_waits_for_the_rank_with_the_most_pairs() -> None:
    """The imbalance counted token by token, and its effect with several samples per micro-batch."""
    result = packed("mean:64", 256)
    draw, length, ring = random.Random(0), 256, 4
    tokens_left, samples = 0, []
    for _ in range(512):
        seen = []
        while len(seen) < length:
            tokens_left = tokens_left or max(1, round(draw.expovariate(1 / 64)))
            part = min(tokens_left, length - len(seen))
            seen += range(1, part + 1)
            tokens_left -= part
        blocks = [sum(seen[block * 32 : (block + 1) * 32]) for block in range(2 * ring)]
        samples.append([blocks[rank] + blocks[-1 - rank] for rank in range(ring)])
    pairs = [[a + b for a, b in zip(one, next_)] for one, next_ in zip(samples, samples[1:] + samples[:1])]
    expected = sum(map(max, pairs)) / (sum(map(sum, pairs)) / ring)
    assert result.uneven[1][:2] == (1.0, pytest.approx(expected)) and expected > 1.2
    assert packed("mean:64", 256, 32).uneven[1][0] > 1.1  # a window's parts are contiguous

    workload = Request(("--model", "llama3-8b"), 64, "mean:4K").workload(32 * K)
    two = Strategy(tensor=2, ring=4, data=2, micro_batch=2)
    assert two.busiest(workload) == pytest.approx(1.40, abs=0.02)
    assert replace(two, micro_batch=1).busiest(workload) == replace(two, ring=1).busiest(workload) == 1
    assert Strategy(ring=3, micro_batch=3).busiest(workload) == workload.uneven[1][2]
    even = estimate(replace(workload, uneven=()), two, A100)
    waits = estimate(workload, two, A100).parts["attention"] / even.parts["attention"]
    assert 1.3 < waits < 1.5
    problem = Problem(workload, 16, A100, Limits(ring=(4,), micro_batch=(2,)))
    assert "1.39 times the attention of the mean" in winning(priced(problem, two), problem)


def test_an_offer_that_leaves_too_little_comes_after_the_others() -> None:
    """The second offer is faster but leaves too little memory."""
    limits = Limits(tensor=(1,), ulysses=(8,), zero=(3,), recompute=("full",), fpdt_chunk=(0,), offload=False)
    workload = Request(("--model", "llama3-8b")).workload(96 * K)
    first = Problem(workload, 8, A100, limits)
    second = replace(first, gpus=16)
    second = replace(second, spare=search(second, near=1.0).plans[0].margin + 5 * GIB)
    result = offers([first, second], 1, None, near=1.0)
    assert [offer.plan.tight for offer in result] == [False, True]
    assert result[1].plan.seconds < result[0].plan.seconds
    assert best_of(result, None) is result[0] and best_of(result[1:], None) is result[1]
    table = offers_table(result, result[0], None)
    assert [("less than the --margin of" in cell) for cell in table.columns[2].cells] == [False, True]
    terms = Terms(1e9, deadline=run_of(result[0].plan, first, Terms(1e9)).seconds * 0.99)
    hurried = offers([first, second], 1, terms, near=1.0)
    assert best_of(hurried, terms) is hurried[1]


def test_lengths_are_read_from_a_file_and_from_the_index_of_a_dataset(tmp_path: Path) -> None:
    text, index, lengths = tmp_path / "lengths.txt", tmp_path / "data.idx", [100, 100, 100]
    text.write_text("100\n" * 3)
    index.write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ3i", 1, 4, 3, 4, *lengths))
    assert packed(str(text), 1000).keys == packed(str(index), 1000).keys == 50.5
    for wrong in ("mean:0", "mean:8K,sigma:9", "mean:8K,tail:1", str(tmp_path / "no"), __file__):
        with pytest.raises(Refusal, match="--documents"):
            packed(wrong, 4096)


@pytest.mark.parametrize("announced", [4, 2**63])
def test_an_index_that_is_cut_short_or_damaged_is_refused(announced: int, tmp_path: Path) -> None:
    index = tmp_path / "data.idx"
    index.write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ3i", 1, 4, announced, 4, 5, 6, 7))
    with pytest.raises(Refusal, match=f"data.idx: its header gives {announced:,} lengths, but the file has at most 3"):
        packed(str(index), 1000)


def test_the_index_is_what_our_own_preprocessing_writes(tmp_path: Path) -> None:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.int32)
    for length in (7, 30):
        builder.add_document(np.zeros(length, np.int32), [length])
    builder.finalize(str(tmp_path / "d.idx"))
    assert read_lengths(tmp_path / "d.idx") == [7, 30]


def test_short_documents_take_less_time_and_uneven_ones_more(eight: Problem) -> None:
    strategy, whole = Strategy(ulysses=2, data=4, zero=3, recompute="full"), eight.workload
    even = replace(whole, keys=4096.0)
    uneven = replace(even, spread=0.5)
    times = [estimate(workload, strategy, A100) for workload in (even, uneven, whole)]
    assert times[0].seconds < times[1].seconds < times[2].seconds
    assert times[0].flops == times[1].flops < times[2].flops
    chance = random.Random(1)
    most = sum(max(chance.gauss(1, 0.5 / math.sqrt(2)) for _ in range(4)) for _ in range(4000)) / 4000
    assert strategy.slowest(uneven) == pytest.approx(most, rel=0.02)


# --- a run, what it costs, what fails ---


def test_the_best_interval_between_saves_is_the_best() -> None:
    """Other intervals between saves give a longer expected run by Daly's formula."""
    shape, rates = Request(("--model", "llama3-70b")).workload(8 * K).shape, Rates(50_700, 10, 1.0)
    result = interrupted(30 * 86400, 4096, 512, shape, rates)
    assert result.save == pytest.approx(checkpoint_bytes(shape) / 512e9)

    def whole(interval: float) -> float:
        between = result.between
        return (
            between * math.exp(600 / between) * math.expm1((interval + result.save) / between) * 30 * 86400 / interval
        )

    assert result.seconds == pytest.approx(whole(result.interval))
    assert all(whole(result.interval) <= whole(result.interval * share) for share in (0.5, 0.8, 1.25, 2))
    assert best_interval(1, 1e6) == pytest.approx(math.sqrt(2e6), rel=0.01)  # Young's formula
    assert result.seconds == pytest.approx(30 * 86400 + result.saving + result.lost)
    with pytest.raises(Refusal, match="makes no progress"):
        interrupted(86400, 16384, 2048, shape, Rates(1.0))


def test_the_cheapest_before_a_deadline_and_the_fastest_within_a_budget(eight: Problem) -> None:
    problems = [replace(eight, gpus=gpus) for gpus in (8, 16, 32)]
    terms = Terms(1e9, Prices({"A100-80G": 2.0}, "USD"))
    runs = [run_of(search(problem, near=1.0).plans[0], problem, terms) for problem in problems]
    assert all(run.cost == pytest.approx(2 * run.gpu_hours) for run in runs)
    assert chosen(runs, terms) is min(runs, key=lambda run: run.seconds)
    late = replace(terms, deadline=1.01 * runs[1].seconds)
    in_time = [run for run in runs if run.seconds <= late.deadline]
    assert chosen(runs, late) is min(in_time, key=lambda run: run.cost)
    poor = replace(terms, budget=1.001 * min(run.cost for run in runs))
    assert chosen(runs, poor).cost <= poor.budget
    for wrong, match in ((replace(terms, deadline=1.0), "--deadline"), (replace(terms, budget=1.0), "--budget")):
        with pytest.raises(Refusal, match=match):
            chosen(runs, wrong)


def test_a_report_of_a_run_has_its_cost_and_a_command_that_saves(capsys: pytest.CaptureFixture) -> None:
    words = "--model llama3-8b --gpus 8 16 --gpu A100-80G --seq-length 64K --global-batch 16 --tensor 1 --pipeline 1"
    words += f" --micro-batch 1 --train-tokens 10B --prices {ROOT}/examples/planner/prices.json --top 2"
    assert plan.main([*words.split(), "--failures", str(ROOT / "examples" / "planner" / "failures.json")]) == 0
    text = capsys.readouterr().out
    steps = math.ceil(10e9 / (16 * 64 * K))
    assert f"{steps:,} steps" in text and "USD" in text and "GPUs to choose from" in text
    assert f"--train-iters {steps} " in text and "--save-interval" in text.split("Start it")[1]
    assert "--seq-length 65536 is above the 8192 tokens that the model is made for" in text


@pytest.mark.parametrize(
    "options, output",
    [
        ("--prices nowhere.json", "--prices is about a complete run: add --train-tokens"),
        ("--train-tokens 1e30", "--train-tokens 1e30"),
        ("--train-tokens 1B --prices nowhere.json", "nowhere.json: cannot be read"),
        ("--train-tokens 1B --deadline 3", "--deadline 3: give a time"),
        ("--train-tokens 1B --failures {wrong}", "gpu_hours_per_failure"),
        ("--margin 200%", "--margin 200%"),
        ("--documents nowhere", "--documents nowhere"),
        ("--reference --confirm", "--confirm with --reference"),
        ("--documents mean:4K --confirm", "--confirm with --documents"),
        ("--window x", "--window x"),
    ],
)
def test_refusals(options: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "wrong.json").write_text(json.dumps({"restart_minutes": 3}))
    words = "--model llama3-8b --gpus 8 --gpu A100-80G --seq-length 8K " + options.format(wrong=tmp_path / "wrong.json")
    assert plan.main(words.split()) == 2
    assert output in capsys.readouterr().err


# Other output of tools/plan.py: lengths to pad to, margins, uncertainty, partly used nodes.


LLAMA = "--model llama3-8b --gpu H100-80G".split()


def output_of(capsys: pytest.CaptureFixture, options: str, code: int = 0) -> str:
    return message(capsys, *LLAMA, *options.split(), code=code)


def test_a_length_with_few_divisors_gets_a_suggested_padding(capsys: pytest.CaptureFixture) -> None:
    text = output_of(capsys, "--gpus 8 --seq-length 12345")
    assert "--seq-length 12345 fits few grids: padded to --seq-length 12352, " in text
    assert "fits few grids" not in output_of(capsys, "--gpus 8 --seq-length 12352")
    output = output_of(capsys, "--gpus 8 --seq-length 12345 --pipeline 1", code=2)
    assert "pad to --seq-length 12352, a multiple of 16, or leave an option out" in output
    output = output_of(capsys, "--gpus 24 --seq-length 99999 --global-batch 7", code=2)
    assert "pad to --seq-length 100032, a multiple of 48" in output


def test_padding_is_short_and_worth_it() -> None:
    def problem(length: int, gpus: int) -> Problem:
        return Problem(Request(("--model", "llama3-8b"), gpus).workload(length), gpus, load("H100-80G"))

    assert padded_length(problem(12345, 8)) == 12352 and padded_length(problem(8192, 8)) == 8192
    assert padded_length(problem(4100, 512)) == 4224  # a multiple of 1,024 would be a quarter longer
    even = problem(4100, 8)  # one sample per GPU: nothing has to be split
    assert padding_words(even, search(even, 1).plans[0]) == ""


def test_a_margin_that_no_plan_leaves_is_refused(capsys: pytest.CaptureFixture) -> None:
    output = output_of(capsys, "--gpus 8 --seq-length 8K --margin 99%", code=2)
    assert "--margin 99%: no plan leaves that much memory; " in output and " or more --gpus" in output
    least = output.split("use --margin ")[1].split(",")[0]
    assert "Start it" in output_of(capsys, f"--gpus 8 --seq-length 8K --margin {least}")


def test_twelve_gpus_are_six_on_each_of_two_nodes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    text = output_of(capsys, f"--gpus 12 --seq-length 8K --global-batch 12 --json {file}")
    assert "12 x H100-80G, global batch 12, 6 of a node's 8 in use" in text
    for row in json.loads(file.read_text()):
        assert "--nproc-per-node 6 --nnodes 2 " in row["command"]
        parse(flags_of(row["command"]), None, 12)


@pytest.mark.parametrize("gpus, used", [(3, 8), (8, 8), (24, 8), (12, 6), (20, 5), (14, 7), (9, None), (13, None)])
def test_how_many_gpus_of_a_node_are_used(gpus: int, used: int | None) -> None:
    machine = load("H100-80G")
    if used is None:
        with pytest.raises(plan.Refusal, match="cannot be spread evenly"):
            plan_options.on_nodes(str(gpus), machine)
    else:
        assert plan_options.on_nodes(str(gpus), machine) == (gpus, replace(machine, gpus=used))


def test_the_fewest_gpus_are_whole_nodes_again(capsys: pytest.CaptureFixture) -> None:
    output = output_of(capsys, "--gpus 12 --seq-length 8K --num-layers 200 --hidden-size 8192 --recompute full", code=2)
    assert int(output.split("sufficient number is --gpus ")[1]) % 8 == 0


def test_uncertain_constants_make_a_step_uncertain(capsys: pytest.CaptureFixture) -> None:
    text = output_of(capsys, "--gpus 8 --seq-length 8K --global-batch 8")
    assert "Published runs on H100-80G reach different shares of its benchmark rates (gemm 0.76 to 0.83" in text
    problem = Problem(Request(("--model", "llama3-8b"), 8).workload(8192), 8, load("H100-80G"))
    best = search(problem, 1).plans[0]
    assert uncertain_words(best, problem)
    sure = replace(problem, machine=replace(problem.machine, uncertain={}))
    assert uncertain_words(best, sure) == ""


def test_three_heads_are_planned_as_the_program_takes_them(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    sizes = "--num-layers 8 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 3 --vocab-size 5000"
    options = f"{sizes} --gpus 8 --gpu H100-80G --seq-length 8K --json {file}"
    assert plan.main(options.split()) == 0
    for row in json.loads(file.read_text()):
        assert row["tensor"] == row["ulysses"] == 1
        parse(flags_of(row["command"]), None, 8)


# The ten questions of docs/use/planner.md: each command runs and prints the page's figures.


PAGE = (Path(__file__).parents[2] / "docs" / "use" / "planner.md").read_text().split("## Ten questions")[1]
ASKED = re.findall(r"\*\*(\d+)\. (.*?)```bash( refused)?\n(.*?)```", PAGE, re.DOTALL)
AT_ONCE = {"1", "3"}  # these two run by default; the others with --full


def cases() -> list:
    return [pytest.param(*one, id=one[0], marks=[pytest.mark.full] * (one[0] not in AT_ONCE)) for one in ASKED]


def test_the_page_has_ten_questions() -> None:
    assert [number for number, *_ in ASKED] == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("number, text, refused, command", cases())
def test_the_answer_is_what_the_page_says(
    number: str, text: str, refused: str, command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    program, tool, *words = shlex.split(command.replace("\\\n", " "))
    assert (program, tool) == ("python", "tools/plan.py")
    assert plan.main(words) == (2 if refused else 0)
    output = re.sub(r"\s+", " ", "".join(capsys.readouterr()))
    if refused:
        assert "66 GiB" in text and "65.7 GiB optimizer states" in output and "--gpus 16" in output
        return
    for figure in re.findall(r"\d+\.\d+ (?:GiB|TB|s|days|hours|M tokens)\b", text):
        amount = figure.removesuffix(" GiB")
        assert amount in output or figure in converted(output), (number, figure)
    if "--longest" in words:
        longest = re.search(r"(\d+)M\s+tokens", text)[1]
        assert f"The plan for {longest}M:" in output


def converted(output: str) -> set[str]:
    """Step times in hours and host memory in TB, rounded as on the page."""
    hours = {f"{float(seconds) / 3600:.1f} hours" for seconds in re.findall(r"(\d+(?:\.\d+)?) s per step", output)}
    sizes = {float(size.replace(",", "")) for size in re.findall(r"Offloading needs ([\d,.]+) GiB", output)}
    return hours | {f"{size * 2**30 / 1e12:.1f} TB" for size in sizes}
