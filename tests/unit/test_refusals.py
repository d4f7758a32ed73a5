# SPDX-License-Identifier: Apache-2.0
"""What cannot run stops before any training step, with one clear line and exit code 2: as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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

    ``fresh``: in a Python of its own, as a user does; otherwise a fork saves the seconds of importing.
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
        ("--ring-parallel-size 4 --seq-length 36", 4, ("--seq-length 36", "40")),
        ("--ulysses-parallel-size 2 --ring-parallel-size 2", 2, ("--ulysses-parallel-size", "--ring-parallel-size")),
        ("--attention-kernel warp", 1, ("--attention-kernel", "flash_attn", "math")),
        ("--attention-kernel cudnn", 1, ("--attention-kernel cudnn", "GPU", "cpu")),
        ("--num-experts 8", 1, ("--num-experts",)),
        ("--numlayers 2", 1, ("--numlayers", "--num-layers")),
        ("--fpdt", 1, ("--fpdt-chunk-size 65536", "--seq-length")),
        ("--partition-position-embedding", 1, ("--partition-position-embedding", "learned_absolute")),
        ("--attention-dropout 1", 1, ("--attention-dropout 1",)),
        ("--zero-stage 3 --pipeline-model-parallel-size 2", 2, ("--zero-stage 3", "--pipeline-model-parallel-size")),
        ("--device cuda", 1, ("--device",)),
    ],
)
def test_settings_that_cannot_run(flags, world, expected):
    refused(f"{GOOD} {MOCK} {flags}", *expected, world=world)


def test_a_refusal_is_one_line_from_a_python_of_its_own_too():
    refused(f"{GOOD} {MOCK} --attention-kernel cudnn", "--attention-kernel cudnn", fresh=True)


def test_several_refusals_come_as_a_list_with_the_command_line_that_would_be_taken():
    done = pretrain(f"{GOOD} {MOCK} --num-experts 8 --rope-theta 500000")
    assert done.returncode == 2 and "iteration" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[0] == "error: 2 settings cannot run"
    assert lines[1].startswith("  1. --num-experts: ") and lines[2] == "  2. --rope-theta: use --rotary-base"
    assert lines[3] == "this would be accepted, without --num-experts, --rope-theta, with --rotary-base 500000:"
    assert lines[4] == f"  {GOOD} {MOCK} --rotary-base 500000" and len(lines) == 5


def test_a_missing_data_file(tmp_path):
    refused(
        f"{GOOD} --data-path {tmp_path}/nothing --tokenizer-type NullTokenizer --vocab-size 100",
        "--data-path",
        f"{tmp_path}/nothing",
    )


def test_a_truncated_data_file(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(np.arange(90, dtype=np.uint16) % 50, [90])
    builder.finalize(f"{prefix}.idx")
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(whole[:100])
    refused(
        f"{GOOD} --data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 100", f"{prefix}.bin", "100", "180"
    )


def test_a_vocabulary_larger_than_the_tokenizers():
    refused(f"{GOOD} --mock-data --tokenizer-type ByteLevelTokenizer --vocab-size 5000", "--vocab-size 5000")


def test_a_missing_tokenizer():
    refused(
        f"{GOOD} --mock-data --tokenizer-type Llama2Tokenizer --tokenizer-model /nothing",
        "--tokenizer-model",
        "/nothing",
    )


def test_the_same_settings_without_the_fault_do_run():
    done = pretrain(f"{GOOD} {MOCK} --log-interval 1")
    assert done.returncode == 0, done.stderr
    assert "iteration        1/       1" in done.stdout
