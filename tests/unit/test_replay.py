# SPDX-License-Identifier: Apache-2.0
"""Replays on a toy machine, each against a time line made by hand; the table and the picture of where time goes."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron.formulas.strategy import Group
from megatron.simulator.cost.trace import HostCopy, Kernel, Phase, Trace, Transfer, Wait
from megatron.simulator.dry_run.replay import Repeat, Stretch, Unsteady, duration, find_repeat, replay, table
from megatron.simulator.dry_run.timeline import coverage, draw, lanes
from megatron.simulator.machines.machine import Calibration, Link, Machine, Rate
from tests.properties import examples

ONE = Rate(((1.0, 1.0),), power=0.0)
# A FLOP, a byte of memory, of the link and of the host link each take a second.
TOY = Machine(
    "toy", 1e9, 0, {"bf16": 1.0, "fp32": 1.0}, 1.0, ONE, ONE, ONE, 0, 8, Link(1, 0), Link(1, 0), 1e9, Link(1, 0)
)


def work(seconds: float, kind: str = "gemm") -> Kernel:
    return Kernel("work", kind, 0 if kind == "memory" else seconds, seconds if kind == "memory" else 0)


def send(seconds: float, axis: str = "ring", ticket: int | None = None) -> Transfer:
    return Transfer("p2p", axis, Group(2), seconds, ticket)


def load(seconds: float, ticket: int | None = None) -> HostCopy:
    return HostCopy("to_device", seconds, ticket)


def run(*events: object, machine: Machine = TOY):
    return replay(Trace(list(events)), machine)


def test_compute_waits_at_once_without_a_ticket():
    went = run(work(2), send(3), work(1, "attention"), load(4), work(5, "memory"))
    assert went.seconds == 15
    assert went.exposed == {"gemm": 2, "ring": 3, "attention": 1, "host load": 4, "memory": 5}
    assert went.busy == {"compute": 8, "ring": 3, "host load": 4}


def test_a_ticket_hides_what_lasts_no_longer_than_the_compute_beside_it():
    hidden = run(work(1), send(3, ticket=1), work(4), Wait((1,)), work(1))
    assert hidden.seconds == 6 and "ring" not in hidden.exposed
    late = run(work(1), send(3, ticket=1), work(2), Wait((1,)), work(1))
    assert late.seconds == 5 and late.exposed == {"gemm": 4, "ring": 1}
    assert [(span.stream, span.begin, span.end) for span in late.spans][1] == ("ring", 1, 4)


def test_a_stream_works_in_order_and_axes_beside_each_other():
    went = run(send(3, ticket=1), send(2, ticket=2), send(4, "dp", ticket=3), load(1, ticket=4), Wait((4, 2, 3, 1)))
    times = {(span.stream, span.begin): span.end for span in went.spans}
    assert times == {("ring", 0): 3, ("ring", 3): 5, ("dp", 0): 4, ("host load", 0): 1}
    assert went.seconds == 5
    assert went.exposed == {"host load": 1, "ring": 3, "dp": 1}  # who ended last while compute stood


def test_what_nobody_waits_for_still_belongs_to_the_step():
    went = run(work(1), send(3, "dp", ticket=1))
    assert went.seconds == 4 and went.exposed == {"gemm": 1, "dp": 3}


def test_overlap_makes_compute_stand_for_its_share():
    machine = replace(TOY, calibration=Calibration(overlap=0.75))
    went = run(send(4, ticket=1), work(8), Wait((1,)), machine=machine)
    assert went.seconds == 9 and went.exposed == {"ring": 1, "gemm": 8}
    none = replace(TOY, calibration=Calibration(overlap=0.0))
    assert run(send(4, ticket=1), work(8), Wait((1,)), machine=none).seconds == 12  # as if it had no ticket
    assert run(load(4, ticket=1), work(8), Wait((1,)), machine=none).seconds == 8  # a copy takes no multiprocessor


def test_phases_counts_and_mfu():
    went = run(Phase("forward"), work(2), Phase("backward"), Kernel("twice", "gemm", 3, 0, count=2))
    assert went.phases == [("forward", 0), ("backward", 2)] and went.seconds == 8
    assert went.mfu(4, 1.0) == 0.5 and run().mfu(4, 1.0) == 0


def test_an_unknown_ticket_is_refused():
    with pytest.raises(ValueError, match="waits for ticket 7, which nothing before it has issued"):
        run(work(1), Wait((7,)), send(1, ticket=7))


seconds = st.floats(0, 10)
events = st.one_of(
    st.builds(work, seconds, st.sampled_from(["gemm", "attention", "memory"])),
    st.builds(send, seconds, st.sampled_from(["ring", "dp"]), st.one_of(st.none(), st.integers(0, 3))),
    st.builds(load, seconds, st.one_of(st.none(), st.integers(0, 3))),
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


def test_the_table_says_where_time_goes():
    went = run(work(2), send(3, ticket=1), work(1, "attention"), Wait((1,)), load(4))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(went, TOY, model_flops=3))
    text = console.export_text()
    assert "one step on toy: 9.00 s, MFU 33.3 %" in text
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:5]]
        for line in text.splitlines()
        if "│" in line
    }
    assert rows["communication: ring"] == ["3.00 s", "2.00 s", "22.2 %"]
    assert rows["compute: attention"] == ["1.00 s", "1.00 s", "11.1 %"]
    assert rows["host load"] == ["4.00 s", "4.00 s", "44.4 %"]


def test_durations_have_three_digits():
    values = [0, 3e-9, 4.21e-6, 0.0123, 0.5, 1.5, 12.34, 125.6]
    assert [duration(v) for v in values] == [
        "0",
        "0.00 µs",
        "4.21 µs",
        "12.3 ms",
        "500 ms",
        "1.50 s",
        "12.3 s",
        "126 s",
    ]


def test_columns_are_covered_by_what_lies_in_them():
    begins, ends = np.array([0.5, 2.0, 3.0]), np.array([1.5, 2.25, 4.0])
    assert coverage(begins, ends, np.arange(5.0)).tolist() == [0.5, 0.5, 0.25, 1.0]
    assert coverage(np.array([]), np.array([]), np.arange(3.0)).tolist() == [0, 0]


def test_the_picture_of_many_spans_is_drawn_in_seconds(tmp_path):
    from matplotlib import image

    steps = [Phase("forward")]
    for number in range(20_000):
        steps += [send(1, ticket=number), work(1), work(2, "attention"), Wait((number,)), load(0.5)]
    went = run(*steps, Phase("optimizer"), work(9, "memory"))
    assert lanes(went) == ["compute", "ring", "host load"]
    begin = time.process_time()
    draw(went, tmp_path / "new" / "timeline.png", "many")
    assert time.process_time() - begin < 20
    picture = image.imread(tmp_path / "new" / "timeline.png")[..., :3]
    for colour in ("#e69f00", "#0072b2", "#cc6677", "#d55e00"):  # attention, gemm, ring, host load
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(picture - wanted).max(axis=-1) < 0.02).sum() > 500, colour


def test_there_must_be_something_to_draw(tmp_path):
    with pytest.raises(ValueError, match="no spans"):
        draw(replay(Trace([work(1)]), TOY, keep_spans=False), tmp_path / "timeline.png")
    with pytest.raises(ValueError, match="none that takes time"):
        draw(run(work(0)), tmp_path / "timeline.png")


def ahead(*seconds: float) -> list:
    """A stretch that waits for what the one before it began, and begins as much itself."""
    events = []
    for index, long in enumerate(seconds, 1):
        events += [Wait((index - len(seconds),)), work(1), send(long, ("ring", "dp")[index % 2], ticket=index)]
    return [*events, load(0.5)]


@pytest.mark.parametrize("seconds", [(0.5,), (3.0,), (0.2, 4.0), (1.5, 0.5, 2.0)])
def test_what_repeats_is_played_as_if_it_were_written_out(seconds):
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
    found = replay(Trace([*before, *stretch, *after]), machine, repeat=repeat)
    written_out = [event for times in range(41) for event in moved(stretch, times * tickets)]
    whole = replay(Trace([*before, *written_out, *moved(after, 40 * tickets)]), machine)
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert found.exposed == pytest.approx(whole.exposed, rel=1e-12)
    assert found.busy == pytest.approx(whole.busy, rel=1e-12)
    assert len(found.spans) < len(whole.spans) / 4  # it was not played to the end


def test_a_stretch_that_is_waited_for_from_afar_does_not_repeat():
    passes = [Phase("forward"), send(1, ticket=1), Phase("forward"), send(1, ticket=2), Phase("forward")]
    near = find_repeat(Trace([*passes, send(1, ticket=3), Wait((2,))]), Stretch(3, 1, 1, 5))
    assert near == Repeat(2, 4, 5, 1)
    with pytest.raises(Unsteady):
        find_repeat(Trace([*passes, send(1, ticket=3), Wait((0,))]), Stretch(3, 1, 1, 5))
