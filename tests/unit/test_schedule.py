# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules with warm-up, as our flags set them up."""

from types import SimpleNamespace

import pytest

from megatron.training.arguments.parser import parse
from tests.distributed.training_runs import LLAMA, SHAPE

RUN = (
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 "
    "--eval-iters 0 --device cpu --lr 1.0 --min-lr 0.2"
)


def learning_rates(flags: str, steps: int) -> list[float]:
    """The learning rate of each step."""
    from megatron.training.model.optimizer import build_schedule

    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, 1)
    optimizer = SimpleNamespace(param_groups=[{"default_config": True}])
    schedule = build_schedule(optimizer, config)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step(config.data.global_batch_size)
    return rates


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--lr-decay-style constant", [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("--lr-decay-style linear", [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
        ("--lr-decay-style linear --lr-decay-iters 4", [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2, 0.2]),
        ("--lr-decay-style linear --lr-warmup-iters 4", [0, 0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2]),
        ("--lr-decay-style constant --lr-warmup-fraction 0.5", [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("--lr-decay-style cosine", [1, 0.97, 0.883, 0.753, 0.6, 0.447, 0.317, 0.23, 0.2]),
        (
            "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 4 --lr-warmup-iters 2",
            [0, 0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
    ],
)
def test_schedules(flags, expected):
    assert learning_rates(f"{flags} --train-iters 8", 9) == pytest.approx(expected, abs=1e-3)


def test_by_samples():
    by_iterations = learning_rates("--lr-decay-style cosine --lr-warmup-iters 2 --train-iters 8", 9)
    by_samples = learning_rates("--lr-decay-style cosine --lr-warmup-samples 8 --train-samples 32", 9)
    assert by_samples == by_iterations
