# SPDX-License-Identifier: Apache-2.0
"""Published training runs: data and split are unchanged, planner and page use the constants, changes are listed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import pytest

from examples.reproduce import mixtures, record_checks, record_fit, records
from examples.reproduce.open_records import distinct, in_fitted_half, published_file
from examples.reproduce.open_records import records as read_records
from examples.reproduce.record_price import family, predict, published_rate, shape_of
from megatron.formulas.flops import forward_flops
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.cost.estimate import estimate, step_parts
from megatron.simulator.cost.layer_operations import layer
from megatron.simulator.cost.layer_program import OURS, Program, as_run, computed_again
from megatron.simulator.cost.seconds import sustained
from megatron.simulator.machines.machine_file import known, load
from megatron.training.refusal import Refusal
from tools import plan_options

RUNS = read_records()


@pytest.fixture(scope="module")
def result() -> list:
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


def test_flops_of_shapes_agree_with_a_published_page():
    """NeMo's page gives tokens and TFLOPS of each run, counting the full mask."""
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


def test_the_constants_suit_the_half_that_they_were_fitted_to(result):
    """No test asserts the error on the other half, so that it is not used for tuning."""
    fitted = [one for one in result if one.record.fitted and not one.record.unpriced]
    assert record_fit.mean_of_records(fitted) < 10.5
    before = record_fit.predictions(record_fit.unfitted(), [one.record for one in fitted])
    assert record_fit.mean_of_records(before) > 2 * record_fit.mean_of_records(fitted)


def test_unpriced_runs_are_few_shown_and_not_used_for_fitting(result):
    """Unpriced runs are marked in the table, named by source, and not used in the fit."""
    unpriced = [run for run in RUNS if run.unpriced]
    assert len(unpriced) == 8 and {run.source for run in unpriced} == {
        "huggingface-ulysses-sp", "torchao-training-benchmarks", "kempnerforge-weak-scaling-2026-06"
    }  # fmt: skip
    rows = [records.row(one) for one in result if one.record.unpriced]
    assert all(row.note.startswith("not priced: ") for row in rows)
    mine = [run for run in RUNS if run.source == "fms-fsdp-readme" and run.machine == "A100-80G"]
    odd = [replace(run, value=run.value / 9, unpriced="made up") for run in mine]
    assert record_fit.fit(mine + odd) == record_fit.fit(mine)


def test_the_posts_own_figures_contradict_each_other():
    """By Hugging Face's figures, the additional work of 64K over 32K tokens would run faster than the peak."""
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


def test_broadcasting_new_weights_costs_more_on_more_ranks():
    """InternEvo's ZeRO 1 over all ranks; within a node the cost is nearly 0."""
    more = []
    for gpus in (8, 256, 1024):
        run = next(r for r in RUNS if r.weights == "broadcast" and r.gpus == gpus and r.tp == 1 and not r.shard)
        seconds = [
            sum(predict(replace(run, weights=method), record_fit.fitted()).parts.values())
            for method in ("gather", "broadcast")
        ]
        more.append(seconds[1] - seconds[0])
    assert 0 <= more[0] < 0.1 and more[0] < more[1] < 0.6 * more[2] < 3.2  # published: 3.2 s on 1,024


def test_gradients_in_bf16_travel_in_half_the_time():
    run = next(r for r in RUNS if r.model == "nemotron-340b" and r.machine == "B200-192G")
    full, half = (predict(replace(run, gradients=name), record_fit.fitted()).parts["dp"] for name in ("fp32", "bf16"))
    assert 0.4 < half / full < 0.75


def test_planner_and_records_use_the_same_constants(result):
    """The planner has the fitted constants for every machine of a record, and machine files give the same times."""
    assert sum(len(free) for free in record_fit.FREE.values()) == 4
    constants = record_fit.fitted()
    for name in sorted({run.machine for run in RUNS}):
        args, flags = plan_options.parser("").parse_known_args(
            ["--model", "llama3-8b", "--gpus", "8", "--gpu", name, "--seq-length", "8K"]
        )
        machine = plan_options.planning_problems(args, flags)[1][0].machine
        for share, value in constants[family(name)].items():
            assert getattr(machine.calibration, share) == value, (name, share)
    shipped = record_fit.predictions({})
    assert [one.ours for one in result] == [one.ours for one in shipped]


@pytest.mark.full
def test_the_shipped_constants_are_fitted_to_the_even_half_and_their_ranges_to_both():
    even, odd = (record_fit.fit([run for run in RUNS if run.fitted == half]) for half in (True, False))
    for name, free in record_fit.FREE.items():
        for key in free:
            assert record_fit.fitted()[name][key] == pytest.approx(even[name][key], abs=6e-4)
            ends = sorted((even[name][key], odd[name][key]))
            assert record_fit.uncertain()[name][key] == pytest.approx(ends, abs=6e-4), (name, key)


def test_a_measured_constant_is_no_longer_uncertain(tmp_path):
    assert load("H200-141G").uncertain["gemm"] == (0.756, 0.829)
    slow, fast = load("H200-141G").slowest_and_fastest()
    assert slow.calibration.gemm == 0.756 and fast.calibration.gemm == 0.829
    mine = tmp_path / "mine.json"
    mine.write_text('{"extends": "H100-80G", "calibration": {"gemm": 0.8}}')
    assert "gemm" not in load(mine).uncertain and "fp8" in load(mine).uncertain


@pytest.mark.parametrize(
    "wrong, why", [("0.8", "object"), ('{"gemm": 0.8}', "lowest, highest"), ('{"gemm": [0.9, 0.8]}', "above"),
                   ('{"gem": [0.8, 0.9]}', "gemm")]
)  # fmt: skip
def test_a_wrong_uncertain_range_is_refused(tmp_path, wrong, why):
    path = tmp_path / "mine.json"
    path.write_text(f'{{"extends": "H100-80G", "uncertain": {wrong}}}')
    with pytest.raises(Refusal, match=why):
        load(path)


def test_every_change_of_the_test_half_is_listed():
    """With the listed changes undone, the test half is exactly the committed one."""
    for edit in record_checks.edits():
        mine = [run for run in RUNS if edit.concerns(run)]
        assert len(mine) == edit.runs and edit.why and not in_fitted_half(edit.source), edit
        assert all(getattr(run, edit.field) == edit.after for run in mine), edit
    first = [record_checks.undone(run) for run in record_checks.test_half()]
    assert record_checks.checksum(first) == record_checks.as_committed()
    assert record_checks.checksum([replace(first[0], value=1.0), *first[1:]]) != record_checks.as_committed()


def test_runs_after_the_freeze_are_predicted_once_and_never_fitted(tmp_path):
    file = record_checks.read_after_freeze()
    sources = {raw["source"] for raw in file["records"]}
    assert sources == set(file["sources"]) and not sources & {run.source for run in RUNS}
    assert all(one.ours > 0 for one in record_checks.predicted_runs())
    path = tmp_path / "after_freeze.json"
    run = {key: value for key, value in asdict(RUNS[0]).items()} | {"source": "made up"}
    record_checks.write_after_freeze(path, file | {"records": [run, run | {"predicted": 7.0}]})
    with pytest.raises(KeyError):
        record_checks.predicted_runs(path)
    assert record_checks.predict_new(path) == 1 and record_checks.predict_new(path) == 0
    new, old = record_checks.predicted_runs(path)
    assert old.ours == 7.0 and new.ours == pytest.approx(predict(RUNS[0], record_fit.fitted()).ours, abs=0.1)
    assert any("made up" in line for line in record_checks.after_freeze_table(path))


def test_a_fit_recovers_a_constant():
    mine = [run for run in RUNS if run.source == "fms-fsdp-readme" and run.machine == "A100-80G"]
    slow = {"Ampere": {"gemm": 0.8, "fp8": 1.0, "attention": 1.0}}
    as_slow = [replace(run, value=predict(run, slow).ours) for run in mine]
    assert record_fit.fit(as_slow)["Ampere"]["gemm"] == pytest.approx(0.8, abs=0.01)


def test_the_tables_of_the_page_are_those_that_the_command_writes(result):
    page = records.PAGE.read_text()
    assert {name for _, name, _ in records.MARKED.findall(page)} == set(records.TABLES)
    assert records.filled(page) == page, "python examples/reproduce/records.py --page"
    assert all(records.row(one).error == pytest.approx(one.error) for one in result)


# --- programs ---

LLAMA = shape_of(next(run for run in RUNS if run.model == "llama3-8b"))
H100 = load("H100-80G")


def step(program: Program = OURS, machine=H100, **grid: object) -> float:
    grid = {"data": 8, "zero": 3, "micro_batch": 2} | grid
    return estimate(Workload(LLAMA, 8192, 16), Strategy(**grid), machine, program).seconds


def test_our_program_has_its_usual_price():
    forward, _ = layer(Workload(LLAMA, 8192), Strategy())
    assert as_run(forward, LLAMA, OURS) == forward and computed_again(forward, OURS) == []
    assert step() == step(OURS) and "launching" not in step_parts(Workload(LLAMA, 8192), Strategy(), H100)


def test_features_of_programs_change_the_time():
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


def test_a_power_limit_slows_the_kernels_that_draw_most_power():
    full = H100.gemm.points[-1][1]
    half_kilowatt = load("H100-96G-500W")
    assert sustained(full, H100) == full
    assert sustained(full, half_kilowatt) == pytest.approx(full * (400 / 600) ** 0.5)
    assert sustained(0.5 * full, half_kilowatt) == 0.5 * full  # it draws 300 of the 400 W above idle
    assert step(Program("compiled"), half_kilowatt) > 1.1 * step(Program("compiled"))


def test_runs_of_mixtures_have_an_estimate_or_a_reason():
    runs = mixtures.runs()
    assert len(runs) == 18 and all(bool(run.result) != bool(run.reason) for run in runs)
    errors = {run.name: run.error(run.result.seconds) for run in runs if run.result and not run.by_fla}
    assert sorted(errors) == ["DeepSeek-V3 4K, 256 B200"] + [
        f"Qwen3-30B-A3B {length}K, {gpus} H100" for length, gpus in ((1024, 64), (32, 16), (4, 16))
    ]
    assert abs(errors["Qwen3-30B-A3B 4K, 16 H100"]) < 15 and errors["DeepSeek-V3 4K, 256 B200"] > 100  # as on the page
    hybrids = [run.error(run.by_fla) for run in runs if run.by_fla]
    assert len(hybrids) == 3 and max(map(abs, hybrids)) < 50
    for run in (run for run in runs if run.result):
        assert run.by_fla < run.result.seconds
        assert run.once <= run.result.seconds and 0 < run.result.parts["ep"] < run.result.seconds


def test_flas_exchanges_are_cheaper_in_their_order():
    """A gather of maps sends less than an all-to-all over heads, as published; what a map costs to make is left out."""
    rows = mixtures.exchanges()
    (_, forward, gather, both, gather_both), (_, _, heads, _, heads_both) = rows
    assert gather < heads and gather_both < heads_both
    assert gather < forward and gather_both < both
    errors = [predicted / published - 1 for row in rows for published, predicted in (row[1:3], row[3:5])]
    assert max(map(abs, errors)) < 0.35
    assert 0.02 < mixtures.fla_share() < 0.1  # our kernels are many small ones
