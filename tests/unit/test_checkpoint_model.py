# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model against the run's: the activation counts by what it computes, not by the flags that chose it."""

from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.training.arguments.parser import parse
from megatron.training.checkpoint.checkpoint import check_model
from megatron.training.refusal import Refusal
from tests.distributed.training_runs import RUN, SHAPE


def gpt(flags):
    return parse(f"{SHAPE} {RUN} --hidden-dropout 0 --attention-dropout 0 {flags}".split(), None, 1)


def before_there_was_a_flag(flags):
    """What checkpoints said of a model then; GELU was by tanh."""
    told = asdict(gpt(flags).model)
    return {name: value for name, value in told.items() if name not in ("bias_gelu_fusion", "openai_gelu")}


@pytest.mark.parametrize(
    "saved, flags, goes_on",
    [
        (asdict(gpt("").model), "", True),
        (asdict(gpt("").model), "--openai-gelu", True),
        (asdict(gpt("").model), "--no-bias-gelu-fusion", False),
        (asdict(gpt("--squared-relu").model), "", False),
        (before_there_was_a_flag(""), "", True),
        (before_there_was_a_flag("--disable-bias-linear"), "--disable-bias-linear", False),
        (before_there_was_a_flag("--disable-bias-linear"), "--disable-bias-linear --openai-gelu", True),
        (before_there_was_a_flag("--swiglu"), "--swiglu", True),
    ],
)
def test_a_run_goes_on_with_the_same_activation_alone(saved, flags, goes_on):
    config = gpt(flags)
    if goes_on:
        check_model(saved, config, Path("old"), weights_only=False)
        assert not any("activation" in note for note in config.notes)
        return
    with pytest.raises(Refusal, match="activation .* there, .* here"):
        check_model(saved, config, Path("old"), weights_only=False)
    check_model(saved, config, Path("old"), weights_only=True)
    assert any("the activation" in note for note in config.notes)
