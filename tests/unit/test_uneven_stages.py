# SPDX-License-Identifier: Apache-2.0
"""Pipelines that do not divide the layers: flags that the program reads as meant, time and memory of dry runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.dry_run.dry_run import dry_run
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.page import step_shape
from megatron.simulator.planner.plan_report import training_flags
from megatron.simulator.planner.plans import Problem, fullest
from megatron.simulator.planner.request import JOB, Request
from megatron.simulator.planner.search import search
from megatron.simulator.planner.search_space import Limits, fewer_layers, grids, savings
from megatron.training.arguments.parser import parse
from megatron.training.arguments.stages import stage_layers
from tests.unit.formula_runs import LLAMA, flags
from tests.unit.test_estimate_seconds import SHAPE, TOLERANCE, K, case

UNEVEN = [
    case("the last has one less", 16 * K, 8, layers=7, pipeline=4, zero=0, last_less=1),
    case("both ends have one less", 16 * K, 8, layers=10, pipeline=4, zero=0, first_less=1, last_less=1),
    case("ends of given lengths", 16 * K, 8, layers=13, pipeline=4, zero=0, first_less=1, last_less=2),
    case("virtual stages", 16 * K, 8, layers=14, pipeline=4, virtual=2, zero=0, first_less=1, last_less=1),
    case("recomputed", 16 * K, 4, layers=7, pipeline=2, zero=0, last_less=1, recompute="full"),
]


@pytest.mark.parametrize("layers, pipeline, expected", [
    (126, 16, (1, 1)), (126, 8, (1, 1)), (126, 7, (0, 0)), (7, 4, (0, 1)), (32, 12, (2, 2)), (80, 32, None),
    (4, 8, None), (5, 4, None),
])  # fmt: skip
def test_what_the_ends_lack(layers: int, pipeline: int, expected: tuple[int, int] | None) -> None:
    found = fewer_layers(layers, pipeline)
    assert found == expected
    if found:
        s = Strategy(pipeline=pipeline, first_less=found[0], last_less=found[1])
        each = [s.stage_layers(layers, stage) for stage in range(pipeline)]
        assert sum(each) == layers and min(each) >= 1 and max(each) == s.most_layers(layers)


def test_the_program_cuts_stages_as_the_plan_says() -> None:
    """Each uneven grid of 6 layers on 4, and of 11 on 5 GPUs, with each number of recomputed layers."""
    seen = set()
    for layers, gpus in ((6, 4), (11, 5)):
        workload = Workload(replace(SHAPE, layers=layers), 5 * K, 8)
        sizes = f"--num-layers {layers} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        sizes += "--vocab-size 9"
        request = Request((*sizes.split(), "--group-query-attention", "--num-query-groups", "8"))
        for grid in grids(workload, gpus, Limits(micro_batch=(1,))):
            if not grid.uneven:
                continue
            ways = list(savings(grid, workload, Limits(fpdt_chunk=(0,))))
            for way in (ways[0], *{way.recompute_layers: way for way in ways}.values()):
                given = training_flags(workload, way)
                config = parse([*request.program_flags(workload.seq_length), *given, *JOB[2:]], None, gpus)
                each = [way.stage_layers(layers, stage) for stage in range(way.pipeline)]
                assert stage_layers(config) == each, given
                seen |= {word for word in given if "split" in word or "decoder" in word}
    assert len(seen) == 4


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, id=one.name, marks=[pytest.mark.full] * ("both" not in one.name)) for one in UNEVEN],
)
def test_time_and_memory_are_those_of_dry_runs(case) -> None:
    machine, ranks = load("H100-80G"), case.strategy.ranks
    found = dry_run(parse(flags(case), dict(LLAMA), ranks), ranks, machine, vocab_size=SHAPE.vocab, every_layer=True)
    told = estimate(case.workload, case.strategy, machine)
    assert told.seconds == pytest.approx(found.predicted_seconds, rel=TOLERANCE)
    device = max(one.figures.device_peak for one in found.ranks)
    assert 0.99 * device < fullest(case.workload, case.strategy).total < (1 + TOLERANCE) * device


def test_405b_on_512_gpus_goes_through_a_pipeline() -> None:
    """By name. Pipelines had to divide its 126 layers, so ZeRO 3 over all GPUs was the best."""
    workload = Request(("--model", "llama3-405b"), 512).workload(8 * K)
    limits = Limits(micro_batch=(1,), tensor=(8,), fpdt_chunk=(0,))
    problem = Problem(workload, 512, load("H100-80G"), limits)
    best = search(problem, 1, near=1.0).plans[0]
    assert best.strategy.pipeline in (8, 16, 32) and best.strategy.uneven
    shape = step_shape(best, problem)
    assert sum(shape["first"]) < sum(shape["passes"])
