# SPDX-License-Identifier: Apache-2.0
"""Layers whose queries choose their keys (DSA): losses, the indexer's too, and all gradients on any grid."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.training_runs import SP, compare_runs, cp, make_job, train_job

SIZES = "--kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --q-lora-rank 24 --qk-layernorm"
INDEXER = "--dsa-indexer-n-heads 3 --dsa-indexer-head-dim 16 --dsa-indexer-topk 12 --dsa-indexer-loss-coeff 0.5"
DSA = (
    f"--num-layers 2 --multi-latent-attention --norm-epsilon 1e-6 --init-method-std 0.1 {SIZES} "
    f"--experimental-attention-variant dsa {INDEXER}"
)
SPARSE = f"{DSA} --dsa-indexer-use-sparse-loss"

# (processes, model, grid)
CASES = [
    (2, SPARSE, cp(2, 1)),
    (4, SPARSE, f"{SP} {cp(1, 2)}"),
]


def run(flags: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of two steps, and the gradients of the first."""
    return train_job(make_job(flags), 2)


@pytest.fixture(scope="module")
def reference(pool, shared):
    """The same model on one process."""
    return lambda flags: shared(("dsa", flags), lambda: pool.run(run, 1, flags, timeout=120)[0])


@pytest.mark.parametrize("world, model, grid", CASES)
def test_choices_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    compare_runs(pool.run(run, world, f"{model} {grid}", timeout=180), reference(model))
