# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules with warm-up, as our flags set them up."""

from types import SimpleNamespace

import pytest

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tests.distributed.training_runs import LLAMA, SHAPE

RUN = (
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 "
    "--eval-iters 0 --device cpu --lr 1.0 --min-lr 0.2"
)


def learning_rates(flags: str, steps: int) -> list[float]:
    """The learning rate of each step."""
    from megatron.training.arguments.schedule import schedule_unit
    from megatron.training.model.optimizer import build_schedule

    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, 1)
    optimizer = SimpleNamespace(param_groups=[{"default_config": True}])
    schedule = build_schedule(optimizer, config)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step(config.data.global_batch_size * schedule_unit(config))
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


def test_by_tokens():
    """SHAPE's samples have 64 tokens: the schedule is that of as many samples."""
    by_samples = "--lr-decay-style cosine --lr-warmup-samples 8 --train-samples 32"
    by_tokens = "--lr-decay-style cosine --lr-warmup-tokens {} --train-tokens {}"
    length = parse(f"{SHAPE} {RUN}".split()).data.seq_length
    rates = learning_rates(by_samples, 9)
    assert learning_rates(by_tokens.format(8 * length, 32 * length), 9) == rates
    both = f"--train-samples 1000 --lr-decay-tokens {32 * length} --lr-warmup-tokens {8 * length}"
    assert learning_rates(f"--lr-decay-style cosine {both}", 9) == rates
    iterations = f"--train-iters 250 --lr-decay-tokens {32 * length} --lr-warmup-iters 2"
    assert learning_rates(f"--lr-decay-style cosine {iterations}", 9) == rates
    wsd = "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-samples 16"
    assert learning_rates(f"{wsd} --train-tokens {32 * length}", 9) == learning_rates(f"{wsd} --train-samples 32", 9)


@pytest.mark.parametrize("ramp", ["", "--rampup-batch-size 2 1 11", "--rampup-batch-size 1 1 30"])
@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("--train-iters 7", None),
        ("--train-samples 32", None),
        ("--train-tokens 2048", 32),
        ("--train-tokens 2049", 33),  # the step that reaches it is the last
        ("--train-samples 1000 --train-tokens 2048", 32),
        ("--train-samples 32 --train-tokens 204800", None),
        ("--train-iters 7 --train-tokens 640000", None),
        ("--train-iters 700 --train-tokens 2048", 32),
    ],
)
def test_length_of_run(length: str, expected: int | None, ramp: str):
    from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator

    from megatron.training.arguments.schedule import samples_after
    from megatron.training.job import length_of_run

    config = parse(f"{SHAPE} {RUN} {length} {ramp}".split(), LLAMA, 1)
    data = config.data
    calculator = _build_num_microbatches_calculator(0, data.rampup_batch_size, data.global_batch_size, 1, 1, False)
    iterations, samples = length_of_run(config, calculator)
    assert samples == samples_after(config, iterations)
    if expected is not None:
        assert samples >= expected > samples_after(config, iterations - 1)
    elif "iters" in length:
        assert iterations == 7
    else:
        assert 32 <= samples < 36 and samples_after(config, iterations - 1) < 32


def test_tokens_left_by_samples_of_another_length():
    from megatron.training.checkpoint.run_state import Progress
    from megatron.training.job import length_of_run

    config = parse(f"{SHAPE} {RUN} --train-tokens 2048".split(), LLAMA, 1)
    done = Progress(iteration=4, consumed_train_samples=16, consumed_train_tokens=16 * 32)
    assert length_of_run(config, None, done) == (4 + 6, 16 + 24)  # 1536 tokens are left, 24 samples of 64


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("--train-iters 12", (12, 32 + 8 * 2)),
        ("--train-samples 40", (4 + 4, 40)),
        ("--train-samples 41", (4 + 4, 40)),
        ("--train-iters 3", (4, 32)),
        ("--train-samples 20", (4, 32)),
    ],
)
def test_what_is_left_with_batches_of_another_size(length: str, expected: tuple[int, int]):
    """Four steps of 8 samples were taken, the next ones are of 2: the data must reach that far."""
    from megatron.training.checkpoint.run_state import Progress
    from megatron.training.job import length_of_run

    config = parse(f"{SHAPE} {RUN} {length} --global-batch-size 2".split(), LLAMA, 1)
    done = Progress(iteration=4, consumed_train_samples=32, consumed_train_tokens=32 * 64)
    assert length_of_run(config, None, done) == expected


def test_iterations_with_a_growing_batch_are_the_samples_they_take():
    """Steps of 2, 2, 2, 3, 3, 4, 4, 4 and 4 samples."""
    ramp = "--rampup-batch-size 2 1 11 --lr-decay-style cosine"
    config = parse(f"{SHAPE} {RUN} {ramp} --train-iters 9 --lr-warmup-iters 2 --lr-decay-iters 6".split(), LLAMA, 1)
    assert any("--train-iters 9 with --rampup-batch-size takes 28 samples" in note for note in config.notes)
    by_iterations = learning_rates(f"{ramp} --train-iters 9 --lr-warmup-iters 2 --lr-decay-iters 6", 9)
    by_samples = learning_rates(f"{ramp} --train-samples 28 --lr-warmup-samples 4 --lr-decay-samples 16", 9)
    assert by_iterations == by_samples


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train-tokens 2048 --lr-warmup-tokens 2048", "the warm-up takes 2048 tokens decay ends at 2048"),
        ("--train-tokens 2048 --lr-decay-iters 4", "--lr-decay-iters --train-tokens use --lr-decay-tokens"),
        ("--train-samples 64 --lr-decay-tokens 2048 --lr-warmup-fraction 0.5", "--lr-warmup-tokens 1024"),
        ("--train-tokens 64 --lr-warmup-tokens 1 --lr-warmup-fraction 0.5", "--lr-warmup-fraction --lr-warmup-tokens"),
        ("--train-tokens 64 --lr-decay-style WSD", "--lr-wsd-decay-samples"),
        ("--train-tokens 0", "--train-tokens 0 at least 1"),
    ],
)
def test_refusals_by_tokens(flags: str, words: str):
    with pytest.raises(Refusal) as caught:
        parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, 1)
    assert all(word in str(caught.value) for word in words.split()), caught.value


def test_samples_beside_tokens_are_not_read_and_said_so():
    flags = (
        "--train-samples 64 --lr-decay-samples 60 --lr-decay-tokens 2048 --lr-warmup-samples 4 --lr-warmup-tokens 64"
    )
    notes = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, 1).notes
    assert sum("is not read beside --lr-" in note for note in notes) == 2
