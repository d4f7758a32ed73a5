# SPDX-License-Identifier: Apache-2.0
"""The interface between the training loop and what a run does in addition to its steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.step import StepResult


@dataclass
class Step:
    """One iteration. The loop sets the later fields during the step."""

    iteration: int  # the first one of a run is 1
    samples: int  # of the global batch
    length: int  # tokens of each sample that count
    learning_rate: float
    last: bool  # whether the run ends with it
    result: StepResult | None = None
    seconds: float = 0.0
    slow: bool = False  # whether it took much longer than recent steps, on this rank or (after the vote) on any rank


class Feature:
    """One feature of a run. The loop calls each method on every rank, so a method may use collectives."""

    def before_step(self) -> None:
        """Called before the forward pass."""

    def after_step(self, step: Step) -> None:
        """Called after the update, when ``result`` and ``seconds`` of the step are known."""

    def after_log(self, step: Step) -> None:
        """Called after the step was evaluated and logged; checkpoints are saved after this."""

    def stop(self) -> None:
        """Called when training has ended without an error."""


def due(interval: int | None, iteration: int) -> bool:
    """Whether something that happens every ``interval`` iterations happens now; never without an interval."""
    return bool(interval) and iteration % interval == 0
