# SPDX-License-Identifier: Apache-2.0
"""A malicious ``.metadata`` given to each program: nothing is run; one line and exit code 2."""

from __future__ import annotations

import pickle
import shutil
import types
from pathlib import Path

import pytest

from tests.distributed.test_program import FLAGS, PROGRAM
from tests.distributed.test_whole_checkpoints import SMALL
from tests.distributed.training_runs import make_job, refusal_of, save_job
from tests.program import ENVIRONMENT, run_forked
from tests.unit.test_foreign_bytes import MODULE, POPEN, before, call, text
from tools import convert_hf


def hostile(metadata, harm: str) -> bytes:
    """Valid metadata that runs a command if the plain unpickler reads it."""
    return before(pickle.dumps(metadata), call(MODULE, POPEN, b"](" + text("touch") + text(harm) + b"e"))


def save_hostile(folder: str, harm: str) -> None:
    """A checkpoint with correct checksums and a malicious .metadata."""
    from megatron.training.checkpoint import rank_file

    job, plain = make_job(SMALL), rank_file.pickle
    rank_file.pickle = types.SimpleNamespace(dumps=lambda metadata: hostile(metadata, harm))
    try:
        save_job(folder, job)
    finally:
        rank_file.pickle = plain


@pytest.fixture(scope="module")
def attacked(pool, tmp_path_factory) -> tuple[Path, Path]:
    """(a folder with such a checkpoint, the file that the attack would create)."""
    folder = tmp_path_factory.mktemp("attacked")
    pool.run(save_hostile, 1, str(folder / "c"), str(folder / "harm"), timeout=120)
    return folder / "c", folder / "harm"


@pytest.mark.parametrize("listed", [True, False], ids=["with its checksums", "without"])
def test_no_code_is_run_by_training_or_conversion(pool, attacked, tmp_path, capsys, listed):
    source, harm = attacked
    folder = tmp_path / "c"
    shutil.copytree(source, folder)
    if not listed:
        for path in folder.glob("*/checksums.json"):
            path.unlink()
    (message,) = pool.run(refusal_of, 1, f"{SMALL} --load {folder}")
    assert message and "\n" not in message and str(folder) in message
    assert convert_hf.main(["--from", str(folder), "--to-hf", str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not harm.exists() and not (tmp_path / "hf").exists()
    if listed:
        assert "could run code" in message and "could run code" in error


def test_the_program_ends_in_a_line(attacked):
    folder, harm = attacked
    flags = [*FLAGS.split(), "--num-layers", "1", "--vocab-size", "301", "--train-iters", "1", "--load", str(folder)]
    done = run_forked(PROGRAM, flags, ENVIRONMENT)
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and len(lines) == 1 and "could run code" in lines[0], done.stderr
    assert "Traceback" not in done.stderr and not harm.exists()
