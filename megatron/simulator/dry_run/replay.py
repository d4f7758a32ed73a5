# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on a machine: the time of every event, what waits for what, and the causes of the step's time.

Streams are those of a GPU: ``compute``, one for communication on each axis, and ``to_device`` and ``to_host`` for the
host link. Each runs its events in order. A transfer or copy starts when its stream is free and the compute before it in
the trace is done. With a ticket it overlaps compute until a Wait names the ticket; without one, compute waits for it.
Because NCCL's kernels use part of the device, compute stops for a share (1 - ``calibration.overlap``) of a transfer
that it overlaps; this time counts as waiting for the transfer's axis.

The host launches all events in the same order, each in ``Machine.dispatch`` seconds, ahead of the device where it can.
If it falls behind, the time that compute waits for it is ``launching``.

One rank is replayed; all others are assumed to be as fast. :attr:`Replay.waits` records the compute before each wait,
from which cost/jitter.py estimates the effect of unequal ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megatron.simulator.cost.jitter import Waits
from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.trace import Event, HostCopy, Kernel, Phase, Trace, Transfer, Wait
from megatron.simulator.machines.machine import Machine
from megatron.training.settings.config import Config

if TYPE_CHECKING:
    from megatron.training.report.memory_profile import Profile


# --- micro-batches that repeat, of which only a few are run ---
#
# Under 1F1B a stage begins with forward passes, then alternates, and ends with backward passes (Megatron-LM,
# arXiv:2104.04473). The first backward pass allocates gradients, and the last one reduces them. The passes between
# them repeat: a forward and a backward pass; with virtual stages, all passes of a group of micro-batches (by default as
# many as there are stages) on every virtual stage.


@dataclass(frozen=True)
class Stretch:
    """The micro-batches to run instead of all, and which of these repeat."""

    micro_batches: int  # to run
    # first, passes: the part that repeats begins with forward pass number `first` and has `passes` forward passes
    first: int
    passes: int
    times: int  # how often it repeats after it has run


@dataclass(frozen=True)
class Repeat:
    """Events ``begin`` to ``end`` of a trace are followed by ``times`` repetitions of them.

    In each repetition, the tickets that they issue and wait for are larger by ``tickets``.
    """

    begin: int
    end: int
    times: int
    tickets: int

    def more(self, trace: Trace) -> Trace:
        """One repetition."""
        return Trace(trace.events[self.begin : self.end])


class Unsteady(ValueError):
    """The micro-batches do not repeat: all of them have to run."""


def stretch_of(config: Config, stage: int, micro_batches: int) -> Stretch | None:
    """The micro-batches of a pipeline stage to run instead of all; None: all (few repeat, or groups differ)."""
    stages = config.parallel.pipeline_model_parallel_size
    virtual = config.parallel.num_virtual_stages_per_pipeline_rank
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or stages
    if virtual and micro_batches % group:  # the last group is smaller
        return None
    if virtual:
        passes = group * virtual
        warmup = 2 * (stages - stage - 1) + (virtual - 1) * group  # forward passes before the first backward pass
        groups = max(3, -(-(warmup + 2 * passes + 1) // passes))  # the first passes, those that repeat, the last
        run, first = groups * group, warmup + passes
    else:
        passes, warmup = 1, stages - stage - 1
        run, first = warmup + 3, warmup + 1
    if run >= micro_batches:
        return None
    return Stretch(run, first, passes, (micro_batches - run) // (group if virtual else 1))


def find_repeat(trace: Trace, stretch: Stretch) -> Repeat:
    """The repeating events of a trace.

    Raises:
        Unsteady: these or later events wait for something that began more than one repetition before.
    """
    forward = [at for at, event in enumerate(trace.events) if isinstance(event, Phase) and event.name == "forward"]
    begin, end = forward[stretch.first], forward[stretch.first + stretch.passes]
    issued = [
        event.ticket
        for event in trace.events[begin:end]
        if isinstance(event, Transfer | HostCopy) and event.ticket is not None
    ]
    waited = [ticket for event in trace.events[begin:] if isinstance(event, Wait) for ticket in event.tickets]
    if waited and (not issued or min(waited) < min(issued) - len(issued)):
        raise Unsteady("an event waits for another that is more than one repetition older")
    return Repeat(begin, end, stretch.times, len(issued))


def with_growth(profile: Profile, begin: int, end: int, times: int) -> Profile:
    """A memory profile with what ``times`` repetitions of its events ``begin`` to ``end`` leave allocated.

    A repetition leaves the losses that a step reports. All repetitions are assumed to come before these events.
    """
    growth = dict.fromkeys(range(len(profile["kinds"])), 0)
    for _, kind, change in profile["events"][begin:end]:
        growth[kind] += change
    when = profile["events"][begin][0] if begin < len(profile["events"]) else 0.0
    added = [(when, kind, times * change) for kind, change in growth.items() if change]
    return {**profile, "events": [*profile["events"][:begin], *added, *profile["events"][begin:]]}


HOST = {"to_device": "host load", "to_host": "host store"}


class Interval(NamedTuple):
    """An event on a stream; seconds since the step began."""

    stream: str
    kind: str
    begin: float
    end: float
    name: str


@dataclass
class Replay:
    """The result of a replay."""

    seconds: float  # of the step, until all streams are done
    busy: dict[str, float]  # seconds of work by stream
    # the step's seconds by cause: compute by kind (gemm, attention, memory), and waiting for an axis, `host load`,
    # `host store` or `launching`. They add up to `seconds`.
    exposed: dict[str, float]
    phases: list[tuple[str, float]]  # (name, begin) of each
    spans: list[Interval]  # events in the order of the trace; empty if they were not kept
    waits: Waits = field(default_factory=Waits)  # compute between collectives that compute waited for
    marks: list[int] = field(default_factory=list)  # number of spans before each phase


def replay(trace: Trace, machine: Machine, keep_spans: bool = True, repeat: Repeat | None = None) -> Replay:
    """Replay a trace.

    Args:
        repeat: events that repeat. They are played until the streams' positions relative to each other are the same as
            one repetition before; all further repetitions then take the same time.

    Raises:
        ValueError: a Wait names a ticket that no earlier event has issued.
    """
    player = Player(machine, keep_spans)
    if repeat is None:
        player.play(trace.events)
        return player.finish()
    player.play(trace.events[: repeat.begin])
    events, times = trace.events[repeat.begin : repeat.end], repeat.times
    player.play(events)
    for done in range(1, times + 1):
        before = player.state((done - 1) * repeat.tickets)
        player.play(events, done * repeat.tickets)
        if player.is_steady(before, done * repeat.tickets):
            player.skip(before, times - done, repeat.tickets)
            break
    player.play(trace.events[repeat.end :], times * repeat.tickets)
    return player.finish()


@dataclass
class State:
    """The state of a player's streams at a moment."""

    now: float
    ahead: dict[str | int, float]  # seconds until streams, and tickets, are done
    busy: dict[str, float]
    exposed: dict[str, float]
    host: float
    waits: Waits


class Player:
    """Plays events by the rules in the module's docstring."""

    def __init__(self, machine: Machine, keep_spans: bool) -> None:
        self.machine, self.keep_spans = machine, keep_spans
        self.slowdown = 1.0 - machine.calibration.overlap
        self.now = 0.0  # of the compute stream
        # When the host has launched the last event; the first one is launched when the step begins.
        self.host = -machine.dispatch
        self.worked = 0.0  # seconds of compute since the last wait for a collective
        self.waits = Waits()
        self.free: dict[str, float] = {}
        self.busy: dict[str, float] = {"compute": 0.0}
        self.exposed: dict[str, float] = {}
        self.done: dict[int, tuple[float, str]] = {}
        self.ranks: dict[int, int] = {}  # size of the group, by ticket
        self.phases: list[tuple[str, float]] = []
        self.spans: list[Interval] = []
        self.marks: list[int] = []

    def play(self, events: list[Event], tickets: int = 0) -> None:
        """Play events, with ``tickets`` added to their tickets."""
        for event in events:
            if isinstance(event, Kernel):
                self._compute(event)
            elif isinstance(event, Transfer | HostCopy):
                self._move(event, tickets)
            elif isinstance(event, Wait):
                self._wait(sorted(_end_of(ticket + tickets, self.done) for ticket in event.tickets))
                self._count_wait(max((self.ranks.get(ticket + tickets, 0) for ticket in event.tickets), default=0))
            elif isinstance(event, Phase):
                self.phases.append((event.name, self.now))
                self.marks.append(len(self.spans))

    def finish(self) -> Replay:
        """The result, after all streams are done."""
        self._wait(sorted((end, stream) for stream, end in self.free.items()))  # for all streams
        self.waits.add(1, self.worked)
        return Replay(self.now, self.busy, self.exposed, self.phases, self.spans, self.waits, self.marks)

    def state(self, tickets: int) -> State:
        """The current state, with ``tickets`` subtracted from unfinished tickets."""
        ahead: dict[str | int, float] = {stream: end - self.now for stream, end in self.free.items() if end > self.now}
        ahead |= {ticket - tickets: end - self.now for ticket, (end, _) in self.done.items() if end > self.now}
        if self.host > self.now:
            ahead["launching"] = self.host - self.now
        return State(self.now, ahead, dict(self.busy), dict(self.exposed), self.host, self.waits.scaled(1.0))

    def is_steady(self, before: State, tickets: int) -> bool:
        """Whether all streams are as far ahead of compute as in the state ``before``."""
        now, then = self.state(tickets).ahead, before.ahead
        tolerance = 1e-9 * (self.now - before.now)
        return all(abs(now.get(what, 0.0) - then.get(what, 0.0)) <= tolerance for what in {*now, *then})

    def skip(self, before: State, times: int, tickets: int) -> None:
        """Repeat everything since ``before`` another ``times`` times."""
        took = times * (self.now - before.now)
        for total, then in ((self.busy, before.busy), (self.exposed, before.exposed)):
            for name, seconds in total.items():
                total[name] = seconds + times * (seconds - then.get(name, 0.0))
        self.now += took
        self.host += times * (self.host - before.host)
        self.waits.grow(before.waits, times)
        self.free = {stream: end + took for stream, end in self.free.items()}
        self.done = {ticket + times * tickets: (end + took, stream) for ticket, (end, stream) in self.done.items()}
        self.ranks = {ticket + times * tickets: ranks for ticket, ranks in self.ranks.items()}

    def _compute(self, kernel: Kernel) -> None:
        took = kernel_seconds(kernel, self.machine)
        self.host += kernel.count * self.machine.dispatch
        late = self.host + took / kernel.count - (self.now + took)  # the last repetition begins when it is launched
        self._advance("launching", late)
        begin = self.now
        self.busy["compute"] += took
        self.worked += took
        self._advance(kernel.kind, took)
        if self.keep_spans:
            self.spans.append(Interval("compute", kernel.kind, begin, self.now, kernel.name))

    def _count_wait(self, ranks: int) -> None:
        """Record that compute has waited for a collective of ``ranks``; 0: for none."""
        if ranks > 1:
            self.waits.add(ranks, self.worked)
            self.worked = 0.0

    def _move(self, event: Transfer | HostCopy, tickets: int) -> None:
        if isinstance(event, Transfer):
            took, stream, name = transfer_seconds(event, self.machine), event.axis, event.kind
        else:
            took, stream, name = copy_seconds(event, self.machine), HOST[event.direction], event.direction
        self.host += event.count * self.machine.dispatch
        if event.ticket is None:
            self._advance("launching", self.host - self.now)
        begin = max(self.now, self.host, self.free.get(stream, 0.0))
        end = self.free[stream] = begin + took
        self.busy[stream] = self.busy.get(stream, 0.0) + took
        if self.keep_spans and took:
            self.spans.append(Interval(stream, stream, begin, end, name))
        ranks = event.group.size if isinstance(event, Transfer) and event.axis != "pp" else 0
        if event.ticket is None:
            self._wait([(end, stream)])
            self._count_wait(ranks)
            return
        self.ranks[event.ticket + tickets] = ranks
        self.done[event.ticket + tickets] = (end, stream)
        if isinstance(event, Transfer):
            self._advance(stream, self.slowdown * took)

    def _wait(self, ends: list[tuple[float, str]]) -> None:
        for end, stream in ends:
            if end > self.now:
                self._advance(stream, end - self.now)
                self.now = end

    def _advance(self, what: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed[what] = self.exposed.get(what, 0.0) + seconds
            self.now += seconds


def _end_of(ticket: int, done: dict[int, tuple[float, str]]) -> tuple[float, str]:
    if ticket not in done:
        raise ValueError(f"the trace waits for ticket {ticket}, which nothing before it has issued")
    return done[ticket]


def duration(seconds: float) -> str:
    """A time with three digits in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.{2 if seconds < 10 * size else 1 if seconds < 100 * size else 0}f} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0"
