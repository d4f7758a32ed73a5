# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on a machine: when everything happens, what waits for what, where the step's time goes.

Streams, as on a GPU: ``compute``; one for each axis's communication; ``to_device`` and ``to_host``, the two directions
of the host link. Each works off its events in order. A transfer or copy starts when its stream is free, and not before
the compute that precedes it in the trace. With a ticket it runs beside compute until a Wait names the ticket; without
one compute waits at once. While a transfer runs beside compute, NCCL's kernels take part of the device: that part of
its time (1 - ``calibration.overlap``) compute stands still, and counts as waiting for the transfer's axis.

The host launches everything in that order too, each in ``Machine.dispatch`` seconds, and as far ahead of the device
as it gets: where it falls behind, compute stands still for ``launching``.

One rank is replayed: others are as fast, and ready when it is. :attr:`Replay.waits` says after how much compute it
waited for whom, from which cost/jitter.py tells what unequal ranks lose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from megatron.simulator.cost.jitter import Waits
from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.trace import Event, HostCopy, Kernel, Phase, Trace, Transfer, Wait
from megatron.simulator.machines.machine import Machine
from megatron.training.arguments.config import Config

if TYPE_CHECKING:
    from megatron.training.report.memory_profile import Profile


# A few micro-batches for all: those in the middle of a step are alike, so one stretch of them stands for the rest.
#
# Under 1F1B a stage begins with forward passes alone, then alternates, then ends with backward passes alone
# (Megatron-LM, arXiv:2104.04473). The first backward pass makes what the next ones add to, and the last one sends
# gradients. What lies between repeats: one forward and one backward pass; with virtual stages, those of a group of
# micro-batches, as many as there are stages unless the flags say otherwise, on every virtual stage.


@dataclass(frozen=True)
class Stretch:
    """What to run in place of a whole step.

    Attributes:
        micro_batches: to run.
        first, passes: the stretch that repeats begins with this forward pass and has so many.
        times: how often it repeats beyond its own run.
    """

    micro_batches: int
    first: int
    passes: int
    times: int


@dataclass(frozen=True)
class Repeat:
    """Events ``begin`` to ``end`` of a trace happen ``times`` times more, right after themselves; each time the tickets
    that they issue, and wait for, are ``tickets`` further on."""

    begin: int
    end: int
    times: int
    tickets: int

    def more(self, trace: Trace) -> Trace:
        """What happens more, once."""
        return Trace(trace.events[self.begin : self.end])


class Unsteady(ValueError):
    """The stretch does not repeat: all micro-batches have to run."""


def stretch_of(config: Config, stage: int, micro_batches: int) -> Stretch | None:
    """The micro-batches that stand for all on a pipeline stage; None where that saves nothing."""
    stages = config.parallel.pipeline_model_parallel_size
    virtual = config.parallel.num_virtual_stages_per_pipeline_rank
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or stages
    if virtual and micro_batches % group:  # the last group is smaller
        return None
    if virtual:
        passes = group * virtual
        alone = 2 * (stages - stage - 1) + (virtual - 1) * group  # forward passes before the first backward pass
        groups = max(3, -(-(alone + 2 * passes + 1) // passes))  # the first of each kind, the stretch, the last
        run, first = groups * group, alone + passes
    else:
        passes, alone = 1, stages - stage - 1
        run, first = alone + 3, alone + 1
    if run >= micro_batches:
        return None
    return Stretch(run, first, passes, (micro_batches - run) // (group if virtual else 1))


def find_repeat(trace: Trace, stretch: Stretch) -> Repeat:
    """Where in its trace the stretch is.

    Raises:
        Unsteady: something in it or after it waits for what began more than a stretch before.
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
        raise Unsteady("a wait reaches too far back")
    return Repeat(begin, end, stretch.times, len(issued))


def with_growth(profile: Profile, begin: int, end: int, times: int) -> Profile:
    """A profile in which its events ``begin`` to ``end`` are the last of ``times`` more of their kind: what each of
    them left behind (the losses that a step reports) is there."""
    left = dict.fromkeys(range(len(profile["kinds"])), 0)
    for _, kind, change in profile["events"][begin:end]:
        left[kind] += change
    when = profile["events"][begin][0] if begin < len(profile["events"]) else 0.0
    more = [(when, kind, times * change) for kind, change in left.items() if change]
    return {**profile, "events": [*profile["events"][:begin], *more, *profile["events"][begin:]]}


COMPUTE = ("gemm", "attention", "memory")
HOST = {"to_device": "host load", "to_host": "host store"}


class Interval(NamedTuple):
    """Something that a stream did; seconds since the step began."""

    stream: str
    kind: str
    begin: float
    end: float
    name: str


@dataclass
class Replay:
    """How a step went.

    Attributes:
        seconds: of the step; it ends when all streams have.
        busy: seconds of work by stream.
        exposed: where the step's seconds go: compute by kind (gemm, attention, memory), else what compute waited for
            (an axis, ``host load``, ``host store``, ``launching``). They add up to ``seconds``.
        phases: when each began.
        spans: in the order of the trace; none if they were not kept.
        waits: compute between collectives that it waited for.
        marks: how many spans there are before each phase.
    """

    seconds: float
    busy: dict[str, float]
    exposed: dict[str, float]
    phases: list[tuple[str, float]]
    spans: list[Interval]
    waits: Waits = field(default_factory=Waits)
    marks: list[int] = field(default_factory=list)

    def mfu(self, model_flops: float, peak: float) -> float:
        """Share of ``peak`` FLOP/s that the model's FLOPs of this rank make: no recompute, by convention."""
        return model_flops / (self.seconds * peak) if self.seconds else 0.0


def replay(trace: Trace, machine: Machine, keep_spans: bool = True, repeat: Repeat | None = None) -> Replay:
    """
    Args:
        repeat: events that happen more often than the trace has them. They are played until all streams stand, to each
            other, as they did a repetition before: then every further one is the same, and takes as long.

    Raises:
        ValueError: a Wait names a ticket that nothing before it has issued.
    """
    player = Player(machine, keep_spans)
    if repeat is None:
        player.play(trace.events)
        return player.finish()
    player.play(trace.events[: repeat.begin])
    events, times = trace.events[repeat.begin : repeat.end], repeat.times
    player.play(events)
    for done in range(1, times + 1):
        before = player.standing((done - 1) * repeat.tickets)
        player.play(events, done * repeat.tickets)
        if player.settled(before, done * repeat.tickets):
            player.leap(before, times - done, repeat.tickets)
            break
    player.play(trace.events[repeat.end :], times * repeat.tickets)
    return player.finish()


@dataclass
class Standing:
    """Where the streams of a player are at a moment."""

    now: float
    ahead: dict[str | int, float]  # seconds until streams, and tickets, are done
    busy: dict[str, float]
    exposed: dict[str, float]
    host: float
    waits: Waits


class Player:
    """Plays events; see the module."""

    def __init__(self, machine: Machine, keep_spans: bool) -> None:
        self.machine, self.keep_spans = machine, keep_spans
        self.felt = 1.0 - machine.calibration.overlap
        self.now = 0.0  # of the compute stream
        self.host = (
            -machine.dispatch
        )  # when the host has launched what was played; the first is there as the step begins
        self.worked = 0.0  # seconds of compute since a collective was waited for
        self.waits = Waits()
        self.free: dict[str, float] = {}
        self.busy: dict[str, float] = {"compute": 0.0}
        self.exposed: dict[str, float] = {}
        self.done: dict[int, tuple[float, str]] = {}
        self.ranks: dict[int, int] = {}  # of the groups of tickets
        self.phases: list[tuple[str, float]] = []
        self.spans: list[Interval] = []
        self.marks: list[int] = []

    def play(self, events: list[Event], tickets: int = 0) -> None:
        """``tickets`` is added to those of the events."""
        for event in events:
            if isinstance(event, Kernel):
                self._compute(event)
            elif isinstance(event, Transfer | HostCopy):
                self._move(event, tickets)
            elif isinstance(event, Wait):
                self._wait(sorted(ended(ticket + tickets, self.done) for ticket in event.tickets))
                self._met(max((self.ranks.get(ticket + tickets, 0) for ticket in event.tickets), default=0))
            elif isinstance(event, Phase):
                self.phases.append((event.name, self.now))
                self.marks.append(len(self.spans))

    def finish(self) -> Replay:
        self._wait(sorted((end, stream) for stream, end in self.free.items()))  # what nobody has waited for
        self.waits.add(1, self.worked)
        return Replay(self.now, self.busy, self.exposed, self.phases, self.spans, self.waits, self.marks)

    def standing(self, tickets: int) -> Standing:
        """``tickets`` is taken off those that are not yet done."""
        ahead: dict[str | int, float] = {stream: end - self.now for stream, end in self.free.items() if end > self.now}
        ahead |= {ticket - tickets: end - self.now for ticket, (end, _) in self.done.items() if end > self.now}
        if self.host > self.now:
            ahead["launching"] = self.host - self.now
        return Standing(self.now, ahead, dict(self.busy), dict(self.exposed), self.host, self.waits.scaled(1.0))

    def settled(self, before: Standing, tickets: int) -> bool:
        """Whether all that is under way stands to compute as it did then."""
        here, there = self.standing(tickets).ahead, before.ahead
        tolerance = 1e-9 * (self.now - before.now)
        return all(abs(here.get(what, 0.0) - there.get(what, 0.0)) <= tolerance for what in {*here, *there})

    def leap(self, before: Standing, times: int, tickets: int) -> None:
        """What happened since ``before`` happens ``times`` times more."""
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
        late = self.host + took / kernel.count - (self.now + took)  # the last of them begins when it is launched
        self._pass("launching", late)
        begin = self.now
        self.busy["compute"] += took
        self.worked += took
        self._pass(kernel.kind, took)
        if self.keep_spans:
            self.spans.append(Interval("compute", kernel.kind, begin, self.now, kernel.name))

    def _met(self, ranks: int) -> None:
        """Compute has waited for a collective of ``ranks``; 0: for none."""
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
            self._pass("launching", self.host - self.now)
        begin = max(self.now, self.host, self.free.get(stream, 0.0))
        end = self.free[stream] = begin + took
        self.busy[stream] = self.busy.get(stream, 0.0) + took
        if self.keep_spans and took:
            self.spans.append(Interval(stream, stream, begin, end, name))
        ranks = event.group.size if isinstance(event, Transfer) and event.axis != "pp" else 0
        if event.ticket is None:
            self._wait([(end, stream)])
            self._met(ranks)
            return
        self.ranks[event.ticket + tickets] = ranks
        self.done[event.ticket + tickets] = (end, stream)
        if isinstance(event, Transfer):
            self._pass(stream, self.felt * took)

    def _wait(self, ends: list[tuple[float, str]]) -> None:
        for end, stream in ends:
            if end > self.now:
                self._pass(stream, end - self.now)
                self.now = end

    def _pass(self, what: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed[what] = self.exposed.get(what, 0.0) + seconds
            self.now += seconds


def ended(ticket: int, done: dict[int, tuple[float, str]]) -> tuple[float, str]:
    if ticket not in done:
        raise ValueError(f"the trace waits for ticket {ticket}, which nothing before it has issued")
    return done[ticket]


def table(result: Replay, machine: Machine, model_flops: float | None = None) -> Table:
    """Where the time goes: a row for each kind of compute and each stream beside it, the largest share first.

    With ``model_flops`` of this rank, also MFU against the peak of the machine's dtype.
    """
    title = f"one step on {machine.name}: {duration(result.seconds)}"
    if model_flops is not None:
        title += f", MFU {100 * result.mfu(model_flops, machine.peak[machine.dtype]):.1f} %"
    out = Table("", "busy", "step's time", "share", title=title, title_justify="left")
    for column in out.columns[1:]:
        column.justify = "right"
    names = {*result.exposed, *result.busy} - {"compute"}
    for name in sorted(names, key=lambda name: (name not in COMPUTE, -result.exposed.get(name, 0.0), name)):
        exposed = result.exposed.get(name, 0.0)
        work = exposed if name in COMPUTE else result.busy[name]
        label = f"compute: {name}" if name in COMPUTE else name if name in HOST.values() else f"communication: {name}"
        share = exposed / result.seconds if result.seconds else 0.0
        out.add_row(label, duration(work), duration(exposed), f"{100 * share:.1f} %")
    return out


def duration(seconds: float) -> str:
    """Three digits and a unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.{2 if seconds < 10 * size else 1 if seconds < 100 * size else 0}f} {unit}"
    return f"{seconds * 1e6:.2f} µs" if seconds else "0"
