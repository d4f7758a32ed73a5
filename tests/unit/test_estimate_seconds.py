# SPDX-License-Identifier: Apache-2.0
"""The estimate's seconds against those of dry runs: the closed form against the program's own step, replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.program import Program
from megatron.simulator.dry_run.dry_run import dry_run
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from tests.unit.formula_runs import LLAMA, Case, flags

TOLERANCE = 0.05
K = 1024
# Two layers as wide as Llama-3-8B's, so that kernels take as long as they do in earnest.
SHAPE = Shape(layers=2, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=32000)


def case(name: str, tokens: int, batch: int = 1, layers: int = 2, **grid: Any) -> Case:
    return Case(name, Workload(replace(SHAPE, layers=layers), tokens, batch), Strategy(**grid), itemsize=2)


CASES = [
    case("one GPU", 16 * K, zero=0),
    case("tensor, more ranks than keys", 16 * K, tensor=16, zero=0),
    case("ring of eight, ulysses", 128 * K, ulysses=2, ring=8),
    case("zero 3, inputs in host memory", 64 * K, ulysses=4, zero=3, recompute="full", offload_checkpoints=True),
    case("pipeline", 16 * K, 4, pipeline=2, zero=0),
    case("fpdt on a ring", 64 * K, ulysses=2, ring=2, recompute="full", fpdt_chunk=16 * K),
]
MORE = [
    case("fpdt", 64 * K, ulysses=4, recompute="full", fpdt_chunk=16 * K),
    case("tensor", 16 * K, tensor=4, zero=0),
    case("ulysses", 64 * K, ulysses=8),
    case("ring of two", 64 * K, ring=2),
    case("contiguous ring, recomputed", 64 * K, ring=4, balance="contiguous", recompute="full"),
    case("tensor, ulysses, ring", 64 * K, tensor=2, ulysses=2, ring=2),
    case("zero 3", 16 * K, 4, data=4, zero=3),
    case("selective", 16 * K, recompute="selective", zero=0),
    case("tensor without TP-sp", 16 * K, tensor=4, zero=0, sequence_parallel=False),
    case("ring of four", 64 * K, ring=4),
    case("zero 2", 16 * K, 4, data=4, zero=2),
    case("fpdt on the device", 64 * K, ulysses=4, recompute="full", fpdt_chunk=16 * K, fpdt_offload=False),
    case("virtual stages", 16 * K, 8, layers=4, pipeline=2, virtual=2, zero=0),
    case("fpdt on a ring of four", 128 * K, ring=4, fpdt_chunk=32 * K),
    case("fpdt on a contiguous ring", 64 * K, ulysses=2, ring=2, balance="contiguous", fpdt_chunk=16 * K),
    case("ffn and loss in chunks", 16 * K, ffn_chunks=4, loss_chunks=8, recompute="full", zero=0),
]


EVERY_HEAD = replace(SHAPE, kv_heads=32)
MORE += [  # by keys: the host link decides
    replace(
        case("fpdt by keys", 64 * K, ulysses=4, recompute="full", fpdt_chunk=16 * K),
        workload=Workload(EVERY_HEAD, 64 * K),
    ),
    replace(
        case("fpdt by keys, two chunks", 32 * K, ulysses=2, fpdt_chunk=16 * K), workload=Workload(EVERY_HEAD, 32 * K)
    ),
]


def names(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@names(CASES)
def test_a_step_takes_as_long_as_its_dry_run(case: Case, gpu: str = "A100-80G") -> None:
    machine, ranks = load(gpu), case.strategy.ranks
    config = parse(flags(case), dict(LLAMA), ranks)
    found = dry_run(config, ranks, machine, vocab_size=SHAPE.vocab, every_layer=True)
    told = estimate(case.workload, case.strategy, machine)
    assert told.seconds == pytest.approx(found.predicted_seconds, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["H100-80G", "B200-192G"])
def test_heads_of_256_run_on_the_kernel_that_takes_them(gpu: str) -> None:
    """cuDNN on Hopper; on Blackwell FlashAttention-2."""
    wide = case("heads of 256", 16 * K, zero=0)
    shape = replace(SHAPE, heads=16, kv_heads=4, head_dim=256)
    test_a_step_takes_as_long_as_its_dry_run(replace(wide, workload=replace(wide.workload, shape=shape)), gpu)


@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(one, marks=pytest.mark.full) for one in ("tensorwise", "blockwise"))]
)
@pytest.mark.parametrize(
    "case",
    [
        case("tensor", 16 * K, tensor=4, zero=0),
        *(
            pytest.param(one, marks=pytest.mark.full, id=one.name)
            for one in (CASES[0], case("ulysses", 32 * K, ulysses=4), case("full", 16 * K, zero=0, recompute="full"))
        ),
    ],
)
def test_in_fp8_a_step_takes_as_long_as_its_dry_run(case: Case, recipe: str) -> None:
    """--fp8-format: Transformer Engine's layers on H100, by each of its recipes there."""
    machine, ranks = load("H100-80G"), case.strategy.ranks
    given = [
        "--fp8-format",
        "hybrid",
        "--fp8-recipe",
        recipe,
        "--dry-run",
        "--gpu",
        "H100-80G",
        "--world-size",
        str(ranks),
    ]
    config = parse([*flags(case), *given], dict(LLAMA), ranks)
    found = dry_run(config, ranks, machine, vocab_size=SHAPE.vocab, every_layer=True)
    told, plain = (estimate(case.workload, case.strategy, machine, Program(fp8=fp8)) for fp8 in (True, False))
    assert told.seconds == pytest.approx(found.predicted_seconds, rel=TOLERANCE) and told.seconds < 0.95 * plain.seconds


@pytest.mark.full
@names(MORE)
def test_more_steps_take_as_long_as_their_dry_runs(case: Case) -> None:
    test_a_step_takes_as_long_as_its_dry_run(case)
