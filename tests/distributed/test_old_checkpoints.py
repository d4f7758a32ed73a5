# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of earlier versions go on as they would have then, on any grid."""

import tarfile
from pathlib import Path

import pytest

from tests.distributed.training_runs import make_job, train_job

# Written by commit 0b3becd after 3 of 6 iterations on TP 2 with ZeRO 1:
#   torchrun --nproc-per-node 2 pretrain_llama.py FLAGS --tensor-model-parallel-size 2 --zero-stage 1 --exit-interval 3
OLD = Path(__file__).parent / "data" / "checkpoint_0b3becd.tgz"
FLAGS = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-2 --lr-decay-style linear "
    "--train-iters 6 --vocab-size 31 --make-vocab-size-divisible-by 1"
)
LOSSES = [3.1767651587724686, 3.1325147300958633, 3.1376088932156563]  # of that commit, one process without a break


def go_on(flags: str) -> tuple[int, list[float]]:
    job = make_job(flags)
    return job.progress.iteration, train_job(job, 3)[0]


@pytest.mark.parametrize(
    "world, grid",
    [
        (1, ""),
        (2, "--ulysses-parallel-size 2 --zero-stage 3"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --ring-parallel-size 2 --fpdt --fpdt-chunk-size 8"),
    ],
)
def test_a_checkpoint_of_november_2026_goes_on(pool, tmp_path, world, grid):
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    for first, losses in pool.run(go_on, world, f"{FLAGS} {grid} --load {tmp_path}"):
        assert first == 3
        assert losses == pytest.approx(LOSSES, rel=1e-5)
