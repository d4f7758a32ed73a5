# SPDX-License-Identifier: Apache-2.0
"""The trace of a predicted step: all stages, layers and micro-batches; it ends at the printed time."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.cost.estimate import estimate
from megatron.simulator.cost.layer_program import Program
from megatron.simulator.dry_run.dry_run import DryRun, dry_run
from megatron.simulator.dry_run.replay import Interval
from megatron.simulator.dry_run.timeline import write_trace
from megatron.simulator.dry_run.whole_step import Pass, begins, program, with_all_layers
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.plans import fullest
from megatron.training.arguments.parser import parse
from tests.unit.formula_runs import LLAMA, Case, flags
from tests.unit.test_dry_run import config_of

VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


PIPELINE = "--pipeline-model-parallel-size 4 --num-layers 4 --global-batch-size 12"  # six micro-batches on eight ranks


@cache
def simulated(flags: str, ranks: int, **options: Any) -> DryRun:
    return dry_run(config_of(flags, ranks), ranks, load("A100-80G"), vocab_size=301, **options)


def written(result: DryRun, path: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    write_trace(result, path, **options)
    trace = json.loads(path.read_text())
    return trace["traceEvents"], trace["otherData"]


def ends(events: list[dict[str, Any]]) -> float:
    """Seconds until the last event of a trace has ended."""
    return 1e-6 * max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")


@pytest.mark.parametrize(
    ("stages", "batches", "virtual", "group"), [(1, 3, 1, 0), (4, 6, 1, 0), (4, 2, 1, 0), (2, 6, 3, 0), (2, 7, 2, 3)]
)
def test_stages_run_what_core_runs(monkeypatch, stages: int, batches: int, virtual: int, group: int) -> None:
    from megatron.core.pipeline_parallel import schedules

    group = group or stages
    table = schedules.get_schedule_table(batches, virtual, group)
    for stage in range(stages):
        state = schedules.parallel_state
        monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: stages)
        monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        several = virtual if virtual > 1 else None
        monkeypatch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda several=several: several)
        total, _, alone, _ = schedules.get_pp_rank_microbatches(batches, virtual, group)
        steps = program(stage, stages, batches, virtual, group)
        assert len(steps) == 2 * total
        assert [step.backward for step in steps[: alone + 1]] == [False] * min(alone + 1, total) + [True] * (
            alone == total
        )
        assert [(x.micro_batch, x.chunk) for x in steps if not x.backward] == table
        assert [(x.micro_batch, virtual - 1 - x.chunk) for x in steps if x.backward] == table


def test_even_stages_have_the_bubble_of_the_papers() -> None:
    for stages, batches, virtual in ((4, 8, 1), (4, 8, 2), (2, 6, 3)):
        steps = [program(stage, stages, batches, virtual) for stage in range(stages)]
        took = {False: (1.0 / virtual,) * 2, True: (2.0 / virtual,) * 2}
        result = begins(steps, lambda _, step, took=took: took[step.backward])
        end = max(row[-1] + 2.0 / virtual for row in result)
        assert end == pytest.approx(3 * batches + 3 * (stages - 1) / virtual)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (PIPELINE, 8),
        pytest.param(VIRTUAL, 2, marks=pytest.mark.full),
        pytest.param(f"{VIRTUAL} --overlap-p2p-communication-warmup-flush", 2, marks=pytest.mark.full),
        pytest.param(
            "--pipeline-model-parallel-size 2 --zero-stage 1 --global-batch-size 16", 4, marks=pytest.mark.full
        ),
    ],
)
def test_stages_wait_for_each_other(flags: str, ranks: int, tmp_path: Path) -> None:
    result = simulated(flags, ranks)
    events, about = written(result, tmp_path / "trace.json")
    assert about["predicted_ms"] == 1e3 * result.predicted_seconds and about["left_out"] == []
    assert ends(events) == pytest.approx(result.predicted_seconds, rel=1e-2)
    passes = [event for event in events if event["ph"] == "X" and event["cat"] == "phase"]
    stages = result.config.parallel.pipeline_model_parallel_size
    first, last = 0, ranks - 1  # ranks of the first and the last stage
    begin = {
        (rank, name): min(x["ts"] for x in passes if x["pid"] == rank and x["name"] == name)
        for rank in (first, last)
        for name in ("forward", "backward", "optimizer")
    }
    end_of_forward = min(x["ts"] + x["dur"] for x in passes if x["pid"] == last and x["name"] == "forward")
    assert begin[first, "forward"] < begin[last, "forward"] < end_of_forward
    assert begin[first, "backward"] > begin[last, "backward"] >= end_of_forward - 1
    assert begin[first, "optimizer"] >= max(
        x["ts"] + x["dur"] for x in passes if x["name"] == "backward" and x["pid"] == last
    )
    # A stage begins with a micro-batch only after the previous stage has sent it.
    sent = {event["id"]: event for event in events if event["ph"] == "s"}
    received = [event for event in events if event["ph"] == "f"]
    places = stages * (result.config.parallel.num_virtual_stages_per_pipeline_rank or 1)
    batches = result.ranks[0].micro_batches[0]
    assert len(received) == len(sent) == 2 * (places - 1) * batches * (ranks // stages)
    assert all(sent[event["id"]]["ts"] <= event["ts"] + 1e-3 for event in received)
    assert all(sent[event["id"]]["pid"] != event["pid"] for event in received)
    assert_no_overlap(events)


def assert_no_overlap(events: list[dict[str, Any]]) -> None:
    """Events of a stream do not overlap."""
    spans = [event for event in events if event["ph"] == "X"]
    for stream in {(event["pid"], event["tid"]) for event in spans}:
        mine = sorted((x["ts"], x["ts"] + x["dur"]) for x in spans if (x["pid"], x["tid"]) == stream)
        assert all(b[0] >= a[1] - 2e-3 for a, b in pairwise(mine)), stream


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--ulysses-parallel-size 2 --bf16", 2),
        pytest.param("--zero-stage 3 --bf16 --global-batch-size 16", 2, marks=pytest.mark.full),
        pytest.param(
            f"{VIRTUAL} --num-layers 40 --num-layers-per-virtual-pipeline-stage 10 --global-batch-size 16",
            2,
            marks=pytest.mark.full,
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --num-layers 26 --global-batch-size 8 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            2,
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.lab
def test_skipped_layers_appear_as_if_they_had_run(flags: str, ranks: int, tmp_path: Path) -> None:
    flags = f"--num-layers 10 {flags}"
    few, every = simulated(flags, ranks), simulated(flags, ranks, every_layer=True, every_micro_batch=True)
    assert few.ranks[0].layers[1] < few.ranks[0].layers[0] == every.ranks[0].layers[1]
    assert few.ranks[0].micro_batches[1] < every.ranks[0].micro_batches[1] == few.ranks[0].micro_batches[0]
    some, all_of_them = (
        written(result, tmp_path / name)[0] for result, name in ((few, "few.json"), (every, "every.json"))
    )
    assert ends(some) == pytest.approx(few.predicted_seconds, rel=1e-2)
    assert ends(all_of_them) == pytest.approx(every.predicted_seconds, rel=1e-2)
    for rank in range(ranks):
        a, b = (
            [event for event in events if event["ph"] == "X" and event["pid"] == rank and event["cat"] != "wait"]
            for events in (some, all_of_them)
        )
        # ZeRO 1's optimizer updates a rank's part of every parameter, so its kernels depend on the layers.
        begins_of = [next(x["ts"] for x in events if x["name"] == "optimizer") for events in (a, b)]
        a, b = ([x for x in events if x["ts"] < begin - 1e-3] for events, begin in zip((a, b), begins_of))
        assert [(x["tid"], x["name"]) for x in a] == [(x["tid"], x["name"]) for x in b]
        assert max(abs(x["ts"] - y["ts"]) for x, y in zip(a, b)) < 0.01 * 1e6 * every.predicted_seconds
    assert_no_overlap(some)


def test_a_trace_with_a_limit_says_what_it_leaves_out(tmp_path: Path) -> None:
    result = simulated(PIPELINE, 8)
    whole, _ = written(result, tmp_path / "whole.json")
    kinds = ("phase", "wait")
    count = sum(event["ph"] == "X" and event["cat"] not in kinds for event in whole)
    for most, less in ((count // 2 + 1, 1), (count // 4, 2), (5, 2)):
        events, about = written(result, tmp_path / "less.json", most=most)
        spans = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in spans} == {0, 2, 4, 6} and len(about["left_out"]) == less
        inside = sum(event["cat"] not in kinds for event in spans)
        assert inside <= most and (inside > 0) == (most > 5)
        assert sum(event["name"] == "backward" for event in spans) == 4 * 6
        assert ends(events) == pytest.approx(ends(whole), rel=1e-9)


def test_indistinguishable_layers_are_spread_over_their_time() -> None:
    def spans(*names: str) -> list[Interval]:
        return [Interval("compute", "gemm", float(at), at + 1.0, name) for at, name in enumerate(names)]

    few, more = Pass("forward", 4.0, 4.0, spans(*"axyb")), Pass("forward", 6.0, 6.0, spans(*"axyxyb"))
    whole = with_all_layers(few, more, 2)
    assert "".join(span.name for span in whole.spans) == "axyxyxyxyb" and whole.seconds == 10.0
    assert [span.begin for span in whole.spans] == [float(at) for at in range(10)]
    other = with_all_layers(Pass("forward", 4.0, 4.0, spans(*"axyc")), more, 2)
    assert len(other.spans) == 6 and other.spans[-1].end == other.seconds == 10.0


# The seconds of the closed form compared with those of dry runs, which replay a step of the program.


TOLERANCE = 0.05
K = 1024
# Two layers of Llama-3-8B's width, so that kernels take realistic times.
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
MORE += [  # loops over keys (fpdt/by_keys.py): the host link determines the time
    replace(
        case("fpdt by keys", 64 * K, ulysses=4, recompute="full", fpdt_chunk=16 * K),
        workload=Workload(EVERY_HEAD, 64 * K),
    ),
    replace(
        case("fpdt by keys, two chunks", 32 * K, ulysses=2, fpdt_chunk=16 * K), workload=Workload(EVERY_HEAD, 32 * K)
    ),
]


WINDOW = 4 * K  # tokens that a query sees, itself included


def sampled(name: str, tokens: int, batch: int = 1, kv_heads: int = 8, layers: int = 2, **grid: Any) -> Case:
    """A case of a random sample whose estimated time or memory was once outside of the tolerance."""
    result = case(name, tokens, batch, layers, **grid)
    keys = WINDOW - (WINDOW * WINDOW - WINDOW) / 2 / tokens if "window" in name else 0.0
    workload = replace(result.workload, shape=replace(SHAPE, layers=layers, kv_heads=kv_heads), keys=keys)
    return replace(result, workload=workload)


FULL, IN_HOST = {"recompute": "full"}, {"recompute": "full", "offload_checkpoints": True}
SAMPLED = [
    sampled("short sequences on many ranks", 16 * K, 2, ring=4, data=2, zero=0, **FULL),
    pytest.param(
        sampled("window on a ring", 32 * K, 2, ulysses=2, ring=4, zero=2, recompute="selective", ffn_chunks=4),
        marks=pytest.mark.full,
    ),
    *(
        pytest.param(one, marks=pytest.mark.full)
        for one in (
            sampled(
                "streamed on a ring", 128 * K, 4, ulysses=4, ring=2, data=2, zero=2, fpdt_chunk=32 * K,
                stream_hidden=True, **FULL,
            ),
            sampled("fpdt under zero 2", 32 * K, 2, ulysses=4, zero=2, fpdt_chunk=16 * K),
            sampled("fpdt on a ring", 32 * K, 1, 32, 4, ulysses=4, ring=2, zero=2, fpdt_chunk=16 * K, **IN_HOST),
            sampled("every head, zero 2", 128 * K, 1, 32, tensor=2, ulysses=2, ring=4, zero=2, loss_chunks=8),
            sampled(
                "tensor under zero 2", 16 * K, 4, 32, 4, tensor=2, ulysses=4, data=2, zero=2, recompute="selective",
                loss_chunks=8,
            ),
        )
    ),
]  # fmt: skip


def names(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@names(SAMPLED)
def test_time_and_memory_are_those_of_dry_runs(case: Case) -> None:
    """Device and host memory are those of the fullest rank, and are underestimated by at most 1 %."""
    machine, ranks, workload, strategy = load("A100-80G"), case.strategy.ranks, case.workload, case.strategy
    window = ["--window-size", f"{WINDOW - 1},0"] if workload.keys else []
    config = parse([*flags(case), *window], dict(LLAMA), ranks)
    result = dry_run(config, ranks, machine, vocab_size=SHAPE.vocab, every_layer=True)
    assert estimate(workload, strategy, machine).seconds == pytest.approx(result.predicted_seconds, rel=TOLERANCE)
    memory = fullest(workload, strategy)
    device, host = (max(getattr(one.figures, field) for one in result.ranks) for field in ("device_peak", "host_peak"))
    assert 0.99 * device < memory.total < (1 + TOLERANCE) * device
    assert 0.99 * host <= memory.host <= (1 + TOLERANCE) * host


@names([*CASES, *(pytest.param(one, marks=pytest.mark.full) for one in MORE)])
@pytest.mark.usual(0, 1, 3)
def test_a_step_takes_as_long_as_its_dry_run(case: Case, gpu: str = "A100-80G") -> None:
    machine, ranks = load(gpu), case.strategy.ranks
    config = parse(flags(case), dict(LLAMA), ranks)
    result = dry_run(config, ranks, machine, vocab_size=SHAPE.vocab, every_layer=True)
    estimated = estimate(case.workload, case.strategy, machine)
    assert estimated.seconds == pytest.approx(result.predicted_seconds, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["H100-80G", "B200-192G"])
def test_heads_of_256_run_on_the_kernel_that_takes_them(gpu: str) -> None:
    """The kernel is cuDNN on Hopper and FlashAttention-2 on Blackwell."""
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
    """--fp8-format: Transformer Engine's layers on H100, with each recipe."""
    machine, ranks = load("H100-80G"), case.strategy.ranks
    given = f"--fp8-format hybrid --fp8-recipe {recipe} --dry-run --gpu H100-80G --world-size {ranks}"
    config = parse([*flags(case), *given.split()], dict(LLAMA), ranks)
    result = dry_run(config, ranks, machine, vocab_size=SHAPE.vocab, every_layer=True)
    estimated, plain = (estimate(case.workload, case.strategy, machine, Program(fp8=fp8)) for fp8 in (True, False))
    assert estimated.seconds == pytest.approx(result.predicted_seconds, rel=TOLERANCE)
    assert estimated.seconds < 0.95 * plain.seconds
