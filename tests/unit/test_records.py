# SPDX-License-Identifier: Apache-2.0
"""Published training runs: the data is whole, the split is the rule, the errors are those that the page tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from examples.reproduce import record_fit, records
from examples.reproduce.open_records import distinct, in_fitted_half, published_file
from examples.reproduce.open_records import records as read_records
from examples.reproduce.record_price import family, predict, published_rate, shape_of
from megatron.formulas.flops import forward_flops
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate, step_parts
from megatron.simulator.cost.program import OURS, Program, as_run, computed_again
from megatron.simulator.cost.seconds import sustained
from megatron.simulator.cost.step_operations import micro_batch
from megatron.simulator.machines.machine_file import known, load

RUNS = read_records()


@pytest.fixture(scope="module")
def found() -> list:
    return record_fit.predictions(record_fit.fitted())


def test_every_run_has_a_source_a_machine_a_model_and_fills_its_gpus():
    file = published_file()
    assert len(RUNS) >= 30 and {run.source for run in RUNS} == set(file["sources"])
    for source in file["sources"].values():
        assert source["title"] and source["url"].startswith("https://") and source["date"]
    for run in RUNS:
        assert run.machine in known() and run.model in file["models"] and run.value > 0
        assert run.tp * run.ulysses * run.ring * run.pp * run.dp == run.gpus
        assert run.global_batch % (run.dp * run.micro_batch) == 0
    assert distinct(RUNS) == 393


def test_shapes_are_those_whose_flops_a_page_prints():
    """NeMo's page has tokens and TFLOPS of each run, the full mask counted."""
    per_token = {"gpt3-175b": 782 / 726, "nemotron-340b": 678 / 322, "llama2-70b": 759 / 1707, "gpt3-5b": 736 / 22521}
    for model, teraflops in per_token.items():
        run = next(run for run in RUNS if run.model == model and run.source == "nemo-performance-24.07")
        counted = replace(run, unit="full-mask TFLOPS/GPU", value=1.0)
        assert 1 / published_rate(counted) == pytest.approx(teraflops, rel=0.02), model


def test_the_split_is_by_source_and_by_the_rule():
    halves = {source: in_fitted_half(source) for source in published_file()["sources"]}
    assert Counter(halves.values()) == {True: 13, False: 14}
    assert not in_fitted_half("llm-foundry-benchmarking") and in_fitted_half("nemo-performance-24.07")
    for half in (True, False):
        priced = record_fit.priced([run for run in RUNS if run.fitted == half])
        assert {family(run.machine) for run in priced} == {"Ampere", "Hopper", "Blackwell"}


def test_errors_of_both_halves(found):
    """A fit of the even half; what the odd half says of it is the claim of docs/records.md."""
    told = [one for one in found if not one.record.unpriced]
    fitted, test = ([one for one in told if one.record.fitted == half] for half in (True, False))
    assert record_fit.mean_of_records(fitted) < 10.5 and record_fit.mean_of_records(test) < 11.5
    assert record_fit.mean_of_sources(test) < 13 and record_fit.mean_of_rates(test) < 15
    before = record_fit.predictions(record_fit.unfitted(), [one.record for one in test])
    assert record_fit.mean_of_records(before) > 14


def test_what_is_not_priced_is_few_shown_and_taught_nothing(found):
    """Marked in the table, named by source, and without a say in the fit."""
    unpriced = [run for run in RUNS if run.unpriced]
    assert len(unpriced) == 8 and {run.source for run in unpriced} == {
        "huggingface-ulysses-sp", "torchao-training-benchmarks", "kempnerforge-weak-scaling-2026-06"
    }  # fmt: skip
    rows = [records.row(one) for one in found if one.record.unpriced]
    assert all(row.note.startswith("not priced: ") for row in rows)
    mine = [run for run in RUNS if run.source == "fms-fsdp-readme" and run.machine == "A100-80G"]
    odd = [replace(run, value=run.value / 9, unpriced="made up") for run in mine]
    assert record_fit.fit(mine + odd) == record_fit.fit(mine)


def test_the_posts_own_figures_contradict_each_other():
    """Hugging Face: what 64K tokens need beyond 32K is more than the data sheet's peak would do in the difference."""
    half, whole = (next(run for run in RUNS if run.source == "huggingface-ulysses-sp" and run.seq_length == length)
                   for length in (32768, 65536))  # fmt: skip
    seconds = [run.seq_length / run.value / run.gpus for run in (half, whole)]  # of a micro-batch
    work = [forward_flops(shape_of(run), run.seq_length) for run in (half, whole)]
    done = [3 * (one.gemm + one.attention / 2) / run.gpus for one, run in zip(work, (half, whole))]
    assert (done[1] - done[0]) / (seconds[1] - seconds[0]) > load("H100-80G").peak["bf16"]


def test_an_optimizer_in_host_memory_costs_what_its_program_does():
    run = next(run for run in RUNS if run.optimizer == "deepspeed" and run.model == "llama2-7b" and run.gpus == 8)
    gpu, cpu, slow = (
        predict(replace(run, optimizer=name), record_fit.fitted()).parts["optimizer"]
        for name in ("gpu", "cpu", "deepspeed")
    )
    assert gpu < 0.2 * cpu and cpu < 0.5 * slow and slow == pytest.approx(6.5, rel=0.05)  # DeepSpeed's ZenFlow post


def test_new_weights_by_a_broadcast_a_rank_cost_more_the_more_ranks():
    """InternEvo's ZeRO 1 over all ranks; within a node next to nothing."""
    more = []
    for gpus in (8, 256, 1024):
        run = next(r for r in RUNS if r.weights == "broadcast" and r.gpus == gpus and r.tp == 1 and not r.shard)
        told = [
            sum(predict(replace(run, weights=how), record_fit.fitted()).parts.values())
            for how in ("gather", "broadcast")
        ]
        more.append(told[1] - told[0])
    assert 0 <= more[0] < 0.1 and more[0] < more[1] < 0.6 * more[2] < 3.2  # published: 3.2 s on 1,024


def test_gradients_in_bf16_travel_in_half_the_time():
    run = next(r for r in RUNS if r.model == "nemotron-340b" and r.machine == "B200-192G")
    full, half = (predict(replace(run, gradients=name), record_fit.fitted()).parts["dp"] for name in ("fp32", "bf16"))
    assert 0.4 < half / full < 0.75


def test_the_constants_are_few_and_the_shipped_machines_have_them():
    constants = record_fit.fitted()
    assert sum(len(free) for free in record_fit.FREE.values()) == 4
    for name in ("H100-80G", "H200-141G", "B200-192G"):
        for share, value in constants[family(name)].items():
            assert getattr(load(name).calibration, share) == pytest.approx(value, abs=6e-4), (name, share)


def test_a_search_finds_a_constant_again():
    mine = [run for run in RUNS if run.source == "fms-fsdp-readme" and run.machine == "A100-80G"]
    slow = {"Ampere": {"gemm": 0.8, "fp8": 1.0, "attention": 1.0}}
    as_slow = [replace(run, value=predict(run, slow).ours) for run in mine]
    assert record_fit.fit(as_slow)["Ampere"]["gemm"] == pytest.approx(0.8, abs=0.01)


def test_the_page_tells_what_the_command_prints(found):
    page = (record_fit.FILE.parents[3] / "docs" / "records.md").read_text()
    test = [one for one in found if not one.record.fitted and not one.record.unpriced]
    told = (record_fit.mean_of_records(test), record_fit.mean_of_sources(test), record_fit.mean_of_rates(test))
    assert all(f"{value:.1f} %" in page for value in told)
    for source, rows in record_fit.by_source(found).items():
        error = record_fit.mean_of_records(record_fit.of_priced(rows))
        assert f"| {len(rows)} |" in page and f"| {error:.1f} %" in page, source
    lines = record_fit.summary(record_fit.fitted()) + record_fit.totals(record_fit.fitted())
    assert any("| **test** | 244 | 230 |" in line for line in lines)
    assert all(records.row(one).error == pytest.approx(one.error) for one in found)


# --- programs ---

LLAMA = shape_of(next(run for run in RUNS if run.model == "llama3-8b"))
H100 = load("H100-80G")


def step(program: Program = OURS, machine=H100, **grid: object) -> float:
    grid = {"data": 8, "zero": 3, "micro_batch": 2} | grid
    return estimate(Workload(LLAMA, 8192, 16), Strategy(**grid), machine, program).seconds


def test_our_program_is_priced_as_ever():
    work = micro_batch(Workload(LLAMA, 8192), Strategy())
    assert as_run(work.forward, LLAMA, OURS) == list(work.forward) and computed_again(work.forward, OURS) == []
    assert step() == step(OURS) and "launching" not in step_parts(Workload(LLAMA, 8192), Strategy(), H100)


def test_what_a_program_does_costs_or_saves():
    eager, compiled = step(Program("eager"), fused=False), step(Program("compiled"))
    assert 1.1 < eager / compiled < 1.3  # torchtitan's table 1: 6,667 / 5,762 = 1.16
    assert step(Program("compiled", fp8=True)) < 0.85 * compiled
    assert step(Program("compiled", again=0.37)) > 1.05 * compiled
    slow, fast = (step(Program("compiled", attention=name)) for name in ("flash1", "flash_attn"))
    assert slow > step(Program("compiled", attention="flash")) > fast
    tp = {"tensor": 4, "data": 2, "micro_batch": 4, "zero": 1}
    assert step(Program("fused", overlap=True), **tp) < 0.95 * step(Program("fused"), **tp)


def test_a_host_that_is_slower_than_the_gpu_is_waited_for():
    tiny = Workload(replace(LLAMA, hidden=256, ffn=512, heads=2, kv_heads=2), 128)
    parts = step_parts(tiny, Strategy(), H100, Program("eager"))
    assert parts["launching"] > 0.5 * sum(parts.values())


def test_a_power_limit_slows_what_draws_most():
    full = H100.gemm.points[-1][1]
    half_kilowatt = load("H100-96G-500W")
    assert sustained(full, H100) == full
    assert sustained(full, half_kilowatt) == pytest.approx(full * (400 / 600) ** 0.5)
    assert sustained(0.5 * full, half_kilowatt) == 0.5 * full  # draws 400 of the 400 W above idle
    assert step(Program("compiled"), half_kilowatt) > 1.1 * step(Program("compiled"))
