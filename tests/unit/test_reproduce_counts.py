# SPDX-License-Identifier: Apache-2.0
"""What examples/reproduce counts: messages, tiles, tables, masks, and how far loss curves are apart."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from examples.reproduce import convergence
from examples.reproduce.fpdt import figure_12_measured, figure_13
from examples.reproduce.genslm import figure_4, figure_6
from examples.reproduce.ulysses import section_3_2
from examples.reproduce.ulysses.section_3_2 import Traffic
from examples.reproduce.usp import figure_3
from megatron.platform.simulated_cluster import simulated_world


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


def test_what_is_not_counted_is_told():
    with simulated_world(4), Traffic(), pytest.raises(NotImplementedError, match="gather_"):
        dist.gather(torch.zeros(1), [torch.zeros(1)] * 4)


@pytest.mark.parametrize("method", ["Ulysses", "Megatron-SP"])
@pytest.mark.parametrize("ranks, kv_heads", [(4, 64), (4, 8), (16, 8)])
def test_a_layer_sends_what_the_closed_form_says(method, ranks, kv_heads):
    sent = section_3_2.sent_by_a_layer(method, ranks, kv_heads)
    group = section_3_2.HEADS // kv_heads
    assert sent == pytest.approx(section_3_2.exact_form(method, ranks, group), rel=1e-9)
    told = section_3_2.closed_form(method, ranks, group)
    if ranks <= kv_heads:
        assert sent == pytest.approx(told * (ranks - 1) / ranks, rel=1e-9)
    else:
        assert sent > told * (ranks - 1) / ranks


def test_a_ring_sends_keys_and_values():
    """All but what is masked: the rank that sends most passes its own block and those of all ranks but the next on."""
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
    found = figure_6.table_bytes(16384, 16, partitioned, rank=5)
    assert found == {"parameters": weights, "gradients": weights, "optimizer": 2 * weights}


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
    """Levels count from the start of the step; events in the FFN are told apart."""
    blocks = [SimpleNamespace(place=place) for place in ("device", "device", "host", "elsewhere")]
    events = [(0, 0, 100), (1, 1, 30), (2, 2, 7), (3, 1, 20), (3.5, 3, 1), (4, 1, -50), (9, 0, -100)]
    history = SimpleNamespace(blocks=blocks, events=events)
    found = figure_13._within(history, {"block": [(2, 5)], "ffn": [(2.5, 3.2)]}, 100, 0)
    assert (found.device, found.host) == ([30, 50, 50, 0], [7, 7, 7, 7])
    assert found.in_ffn == [False, True, False, False] and (found.peak(True), found.peak(False)) == (50, 50)
    recorded = {(2, 4): figure_13.Backward([3, 8, 5], [1, 2, 1], [True, False, False])}
    rows = {row.label["in"]: row for row in figure_13.rows_of(recorded)}
    assert rows["the block"].agrees and rows["attention"].ours == 8 / 2**20
    figure_13.write(tmp_path, "f", "F", list(rows.values()), draw=lambda f: figure_13.draw(f, recorded))


def test_chunks_are_set_against_the_whole():
    whole = {"chunks": None, "activations": 400, "tokens_per_second": 10.0, "of_reference": 1.0}
    halves = {"chunks": 2, "activations": 240, "tokens_per_second": 9.0, "of_reference": 0.9}
    rows = figure_12_measured.rows_of([whole, halves])
    shares = {row.unit: row for row in rows if "of the whole" in row.unit}
    assert shares["activations, of the whole"].ours == 0.6
    assert shares["activations, of the whole"].error == pytest.approx(-10)
    assert shares["speed, of the whole"].ours == 0.9
