# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of each packing are equal on all grids."""

from __future__ import annotations

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.distributed.training_runs import compare_gradients, make_job, train_job

MOCK = "--mock-data"
GRIDS = {
    "Ulysses x Ring": "--ulysses-parallel-size 2 --ring-parallel-size 2",
    "TP x PP": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    "DP x Ring, ZeRO 1": "--ring-parallel-size 2 --zero-stage 1",
}
USUAL = [("best-fit", "Ulysses x Ring"), ("by-work", "TP x PP"), ("by-work", "DP x Ring, ZeRO 1")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("packing") / "data"
    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in random.integers(2, 100, 60):
        builder.add_document(np.append(random.integers(0, 300, length - 1), 300), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def steps(corpus, kind, flags):
    """Three steps of the program with packed documents that do not attend to each other."""
    from tests.distributed import training_runs

    data = f"--data-path {corpus} --split 1,0,0 --reset-attention-mask --packing {kind} --packing-window 16"
    whole, training_runs.RUN = training_runs.RUN, training_runs.RUN.replace("--vocab-size 301", "--vocab-size 300")
    training_runs.RUN = training_runs.RUN.replace(MOCK, data)
    try:
        return train_job(make_job(flags), 3)
    finally:
        training_runs.RUN = whole


@pytest.fixture(scope="module")
def single(pool, corpus):
    made = {}
    return lambda kind: made.get(kind) or made.setdefault(kind, pool.run(steps, 1, str(corpus), kind, "")[0])


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        pytest.param(kind, grid, marks=() if (kind, grid) in USUAL else pytest.mark.full)
        for kind in ("greedy", "best-fit", "by-work")
        for grid in GRIDS
    ],
)
def test_a_packing_on_a_grid(pool, corpus, single, kind, grid):
    results = pool.run(steps, 4, str(corpus), kind, GRIDS[grid])
    losses, norms, expected = single(kind)
    for mine, others, _ in results:
        assert mine == pytest.approx(losses, rel=1e-5) and others == pytest.approx(norms, rel=1e-4)
    compare_gradients([gradients for _, _, gradients in results], expected)


def test_packings_differ(single):
    """The control: another packing has other losses."""
    assert abs(single("best-fit")[0][0] - single("by-work")[0][0]) > 1e-4
