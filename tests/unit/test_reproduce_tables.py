# SPDX-License-Identifier: Apache-2.0
"""The papers' throughput tables, simulated: errors against the published numbers, and the fastest row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from examples.reproduce import capacity, convergence, fit
from examples.reproduce.capacity import AT_LEAST, longest_multiple, longest_power, within_a_doubling
from examples.reproduce.fpdt import capacity as fpdt
from examples.reproduce.fpdt import figure_12_measured, figure_13
from examples.reproduce.fpdt.training import (
    figure_1_rows,
    figure_11_rows,
    figure_12_rows,
    first_covered,
    table_3_rows,
)
from examples.reproduce.genslm import capacity as genslm
from examples.reproduce.genslm import figure_4, figure_6
from examples.reproduce.genslm.capacity import MEGATRON_LM, OLD_MEGATRON_DEEPSPEED, layer_activations, old_memory
from examples.reproduce.genslm.tables import throughput_rows
from examples.reproduce.report import Row, mean_error, published
from examples.reproduce.simulate import CLUSTERS, Simulated, clock, cluster, deepspeed_tflops, shape_of, usp_tflops
from examples.reproduce.ulysses import section_3_2
from examples.reproduce.ulysses.section_3_2 import Traffic
from examples.reproduce.ulysses.tables import figure_3_rows, figure_7_rows, figure_rows, scaling_rows, shape
from examples.reproduce.usp import figure_3
from examples.reproduce.usp.tables import attention_rows, figure_5_rows, training_rows
from megatron.formulas.strategy import Workload
from megatron.platform.simulated_cluster import simulated_world
from megatron.simulator.machines.machine import Machine


@pytest.fixture(scope="module")
def usp() -> list[Row]:
    return training_rows(clock("usp-a800", measure=False))


BARS = {  # largest permitted mean errors in percent
    "USP, tables 5 to 7": (2.8, lambda: training_rows(clock("usp-a800", measure=False))),
    "USP, table 4": (3.3, lambda: attention_rows(cluster("usp-a100"), "8xA100_nvlink")),
    # 3.6 until merges of outputs cost other programs what they cost: their bytes were scaled twice.
    "USP, table 3": (3.7, lambda: attention_rows(cluster("usp-l20"), "8xL20_pcie")),
    # 5.4 until Adam clipped as it read: the published program clips by a pass of its own, ours is predicted without.
    "USP, figure 5": (5.5, lambda: figure_5_rows(clock("usp-a800", measure=False))),
    "Ulysses, tables 2 and 3": (3.1, lambda: scaling_rows(clock("ulysses-a100", measure=False), (2, 3))),
    "FPDT, figure 11": (3.8, lambda: figure_11_rows(Simulated(cluster("fpdt-a100")))),
    "FPDT, table 3": (10.8, lambda: table_3_rows(Simulated(cluster("fpdt-a100")))),
    "GenSLM, throughput": (4.6, lambda: throughput_rows(Simulated(cluster("genslm-a100")))),
}


@pytest.mark.parametrize("table", BARS)
def test_mean_errors_do_not_grow(table):
    bar, rows = BARS[table]
    assert round(mean_error(rows()), 1) <= bar


def test_usp_winners_are_at_most_two_percent_below_the_published_best(usp):
    tables = published("usp_tables_5_6_7")
    # 64K with a batch of 1 is in table 5 (8 GPUs, Llama2) and in table 6 (16, Llama 3): group by table
    groups: dict[tuple, list[Row]] = {}
    for line, row in zip(tables, usp):
        groups.setdefault((line["table"], line["seq_length"], line["global_batch"]), []).append(row)
    assert sum(len(rows) > 1 for rows in groups.values()) == 6
    for group, rows in groups.items():
        winner, best = max(rows, key=lambda row: row.ours), max(rows, key=lambda row: row.published)
        assert winner.published >= 0.98 * best.published, (group, winner.label, best.label)


def test_usp_flops_are_counted_as_printed():
    """The paper's 152.51 (last version, causal) follows from its 266 (first version) only for an MLP without gate."""
    workload = Workload(shape_of("llama3-8b"), 122880)
    full, half = (usp_tflops(replace(workload, seq_length=length), 1.0, 16) for length in (122880, 61440))
    attention = 2 * (full - 2 * half)  # the quadratic part for the full length
    assert 266 * (1 - attention / 2 / full) == pytest.approx(152.51, rel=0.005)


def test_usp_attention_alone():
    l20, a100 = attention_rows(cluster("usp-l20"), "8xL20_pcie"), attention_rows(cluster("usp-a100"), "8xA100_nvlink")
    for length in (8192, 32768, 131072):  # over PCIe neither pure Ulysses nor pure Ring is best
        rows = [row for row in l20 if row.label["seq_length"] == length and row.label["ring"] == "balanced"]
        assert max(rows, key=lambda row: row.published).label["ulysses"] == 2
        assert max(rows, key=lambda row: row.ours).label["ulysses"] == 2
        assert min(rows, key=lambda row: row.ours).label["ulysses"] == 8
    doubled = [row for row in a100 if row.label["seq_length"] == 131072]
    assert doubled and all(row.published is None and row.ours > 2 for row in doubled)  # both readings of 128K are shown


def test_data_parallelism_is_fastest_in_figure_5():
    rows = figure_5_rows(clock("usp-a800", measure=False))
    for data, sequence in zip(rows[::2], rows[1::2]):
        assert data.ours >= sequence.ours and data.published > sequence.published
        # At 512 tokens both wait for the same gradients.
        assert data.ours > sequence.ours or data.label["seq_length"] == 512


@pytest.mark.parametrize("table", [2, 3])
def test_ulysses_tables_are_within_ten_percent(table):
    rows = scaling_rows(clock("ulysses-a100", measure=False), (table,))
    assert len(rows) == 6
    assert all(abs(row.error) < 10 for row in rows)


def test_ulysses_times_and_tflops_agree_by_its_formula():
    for line in published("ulysses_scaling"):
        workload = Workload(shape(line["model"]), line["seq_length"], line["global_batch"])
        assert deepspeed_tflops(workload, line["step_ms"] / 1e3, line["gpus"]) == pytest.approx(
            line["tflops_per_gpu"], rel=0.004
        )


def test_ulysses_figures_have_their_shape():
    time = clock("ulysses-a100", measure=False)
    for figure, most in ((4, 12), (5, 18), (6, 18)):
        rows = figure_rows(time, figure)
        assert mean_error(rows) < most
        lengths = {row.label["seq_length"]: row.ours for row in rows if row.label["system"] == "megatron-sp"}
        for row in rows:
            other = lengths.get(row.label["seq_length"])
            if row.label["system"] == "ulysses" and other is not None and figure != 6:
                assert row.ours > other
    sparse = [row.ours for row in figure_rows(time, 6) if row.label["system"] == "ulysses"]
    assert sparse == sorted(sparse, reverse=True)  # for long sequences the kernel's rate decides
    assert all(row.published is None for row in figure_3_rows(time) + figure_7_rows(time))


def test_fpdt_mfu_over_the_length():
    machine = cluster("fpdt-a100")
    time = Simulated(machine)
    rows = figure_11_rows(time)
    assert len(rows) == 43 and mean_error(figure_1_rows(time)) < 8
    for model in {row.label["model"] for row in rows}:
        rising = [row.ours for row in rows if (row.label["model"], row.label["system"]) == (model, "fpdt")]
        assert rising == sorted(rising)
    assert 32 * 1024 <= first_covered(machine) <= 64 * 1024  # section 4.2
    by_chunk = [row.ours for row in figure_12_rows(time) if row.label["model"] == "gpt-6.7b"]
    assert by_chunk[:4] == sorted(by_chunk[:4])  # up to 64K, the paper's choice; longer chunks are not faster
    assert by_chunk[4] < 1.01 * by_chunk[3]
    # With 64K only the first loads of each backward pass are not hidden.
    assert by_chunk[0] < 0.6 * by_chunk[-1] and by_chunk[3] > 0.92 * by_chunk[-1]


def test_fpdt_strategies_are_predicted():
    """No constant was fitted to these strategies."""
    rows = table_3_rows(clock("fpdt-a100", measure=False))
    named = {row.label["strategy"]: abs(row.error) for row in rows}
    assert len(rows) == 10
    assert all(error < 5 for name, error in named.items() if "Ulysses 8" in name and "recompute" in name)


@pytest.mark.parametrize("name", sorted(fit.FITS))
def test_constants_of_a_cluster_are_few_and_say_where_they_come_from(name):
    raw, wanted = json.loads((CLUSTERS / f"{name}.json").read_text()), fit.FITS[name]
    assert len(wanted.constants) <= 7 and set(raw) <= {
        "extends", "gpus", "link", "network", "host_link", "host_memory", "head_size", "calibration", "sources"
    }  # fmt: skip
    for constant in raw["calibration"]:
        assert f"calibration.{constant}" in raw["sources"]
    assert set(wanted.constants) <= set(raw["calibration"])


def test_a_fit_recovers_a_constant():
    start = fit.beginning("genslm-a100")
    slow = replace(start, calibration=replace(start.calibration, gemm=0.6))

    def table(machine: Machine) -> list[Row]:
        pairs = zip(throughput_rows(Simulated(slow), ("new",)), throughput_rows(Simulated(machine), ("new",)))
        return [replace(right, published=right.ours, ours=ours.ours) for right, ours in pairs]

    assert fit.mean_error(start, [table]) > 5
    result = fit.fit(start, ("gemm",), [table])
    assert result.calibration.gemm == pytest.approx(0.6, rel=0.03) and fit.mean_error(result, [table]) < 1


# Longest contexts and device memory of the papers' runs, by our closed forms.


GIB_OF_80 = 60  # a row of table 3 with this many GiB or more fills an A100-80G


def lengths(theirs: int | None, ours: int, note: str = "") -> Row:
    return Row({"model": "7b"}, theirs, ours, "simulated", "tokens", note)


@pytest.mark.parametrize("most", [0, 4095, 4096, 5000, 8192, 100_000])
def test_the_longest_that_fits(most):
    tried = []
    result = longest_power(lambda length: tried.append(length) or length <= most)
    assert result == max((4096 << n for n in range(6) if 4096 << n <= most), default=0)
    assert longest_multiple(lambda length: length <= most, 1000) == most // 1000 * 1000


def test_a_search_without_a_limit_ends():
    assert longest_power(lambda _: True) == capacity.LONGEST
    assert longest_multiple(lambda _: True, 1024) < 2 * capacity.LONGEST


@pytest.mark.parametrize(
    "row, agrees",
    [
        (lengths(1024, 2048), True),
        (lengths(1024, 512), True),
        (lengths(1024, 2049), False),
        (lengths(1024, 511), False),
        (lengths(1024, 0), False),
        (lengths(1024, 4096, f"{AT_LEAST}; more"), True),
        (lengths(1024, 1023, AT_LEAST), False),
    ],
)
def test_agreement_is_within_a_doubling(row, agrees, capsys):
    assert within_a_doubling([row, lengths(None, 7), Row({}, 3, 9, "simulated", "GiB")]) == (int(agrees), 1)
    capacity.print_agreement([row, row])
    assert f"{2 * agrees} of 2 rows" in capsys.readouterr().out


def test_fpdt_table_3():
    """All lengths agree within a doubling; device memory agrees within 15 % in rows that fill the GPU in the paper.

    FPDT's row differs: our program uses half of the published device memory, and host memory is its limit.
    Under ZeRO 2, which is also used for ZeRO 1, our FSDP keeps the buffer of its last gather, the output layer, during
    the loss, as in dry runs; DeepSpeed gathers weights only after a step.
    """
    rows = fpdt.table_3_rows()
    assert within_a_doubling(rows) == (10, 10)
    memory = {row.label["strategy"]: row for row in rows if row.unit.startswith("GiB")}
    chunked = memory.pop("Ulysses ZeRO-3 AC OC FPDT")
    assert 0.4 * chunked.published < chunked.ours < chunked.published
    gathered = 128256 * 4096 * 2 / 2**30
    for strategy in ("Ulysses ZeRO-1 AC OC", "Ulysses ZeRO-2 AC OC"):
        memory[strategy] = replace(memory[strategy], ours=memory[strategy].ours - gathered)
    full = [row for row in memory.values() if row.published >= GIB_OF_80]
    assert len(full) == 6 and max(abs(row.error) for row in full) < 15
    assert sum(abs(row.error) for row in memory.values()) / len(memory) < 12


def test_fpdt_is_limited_to_4m_by_host_memory():
    run = fpdt.Run(fpdt.shape_of("llama3-8b"), fpdt.machine_of("A100-80G"), fpdt.fpdt(fpdt.shape_of("llama3-8b"), 8))
    assert fpdt.longest(run) == 4 * fpdt.MIB
    assert fpdt.memory(run, 8 * fpdt.MIB).total < run.machine.usable_memory
    assert "1.22 TB of the node's host memory" in fpdt.stopped_by(run, 4 * fpdt.MIB)


def test_fpdt_table_1():
    rows = fpdt.table_1_rows()
    within, compared = within_a_doubling(rows)
    assert compared == 23 and within >= 0.9 * compared
    assumed = [row.label["model"] for row in rows if "ASSUMED" in row.note]
    assert assumed == ["gpt-2.7b", "llama3-70b"]


@pytest.mark.parametrize("model, gpu, gpus", [("gpt-2.7b", "A100-40G", 1), ("llama3-70b", "A100-80G", 16)])
def test_two_rows_of_table_1_need_an_assumption(model, gpu, gpus):
    """Without the assumption no length fits; with it, at most twice the published length fits."""
    run = fpdt.table_1_run(model, gpu, gpus)
    plain = replace(run, strategy=fpdt.fpdt(run.shape, gpus), adam_on_host=False)
    assert fpdt.longest(plain) == 0 < fpdt.longest(run)


def test_fpdt_figures_1_and_11():
    rows = fpdt.figure_11_rows()
    assert len(rows) == 16 and within_a_doubling(rows)[0] >= 12
    assert all(row.doublings >= -1 for row in rows)
    of_fpdt = {row.label["model"]: row.ours for row in rows if row.label["system"] == "fpdt"}
    others = [row for row in rows if row.label["system"] != "fpdt"]
    assert all(row.ours < of_fpdt[row.label["model"]] for row in others)
    rows_per_gpu = fpdt.figure_11_rows(("llama3-70b",), per_gpu=True)
    assert [row.ours for row in rows_per_gpu] == [row.ours // 32 for row in rows if row.label["model"] == "llama3-70b"]


def test_genslm_maxima():
    """Three systems on 16, 32 and 64 GPUs, two models."""
    rows = [row for model in ("genslm-25b", "genslm-33b") for row in genslm.maxima_rows(model)]
    within, compared = within_a_doubling(rows)
    assert compared == 18 and within >= 0.9 * compared
    plain = [row for row in rows if row.label["system"] == "Megatron-LM"]
    assert max(abs(row.error) for row in plain) < 20


@pytest.mark.parametrize("line", published("genslm_max_context"), ids=lambda line: f"{line['model']} {line['gpus']}")
def test_older_systems_need_the_memory_that_is_assumed(line):
    """Old Megatron-DeepSpeed needs states in host memory; Megatron-LM on 16 and 32 GPUs needs FlashAttention."""
    shape, gpus = genslm.shape_of(line["model"]), line["gpus"]
    limit = genslm.load(genslm.GPU).usable_memory
    on_device = replace(OLD_MEGATRON_DEEPSPEED, adam_on_host=False)
    held = old_memory(shape, line["old_megatron_deepspeed_tokens"], gpus, on_device)
    assert held.states + held.positions + held.inputs > limit
    written_out = replace(MEGATRON_LM, flash=False)
    assert gpus == 64 or old_memory(shape, line["megatron_lm_tokens"], gpus, written_out).total > limit


def test_figures_of_the_page_about_masks_and_tables():
    """At 50K tokens a mask has over 10 GB, twice as much while it is made; at 100K the table has over 10 GB."""
    shape = genslm.shape_of("genslm-25b")
    held = old_memory(shape, 4096, 16, MEGATRON_LM)
    assert (held.making_mask, held.mask) == (2**27, 2**24)  # as figure_4.py counts them on simulated tensors
    assert old_memory(shape, 51200, 16, MEGATRON_LM).making_mask / 2 > 10e9
    assert 10e9 < old_memory(shape, 102400, 64, MEGATRON_LM).positions < 11e9


def test_activations_of_a_layer_by_korthikanti():
    """TP: equation 2 plus the gradient of the scores; with sequence parallelism: equation 4; one rank: equation 1."""
    shape = replace(genslm.shape_of("genslm-25b"), hidden=64, heads=4)
    s, h, a, t = 128, 64, 4, 2
    plain = replace(OLD_MEGATRON_DEEPSPEED, flash=False)
    assert layer_activations(shape, s, t, plain) == s * h * (10 + 24 // t) + (5 + 2) * a * s * s // t
    assert layer_activations(shape, s, t, MEGATRON_LM) == 34 * s * h // t
    alone = (layer_activations(shape, s, 1, replace(plain, sequence_parallel=on)) for on in (False, True))
    assert len(set(alone)) == 1


def test_without_partitioning_the_table_50k_is_the_longest():
    """More GPUs do not help: from 32 to 64 GPUs, the length grows by less than 20 %."""
    rows = {(row.label["savings"], row.label["gpus"]): row for row in genslm.scalability_rows("genslm-25b")}
    assert abs(rows["TP, SP", 64].error) < 20
    assert rows["TP, SP", 64].ours < 1.2 * rows["TP, SP", 32].ours
    assert rows["TP, SP, table and mask", 64].ours > 10 * rows["TP, SP", 64].ours
    assert "blames the table" in rows["TP, SP", 64].note


# Counts of examples/reproduce: messages, tiles, tables, masks, and distances of loss curves.


def test_messages_are_counted_once_for_each_receiver():
    with simulated_world(4, rank=1), Traffic() as traffic:
        x, whole = torch.zeros(8, 2), torch.zeros(32, 2)
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.all_to_all_single(torch.empty(12, 2), x, [3] * 4, [1, 2, 4, 1])
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(x, whole)
        dist.all_reduce(x)
        operations = [dist.P2POp(dist.isend, x, 2), dist.P2POp(dist.irecv, x, 0)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    assert traffic.sent == {
        "all-to-all": 12 + (8 - 2) * 2,
        "all-gather": 3 * 16,
        "reduce-scatter": 3 * 16,
        "all-reduce": 2 * 16 * 3 // 4,
        "send": 16,
    }


def test_a_collective_that_is_not_counted_raises_an_error():
    with simulated_world(4), Traffic(), pytest.raises(NotImplementedError, match="gather_"):
        dist.gather(torch.zeros(1), [torch.zeros(1)] * 4)


@pytest.mark.parametrize("method", ["Ulysses", "Megatron-SP"])
@pytest.mark.parametrize("ranks, kv_heads", [(4, 64), (4, 8), (16, 8)])
def test_a_layer_sends_what_the_closed_form_says(method, ranks, kv_heads):
    sent = section_3_2.sent_by_a_layer(method, ranks, kv_heads)
    group = section_3_2.HEADS // kv_heads
    assert sent == pytest.approx(section_3_2.exact_form(method, ranks, group), rel=1e-9)
    message = section_3_2.closed_form(method, ranks, group)
    if ranks <= kv_heads:
        assert sent == pytest.approx(message * (ranks - 1) / ranks, rel=1e-9)
    else:
        assert sent > message * (ranks - 1) / ranks


def test_a_ring_sends_keys_and_values():
    """Masked blocks are not sent: the busiest rank sends its own block and those of all ranks except the next."""
    assert section_3_2.sent_by_a_layer("Ring", 4, 64) == pytest.approx(2 * 3 / 4)
    assert section_3_2.sent_by_a_layer("Ring", 4, 8) == pytest.approx(2 * 3 / 4 / 8)
    least = min(section_3_2.sent_by_a_layer("Ring", 4, 64, rank) for rank in range(4))
    assert least < 2 * 3 / 4


@pytest.mark.parametrize("ring", figure_3.RINGS)
def test_contiguous_rings_are_unbalanced_by_twice_their_size(ring):
    contiguous, zigzag = ([plan.pairs for plan in figure_3.plans_of(ring, b)] for b in ("contiguous", "zigzag"))
    assert sum(contiguous) == sum(zigzag) == figure_3.LENGTH * (figure_3.LENGTH + 1) // 2
    assert max(contiguous) / min(contiguous) == pytest.approx(2 * ring - 1, rel=0.01)
    assert len(set(zigzag)) == 1 and set(figure_3.shares(zigzag)) == {1}


@pytest.mark.parametrize("partitioned, parts", [(False, 1), (True, 16)])
def test_a_table_takes_16_bytes_a_number(partitioned, parts):
    weights = 16384 * 5760 * 4 // parts
    result = figure_6.table_bytes(16384, 16, partitioned, rank=5)
    assert result == {"parameters": weights, "gradients": weights, "optimizer": 2 * weights}


def test_dense_masks_grow_and_ours_do_not():
    assert figure_4.dense_bytes(4096) == (2**26, 2**27, 2**24)
    sizes = [figure_4.part_bytes(length, 0) for length in (8192, 32768)]
    assert sizes[0] == sizes[1] < 64 * 2**20 < 32768**2


def test_curves_coincide_or_differ(tmp_path: Path, capsys: pytest.CaptureFixture):
    curves = {"a": [3.0, 2.0, 1.0], "b": [3.0, 2.00001, 1.0], "c": [3.0, 2.0, 1.01]}
    for name, curve in curves.items():
        lines = [json.dumps({"iteration": n, "lm_loss": loss}) for n, loss in enumerate(curve)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    rows = convergence.compare(curves)
    assert [row.agrees for row in rows if row.unit == "curves"] == [True, False]
    assert [row.ours for row in rows if row.unit == "nats"] == [2, pytest.approx(1e-5), pytest.approx(0.01)]
    assert convergence.main([str(tmp_path), "figure", "Curves", "a", "b"]) == 0
    assert convergence.main([str(tmp_path), "figure", "Curves", "a", "b", "c"]) == 1
    assert (tmp_path / "figure.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="b has 2 steps, a 3: train both again"):
        convergence.compare({"a": curves["a"], "b": [1.0, 2.0]})
    assert convergence.main([str(tmp_path)]) == 2 and "BASELINE" in capsys.readouterr().err


def test_the_part_of_a_step_that_is_a_blocks_backward(tmp_path: Path):
    """Levels are relative to the start of the step; events in the FFN are marked."""
    blocks = [SimpleNamespace(place=place) for place in ("device", "device", "host", "elsewhere")]
    events = [(0, 0, 100), (1, 1, 30), (2, 2, 7), (3, 1, 20), (3.5, 3, 1), (4, 1, -50), (9, 0, -100)]
    history = SimpleNamespace(blocks=blocks, events=events)
    result = figure_13._within(history, {"block": [(2, 5)], "ffn": [(2.5, 3.2)]}, 100, 0)
    assert (result.device, result.host) == ([30, 50, 50, 0], [7, 7, 7, 7])
    assert result.in_ffn == [False, True, False, False] and (result.peak(True), result.peak(False)) == (50, 50)
    recorded = {(2, 4): figure_13.Backward([3, 8, 5], [1, 2, 1], [True, False, False])}
    rows = {row.label["in"]: row for row in figure_13.rows_of(recorded)}
    assert rows["the block"].agrees and rows["attention"].ours == 8 / 2**20
    figure_13.write(tmp_path, "f", "F", list(rows.values()), draw=lambda f: figure_13.draw(f, recorded))


def test_chunks_are_compared_with_the_complete_sequence():
    whole = {"chunks": None, "activations": 400, "tokens_per_second": 10.0, "of_reference": 1.0}
    halves = {"chunks": 2, "activations": 240, "tokens_per_second": 9.0, "of_reference": 0.9}
    rows = figure_12_measured.rows_of([whole, halves])
    shares = {row.unit: row for row in rows if "of the whole" in row.unit}
    assert shares["activations / those of the whole"].ours == 0.6
    assert shares["activations / those of the whole"].error == pytest.approx(-10)
    assert shares["speed / that of the whole"].ours == 0.9
