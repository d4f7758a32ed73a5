# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron-LM has written go on here with its losses, and ours there with ours, on any grid."""

import pytest

from tests.distributed import megatron_lm
from tests.distributed.training_runs import make_job, train_job

# No row pads the vocabulary: Megatron-LM counts those in its loss.
FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --seq-length 32 --max-position-embeddings 32 --vocab-size 63 --make-vocab-size-divisible-by 1 "
    "--lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --zero-stage 0"
)
T2 = "--tensor-model-parallel-size 2"
P2 = "--pipeline-model-parallel-size 2"
V2 = "--num-virtual-stages-per-pipeline-rank 2"


def megatron_saves(flags, folder, kind, distributed, llama=True, core_writer=False):
    """Two steps of Megatron-LM's, its checkpoint, and the losses of its next three."""
    run = megatron_lm.build(flags, llama, distributed=distributed)
    megatron_lm.train(run, 2)
    megatron_lm.save(run, folder, 2, kind, core_writer=core_writer)
    return megatron_lm.train(run, 3)


def we_go_on(flags, folder, llama=True):
    job = make_job(f"{flags} --load {folder}", llama)
    return job.progress.iteration, job.progress.consumed_train_samples, train_job(job, 3)[0]


KINDS = {
    # how it was written: processes, grid, form of the optimizer, whether that is distributed, a Llama or a GPT
    "alone, fully_reshardable": (1, "", "fully_reshardable", True, True),
    "TP 2, not distributed": (2, T2, None, False, True),
    "TP 2 x DP 2, dp_reshardable": (4, T2, "dp_reshardable", True, True),
    "TP 2 x PP 2, dp_reshardable": (4, f"{T2} {P2}", "dp_reshardable", True, True),
    "PP 2 in turns, fully_reshardable": (2, f"{P2} {V2} --micro-batch-size 1", "fully_reshardable", True, True),
    "PP 2 in turns, dp_reshardable": (2, f"{P2} {V2} --micro-batch-size 1", "dp_reshardable", True, True),
    "GPT, PP 2, dp_reshardable": (2, P2, "dp_reshardable", True, False),
    "GPT, TP 2 x PP 2, fully_reshardable": (4, f"{T2} {P2}", "fully_reshardable", True, False),
}
GRIDS = {
    "one process": (1, "--zero-stage 0"),
    "ZeRO 1, R 2": (2, "--zero-stage 1 --ring-parallel-size 2"),
    "ZeRO 3, U 2": (2, "--zero-stage 3 --ulysses-parallel-size 2"),
    "TP 2, PP 2, ZeRO 1": (4, f"{T2} {P2} --zero-stage 1"),
    "TP 2, FPDT, ZeRO 2": (4, f"{T2} --sequence-parallel --fpdt --fpdt-chunk-size 16 --zero-stage 2"),
}
PAIRS = [
    ("alone, fully_reshardable", "TP 2, PP 2, ZeRO 1"),
    ("TP 2, not distributed", "ZeRO 1, R 2"),
    ("TP 2 x PP 2, dp_reshardable", "ZeRO 3, U 2"),
    ("GPT, PP 2, dp_reshardable", "one process"),
]


@pytest.fixture(scope="module")
def written(pool, shared, tmp_path_factory):
    """What Megatron-LM has saved after two steps, once, and the losses of its next three."""

    def run(name):
        world, grid, *how = KINDS[name]
        folder = str(tmp_path_factory.mktemp("megatron"))
        kind, distributed, llama = how
        core_writer = name.startswith("alone")
        args = (f"{FLAGS} {grid}", folder, kind, distributed, llama, core_writer)
        return folder, pool.run(megatron_saves, world, *args, timeout=120)[0]

    return lambda name: shared(("megatron", name), lambda: run(name))


def every_pair():
    usual = [pytest.param(*pair) for pair in PAIRS]
    return usual + [
        pytest.param(kind, grid, marks=pytest.mark.full)
        for kind in KINDS
        for grid in GRIDS
        if (kind, grid) not in PAIRS
    ]


@pytest.mark.parametrize("kind, grid", every_pair())
def test_what_megatron_saved_goes_on_here(pool, written, kind, grid):
    folder, theirs = written(kind)
    world, flags = GRIDS[grid]
    first, consumed, losses = pool.run(we_go_on, world, f"{FLAGS} {flags}", folder, KINDS[kind][-1], timeout=120)[0]
    assert (first, consumed) == (2, 8)
    assert losses == pytest.approx(theirs, rel=1e-5)


def we_save(flags, folder, llama=True):
    from megatron.training.checkpoint import checkpoint

    job = make_job(flags, llama)
    train_job(job, 2)
    checkpoint.save(folder, job.progress, job.chunks, job.optimizer, job.schedule, job.config)
    return train_job(job, 3)[0]


def megatron_goes_on(flags, folder, llama=True):
    run = megatron_lm.build(flags, llama)
    first = megatron_lm.load(run, folder)
    return first, run.args.consumed_train_samples, megatron_lm.train(run, 3)


THERE = [
    ("ZeRO 3, U 2", (1, ""), True),
    ("one process", (4, f"{T2} {P2}"), False),
    pytest.param("ZeRO 1, R 2", (2, T2), True, marks=pytest.mark.full),
    pytest.param("TP 2, PP 2, ZeRO 1", (1, ""), False, marks=pytest.mark.full),
    pytest.param("TP 2, FPDT, ZeRO 2", (2, f"{P2} {V2} --micro-batch-size 1"), True, marks=pytest.mark.full),
]


@pytest.mark.parametrize("grid, there, llama", THERE)
def test_what_we_saved_goes_on_there(pool, tmp_path, grid, there, llama):
    world, flags = GRIDS[grid]
    ours = pool.run(we_save, world, f"{FLAGS} {flags}", str(tmp_path), llama, timeout=120)[0]
    first, consumed, theirs = pool.run(
        megatron_goes_on, there[0], f"{FLAGS} {there[1]}", str(tmp_path), llama, timeout=120
    )[0]
    assert (first, consumed) == (2, 8)
    assert theirs == pytest.approx(ours, rel=1e-5)
