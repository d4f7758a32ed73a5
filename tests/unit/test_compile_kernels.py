# SPDX-License-Identifier: Apache-2.0
"""tools/compile_kernels.py: which kernels a training command launches, and Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from megatron.context_parallel.attention.kernels.triton_kernels.triton_kernel import missing_triton
from tests.patience import patience

pytestmark = pytest.mark.skipif(missing_triton() is not None, reason=missing_triton() or "")

ROOT = Path(__file__).resolve().parents[2]
TOOL = str(ROOT / "tools" / "compile_kernels.py")
MODEL = (
    "--hidden-size 64 --num-layers 2 --num-attention-heads 4 --ffn-hidden-size 128 --vocab-size 301 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --bf16 --attention-kernel triton"
)
HYBRID = (
    "--is-hybrid-model --hybrid-override-pattern M*M- --mamba-num-heads 4 --mamba-head-dim 16 --mamba-num-groups 2 "
    "--mamba-state-dim 16 --num-layers 4 --linear-attention-kernel triton"
)
ATTENTION = {"forward_kernel", "delta_kernel", "query_kernel", "key_kernel"}
DECAY = {"decay_states", "decay_outputs", "decay_state_grads", "decay_value_grads", "decay_key_grads"}


def tool(*words: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOL, *words]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(200))


def names_of(flags: str, gpus: int) -> Counter:
    sys.path.insert(0, str(ROOT))
    from tools.compile_kernels import wanted

    kernels, capability = wanted(flags.split(), gpus)
    assert capability == 90
    return Counter(one.name for one in kernels)


@pytest.fixture(scope="module")
def compiling() -> Iterator[Callable]:
    """Calls functions in a separate process with Triton's compiler; a dry run changes megatron-core for its process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            started = one.submit(abs, 0)  # with the current environment
        started.result(patience(60))
        yield lambda function, *arguments: one.submit(function, *arguments).result(patience(100))


@pytest.mark.lab
@pytest.mark.parametrize(
    "flags, gpus, names",
    [
        ("--ring-parallel-size 2", 2, ATTENTION | {"rotate_kernel"}),
        ("--loss-chunks 4", 1, ATTENTION | {"rotate_kernel", "sums_kernel", "gradient_kernel"}),
        ("--fpdt --fpdt-chunk-size 256", 1, ATTENTION | {"rotate_kernel", "sums_kernel", "gradient_kernel"}),
        ("--attention-kernel cudnn", 1, {"rotate_kernel"}),
        (HYBRID, 1, ATTENTION | DECAY | {"rotate_kernel"}),
    ],
)
def test_the_kernels_of_a_command(compiling, flags, gpus, names):
    found = compiling(names_of, f"{MODEL} {flags}", gpus)
    assert set(found) == names, found


@pytest.mark.full
def test_kernels_lie_in_the_cache(tmp_path):
    """A second run finds all of them."""
    words = ["--", *MODEL.split(), "--seq-length", "256"]
    done = tool(*words, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and "5 of 5 kernels for compute capability 9.0" in done.stdout, (
        done.stdout + done.stderr
    )
    made = set(tmp_path.rglob("*.cubin"))
    assert len(made) == 5
    assert tool(*words, TRITON_CACHE_DIR=str(tmp_path)).returncode == 0 and set(tmp_path.rglob("*.cubin")) == made


@pytest.mark.lab
def test_a_command_that_would_be_refused(tmp_path):
    done = tool("--gpus", "3", "--", *MODEL.split(), "--ring-parallel-size", "2")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
