# SPDX-License-Identifier: Apache-2.0
"""A few micro-batches for all: those in the middle of a step are alike, so one stretch of them stands for the rest.

Under 1F1B a stage begins with forward passes alone, then alternates, then ends with backward passes alone (Megatron-LM,
arXiv:2104.04473). The first backward pass makes what the next ones add to, and the last one sends gradients. What lies
between repeats: one forward and one backward pass; with virtual stages, those of a group of micro-batches, as many as
there are stages unless the flags say otherwise, on every virtual stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.simulator.cost.trace import HostCopy, Phase, Trace, Transfer, Wait
from megatron.training.arguments.config import Config

if TYPE_CHECKING:  # it brings numpy, which planners need not wait for
    from megatron.training.report.memory_picture import Profile


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
