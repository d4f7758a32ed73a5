# SPDX-License-Identifier: Apache-2.0
"""What a run begins with: weights by a seed, states of the optimizer; and the ranges of a profile."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.training import step
from megatron.training.model import optimizer, weights


def test_states_that_an_optimizer_begins_with() -> None:
    for make, names in (
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.AdamW(p, 0.1), {"step", "exp_avg", "exp_avg_sq"}),
    ):
        weight = nn.Parameter(torch.ones(3))
        inner = make([weight])
        optimizer.fill_states(SimpleNamespace(optimizer=inner))
        assert inner.state[weight].keys() == names and not any(state.any() for state in inner.state[weight].values())
    other = SimpleNamespace(optimizer=torch.optim.Adadelta([nn.Parameter(torch.ones(3))]))  # makes its own
    optimizer.fill_states(other)
    assert not other.optimizer.state and not hasattr(other, "init_state_fn")


def test_phases_have_ranges_while_torch_profiles() -> None:
    marked: list[str] = []
    assert step.with_profiler_ranges(marked.append) == marked.append and step.with_profiler_ranges(None) is None
    with torch.profiler.profile() as profile:
        for mark in (step.with_profiler_ranges(marked.append), step.with_profiler_ranges(None)):
            mark("a phase")
    assert marked == ["a phase"] and sum(event.name == "a phase" for event in profile.events()) == 2


def test_a_seed_gives_the_same_weights_in_all_versions() -> None:
    """A checkpoint may be continued, and a table reproduced, with another version."""
    generator = weights.generator_of("1/decoder.final", torch.device("cpu"))
    digits = hashlib.sha256(b"1/decoder.final").hexdigest()[:14]
    assert generator.initial_seed() == int("".join(digits[at : at + 2] for at in range(12, -1, -2)), 16)
    assert torch.randn(3, generator=weights.generator_of("1", torch.device("cpu"))).shape == (3,)


@pytest.mark.parametrize(
    "marks, shares", [({}, (1,)), ({"partition_stride": 2}, (1, 1)),
                      ({"partition_sections": (3, 1), "partition_stride": 1}, (3, 1))]
)  # fmt: skip
def test_shares_of_a_parameter_that_tp_splits(marks: dict[str, Any], shares: tuple[int, ...]) -> None:
    assert weights.sections(SimpleNamespace(**marks)) == shares
    x = torch.arange(8.0)
    assert [len(part) for part in weights.in_sections(x, 0, shares)] == [8 * share // sum(shares) for share in shares]
