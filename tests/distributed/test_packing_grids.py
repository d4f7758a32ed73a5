# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of each packing, and of each stage of a schedule of lengths, are equal on all grids."""

from __future__ import annotations

import shutil
from itertools import product

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.training.arguments.schedule import LengthStageEnded
from tests.distributed.flags import LLAMA, RUN, SHAPE
from tests.distributed.training_runs import compare_gradients, compare_runs, make_job, save_job, train_job
from tests.pairs import full_but

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
    """Three steps of the program with packed documents that do not attend to each other; by work, of a blend."""
    from tests.distributed import training_runs

    path = f"2 {corpus} 1 {corpus}" if kind == "by-work" else corpus
    data = f"--data-path {path} --split 1,0,0 --reset-attention-mask --packing {kind} --packing-window 16"
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


@pytest.mark.parametrize("kind, grid", full_but(product(("greedy", "best-fit", "by-work"), GRIDS), *USUAL))
@pytest.mark.usual(2)
def test_a_packing_on_a_grid(pool, corpus, single, kind, grid):
    results = pool.run(steps, 4, str(corpus), kind, GRIDS[grid])
    compare_runs(results, single(kind))


def test_packings_differ(single):
    """The control: another packing has other losses."""
    assert abs(single("best-fit")[0][0] - single("by-work")[0][0]) > 1e-4


# Stages of several lengths: one run over three of them, in which a stage may stop in the middle and go on elsewhere.


STAGES = "0:32 {} 2:64 {} 4:128 {}"
ONE = {
    "DP 2": "--zero-stage 1 --micro-batch-size 1",
    "U 2": "--ulysses-parallel-size 2 --zero-stage 2",
    "R 2": "--ring-parallel-size 2 --zero-stage 3",
    "PP 2": "--pipeline-model-parallel-size 2",
    "TP 2": "--tensor-model-parallel-size 2 --sequence-parallel",
}
MIXED = {
    "R, TP, U with FPDT": ("R 2", "TP 2", "U 2", "--fpdt --fpdt-chunk-size 64"),
    "ZeRO 3, then R, then PP": ("DP 2", "R 2", "PP 2", ""),
}


def stages(corpus, kind, folder, schedule, until=6, more=""):
    """Losses, norms, lengths, and gradients of each stage's first step, of a run up to a step; it saves at its end."""
    from megatron.training.arguments.parser import parse
    from megatron.training.job import prepare
    from megatron.training.setup import start, stop

    data = f"--data-path {corpus} --split 1,0,0 --reset-attention-mask --packing {kind} --packing-window 16"
    words = f"{SHAPE} {RUN} {data} --train-iters 6 --hidden-dropout 0.1 --save {folder} --load {folder} {more}"
    words = words.replace("--seq-length 64 --max-position-embeddings 64", "").replace("--vocab-size 301", "")
    words = [*words.replace(MOCK, "--vocab-size 300").split(), "--seq-length-schedule", schedule]
    losses, norms, gradients, config = [], [], [], parse(words, LLAMA, dist.get_world_size())
    while True:
        runtime = start(config)
        try:
            job = prepare(config, runtime)
        except LengthStageEnded as stage:
            done = stage.iteration
        else:
            end = min(until, job.iterations)
            found = train_job(job, end - job.progress.iteration)
            for kept, one in zip((losses, norms), found):
                kept += one
            gradients.append(found[2])
            done = job.progress.iteration
            save_job(folder, job)
            job.owner.release()
            if done == until:
                return losses, norms, gradients
        stop(keep_world=True)
        config = parse(words, LLAMA, dist.get_world_size(), iteration=done)


@pytest.fixture(scope="module")
def undisturbed(pool, corpus, tmp_path_factory):
    """By packing: losses, norms and gradients of all stages in one process that nothing stopped; its checkpoints."""
    made = {}

    def run(kind):
        if kind not in made:
            folder, schedule = tmp_path_factory.mktemp("stages") / "c", STAGES.format("", "", "")
            result = pool.run(stages, 1, str(corpus), kind, str(folder), schedule, timeout=120)[0]
            made[kind] = *result, folder
        return made[kind]

    return run


def compare(results, losses, norms):
    for mine, others, _ in results:
        assert mine == pytest.approx(losses, rel=1e-5) and others == pytest.approx(norms, rel=1e-4)


EVERY = [(kind, grid) for kind in ("greedy", "best-fit", "by-work") for grid in ONE]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "grid"), EVERY)
def test_stages_on_a_grid(pool, corpus, undisturbed, tmp_path, kind, grid):
    schedule = STAGES.format(*[ONE[grid]] * 3)
    results = pool.run(stages, 2, str(corpus), kind, str(tmp_path / "c"), schedule, timeout=120)
    losses, norms, gradients, _ = undisturbed(kind)
    compare(results, losses, norms)
    compare_gradients([mine[0] for _, _, mine in results], gradients[0])


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("kind", "grid"), EVERY)
def test_gradients_of_a_later_stage(pool, corpus, undisturbed, tmp_path, kind, grid, stage):
    """From one process' checkpoint: Adam would turn rounding of tiny gradients into weights that differ."""
    losses, norms, gradients, whole = undisturbed(kind)
    begin, folder = 2 * stage, tmp_path / "c"
    shutil.copytree(whole / f"iter_{begin:07d}", folder / f"iter_{begin:07d}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(begin))
    schedule = STAGES.format(*[ONE[grid]] * 3)
    results = pool.run(stages, 2, str(corpus), kind, str(folder), schedule, begin + 1, timeout=120)
    compare(results, losses[begin : begin + 1], norms[begin : begin + 1])
    compare_gradients([mine[0] for _, _, mine in results], gradients[stage])


@pytest.mark.parametrize("grids, stop", full_but(product(MIXED, (1, 3, 5)), ("R, TP, U with FPDT", 3)))
@pytest.mark.lab
def test_stages_on_other_grids(pool, corpus, undisturbed, tmp_path, grids, stop):
    """Each stage has its own grid; within a stage the run stops and goes on with other grids on more processes."""
    *names, last = MIXED[grids]
    first, second = [ONE[name] for name in names], [ONE[name] for name in reversed(names)]
    if grids[0] == "Z":
        first[0] = "--zero-stage 3 --micro-batch-size 1"
    first[2] += f" {last}"
    folder = str(tmp_path / "c")
    before = pool.run(stages, 2, str(corpus), "by-work", folder, STAGES.format(*first), stop, timeout=120)
    after = pool.run(stages, 4, str(corpus), "by-work", folder, STAGES.format(*second), timeout=120)
    losses, norms, *_ = undisturbed("by-work")
    compare(before, losses[:stop], norms[:stop])
    compare(after, losses[stop:], norms[stop:])


@pytest.mark.full
def test_stages_differ(undisturbed):
    """The control: the data of a stage are not those of another, nor of another packing."""
    losses = undisturbed("by-work")[0]
    assert len(losses) == 6 and min(abs(a - b) for a, b in zip(losses, undisturbed("best-fit")[0])) > 1e-4
