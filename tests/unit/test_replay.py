# SPDX-License-Identifier: Apache-2.0
"""A simulated GPU uses the attention kernel that `kernels.select` would choose on a real one, and prices it."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from math import inf, prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron.context_parallel as cp
from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels import KernelUnavailable
from megatron.context_parallel.attention.kernels.triton_kernels import triton_tiles
from megatron.context_parallel.attention.ring_plan import _attention_plan
from megatron.context_parallel.core.groups import forget_grid
from megatron.context_parallel.fpdt.chunked_loss import add_product
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.formulas.strategy import Group
from megatron.platform import hooks
from megatron.platform.hooks import patched, patched_items, replaceable, replaced
from megatron.platform.simulated_cluster import simulated_world
from megatron.simulator.cost.seconds import attention_named, kernel_seconds
from megatron.simulator.cost.trace import HostCopy, Kernel, Phase, Trace, Transfer, Wait
from megatron.simulator.dry_run.recording.gpu_kernels import gpu_kernels
from megatron.simulator.dry_run.recording.recorder import Recorder
from megatron.simulator.dry_run.replay import Repeat, Stretch, Unsteady, duration, find_repeat, replay
from megatron.simulator.dry_run.timeline import coverage, draw
from megatron.simulator.machines.machine import Calibration, Link, Machine, Rate
from megatron.simulator.machines.machine_file import load
from tests.properties import examples

bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
MASK, MANY = {"needs_mask": True}, {"tile_rows": 1024.0}


@pytest.mark.parametrize(
    "gpu, name, dtype, head, how, chosen",
    [
        ("A100-80G", "auto", bf16, 64, {}, "flash"),
        ("H100-80G", "auto", bf16, 128, {}, "cudnn"),
        ("B200-192G", "auto", bf16, 128, {}, "cudnn"),
        ("H100-80G", "auto", bf16, 256, {}, "cudnn"),
        ("B200-192G", "auto", bf16, 256, {}, "flash"),  # cuDNN supports heads above 128 only on Hopper
        ("L20-48G", "auto", bf16, 256, {}, "triton"),  # no backward of flash attention for 256 on small GPUs
        ("H100-80G", "auto", bf16, 100, {}, "triton"),  # not a multiple of 8
        ("H100-80G", "auto", fp32, 128, {}, "triton"),
        ("H100-80G", "auto", fp64, 128, {}, "math"),
        ("H100-80G", "auto", bf16, 512, {}, "math"),
        ("A100-80G", "auto", bf16, 128, MANY, "triton"),
        ("H100-80G", "auto", bf16, 128, MANY, "triton"),
        ("H100-80G", "cudnn", bf16, 128, MANY, "cudnn"),
        ("H100-80G", "flash_attn", bf16, 128, {}, "flash_attn"),
        ("A100-80G", "auto", bf16, 64, {"needs_dropout": True}, "triton"),
        ("A100-80G", "auto", bf16, 64, {"needs_softcap": True}, "triton"),
        ("A100-80G", "auto", bf16, 64, MASK, "triton"),
        ("A100-80G", "auto", fp64, 64, MASK, "math"),
        ("A100-80G", "triton", bf16, 64, {}, "triton"),
        ("A100-80G", "math", bf16, 64, MASK, "math"),
    ],
)
def test_what_a_gpu_would_take(gpu, name, dtype, head, how, chosen):
    with gpu_kernels(Recorder({}), load(gpu)):
        assert kernels.select(name, device="cpu", dtype=dtype, head_dim=head, **how).name == chosen


@pytest.mark.parametrize(
    "gpu, kernel, rows, chosen",
    [
        ("H100-80G", "flash_attn", inf, "flash_attn"),  # version 3
        ("B200-192G", "flash_attn", inf, "cudnn"),  # version 2 does not use Blackwell's instructions
        ("H100-80G", "flash", inf, "flash"),
        ("H100-80G", "flash", 1024.0, "triton"),
        ("H100-80G", "flash_attn", 2.0**17, "flash_attn"),
        ("H100-80G", "flash_attn", 1024.0, "triton"),
    ],
)
def test_a_machine_that_names_its_kernel(gpu, kernel, rows, chosen):
    machine = replace(load(gpu), attention_kernel=kernel)
    assert machine.choose_attention("auto", bf16, 128, tile_rows=rows) == chosen


def test_a_measured_crossover_replaces_the_prediction():
    machine = replace(load("H100-80G"), attention_kernel="flash_attn", crossover={"flash_attn": 500.0})
    assert machine.choose_attention("auto", bf16, 128, tile_rows=1024.0) == "flash_attn"
    assert machine.choose_attention("auto", bf16, 128, tile_rows=400.0) == "triton"


@pytest.mark.parametrize(
    "name, head, how, says",
    [
        ("flash", 64, MASK, "does not support masks.*can run on that GPU: triton, math"),
        ("cudnn", 256, {}, "at most 128"),
        ("cpu", 64, {}, "needs tensors on the CPU"),
        ("fa4", 64, {}, "no such kernel"),
    ],
)
def test_what_a_gpu_would_refuse(name, head, how, says):
    with pytest.raises(KernelUnavailable, match=says):
        load("A100-80G").choose_attention(name, bf16, head, **how)


@pytest.mark.parametrize("gpu", ["A100-80G", "H100-80G", "B200-192G", "L20-48G"])
@pytest.mark.parametrize("head", [64, 128, 192, 256])
def test_a_present_and_a_simulated_gpu_choose_the_same_kernel(monkeypatch, gpu, head):
    machine = load(gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: machine.capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    for rows in (inf, 1024.0):
        order = kernels.available("cuda", bf16, head, tile_rows=rows)
        real = [name for name in order if name not in ("triton", "flash_attn")]  # these may not be installed
        simulated = machine.choose_attention("auto", bf16, head, tile_rows=rows)
        assert simulated == ("triton" if rows < inf or real[0] == "math" else real[0])


def test_the_closed_form_prices_what_the_dry_run_does():
    machine, shape = load("B200-192G"), (32768.0, 32768.0, 32.0, 256.0)
    closed, recorded = (Kernel(name, "attention", 4e15, 1e9, shape) for name in ("attention", attention_named("flash")))
    assert kernel_seconds(closed, machine) == kernel_seconds(recorded, machine)
    on_cudnn = replace(closed, name=attention_named("cudnn"))
    assert kernel_seconds(closed, machine) > 4 * kernel_seconds(on_cudnn, machine)


def launches(mask, s=256, b=2, h=4, d=64, **how):
    layout = cp.SequenceLayout(s, abstract_grid())
    q, k, v = (torch.randn(s, b, h, d, dtype=bf16, requires_grad=True) for _ in range(3))
    recorder = Recorder({})
    with gpu_kernels(recorder, load("H100-80G")), recorder:
        out = cp.attention(q, k, v, layout=layout, mask=mask, **how)
        out.backward(torch.ones_like(out))
    return [event for event in recorder.trace.events if getattr(event, "kind", "") == "attention"], recorder.trace


def test_products_that_add_to_a_sum_are_products():
    recorder = Recorder({})
    with FakeTensorMode(), gpu_kernels(recorder, load("A100-80G")), recorder:
        total, a, b = torch.empty(6, 5), torch.empty(6, 3, dtype=bf16), torch.empty(3, 5, dtype=bf16)
        add_product(total, a, b)  # bf16 matrices, fp32 sum
        add_product(total, a.float(), b.float())
    products = [event for event in recorder.trace.events if getattr(event, "kind", "") == "gemm"]
    sums = 2 * 4 * 6 * 5  # read and written
    assert [(one.name, one.flops, one.bytes, one.itemsize) for one in products] == [
        ("addmm", 2 * 6 * 3 * 5, sums + 2 * (6 * 3 + 3 * 5), 2),
        ("addmm_", 2 * 6 * 3 * 5, sums + 4 * (6 * 3 + 3 * 5), 4),
    ]


def test_tritons_launches_are_priced_by_the_pairs_of_their_tiles():
    result, _ = launches(cp.Causal(), alibi_slopes=alibi_slopes(4))
    assert {one.name for one in result} == {attention_named("triton")}
    pairs = 2 * 4 * 64 * 256 * 257 // 2
    assert [(one.flops, one.backward) for one in result] == [(4 * pairs, False), (6 * pairs, True), (8 * pairs, True)]
    machine = load("H100-80G")
    assert machine.kernels["triton"] < machine.kernels[machine.plain_kernel()]
    assert all(kernel_seconds(one, machine) >= machine.launch for one in result)


def test_a_window_takes_one_launch_forward_and_two_backward():
    result, _ = launches(cp.Window(63))
    assert [one.backward for one in result] == [False, True, True]
    pairs = sum(min(row + 1, 64) for row in range(256))
    assert result[0].flops == 4 * 2 * 4 * 64 * pairs


def test_a_mask_function_is_evaluated_once_in_each_pass(monkeypatch):
    mask = cp.MaskFunction(lambda q, k: (q - k) % 3 != 1, cp.Causal())
    result, trace = launches(mask)
    assert len(result) == 3
    asked = [event.bytes for event in trace.events if getattr(event, "name", "") == "mask_bits"]
    assert len(asked) == 2 and asked[0] == asked[1] == 24 * 256 * 256
    _attention_plan.cache_clear()  # cached tiles remember how they were grouped into launches
    # Bits that do not fit at once need more launches, as in the kernel itself.
    monkeypatch.setattr(triton_tiles, "BITS_AT_ONCE", 4096)
    monkeypatch.setattr(triton_tiles, "MASKED_ROWS", 64)
    assert len(launches(mask)[0]) == 3 * 2


# Replays on a toy machine compared with time lines made by hand; the table and the picture.


ONE = Rate(((1.0, 1.0),), power=0.0)
# A FLOP takes a second, and so does a byte through memory, the link or the host link.
TOY = Machine(
    "toy", 1e9, 0, {"bf16": 1.0, "fp32": 1.0}, 1.0, ONE, ONE, ONE, 0, 8, Link(1, 0), Link(1, 0), 1e9, Link(1, 0)
)


def work(seconds: float, kind: str = "gemm") -> Kernel:
    return Kernel("work", kind, 0 if kind == "memory" else seconds, seconds if kind == "memory" else 0)


def send(seconds: float, axis: str = "ring", ticket: int | None = None) -> Transfer:
    return Transfer("p2p", axis, Group(2), seconds, ticket)


def load_chunk(seconds: float, ticket: int | None = None) -> HostCopy:
    return HostCopy("to_device", seconds, ticket)


def run(*events: object, machine: Machine = TOY):
    return replay(Trace(list(events)), machine)


def test_compute_waits_at_once_without_a_ticket():
    went = run(work(2), send(3), work(1, "attention"), load_chunk(4), work(5, "memory"))
    assert went.seconds == 15
    assert went.exposed == {"gemm": 2, "ring": 3, "attention": 1, "host load": 4, "memory": 5}
    assert went.busy == {"compute": 8, "ring": 3, "host load": 4}


def test_a_transfer_with_a_ticket_is_hidden_by_as_much_compute():
    hidden = run(work(1), send(3, ticket=1), work(4), Wait((1,)), work(1))
    assert hidden.seconds == 6 and "ring" not in hidden.exposed
    late = run(work(1), send(3, ticket=1), work(2), Wait((1,)), work(1))
    assert late.seconds == 5 and late.exposed == {"gemm": 4, "ring": 1}
    assert [(span.stream, span.begin, span.end) for span in late.spans][1] == ("ring", 1, 4)


def test_a_stream_works_in_order_and_axes_concurrently():
    went = run(
        send(3, ticket=1), send(2, ticket=2), send(4, "dp", ticket=3), load_chunk(1, ticket=4), Wait((4, 2, 3, 1))
    )
    times = {(span.stream, span.begin): span.end for span in went.spans}
    assert times == {("ring", 0): 3, ("ring", 3): 5, ("dp", 0): 4, ("host load", 0): 1}
    assert went.seconds == 5
    assert went.exposed == {"host load": 1, "ring": 3, "dp": 1}  # the stream that compute waited for last


def test_transfers_that_nothing_waits_for_count_in_the_step():
    went = run(work(1), send(3, "dp", ticket=1))
    assert went.seconds == 4 and went.exposed == {"gemm": 1, "dp": 3}


def test_compute_stops_for_the_share_of_a_transfer_that_cannot_overlap():
    machine = replace(TOY, calibration=Calibration(overlap=0.75))
    went = run(send(4, ticket=1), work(8), Wait((1,)), machine=machine)
    assert went.seconds == 9 and went.exposed == {"ring": 1, "gemm": 8}
    none = replace(TOY, calibration=Calibration(overlap=0.0))
    assert run(send(4, ticket=1), work(8), Wait((1,)), machine=none).seconds == 12  # the same as without a ticket
    assert run(load_chunk(4, ticket=1), work(8), Wait((1,)), machine=none).seconds == 8  # a copy uses no multiprocessor


def test_phases_and_counts():
    went = run(Phase("forward"), work(2), Phase("backward"), Kernel("twice", "gemm", 3, 0, count=2))
    assert went.phases == [("forward", 0), ("backward", 2)] and went.seconds == 8


def test_an_unknown_ticket_is_refused():
    with pytest.raises(ValueError, match="waits for ticket 7, which nothing before it has issued"):
        run(work(1), Wait((7,)), send(1, ticket=7))


seconds = st.floats(0, 10)
events = st.one_of(
    st.builds(work, seconds, st.sampled_from(["gemm", "attention", "memory"])),
    st.builds(send, seconds, st.sampled_from(["ring", "dp"]), st.one_of(st.none(), st.integers(0, 3))),
    st.builds(load_chunk, seconds, st.one_of(st.none(), st.integers(0, 3))),
)


@examples(60)
@given(st.lists(events, max_size=30), st.floats(0, 1))
def test_where_time_goes_adds_up(steps, overlap):
    machine = replace(TOY, calibration=Calibration(overlap=overlap))
    went = run(*steps, machine=machine)
    assert sum(went.exposed.values()) == pytest.approx(went.seconds)
    assert max(went.busy.values()) <= went.seconds * (1 + 1e-9) <= sum(went.busy.values()) * (1 + 1e-6) + 1e-9
    ends: dict[str, float] = {}
    for span in went.spans:
        assert span.begin >= ends.get(span.stream, 0.0) - 1e-9
        ends[span.stream] = span.end
    bare = replay(Trace(list(steps)), machine, keep_spans=False)
    assert not bare.spans and bare.seconds == went.seconds


def test_durations_have_three_digits():
    values = [0, 3e-9, 4.21e-6, 0.0123, 0.5, 1.5, 12.34, 125.6]
    shown = ["0", "0.00 µs", "4.21 µs", "12.3 ms", "500 ms", "1.50 s", "12.3 s", "126 s"]
    assert [duration(v) for v in values] == shown


def test_coverage_is_the_share_of_a_column_that_spans_fill():
    begins, ends = np.array([0.5, 2.0, 3.0]), np.array([1.5, 2.25, 4.0])
    assert coverage(begins, ends, np.arange(5.0)).tolist() == [0.5, 0.5, 0.25, 1.0]
    assert coverage(np.array([]), np.array([]), np.arange(3.0)).tolist() == [0, 0]


def test_a_timeline_without_spans_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no spans"):
        draw(replay(Trace([work(1)]), TOY, keep_spans=False), tmp_path / "timeline.png")
    with pytest.raises(ValueError, match="none that takes time"):
        draw(run(work(0)), tmp_path / "timeline.png")


def ahead(*seconds: float) -> list:
    """A stretch of events that waits for transfers of the previous stretch and starts those for the next."""
    events = []
    for index, long in enumerate(seconds, 1):
        events += [Wait((index - len(seconds),)), work(1), send(long, ("ring", "dp")[index % 2], ticket=index)]
    return [*events, load_chunk(0.5)]


@pytest.mark.parametrize("seconds", [(0.5,), (3.0,), (0.2, 4.0), (1.5, 0.5, 2.0)])
def test_repetitions_are_replayed_like_the_complete_list(seconds):
    stretch, tickets = ahead(*seconds), len(seconds)
    before = [work(2), *(send(0.1, ticket=index - tickets) for index in range(1, tickets + 1))]
    after = [Wait((tickets,)), work(1, "attention")]
    machine = replace(TOY, calibration=Calibration(overlap=0.9))

    def moved(events, by):
        return [
            replace(event, tickets=tuple(ticket + by for ticket in event.tickets))
            if isinstance(event, Wait)
            else replace(event, ticket=event.ticket + by)
            if isinstance(event, Transfer)
            else event
            for event in events
        ]

    repeat = Repeat(len(before), len(before) + len(stretch), 40, tickets)
    result = replay(Trace([*before, *stretch, *after]), machine, repeat=repeat)
    written_out = [event for times in range(41) for event in moved(stretch, times * tickets)]
    whole = replay(Trace([*before, *written_out, *moved(after, 40 * tickets)]), machine)
    assert result.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert result.exposed == pytest.approx(whole.exposed, rel=1e-12)
    assert result.busy == pytest.approx(whole.busy, rel=1e-12)
    assert len(result.spans) < len(whole.spans) / 4  # repetitions were not played


def test_a_stretch_that_waits_for_more_than_the_previous_one_does_not_repeat():
    passes = [Phase("forward"), send(1, ticket=1), Phase("forward"), send(1, ticket=2), Phase("forward")]
    near = find_repeat(Trace([*passes, send(1, ticket=3), Wait((2,))]), Stretch(3, 1, 1, 5))
    assert near == Repeat(2, 4, 5, 1)
    with pytest.raises(Unsteady):
        find_repeat(Trace([*passes, send(1, ticket=3), Wait((0,))]), Stretch(3, 1, 1, 5))


# A simulated world: real grids for ranks that do not exist.


# (tensor, ulysses, ring, data, pipeline)
GRIDS = [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (1, 4, 2, 3, 1), (4, 1, 3, 2, 5), (2, 3, 1, 1, 4), (8, 8, 4, 2, 4)]


def coordinates(rank, sizes):
    """The definition: rank = tp + T * (u + U * (r + R * (d + D * p)))."""
    result = []
    for size in sizes:
        result.append(rank % size)
        rank //= size
    return result


CASES = [(sizes, rank) for sizes in GRIDS for rank in sorted({0, 1, prod(sizes) // 2, prod(sizes) - 1})]


@pytest.mark.parametrize("sizes, rank", [case for case in CASES if case[1] < prod(case[0])])
def test_coordinates_and_groups(sizes, rank):
    tensor, ulysses, ring, data, pipeline = sizes
    mine = coordinates(rank, sizes)
    strides = [1, tensor, tensor * ulysses, tensor * ulysses * ring, tensor * ulysses * ring * data]
    with simulated_world(prod(sizes), rank):
        grid = cp.initialize_grid(tensor=tensor, ulysses=ulysses, ring=ring, pipeline=pipeline)
        axes = (grid.tensor, grid.ulysses, grid.ring, grid.data, grid.pipeline)
        assert [axis.size for axis in axes] == list(sizes)
        assert [axis.rank for axis in axes] == mine
        assert grid.world_size == dist.get_world_size() == prod(sizes)
        assert dist.get_rank() == rank
        for axis, stride, coordinate in zip(axes, strides, mine):
            first = rank - stride * coordinate
            assert dist.get_process_group_ranks(axis.group) == [first + stride * n for n in range(axis.size)]
            assert axis.global_rank(coordinate) == rank
        first = rank - tensor * (mine[1] + ulysses * mine[2])
        context = [first + tensor * n for n in range(ulysses * ring)]
        assert dist.get_process_group_ranks(grid.context.group) == context
        assert grid.context.rank == mine[1] + ulysses * mine[2]


def test_collectives_return_at_once():
    with simulated_world(64, rank=5):
        grid = cp.initialize_grid(ulysses=4, ring=4)
        x = torch.ones(3)
        dist.all_reduce(x, group=grid.context.group)
        parts = torch.empty(16 * 3)
        dist.all_gather_into_tensor(parts, x, group=grid.context.group)
        dist.barrier()


def test_attention_runs_with_true_shapes():
    with simulated_world(16, rank=9):
        layout = cp.SequenceLayout(64, cp.initialize_grid(ulysses=4, ring=4))
        q = torch.zeros(4, 1, 8, 16, requires_grad=True)
        out = cp.attention(q, q, q, layout=layout)
        out.sum().backward()
        assert out.shape == q.shape == q.grad.shape


def nothing_is_left():
    return not dist.is_initialized() and not parallel_state.model_parallel_is_initialized()


def test_the_context_leaves_nothing_behind():
    create_group = parallel_state.create_group
    with simulated_world(8, rank=3):
        cp.initialize_grid(ulysses=2, ring=2)
        assert parallel_state.create_group is not create_group
    assert nothing_is_left() and parallel_state.create_group is create_group
    with pytest.raises(KeyError):
        with simulated_world(8):
            cp.initialize_grid(ring=8)
            raise KeyError
    assert nothing_is_left() and parallel_state.create_group is create_group
    grid = cp.initialize_grid()  # afterwards, a real world of one process
    try:
        assert grid.world_size == 1 and dist.get_backend() == "gloo"
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_a_grid_that_does_not_fit_is_refused_and_leaves_nothing():
    with pytest.raises(ValueError, match="does not divide the 6 processes"):
        with simulated_world(6):
            cp.initialize_grid(ring=4)
    assert nothing_is_left()


def test_no_world_within_a_world():
    with simulated_world(4):
        with pytest.raises(RuntimeError, match="already"):
            with simulated_world(2):
                pass
        assert dist.get_world_size() == 4
    assert nothing_is_left()


@pytest.mark.parametrize("size, rank", [(4, 4), (4, -1), (0, 0)])
def test_there_is_no_such_rank(size, rank):
    with pytest.raises(ValueError, match="has no rank"):
        with simulated_world(size, rank):
            pass


@pytest.mark.lab
def test_groups_of_16384_ranks_in_five_seconds():
    seconds = []
    for rank in (0, 16383):
        start = time.process_time()  # CPU time: other programs on this machine do not count
        with simulated_world(16384, rank):
            grid = cp.initialize_grid(tensor=8, ulysses=8, ring=4, pipeline=4)
            assert grid.data.size == 16 and grid.world_size == 16384
        seconds.append(time.process_time() - start)
    assert min(seconds) < 5, seconds


def test_a_deterministic_run_leaves_later_ones_as_they_were(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    with simulated_world(2):
        torch.use_deterministic_algorithms(True)
        os.environ |= {"NCCL_ALGO": "Ring", "KEPT": "2"}
    assert not torch.are_deterministic_algorithms_enabled()
    assert "NCCL_ALGO" not in os.environ and os.environ["KEPT"] == "1"


# The hooks by which a simulation replaces functions.


@replaceable
def doubled(x: int) -> int:
    return 2 * x


def test_a_replaceable_function_is_replaced_temporarily_and_replacements_nest() -> None:
    with replaced(doubled, lambda before: lambda x: before(x) + 1):
        assert doubled(3) == 7
        with replaced(doubled, lambda before: lambda x: 10 * before(x)):
            assert doubled(3) == 70
        assert doubled(3) == 7
    assert doubled(3) == 6 and doubled.__name__ == "doubled"


def test_a_replacement_is_undone_after_an_error() -> None:
    table = {"a": 1}
    with pytest.raises(KeyError), replaced(doubled, lambda _: str), patched_items(table, {"b": 2}):
        assert table == {"b": 2} and doubled(3) == "3"
        raise KeyError
    assert table == {"a": 1} and doubled(3) == 6


def test_other_libraries_can_be_patched_and_this_program_cannot() -> None:
    before = json.dumps
    with patched(json, "dumps", lambda _: "patched"):
        assert json.dumps({}) == "patched"
    assert json.dumps is before
    with (
        pytest.raises(ValueError, match="part of this program: mark Replaceable as replaceable"),
        patched(hooks, "Replaceable", None),
    ):
        raise AssertionError("unreachable")


def test_another_grid_forgets_the_groups_of_core(monkeypatch):
    destroyed = []
    monkeypatch.setattr(parallel_state, "destroy_model_parallel", lambda: destroyed.append(1))
    forget_grid()
    assert destroyed == [1]
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    forget_grid()  # there is nothing to forget
    assert destroyed == [1]
