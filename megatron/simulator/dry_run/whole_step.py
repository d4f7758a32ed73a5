# SPDX-License-Identifier: Apache-2.0
"""A step of all pipeline stages together, from a dry run's replays of each kind of rank.

A replay shows one rank that waits for no other stage, often with few layers and few micro-batches. It is cut into
passes. Copies of the last layer are added for the layers that did not run, and micro-batches are repeated. Then the
passes of all stages are scheduled so that each begins when its input has arrived. Reductions of gradients that stages
share, and of the optimizer's norm, begin when the last stage is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from megatron.simulator.dry_run.replay import Interval, Replay, Stretch
from megatron.training.settings.config import Config

# --- the schedule ---
#
# 1F1B (Megatron-LM, arXiv:2104.04473, section 2.2): a stage begins with forward passes, then alternates, and ends with
# backward passes. With interleaving, a rank has several virtual stages and runs them for one group of micro-batches
# after another. A pass begins when the rank is free and the neighbour's output of the same micro-batch has arrived. A
# sender never waits for its receiver.


class Slot(NamedTuple):
    """The place of a pass in a rank's program."""

    backward: bool
    micro_batch: int
    chunk: int  # the virtual stage
    index: int  # number of the pass among the rank's passes of its direction


PassTimes = Callable[[int, Slot], tuple[float, float]]
"""(stage, slot) -> (seconds of the pass, seconds from its begin until the next stage has its output)."""


def program(stage: int, stages: int, micro_batches: int, virtual: int = 1, group: int = 0) -> list[Slot]:
    """The passes of a rank of ``stage`` in their order.

    Args:
        virtual: virtual stages of a rank.
        group: consecutive micro-batches on a virtual stage; 0: as many as there are stages.
    """
    group, total = group or stages, micro_batches * virtual
    table = [
        (batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(virtual)
        for batch in range(first, min(first + group, micro_batches))
    ]
    warmup = stages - stage - 1 if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * group
    warmup = min(warmup, total)
    forward = [Slot(False, *place, index) for index, place in enumerate(table)]
    backward = [Slot(True, batch, virtual - 1 - chunk, index) for index, (batch, chunk) in enumerate(table)]
    slots = forward[:warmup]
    for pair in zip(forward[warmup:], backward):
        slots += pair
    return slots + backward[total - warmup :]


def begins(programs: list[list[Slot]], took: PassTimes, first: list[float] | None = None) -> list[list[float]]:
    """Seconds at which each pass of each stage's program begins.

    Args:
        first: when each stage may begin.

    Raises:
        ValueError: the programs are in a deadlock.
    """
    stages = len(programs)
    last = stages * (1 + max(slot.chunk for slot in programs[0])) - 1
    free = list(first or [0.0] * stages)
    inputs: dict[tuple[bool, int, int], float] = {}  # when the input of a virtual stage's pass arrives
    times: list[list[float]] = [[] for _ in programs]
    remaining = sum(map(len, programs))
    while remaining:
        before = remaining
        for stage, slots in enumerate(programs):
            while len(times[stage]) < len(slots):
                slot = slots[len(times[stage])]
                place = slot.chunk * stages + stage
                source = place == last if slot.backward else place == 0
                ready = 0.0 if source else inputs.get((slot.backward, slot.micro_batch, place))
                if ready is None:
                    break
                begin = max(free[stage], ready)
                seconds, sent = took(stage, slot)
                free[stage] = begin + seconds
                inputs[slot.backward, slot.micro_batch, place + (-1 if slot.backward else 1)] = begin + sent
                times[stage].append(begin)
                remaining -= 1
        if remaining == before:
            raise ValueError("stages of the pipeline wait for each other")
    return times


END = "gradients"  # name of the phase between the last pass and the optimizer


@dataclass(frozen=True)
class Pass:
    """A phase of a rank's step."""

    name: str
    seconds: float  # from its begin until the next phase begins
    sent: float  # seconds from its begin until its message has arrived; `seconds` if it sends none
    made: list[Interval] | Callable[[], list[Interval]]  # the spans, or what makes them when a picture needs them

    @cached_property
    def spans(self) -> list[Interval]:
        """In program order; seconds from the phase's begin."""
        return self.made() if callable(self.made) else self.made


@dataclass(frozen=True)
class Program:
    """A rank's complete step: the phase before its first pass, its passes in order, and the phases after them."""

    before: Pass
    forward: list[Pass]
    backward: list[Pass]
    after: list[Pass]


@dataclass(frozen=True)
class Placed:
    """A phase with its begin in the step; ``slot``: None before and after the passes."""

    begin: float
    phase: Pass
    slot: Slot | None


@dataclass(frozen=True)
class WholeStep:
    """The phases of all stages; ``seconds``: until the last stage is done."""

    stages: list[list[Placed]]
    seconds: float


def passes(replayed: Replay) -> list[Pass]:
    """The phases of a replay; the time before the first one is the phase ``start``."""
    times = [0.0, *(when for _, when in replayed.phases), replayed.seconds]
    marks = [0, *replayed.marks, len(replayed.spans)]
    names = ["start", *(name for name, _ in replayed.phases)]
    return [
        _pass(name, replayed.spans[marks[at] : marks[at + 1]], times[at], times[at + 1])
        for at, name in enumerate(names)
    ]


def _pass(name: str, spans: Sequence[Interval], begin: float, end: float) -> Pass:
    sent = next((span.end for span in spans if span.stream == "pp" and span.name == "p2p"), end)
    return Pass(name, end - begin, sent - begin, partial(_shifted, spans, -begin))


def with_all_layers(few: Pass, more: Pass, units: float) -> Pass:
    """``more`` with ``units`` further units of layers; the difference between ``more`` and ``few`` is one unit.

    If ``units`` is fractional, because recompute leaves an incomplete unit at the end of a stage, the fraction is added
    to the time only. If the passes differ in several places (reductions of gradients, whose buckets do not end with a
    layer), the spans of ``more`` are stretched over the time.
    """
    step = more.seconds - few.seconds
    seconds, sent = more.seconds + units * step, more.sent + units * (more.sent - few.sent)
    return Pass(more.name, seconds, sent, partial(_all_spans, few, more, units))


def _all_spans(few: Pass, more: Pass, units: float) -> list[Interval]:
    extra, step = len(more.spans) - len(few.spans), more.seconds - few.seconds
    cut = _first_extra(few.spans, more.spans) if extra > 0 else None
    if cut is None:
        return _shifted(more.spans, 0.0, 1 + units * step / more.seconds if more.seconds else 1.0)
    spans = list(more.spans[: cut + extra])
    for time in range(1, int(units) + 1):
        spans += _shifted(more.spans[cut : cut + extra], time * step)
    return _in_turn([*spans, *_shifted(more.spans[cut + extra :], units * step)])


def _in_turn(spans: list[Interval]) -> list[Interval]:
    """The spans, each beginning after the one before on its stream. A pass in which only some layers wait for the host
    is not periodic, so that its repeated layers overlap by microseconds."""
    ends: dict[str, float] = {}
    result = []
    for stream, kind, begin, end, name in spans:
        begin = max(begin, ends.get(stream, begin))
        ends[stream] = end = max(begin, end)
        result.append(Interval(stream, kind, begin, end, name))
    return result


def _first_extra(few: list[Interval], more: list[Interval]) -> int | None:
    """Index of the first span that ``more`` has in addition to ``few``; None: they differ in several places."""
    for key in (lambda x: (x.stream, x.name, f"{x.end - x.begin:.5g}"), lambda x: (x.stream, x.name)):
        a, b = list(map(key, few)), list(map(key, more))
        before, behind = _common_prefix(a, b), _common_prefix(a[::-1], b[::-1])
        if before + behind >= len(a):
            return before
    return None


def _common_prefix(a: list, b: list) -> int:
    """Length of the common prefix."""
    return next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _shifted(spans: Sequence[Interval], by: float, scale: float = 1.0) -> list[Interval]:
    return [
        Interval(stream, kind, begin * scale + by, end * scale + by, name) for stream, kind, begin, end, name in spans
    ]


def program_of(
    few: Replay, more: Replay, layers: tuple[int, int, int], stretch: Stretch | None, pipelined: bool
) -> Program:
    """A rank's complete step.

    Args:
        few, more: replays of two numbers of layers, ``layers[0]`` and ``layers[1]``; one replay if all layers ran.
        layers: these two numbers, and the number of all layers.
        stretch: the micro-batches that repeat; None: all ran.
    """
    phases = passes(more)
    if layers[1] != layers[2]:
        units = (layers[2] - layers[1]) / (layers[1] - layers[0])
        phases = [with_all_layers(a, b, units) for a, b in zip(passes(few), phases, strict=True)]
    after = [phases.pop()] if phases[-1].name == "optimizer" else []
    before, phases = phases[0], phases[1:]
    if pipelined:
        last, end = _split_last(phases.pop())
        phases.append(last)
        after.insert(0, end)
    if stretch:
        forward = [at for at, one in enumerate(phases) if one.name == "forward"]
        begin, end = forward[stretch.first], forward[stretch.first + stretch.passes]
        phases = [*phases[:begin], *(1 + stretch.times) * phases[begin:end], *phases[end:]]
    by_name = {name: [one for one in phases if one.name == name] for name in ("forward", "backward")}
    return Program(before, by_name["forward"], by_name["backward"], after)


def _split_last(last: Pass) -> tuple[Pass, Pass]:
    """(the last backward pass, the phase that begins with the first collective over the pipeline's stages)."""
    spans = last.spans
    at = next((at for at, x in enumerate(spans) if x.stream == "pp" and x.name != "p2p"), len(spans))
    when = spans[at].begin if at < len(spans) else last.seconds
    own = Pass(last.name, when, min(last.sent, when), spans[:at])
    return own, Pass(END, last.seconds - when, 0.0, _shifted(spans[at:], -when))


def stage_name(stage: int, stages: int) -> str:
    """The kind of a pipeline stage; one stage of each kind is simulated."""
    return "first" if stage == 0 else "last" if stage == stages - 1 else "middle"


def whole_step_of(config: Config, by_name: dict[str, Program], micro_batches: int) -> WholeStep:
    """Schedule the programs of all stages of a run; ``by_name``: of each kind of stage."""
    stages = config.parallel.pipeline_model_parallel_size
    programs = [by_name[stage_name(stage, stages)] for stage in range(stages)]
    virtual = config.parallel.num_virtual_stages_per_pipeline_rank or 1
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or 0
    slots = [program(stage, stages, micro_batches, virtual, group) for stage in range(stages)]

    def done(stage: int, slot: Slot) -> Pass:
        mine = programs[stage]
        return (mine.backward if slot.backward else mine.forward)[slot.index]

    def took(stage: int, slot: Slot) -> tuple[float, float]:
        one = done(stage, slot)
        return one.seconds, one.sent

    times = begins(slots, took, [mine.before.seconds for mine in programs])
    placed = [
        [
            Placed(0.0, mine.before, None),
            *(Placed(begin, done(stage, slot), slot) for begin, slot in zip(times[stage], slots[stage])),
        ]
        for stage, mine in enumerate(programs)
    ]
    now = max(row[-1].begin + row[-1].phase.seconds for row in placed)
    end = now
    for row, mine in zip(placed, programs):
        begin = now if stages > 1 else row[-1].begin + row[-1].phase.seconds
        for one in mine.after:
            row.append(Placed(begin, one, None))
            begin += one.seconds
        end = max(end, begin)
    return WholeStep(placed, end)
