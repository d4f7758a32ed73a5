# SPDX-License-Identifier: Apache-2.0
"""A setting is one definition: a field that is added to a section has its flag, its checks and its readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields

import pytest

from megatron.inference.load import configure
from megatron.training.arguments import parser
from megatron.training.checkpoint.checkpoint import check_model
from megatron.training.refusal import Refusal
from megatron.training.settings import same_network
from megatron.training.settings.config import Config, ModelConfig
from megatron.training.settings.flag import ABOVE_ZERO, ALWAYS, FUNCTION, flag, for_core
from megatron.training.settings.read_with import FP8

SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --position-embedding-type rope --seq-length 64 "
DRY = SMALL + "--vocab-size 99 --dry-run "


def define(section: type, **others: object) -> None:
    """Let ``section`` have its fields and ``others``, as if they were written in its body."""
    for name in [one.name for one in fields(section) if one.name == "new_flag"]:
        delattr(section, name)
        del section.__annotations__[name]
    for one in fields(section):
        if one.name in section.__annotations__:
            default = {} if one.default is MISSING else {"default": one.default}
            factory = {} if default else {"default_factory": one.default_factory}
            setattr(section, one.name, field(**(default or factory), metadata=one.metadata))
    for name, value in others.items():
        section.__annotations__[name] = "float | None"
        setattr(section, name, value)
    for made in ("__init__", "__repr__", "__eq__"):
        delattr(section, made)
    dataclass(section)


@pytest.fixture
def new_flag() -> Iterator[None]:
    """The edit: one field of the model."""
    caches = [parser.build_parser, parser.supported_flags, parser._kinds, same_network.roles]
    one = flag(
        None, "how new it is", type=float, range=ABOVE_ZERO, read_with=FP8, network=FUNCTION, loaded=ALWAYS,
        stage=True, generation="it is too new", core="newness", needs=("bf16",),
    )  # fmt: skip
    try:
        define(ModelConfig, new_flag=one)
        for cache in caches:
            cache.cache_clear()
        yield
    finally:
        define(ModelConfig)
        for cache in caches:
            cache.cache_clear()


def test_one_edit_adds_a_flag(new_flag: None, tmp_path) -> None:
    shown = parser.build_parser().format_help()
    assert "--new-flag X" in shown and "how new it is" in shown
    config = parser.parse(f"{DRY} --bf16 --new-flag 2.5".split(), world_size=1)  # the dry run
    assert config.model.new_flag == 2.5
    assert "no effect here: --new-flag (read only with --fp8-format)" in config.notes
    assert for_core(config.model, config)["newness"] == 2.5  # core
    with pytest.raises(Refusal, match=r"--new-flag -1 must be above 0"):
        parser.parse(f"{DRY} --bf16 --new-flag -1".split(), world_size=1)
    with pytest.raises(Refusal, match=r"--new-flag does nothing without --bf16"):
        parser.parse(f"{DRY} --new-flag 2".split(), world_size=1)
    with pytest.raises(Refusal, match=r"--new-flag is not for generation: it is too new"):
        configure(["--new-flag", "2"], str(tmp_path), None, None, 1)


def test_the_new_flag_in_checkpoints(new_flag: None, tmp_path) -> None:
    words = f"{DRY} --bf16 --load {tmp_path} --use-checkpoint-args --new-flag 1".split()
    saved = parser.parse(f"{DRY} --bf16 --new-flag 3".split(), world_size=1)
    loaded = parser.parse(words, world_size=1, shape_of=lambda *_: vars(saved.model))
    assert loaded.model.new_flag == 3 and any("new-flag 1.0 -> 3" in note for note in loaded.notes)
    with pytest.raises(Refusal, match="--new-flag 3.0 in the checkpoint, 4.0 in this run"):
        other = parser.parse(f"{DRY} --bf16 --new-flag 4".split(), world_size=1)
        check_model(same_network.of_run(saved), other, tmp_path, changed=False)


def test_a_stage_may_set_the_new_flag(new_flag: None, tmp_path) -> None:
    run = "--vocab-size 99 --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --lr 1e-3 --train-iters 4"
    words = f"{SMALL} {run} --bf16 --save {tmp_path} --load {tmp_path} --seq-length-schedule"
    words = words.replace("--seq-length 64", "").split()
    later = parser.parse([*words, "0:64 2:128 --new-flag 7"], world_size=1, iteration=2)
    assert later.model.new_flag == 7 and later.data.seq_length == 128


def test_the_edit_leaves_nothing_behind() -> None:
    assert "new_flag" not in vars(Config().model) and "--new-flag" not in parser.supported_flags()
