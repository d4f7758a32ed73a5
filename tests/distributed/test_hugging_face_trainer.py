# SPDX-License-Identifier: Apache-2.0
"""The examples of Hugging Face: a loop of one's own, and transformers' Trainer, each beside one process."""

import json
import os
from pathlib import Path

import pytest

from tests.program import run_forked, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples" / "huggingface"


@pytest.mark.parametrize("options", ["--steps 2", pytest.param("--fpdt-chunk-size 64", marks=pytest.mark.full)])
def test_a_loop_of_ones_own(options):
    ranks = run_ranks(EXAMPLES / "finetune.py", [*options.split(), "--seq-length", "128"], os.environ, 4)
    assert [rank.returncode for rank in ranks] == [0] * 4, ranks[0].stderr  # it is not 0 where losses differ
    assert "Ulysses 2 x Ring 2" in ranks[0].stdout and "largest difference" in ranks[0].stdout


@pytest.fixture(scope="module")
def steps(long_runs):
    return 20 if long_runs else 10


@pytest.fixture(scope="module")
def alone(tmp_path_factory, steps):
    """The losses of transformers' Trainer by itself."""
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers.Trainer needs")
    file = tmp_path_factory.mktemp("alone") / "losses.json"
    done = run_forked(EXAMPLES / "trainer.py", ["--steps", str(steps), "--json", str(file)], os.environ)
    assert not done.returncode, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("options", ["", pytest.param("--ring 1 --micro-batch 2", marks=pytest.mark.full)])
def test_steps_of_trainer_and_an_evaluation(alone, tmp_path, steps, options):
    argv = [*options.split(), "--steps", str(steps), "--json", str(tmp_path / "losses.json")]
    ranks = run_ranks(EXAMPLES / "trainer.py", argv, os.environ, 4)
    assert [rank.returncode for rank in ranks] == [0] * 4, ranks[0].stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == steps + 1 and losses == pytest.approx(alone, rel=1e-6)
    assert losses[-1] < losses[0] - 0.1
