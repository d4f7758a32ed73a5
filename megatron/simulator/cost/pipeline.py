# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline together: which passes each runs, in which order, and when each can begin.

1F1B (Megatron-LM, arXiv:2104.04473, section 2.2): a stage begins with forward passes alone, then alternates, then ends
with backward passes alone. Interleaved, a rank has several virtual stages and goes through them in groups of
micro-batches. A pass begins when the rank is free and its input is there: the neighbour's output of the same
micro-batch. A sender waits for nobody, as if its receiver had room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Turn(NamedTuple):
    """A pass in a rank's program; ``index``: how many of its direction the rank has run before."""

    backward: bool
    micro_batch: int
    chunk: int
    index: int


Took = Callable[[int, Turn], tuple[float, float]]
"""Of (stage, turn): seconds of the pass, and seconds from its begin until the next stage has its output."""


def program(stage: int, stages: int, micro_batches: int, virtual: int = 1, group: int = 0) -> list[Turn]:
    """What a rank of ``stage`` does, in its order.

    Args:
        virtual: stages of a rank.
        group: micro-batches that a virtual stage takes in a row; default: as many as there are stages.
    """
    group, total = group or stages, micro_batches * virtual
    table = [
        (batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(virtual)
        for batch in range(first, min(first + group, micro_batches))
    ]
    alone = stages - stage - 1 if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * group
    alone = min(alone, total)
    forward = [Turn(False, *place, index) for index, place in enumerate(table)]
    backward = [Turn(True, batch, virtual - 1 - chunk, index) for index, (batch, chunk) in enumerate(table)]
    turns = forward[:alone]
    for one, other in zip(forward[alone:], backward):
        turns += [one, other]
    return turns + backward[total - alone :]


def begins(programs: list[list[Turn]], took: Took, first: list[float] | None = None) -> list[list[float]]:
    """When each pass of each stage's program begins, seconds.

    Args:
        first: when each stage may begin.

    Raises:
        ValueError: the programs wait for each other in a circle.
    """
    stages = len(programs)
    last = stages * (1 + max(turn.chunk for turn in programs[0])) - 1
    free = list(first or [0.0] * stages)
    there: dict[tuple[bool, int, int], float] = {}  # when the input of a virtual stage's pass is there
    found: list[list[float]] = [[] for _ in programs]
    left = sum(map(len, programs))
    while left:
        before = left
        for stage, turns in enumerate(programs):
            while len(found[stage]) < len(turns):
                turn = turns[len(found[stage])]
                place = turn.chunk * stages + stage
                source = place == last if turn.backward else place == 0
                ready = 0.0 if source else there.get((turn.backward, turn.micro_batch, place))
                if ready is None:
                    break
                begin = max(free[stage], ready)
                seconds, sent = took(stage, turn)
                free[stage] = begin + seconds
                there[turn.backward, turn.micro_batch, place + (-1 if turn.backward else 1)] = begin + sent
                found[stage].append(begin)
                left -= 1
        if left == before:
            raise ValueError("stages of the pipeline wait for each other")
    return found
