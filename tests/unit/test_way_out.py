# SPDX-License-Identifier: Apache-2.0
"""All refusals of a command line at once, in order, and the command line that would be taken."""

from __future__ import annotations

import shlex

import pytest

from megatron.training.arguments.config import Config
from megatron.training.arguments.foreign import megatron_flags
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Gather, Refusal, Refusals

GOOD = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 99 --attention-dropout 0 --bf16"
)


def refused(flags: str, world_size: int = 8) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(flags.split(), world_size=world_size)
    assert "\n" not in str(caught.value)
    return caught.value


def test_one_refusal_alone_stays_one_line():
    refusal = refused(f"{GOOD} --num-experts 8")
    assert type(refusal) is Refusal and refusal.told() == str(refusal)
    assert str(refusal) == "--num-experts: mixtures of experts are not built here: leave it out"


def test_words_and_settings_are_refused_together_in_order():
    """Unknown flags, refused ones, values, then what does not fit: each once, none that the others cause."""
    refusal = refused(
        f"{GOOD} --num-experts 8 --seq-lenght 128 --optimizer muon --clip-grad x --zero-stage 7 "
        "--ulysses-parallel-size 3 --recompute-granularity full --load-optim-state"
    )
    assert isinstance(refusal, Refusals) and refusal.lines == [
        "--clip-grad: invalid number value: 'x'",
        "--seq-lenght is not a known flag: did you mean --seq-length?",
        "--load-optim-state is not a known flag: --help lists them",
        "--num-experts: mixtures of experts are not built here: leave it out",
        "--zero-stage 7: not supported; choose from 0, 1, 2, 3",
        "--optimizer muon: not supported; choose from adam, sgd",
        "--ulysses-parallel-size 3 = 3 ranks does not divide the 8 processes: start a multiple of 3, or lower one",
        "--ulysses-parallel-size 3 does not divide the 8 query heads of a TP rank (--num-attention-heads 8, TP 1): use "
        "--ulysses-parallel-size 1 --ring-parallel-size 3",
        "--seq-length 256 cannot be cut over Ulysses 3 x Ring 1 (zigzag): use a multiple of 3, 255 or 258",
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers: for the least memory add "
        "--recompute-method uniform --recompute-num-layers 1",
    ]
    assert refusal.command is None  # which optimizer, which grid: that is the user's to say


def test_the_list_ends_with_the_command_line_that_is_taken():
    refusal = refused(f"{GOOD} --num-experts 8 --ulyses-parallel-size 4 --ulysses_degree 2 --fpdt")
    assert isinstance(refusal, Refusals) and len(refusal.lines) == 4
    assert refusal.command is None  # two sizes for one axis

    refusal = refused(f"{GOOD} --num-experts 8 --kd --ulyses-parallel-size 4 --fpdt")
    told = refusal.told().splitlines()
    assert told[0] == "4 settings cannot run" and told[1].startswith("  1. --ulyses-parallel-size is not a known flag")
    assert "this would be accepted, without --num-experts, --kd, --ulyses-parallel-size, with " in told[5]
    config = parse(shlex.split(told[6]), world_size=8)
    assert config.parallel.ulysses_parallel_size == 4 and config.chunks.fpdt_chunk_size == 256


FIXED = {  # flags beside two that must go -> what stands in their place
    "--rope-theta 500000": "--rotary-base 500000",
    "--num-hidden-layers 8": "",  # --num-layers is there already
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
def test_ways_out(flags: str):
    """The command line that is named is parsed as what was given, with the way out done and nothing else changed."""
    refusal = refused(f"{GOOD} {flags} --num-experts 8 --fp4-format e2m1")
    wanted = FIXED[flags]
    if wanted is None:
        assert refusal.command is None, refusal.told()
        return
    kept = flags if flags.startswith(("--recompute", "--optimizer", "--fpdt", "--manual")) else ""
    assert parse(shlex.split(refusal.command), world_size=8) == parse(f"{GOOD} {kept} {wanted}".split(), world_size=8)


def test_a_default_that_is_refused_is_in_the_list():
    refusal = refused(f"{GOOD} --fpdt --num-experts 8")
    assert [line.split()[0] for line in refusal.lines] == ["--num-experts:", "--fpdt-chunk-size"]


def test_what_only_follows_from_another_refusal_is_not_in_the_list():
    for flags in ("--num-layers two", "--seq-length= 5", "--lr x --train-iters y"):
        lines = getattr(refused(f"{GOOD} {flags} --num-experts 8"), "lines", [])
        assert not [line for line in lines if line.startswith("missing")], lines


def test_gather_leaves_out_what_needs_a_refused_check():
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
        megatron_flags._unknown.cache_clear()
        with pytest.raises(Refusals) as caught:
            flags = f"{GOOD} --num-experts 8 --ulyses-parallel-size 4 --rope-theta 1000 --fpdt --manual-gc-interval 5"
            parse(flags.split(), world_size=8)
        commands.append((caught.value.command, caught.value.changes))
    megatron_flags._unknown.cache_clear()
    assert commands[0] == commands[1] and commands[0][0] is not None


def test_ranges_are_refused_together():
    lines = refused(f"{GOOD} --num-layers 0 --lr 0 --adam-beta1 2 --rotary-percent 3").lines
    assert [line.split()[0] for line in lines] == ["--num-layers", "--lr", "--adam-beta1", "--rotary-percent"]


def test_what_is_taken_is_read_once():
    assert isinstance(parse(GOOD.split(), world_size=8), Config)
