# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot run are refused before the first step with one line and exit code 2, as a user sees it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.training.arguments.foreign import megatron_flags
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Gather, Refusal, Refusals, short
from megatron.training.settings.config import Config
from tests.distributed.flags import LLAMA, SHAPE
from tests.patience import patience
from tests.program import run_forked

ROOT = Path(__file__).resolve().parents[2]
GOOD = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --num-workers 0 --device cpu"
)
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"


def pretrain(flags: str, world: int = 1, fresh: bool = False) -> subprocess.CompletedProcess:
    """Start pretrain_llama.py as rank 0 of ``world`` processes; a refusal comes before it would wait for the others.

    ``fresh``: in a new Python process; otherwise in a fork, which saves the time for imports.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    if world > 1:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    script = ROOT / "pretrain_llama.py"
    if not fresh:
        return run_forked(script, flags.split(), environment)
    command = [sys.executable, str(script), *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(100), env=environment)


def refused(flags: str, *expected: str, world: int = 1, fresh: bool = False) -> None:
    done = pretrain(flags, world, fresh)
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "iteration" not in done.stdout
    for text in expected:
        assert text in lines[0]


@pytest.mark.parametrize(
    "flags, world, expected",
    [
        ("--num-attention-heads 6 --kv-channels 8 --ulysses-parallel-size 4", 4, ("--ulysses-parallel-size", "heads")),
        ("--attention-kernel cudnn", 1, ("--attention-kernel cudnn", "GPU", "cpu")),
        (
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
            "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
            "--linear-attention-kernel fla",
            1,
            ("--linear-attention-kernel fla: needs a GPU", "blocks"),
        ),
        ("--lazy-mpu-init 1", 1, ("--lazy-mpu-init",)),
        ("--partition-position-embedding", 1, ("--partition-position-embedding", "learned_absolute")),
        ("--device cuda", 1, ("--device",)),
    ],
)
def test_settings_that_cannot_run(flags, world, expected):
    refused(f"{GOOD} {MOCK} {flags}", *expected, world=world)


@pytest.mark.full
def test_a_refusal_in_a_new_process_is_one_line_too():
    refused(f"{GOOD} {MOCK} --attention-kernel cudnn", "--attention-kernel cudnn", fresh=True)


def test_several_refusals_are_a_list_with_the_command_line_that_would_be_accepted():
    done = pretrain(f"{GOOD} {MOCK} --lazy-mpu-init 1 --rope-theta 500000")
    assert done.returncode == 2 and "iteration" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[0] == "error: 2 settings cannot run"
    assert lines[1].startswith("  1. --lazy-mpu-init: ") and lines[2] == "  2. --rope-theta: use --rotary-base"
    assert lines[3] == "this would be accepted (without --lazy-mpu-init, --rope-theta; with --rotary-base 500000):"
    assert lines[4] == f"  {GOOD} {MOCK} --rotary-base 500000" and len(lines) == 5


def test_a_missing_data_file(tmp_path):
    refused(
        f"{GOOD} --data-path {tmp_path}/nothing --tokenizer-type NullTokenizer --vocab-size 100",
        "--data-path",
        f"{tmp_path}/nothing",
    )


def test_a_vocabulary_larger_than_the_tokenizers():
    refused(f"{GOOD} --mock-data --tokenizer-type ByteLevelTokenizer --vocab-size 5000", "--vocab-size 5000")


def test_the_same_settings_without_the_fault_do_run():
    done = pretrain(f"{GOOD} {MOCK} --log-interval 1")
    assert done.returncode == 0, done.stderr
    assert "iteration        1/       1" in done.stdout


# All refusals of a command line at once, in order, and the command line that would be accepted.


ACCEPTED = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 99 --attention-dropout 0 --bf16"
)


def refused_with_command(flags: str, world_size: int = 8) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(flags.split(), world_size=world_size)
    assert "\n" not in str(caught.value)
    return caught.value


def test_one_refusal_alone_stays_one_line():
    refusal = refused_with_command(f"{ACCEPTED} --lazy-mpu-init 1")
    assert type(refusal) is Refusal and refusal.render() == str(refusal)
    assert str(refusal) == "--lazy-mpu-init: weights are always created at start-up: leave it out"


def test_words_and_settings_are_refused_together_in_order():
    """Order: malformed values, unknown flags, refused flags, other values, conflicts; each once, no consequences."""
    refusal = refused_with_command(
        f"{ACCEPTED} --lazy-mpu-init 1 --seq-lenght 128 --optimizer lion --clip-grad x --zero-stage 7 "
        "--ulysses-parallel-size 3 --recompute-granularity full --load-optim-state"
    )
    assert isinstance(refusal, Refusals) and refusal.lines == [
        "--clip-grad: invalid number value: 'x'",
        "--seq-lenght is not a known flag: did you mean --seq-length?",
        "--load-optim-state is not a known flag; the nearest is --no-load-optim, and --help lists all",
        "--lazy-mpu-init: weights are always created at start-up: leave it out",
        "--zero-stage 7: not supported; choose from 0, 1, 2, 3",
        "--optimizer lion: not supported; choose from adam, sgd, muon",
        "--ulysses-parallel-size 3 = 3 ranks does not divide the 8 processes: start a multiple of 3, or lower a size",
        "--ulysses-parallel-size 3 does not divide the 8 query heads of a TP rank (--num-attention-heads 8, TP 1): use "
        "--ulysses-parallel-size 2; with unequal shares, attention would take 12% longer",
        "--seq-length 256 cannot be divided by Ulysses 3 x Ring 1 (zigzag): use a multiple of 3, 255 or 258",
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers: for the least memory add "
        "--recompute-method uniform --recompute-num-layers 1",
    ]
    assert refusal.command is None  # the user has to choose the optimizer and the grid


@pytest.mark.parametrize(
    "flags, first",
    [
        (
            "--position-embedding-type rope --multi-latent-attention --latent-exchange latents "
            "--fpdt --fpdt-chunk-size 32 --ffn-chunks 2",
            "--latent-exchange latents with --fpdt is not supported",
        ),
        ("--parallel-residual --fpdt --fpdt-chunk-size 32", "--parallel-residual with --fpdt is not supported"),
    ],
)  # fmt: skip
def test_a_refusal_that_only_a_change_causes_is_not_listed(flags, first):
    """Without --fpdt, which is one way out of these, its other flags would be refused."""
    refusal = refused_with_command(f"{ACCEPTED} {flags}")
    assert not isinstance(refusal, Refusals) and str(refusal).startswith(first)


def test_what_a_change_needs_in_addition_is_part_of_the_command():
    refusal = refused_with_command(
        f"{ACCEPTED} --lazy-mpu-init 1 --parallel-residual --normalization LayerNorm --fpdt --fpdt-chunk-size 32"
    )
    assert len(refusal.lines) == 2 and refusal.changes == "without --lazy-mpu-init, --fpdt, --fpdt-chunk-size"


def test_the_list_ends_with_the_command_line_that_would_be_accepted():
    refusal = refused_with_command(f"{ACCEPTED} --lazy-mpu-init 1 --ulyses-parallel-size 4 --ulysses_degree 2 --fpdt")
    assert isinstance(refusal, Refusals) and len(refusal.lines) == 4
    assert refusal.command is None  # two sizes for one axis

    refusal = refused_with_command(f"{ACCEPTED} --lazy-mpu-init 1 --kd --ulyses-parallel-size 4 --fpdt")
    message = refusal.render().splitlines()
    assert message[0] == "4 settings cannot run" and message[1].startswith(
        "  1. --ulyses-parallel-size is not a known flag"
    )
    assert "this would be accepted (without --lazy-mpu-init, --kd, --ulyses-parallel-size; with " in message[5]
    config = parse(shlex.split(message[6]), world_size=8)
    assert config.parallel.ulysses_parallel_size == 4 and config.chunks.fpdt_chunk_size == 256


FIXED = {  # flags, given with two others that must be removed -> their replacement
    "--rope-theta 500000": "--rotary-base 500000",
    "--num-hidden-layers 8": "",  # --num-layers is given already
    "--num-hidden-layers 4": None,
    "--kd": "",
    "--ulysses-degree 2": "--ulysses-parallel-size 2",
    "--lr-warmup-iter 5": "--lr-warmup-iters 5",
    "--gradient-checkpointing": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full": "--recompute-method uniform --recompute-num-layers 1",
    "--position-embedding-type rope --yarn-beta-fast 16": None,
    "--sequence-parallel --tensor-model-parallel-size 3": None,
    "--ulysses-parallel-size 16 --num-query-groups 1": None,
    "--optimizer sgd --zero-stage 1": "--zero-stage 0",
    "--fpdt --fpdt-chunk-size 512": "--fpdt-chunk-size 256",
    "--manual-gc-interval 5": "--manual-gc",
    "--lr-warmup-samples 5": "--lr-warmup-iters 5",
}


@pytest.mark.parametrize("flags", FIXED)
def test_fixes_of_the_proposed_command_line(flags: str):
    """The proposed command line equals the given one, except for the fix."""
    refusal = refused_with_command(f"{ACCEPTED} {flags} --lazy-mpu-init 1 --fp4-format e2m1")
    wanted = FIXED[flags]
    if wanted is None:
        assert refusal.command is None, refusal.render()
        return
    kept = flags if flags.startswith(("--recompute", "--optimizer", "--fpdt", "--manual")) else ""
    assert parse(shlex.split(refusal.command), world_size=8) == parse(
        f"{ACCEPTED} {kept} {wanted}".split(), world_size=8
    )


def test_a_default_that_is_refused_is_in_the_list():
    refusal = refused_with_command(f"{ACCEPTED} --fpdt --lazy-mpu-init 1")
    assert [line.split()[0] for line in refusal.lines] == ["--lazy-mpu-init:", "--fpdt-chunk-size"]


def test_consequences_of_another_refusal_are_not_listed():
    for flags in ("--num-layers two", "--seq-length= 5", "--lr x --train-iters y"):
        lines = getattr(refused_with_command(f"{ACCEPTED} {flags} --lazy-mpu-init 1"), "lines", [])
        assert not [line for line in lines if line.startswith("missing")], lines


def test_gather_skips_checks_that_need_a_refused_one():
    gather, seen = Gather(), []

    def refuse() -> None:
        raise Refusal("first")

    gather.check("a", refuse)
    gather.check("b", lambda: seen.append("b"), "a")
    gather.check("c", lambda: seen.append("c"), "b")
    gather.check("d", lambda: seen.append("d"))
    assert seen == ["d"]
    with pytest.raises(Refusal, match="first") as caught:
        gather.finish()
    assert type(caught.value) is Refusal
    gather.refusals += [Refusal("second"), Refusal("first")]
    with pytest.raises(Refusals) as caught:
        gather.finish()
    assert caught.value.lines == ["first", "second"] and str(caught.value) == "first; second"


def test_rewording_does_not_change_the_command_line(monkeypatch):
    """Fixes are data: with other words in every refusal, the same command line is proposed."""
    commands, plain = [], Refusal.__init__
    for reword in (False, True):
        if reword:
            monkeypatch.setattr(Refusal, "__init__", lambda self, subject, reason="", *fixes, about="": plain(
                self, subject, f"[{reason.replace('--', '')[::-1]}]", *fixes, about=about
            ))  # fmt: skip
        megatron_flags._refusal.cache_clear()
        with pytest.raises(Refusals) as caught:
            flags = "--lazy-mpu-init 1 --ulyses-parallel-size 4 --rope-theta 1000 --fpdt --manual-gc-interval 5"
            parse(f"{ACCEPTED} {flags}".split(), world_size=8)
        commands.append((caught.value.command, caught.value.changes))
    megatron_flags._refusal.cache_clear()
    assert commands[0] == commands[1] and commands[0][0] is not None


def test_ranges_are_refused_together():
    lines = refused_with_command(f"{ACCEPTED} --num-layers 0 --lr 0 --adam-beta1 2 --rotary-percent 3").lines
    assert [line.split()[0] for line in lines] == ["--num-layers", "--rotary-percent", "--lr", "--adam-beta1"]


def test_an_accepted_command_line_becomes_a_config():
    assert isinstance(parse(ACCEPTED.split(), world_size=8), Config)


# Learning-rate schedules with warm-up, as our flags set them up.


RUN = (
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 301 "
    "--eval-iters 0 --device cpu --lr 1.0 --min-lr 0.2"
)


def learning_rates(flags: str, steps: int) -> list[float]:
    """The learning rates by step."""
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


def test_schedules_by_samples():
    by_iterations = learning_rates("--lr-decay-style cosine --lr-warmup-iters 2 --train-iters 8", 9)
    by_samples = learning_rates("--lr-decay-style cosine --lr-warmup-samples 8 --train-samples 32", 9)
    assert by_samples == by_iterations


def test_schedules_by_tokens():
    """SHAPE's samples have 64 tokens: a schedule by tokens equals the schedule by as many samples."""
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
        ("--train-tokens 2049", 33),  # the last step reaches it
        ("--train-samples 1000 --train-tokens 2048", 32),
        ("--train-samples 32 --train-tokens 204800", None),
        ("--train-iters 7 --train-tokens 640000", None),
        ("--train-iters 700 --train-tokens 2048", 32),
    ],
)
def test_length_of_run(length: str, expected: int | None, ramp: str):
    from megatron.training.arguments.schedule import BatchSizes, samples_after
    from megatron.training.job import length_of_run

    config = parse(f"{SHAPE} {RUN} {length} {ramp}".split(), LLAMA, 1)
    calculator = BatchSizes(config.data, 1)
    iterations, samples = length_of_run(config, calculator)
    assert samples == samples_after(config, iterations)
    if expected is not None:
        assert samples >= expected > samples_after(config, iterations - 1)
    elif "iters" in length:
        assert iterations == 7
    else:
        assert 32 <= samples < 36 and samples_after(config, iterations - 1) < 32


def test_batch_sizes_by_steps():
    """As Megatron-LM's loop: each step has the size of the last threshold that its samples have reached."""
    from megatron.training.arguments.schedule import BatchSizes, samples_after
    from megatron.training.job import length_of_run

    command = f"{SHAPE} {RUN}".replace("--global-batch-size 4", "").split()
    steps = [(0, 2), (15, 4), (62, 8)]  # of 64 tokens each
    words = [*command, "--train-samples", "200", "--step-batch-size-schedule"]
    config = parse([*words, "0:2, 1K:4 0.004M:8"], LLAMA, 1)
    assert config.data.global_batch_size == 8 and config.data.seq_length == 64
    sizes, consumed = BatchSizes(config.data, 2), 0
    for iteration in range(40):
        assert samples_after(config, iteration) == consumed
        sizes.update(consumed, True)
        expected = max(size for start, size in steps if consumed >= start)
        assert (sizes.get_current_running_global_batch_size(), sizes.get()) == (expected, expected // 2)
        consumed += expected
    iterations, samples = length_of_run(config, sizes)
    assert samples == samples_after(config, iterations) >= 200 > samples_after(config, iterations - 1)
    for text, more, message in (
        ("1K:2", "", "does not start at 0"),
        ("0:2 1K:3", "--micro-batch-size 2", "3 is not a multiple of --micro-batch-size 2"),
        ("0:2 10:4", "", "grow by samples"),
        ("0:2 x", "", "is not a pair"),
        ("0:2", "--global-batch-size 2", "with --global-batch-size 2"),
        ("0:2", "--rampup-batch-size 2 2 8", "with --rampup-batch-size"),
    ):
        with pytest.raises(Refusal, match=message):
            parse([*words, text, *more.split()], LLAMA, 1)


def test_tokens_left_by_samples_of_another_length():
    from megatron.training.checkpoint.run_state import Progress
    from megatron.training.job import length_of_run

    config = parse(f"{SHAPE} {RUN} --train-tokens 2048".split(), LLAMA, 1)
    done = Progress(iteration=4, consumed_train_samples=16, consumed_train_tokens=16 * 32)
    assert length_of_run(config, None, done) == (4 + 6, 16 + 24)  # 1536 tokens remain, 24 samples of 64


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
def test_remaining_steps_with_batches_of_another_size(length: str, expected: tuple[int, int]):
    """Steps of 2 samples follow four steps of 8: the length of the run counts both."""
    from megatron.training.checkpoint.run_state import Progress
    from megatron.training.job import length_of_run

    config = parse(f"{SHAPE} {RUN} {length} --global-batch-size 2".split(), LLAMA, 1)
    done = Progress(iteration=4, consumed_train_samples=32, consumed_train_tokens=32 * 64)
    assert length_of_run(config, None, done) == expected


def test_iterations_with_a_growing_batch_equal_their_samples():
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


def test_samples_are_ignored_with_a_note_if_tokens_are_given():
    flags = (
        "--train-samples 64 --lr-decay-samples 60 --lr-decay-tokens 2048 --lr-warmup-samples 4 --lr-warmup-tokens 64"
    )
    notes = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, 1).notes
    assert sum("is ignored, because --lr-" in note for note in notes) == 2


def test_a_value_of_any_size_is_quoted_in_a_short_text():
    assert short(10**50) == repr(10**50) and len(short(10**100)) <= 60
    assert short(int("f" * 5000, 16)) == "an integer of about 6000 digits"  # Python writes at most 4,300
    assert short({"weight": [-(16**9999)]}) == "{'weight': [an integer of about 11999 digits]}"


def test_sizes_of_a_model_have_limits_by_flag():
    words = "--hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64".split()
    for flag, value, limit in (
        ("--num-layers", 10**8, "10,000"),
        ("--num-experts", 2**33, "10,000"),
        ("--vocab-size", 10**18, "1,099,511,627,776"),
        ("--rotary-percent", 1e308, "1,099,511,627,776"),
        ("--num-attention-heads", 10**8, "100,000"),
        ("--global-batch-size", 10**8, "4,194,304"),
        ("--world-size", 10**12, "1,048,576"),
    ):
        with pytest.raises(Refusal, match=f"{flag} .*exceeds ({limit}|2..53); use a smaller number"):
            parse([*words, flag, str(value)], world_size=1)
