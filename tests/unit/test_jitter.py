# SPDX-License-Identifier: Apache-2.0
"""Ranks that are not equally fast, and hosts that launch too slowly: by hand, in order, and alike in both models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.formulas.strategy import Group, Shape, Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.jitter import Jitter, Waits, largest_of, spread, step_spread, step_waits
from megatron.simulator.cost.trace import Kernel, Trace, Transfer, Wait
from megatron.simulator.dry_run import command, dry_run_report
from megatron.simulator.dry_run import dry_run as dry_runs
from megatron.simulator.dry_run.replay import replay
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tests.unit.formula_runs import LLAMA
from tests.unit.test_cost import TOY
from tests.unit.test_estimate_seconds import SHAPE, K, case, flags
from tools import plan

A100 = load("A100-80G")
WORK = Workload(Shape(32, 4096, 14336, 32, 8, 128, 128256), 32768, 16)


def test_the_largest_of_more_is_later_and_varies_less():
    assert largest_of(1, 0.1) == pytest.approx((1.0, 0.1), rel=5e-3) and largest_of(64, 0.0) == (1.0, 0.0)
    means, deviations = zip(*(largest_of(ranks, 0.02) for ranks in (1, 2, 8, 64, 1024)))
    assert list(means) == sorted(means) and list(deviations) == sorted(deviations, reverse=True)
    # of normal numbers so many deviations above the mean (Harter, Expected values of normal order statistics, 1961)
    for ranks, above in ((2, 0.564), (8, 1.424), (1000, 3.241)):
        assert largest_of(ranks, 0.001)[0] == pytest.approx(1 + 0.001 * above, abs=1e-5)


def test_a_step_grows_with_ranks_and_variation_and_hangs_on_the_seed_alone():
    waits = Waits()
    waits.add(8, 0.01, 100)
    times = [spread(2.0, waits, ranks, Jitter(0.05)) for ranks in (8, 64, 512)]
    assert [found.mean for found in times] == sorted(found.mean for found in times) and times[0].mean > 2.0
    assert all(found.p95 > found.mean for found in times)
    assert spread(2.0, waits, 64, Jitter(0.05)) == times[1] != spread(2.0, waits, 64, Jitter(0.05, seed=1))
    assert spread(2.0, waits, 64, Jitter(0.0)).p95 == pytest.approx(2.0)
    assert spread(2.0, waits, 64, Jitter(0.1)).mean > times[1].mean
    # a second of compute, cut into a hundred pieces: each of them waits for the largest of eight
    assert times[0].mean == pytest.approx(2 + largest_of(8, 0.05)[0] - 1, rel=1e-3)


def test_more_ranks_of_a_grid_lose_more():
    lost = []
    for data in (1, 2, 4, 8, 16):
        grid = Strategy(tensor=2, ulysses=4, data=data, zero=1)
        seconds = estimate(WORK, grid, A100).seconds
        lost.append(step_spread(WORK, grid, A100, Jitter(0.02)).mean / seconds - 1)
    assert lost == sorted(lost) and 0.005 < lost[0] < lost[-1] < 0.05
    alone = step_waits(WORK, Strategy(data=16, zero=1), A100).by_ranks
    assert set(alone) == {16} and alone[16][0] == 1.0  # replicas meet at the end


CASES = [
    case("tensor", 16 * K, tensor=4, zero=0), case("data", 16 * K, 4, data=4, zero=1),
    case("ulysses, ring", 64 * K, ulysses=2, ring=2), case("zero 3", 16 * K, 4, data=4, zero=3),
]  # fmt: skip


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(one, marks=pytest.mark.full) for one in CASES[1:])])
def test_closed_form_and_replay_lose_alike(case, monkeypatch):
    """By jitter within a hundredth of a step, of the two to three that are lost; by a host that is much too slow within
    a third, as closely as the closed form counts launches."""
    traces, ranks, jitter = [], case.strategy.ranks, Jitter(0.03)
    monkeypatch.setattr(
        dry_runs, "replay", lambda trace, *args, **more: (traces.append(trace), replay(trace, *args))[1]
    )
    found = dry_runs.dry_run(
        parse(flags(case), dict(LLAMA), ranks), ranks, A100, vocab_size=SHAPE.vocab, every_layer=True
    )
    told, plain = dry_run_report.unequal(found, jitter), estimate(case.workload, case.strategy, A100)
    ours = step_spread(case.workload, case.strategy, A100, jitter).mean / plain.seconds
    theirs = float(told.split(" takes ")[1].split()[0]) / found.predicted_seconds
    assert ours > 1.015 and ours == pytest.approx(theirs, abs=0.01)
    slow = replace(A100, dispatch=0.05)
    waited, launched = estimate(case.workload, case.strategy, slow), replay(traces[0], slow)
    assert "launching" not in plain.parts and launched.exposed["launching"] > 0.8 * launched.seconds
    assert waited.parts["launching"] > 0.8 * waited.seconds
    assert waited.seconds == pytest.approx(launched.seconds, rel=0.35)


def test_the_dry_runs_option_is_read_and_refused(monkeypatch):
    base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    base += "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 128"
    asked = {}
    monkeypatch.setattr(dry_runs, "dry_run", lambda *args, **more: None)

    def show(result, console, jitter=None):
        asked["jitter"] = jitter
        raise InterruptedError

    monkeypatch.setattr(dry_run_report, "show", show)
    for more, wanted in (("", None), ("--dry-run-jitter 0.02 --seed 7", Jitter(0.02, 7))):
        with pytest.raises(InterruptedError):
            command.simulate(parse(f"{base} --dry-run --gpu A100-80G {more}".split(), world_size=1))
        assert asked["jitter"] == wanted
    for more, word in (("", "without --dry-run"), ("--dry-run", "--gpu NAME"), ("--dry-run --gpu A100-80G", "below 1")):
        share = "1.5" if word == "below 1" else "0.02"
        with pytest.raises(Refusal, match=word):
            parse(f"{base} {more} --dry-run-jitter {share}".split(), world_size=1)


def test_the_planner_tells_mean_and_percentile(capsys):
    words = "--model llama3-8b --gpus 8 --gpu A100-80G --seq-length 16K --tensor 2 --pipeline 1 --top 1".split()
    assert plan.main([*words, "--jitter", "0.02", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert "varies by 2 %" in first and "(seed 3)" in first
    assert plan.main(words) == 0 and "varies by" not in capsys.readouterr().out
    for more, word in ((["--jitter", "1.5"], "--jitter 1.5"), (["--fp8-format", "hybrid"], "start a dry run")):
        assert plan.main([*words, *more]) == 2 and word in capsys.readouterr().err


def test_a_replay_notes_what_it_waits_for():
    work, send = Kernel("add", "memory", 0.0, 10.0), Transfer("all_gather", "dp", Group(4), 100.0, ticket=1)
    now = Transfer("all_gather", "tp", Group(2), 100.0)
    found = replay(Trace([work, now, work, work, send, work, Wait((1,)), work]), TOY).waits.by_ranks
    once = 0.5 + 1.0  # a launch, and ten bytes
    assert found == {2: (1, once, once**2), 4: (1, 3 * once, 9 * once**2), 1: (1, once, once**2)}


def test_a_slow_host_is_waited_for_by_hand():
    """The first kernel is launched as the step begins, each other one two seconds later than the one before."""
    slow = replace(TOY, dispatch=2.0)
    work = [Kernel("add", "memory", 0.0, 10.0)] * 3  # 1.5 s each
    found = replay(Trace(list(work)), slow)
    assert found.seconds == pytest.approx(4 + 1.5) and found.exposed["launching"] == pytest.approx(1.0)
    long = Kernel("add", "memory", 0.0, 100.0)  # 10.5 s, while the host runs ahead
    assert replay(Trace([long, *work]), slow).seconds == pytest.approx(10.5 + 3 * 1.5)
    assert replay(Trace([long, *work]), slow).exposed.get("launching", 0.0) == 0
