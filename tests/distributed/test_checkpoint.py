# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: exact resume, any grid to any grid, and nothing lost when writing fails."""

import hashlib
import os
import resource
import shutil
import signal
from contextlib import nullcontext
from itertools import pairwise, permutations
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors
from tests.distributed.flags import GQA, P2, R2, SP, STREAM, T2, U2, V2, ZERO1, ZERO2, ZERO3, fpdt
from tests.distributed.pool import fork_server
from tests.distributed.training_runs import (
    make_job,
    refusal_of,
    resume,
    save_job,
    train_and_save,
    train_job,
    weights_of,
)
from tests.pairs import also_in_full

YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"


@pytest.mark.parametrize(
    "world, flags",
    [
        (1, "--hidden-dropout 0.1 --bf16"),
        (1, "--optimizer sgd"),
        (2, f"{ZERO1} --hidden-dropout 0.1"),
        (2, f"{ZERO2} --bf16 --micro-batch-size 1"),
        (2, f"{ZERO3} --fp16 --initial-loss-scale 256 --loss-scale-window 2 --micro-batch-size 1"),
        (4, f"{P2} {V2} {ZERO1} --micro-batch-size 1"),
        *also_in_full(
            (4, f"{SP} {ZERO3} {R2} --hidden-dropout 0.1"),
            (4, f"{U2} {R2} --hidden-dropout 0.1"),
            (2, f"{SP} {ZERO1} --fp16 --initial-loss-scale 1024"),
            (4, f"{SP} {U2} {ZERO1} --fp16 --initial-loss-scale 1024"),
        ),
    ],
)
@pytest.mark.usual(0, 1, 3)
def test_a_resumed_run_continues_exactly(pool, tmp_path, world, flags):
    flags = f"{GQA} --num-layers {4 if 'virtual' in flags else 2} {flags}"
    _, uninterrupted = pool.run(train_and_save, world, flags, str(tmp_path), 3, 3, timeout=120)[0]
    first, resumed = pool.run(resume, world, flags, str(tmp_path), 3, timeout=120)[0]
    assert first == 3
    assert resumed == uninterrupted  # to the last bit


TWO = f"{GQA} --num-layers 2"
BATCH_6 = "--micro-batch-size 1 --global-batch-size 6"
GRIDS = {
    "one process": (1, ""),
    "ZeRO 1, R 2": (4, f"{ZERO1} {R2}"),
    "TP 2, U 2": (4, f"{SP} {U2}"),
    "PP 2, ZeRO 1": (4, f"{P2} {ZERO1}"),
    "ZeRO 2, U 2": (2, f"{ZERO2} {U2}"),
    "ZeRO 3, R 4": (4, f"{ZERO3} --ring-parallel-size 4"),
    "TP 2, ZeRO 3": (4, f"{SP} {ZERO3}"),
    "FPDT streamed, ZeRO 3, U 2": (2, f"{fpdt(22, STREAM)} {ZERO3} {U2}"),
    "DP 3, ZeRO 3": (3, f"{ZERO3} {BATCH_6}"),  # no matrix is a multiple of three rows
    "one process, batch of 6": (1, BATCH_6),
    "TP 2, PP 2": (4, f"{T2} {P2}"),
    "TP 2, an empty stage, ZeRO 1": (4, f"{SP} {P2} --pipeline-model-parallel-layout Et|t||L {ZERO1}"),
}


@pytest.fixture(scope="module")
def saved(pool, shared, tmp_path_factory):
    """A grid's checkpoint after three steps, made once, and the losses of its next three."""

    def run(name: str) -> tuple[str, list[float]]:
        (world, flags), folder = GRIDS[name], str(tmp_path_factory.mktemp("checkpoint"))
        return folder, pool.run(train_and_save, world, f"{TWO} {flags}", folder, 3, 3, timeout=120)[0][1]

    return lambda name: shared(("saved", name), lambda: run(name))


TRANSITIONS = [
    ("FPDT streamed, ZeRO 3, U 2", "one process"),
    ("TP 2, U 2", "FPDT streamed, ZeRO 3, U 2"),
    ("ZeRO 1, R 2", "TP 2, an empty stage, ZeRO 1"),
    ("TP 2, an empty stage, ZeRO 1", "ZeRO 2, U 2"),
]
OF_6 = [name for name, (_, flags) in GRIDS.items() if BATCH_6 in flags]
EQUAL = [name for name in GRIDS if name not in OF_6]  # they have the same batches


@pytest.mark.parametrize("saved_on, loaded_on", [*TRANSITIONS, *also_in_full(*pairwise(EQUAL), *permutations(OF_6))])
@pytest.mark.usual(2, 3)
def test_any_grid_reads_what_another_wrote(pool, saved, saved_on, loaded_on):
    folder, uninterrupted = saved(saved_on)
    world, flags = GRIDS[loaded_on]
    first, resumed = pool.run(resume, world, f"{TWO} {flags}", folder, 3, timeout=120)[0]
    assert first == 3
    assert resumed == pytest.approx(uninterrupted, rel=1e-5)


def sinks_of(job):
    """This rank's learned sinks, by (layer of the model, head of the model)."""
    result = {}
    for name, parameter in weights_of(job).items():
        if name.endswith("softmax_offset"):
            first = job.runtime.grid.tensor.rank * len(parameter)
            result |= {(name, first + head): value for head, value in enumerate(parameter.tolist())}
    return result


def train_sinks(flags, folder, steps_before, steps_after):
    """Train and save in ``folder``, or load from there; then continue. Returns the sinks at both times."""
    job = make_job(flags)
    train_job(job, steps_before)
    if steps_before:
        save_job(folder, job)
    there = sinks_of(job)
    train_job(job, steps_after)
    return there, sinks_of(job)


@pytest.mark.parametrize(
    "world, saved_on, loaded_on",
    [
        (2, SP, P2),
        (2, f"{SP} --zero-stage 1", ""),
        *also_in_full((2, SP, ""), (2, P2, SP), (2, "", f"{SP} --zero-stage 1")),
    ],
)
@pytest.mark.usual(1)
def test_learned_sinks_go_from_grid_to_grid(pool, tmp_path, world, saved_on, loaded_on):
    """The sinks of each head and their optimizer states continue equally."""
    flags = f"{TWO} --softmax-type learnable --lr 1e-2"

    def whole(ranks):
        return tuple({name: value for rank in ranks for name, value in rank[when].items()} for when in (0, 1))

    saved, later = whole(pool.run(train_sinks, world, f"{flags} {saved_on}", str(tmp_path), 2, 2, timeout=120))
    where = f"{flags} {loaded_on} --load {tmp_path}"
    loaded, resumed = whole(pool.run(train_sinks, world, where, str(tmp_path), 0, 2, timeout=120))
    assert len(saved) == 2 * 8 == len(set(saved.values()))
    assert loaded == saved
    assert resumed == pytest.approx(later, abs=1e-5)
    assert max(abs(later[name] - saved[name]) for name in saved) > 5e-3


def save_where_files_cannot_grow(flags, folder):
    """Save once, then again with a limit on file sizes, as on a full disk; the message of the failure."""
    job = make_job(flags)
    train_job(job, 1)
    save_job(folder, job)
    train_job(job, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        save_job(folder, job)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return None


def test_a_full_disk_keeps_the_earlier_checkpoint_complete(pool, tmp_path):
    messages = pool.run(save_where_files_cannot_grow, 2, f"{GQA} --ring-parallel-size 2", str(tmp_path), timeout=120)
    assert all(message and "no checkpoint was written" in message for message in messages), messages
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    first, _ = pool.run(resume, 2, f"{GQA} --ring-parallel-size 2", str(tmp_path), 1)[0]
    assert first == 1


def load_on_core_alone(flags, folder):
    """What core's own ``dist_checkpointing.load`` reads into a fresh job's state, by key."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_items_iter

    from megatron.training.checkpoint import checkpoint

    job = make_job(flags)
    state = checkpoint._state(job.model_chunks, job.optimizer, job.schedule, job.progress, job.config, loading=True)
    loaded = dist_checkpointing.load(state, folder)
    tensors = [value for _, _, value in nested_items_iter(loaded) if isinstance(value, torch.Tensor)]
    return [hashlib.sha256(tensor.double().numpy().tobytes()).hexdigest() for tensor in tensors]


def save_with(flags, folder, writer):
    """Train two steps and save in one of three ways; returns the path and the number of extra processes."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from torch.distributed.checkpoint import filesystem

    from megatron.platform.streams import streams_of
    from megatron.training.checkpoint import checkpoint
    from megatron.training.checkpoint.rank_file import HostCopies

    job = make_job(flags)
    train_job(job, 2)
    write, result = filesystem._write_item, []

    def look_and_write(*args, **kwargs):
        result.append(len(psutil.Process().children(recursive=True)))
        return write(*args, **kwargs)

    before = len(psutil.Process().children(recursive=True))
    state = (job.model_chunks, job.optimizer, job.schedule)
    if writer == "core":
        Path(folder).mkdir(exist_ok=True)
        described = checkpoint._state(*state, job.progress, job.config, loading=False)
        core = TorchDistSaveShardedStrategy("torch_dist", 1)
        dist_checkpointing.save(described, folder, core, content_metadata=dict(checkpoint.METADATA))
        return folder, 0
    filesystem._write_item = look_and_write
    try:
        going = checkpoint.begin_save(folder, job.progress, *state, job.config)
        if writer == "async":
            going.start(HostCopies(streams_of(job.runtime.device)))
            going.copied.wait()
            train_job(job, 1)  # changes all tensors that are being written
        else:
            going.write()
        return str(going.finish()), max(result, default=0) - before
    finally:
        filesystem._write_item = write


@pytest.mark.parametrize(
    "world, flags",
    [(1, ""), pytest.param(4, f"{P2} --ring-parallel-size 2 --zero-stage 1", marks=pytest.mark.full)],
)
def test_a_save_starts_no_process_and_holds_what_cores_writer_writes(pool, tmp_path, world, flags):
    flags, read = f"{TWO} {flags}", {}
    for writer in ("sync", "async", "core"):
        saved = pool.run(save_with, world, flags, str(tmp_path / writer), writer, timeout=120)
        path = Path(saved[0][0])
        assert [started for _, started in saved] == [0] * world
        names = {file.name for file in path.iterdir()}
        assert names >= {".metadata", "metadata.json", "__0_0.distcp"}
        assert ("checksums.json" in names) == (writer != "core")
        # a Path of Python 3.13 cannot be read by earlier ones
        assert writer == "core" or b"pathlib" not in (path / ".metadata").read_bytes()
        assert "common.pt" in names or writer == "core"  # since 0.19 core writes it as an object among the tensors
        read[writer] = pool.run(load_on_core_alone, world, flags, str(path), timeout=120)
    assert read["sync"] == read["async"] == read["core"]


def save_and_be_killed(folder, asynchronous):
    """One process that is killed while it writes its second checkpoint, in the background or not."""
    os.setsid()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    import torch.distributed as dist
    from torch.distributed.checkpoint import filesystem

    from megatron.platform.streams import streams_of
    from megatron.training.checkpoint import checkpoint
    from megatron.training.checkpoint.rank_file import HostCopies

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = make_job(GQA)
    state, write, written = (job.model_chunks, job.optimizer, job.schedule, job.config), filesystem._write_item, []
    copies = HostCopies(streams_of(job.runtime.device))

    def write_or_die(*args, **kwargs):
        written.append(write(*args, **kwargs))
        if job.progress.iteration == 2 and len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return written[-1]

    filesystem._write_item = write_or_die
    for _ in range(2):
        written.clear()
        train_job(job, 1)
        going = checkpoint.begin_save(folder, job.progress, *state)
        if asynchronous:
            going.start(copies)
            going.copied.wait()
            train_job(job, 1)
            job.progress.iteration -= 1
        else:
            going.write()
        going.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.usual(1)
def test_a_worker_killed_while_saving_leaves_the_earlier_checkpoint_and_no_process(pool, tmp_path, asynchronous):
    process = fork_server().Process(target=save_and_be_killed, args=(str(tmp_path), asynchronous))
    process.start()
    session = process.pid
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    left = [one for one in psutil.process_iter() if _session_of(one.pid) == session]
    assert not left
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert {path.name for path in tmp_path.glob("iter_*")} == {"iter_0000001"}
    first, _ = pool.run(resume, 1, GQA, str(tmp_path), 1)[0]
    assert first == 1


def _session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def refusal_without_memory(flags):
    failing = patch.object(StoredTensors, "read", side_effect=torch.OutOfMemoryError("no memory for it"))
    with failing if dist.get_rank() == 1 else nullcontext():
        return refusal_of(flags)


def test_checkpoints_that_cannot_be_loaded_are_refused_by_name(pool, tmp_path):
    folder = str(tmp_path)
    pool.run(train_and_save, 1, GQA, folder, 1, 0)
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder} --num-layers 2")
    assert "another model" in text and "--num-layers 4 in the checkpoint, 2 in this run" in text
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder} {YARN}")  # another network: cannot be resumed
    assert "another model" in text and "--position-embedding-type rope in the checkpoint, yarn in this run" in text
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder} --finetune --position-embedding-type learned_absolute")
    assert "another model" in text
    assert "--position-embedding-type rope in the checkpoint, learned_absolute in this run" in text
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder} --optimizer sgd")
    assert "--optimizer adam" in text and "--no-load-optim" in text
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder} --vocab-size 200")
    assert "vocabulary of 302 tokens" in text and "this run's tokenizer has 201" in text
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder} --ckpt-step 7")
    assert "iter_0000007 is missing" in text and "--ckpt-step" in text
    first, second = pool.run(refusal_without_memory, 2, f"{GQA} {R2} --load {folder}")
    assert "cannot be read: no memory for it (rank 1)" in first == second
    shutil.rmtree(Path(folder) / "iter_0000001")
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder}")
    assert "iter_0000001 is missing or incomplete" in text
    (text,) = pool.run(refusal_of, 1, f"{GQA} --load {folder}/nothing --exit-on-missing-checkpoint")
    assert "holds no checkpoint" in text


def weights_only(flags, folder):
    job = make_job(f"{flags} --load {folder} --finetune")
    return job.progress.iteration, train_job(job, 1)[0]


def test_finetune_takes_the_weights_and_starts_at_zero(pool, tmp_path):
    _, after = pool.run(train_and_save, 1, GQA, str(tmp_path), 3, 1)[0]
    for world, flags in (
        (1, GQA),
        (2, f"{GQA} --zero-stage 1 --bf16"),
        (2, f"{GQA} --zero-stage 3 --bf16"),
        (2, f"{GQA} --tensor-model-parallel-size 2"),
        (1, f"{GQA} {YARN}"),  # YaRN has no weights
    ):
        first, losses = pool.run(weights_only, world, flags, str(tmp_path))[0]
        assert first == 0
        assert losses[0] < 5.5  # a fresh model starts at 5.72


@pytest.mark.parametrize(
    "keep, multiple_of, left", [(1, 4, [4, 8, 10]), (2, None, [8, 10]), (3, 2, [2, 4, 6, 8, 10]), (9, None, "all")]
)
def test_older_checkpoints_are_removed(tmp_path, keep, multiple_of, left):
    from megatron.training.checkpoint.checkpoint_folder import remove_older

    for iteration in (2, 4, 6, 8, 10, 12):  # the last one: of a run that was resumed from an earlier checkpoint
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / "iter_0000002.bak").mkdir()
    (tmp_path / "iter_0000001").symlink_to("iter_0000002.bak")
    remove_older(tmp_path, 10, keep, multiple_of)
    result = {path.name for path in tmp_path.iterdir()}
    assert {"iter_0000012", "iter_0000002.bak", "iter_0000001"} <= result
    numbers = sorted(int(name[5:]) for name in result if name[5:].isdigit() and name[5:] not in ("0000001", "0000012"))
    assert numbers == ([2, 4, 6, 8, 10] if left == "all" else left)


def train_on_tokens(flags, folder, steps):
    """Train and save; returns (iterations of the run, learning rates)."""
    job = make_job(flags)
    rates = []
    for _ in range(steps):
        rates.append(job.optimizer.param_groups[0]["lr"])
        train_job(job, 1)
    save_job(folder, job)
    return job.iterations, rates, job.progress.consumed_train_tokens


def test_a_run_that_counts_tokens_continues_with_another_sequence_length(pool, tmp_path):
    """Steps of 4 x 64 tokens, then of 4 x 32: the schedule continues where it was, at half the rate."""
    flags = f"{TWO} --lr-decay-style linear --train-iters 50 --train-tokens 2048 --lr-decay-tokens 12800"
    iterations, rates, tokens = pool.run(train_on_tokens, 1, flags, str(tmp_path), 2, timeout=120)[0]
    assert (iterations, tokens) == (8, 512) and rates == pytest.approx([1e-3, 0.98e-3])
    flags = f"{flags} --seq-length 32 --load {tmp_path}"
    iterations, rates, tokens = pool.run(train_on_tokens, 1, flags, str(tmp_path), 2, timeout=120)[0]
    assert (iterations, tokens) == (2 + 12, 768) and rates == pytest.approx([0.96e-3, 0.95e-3])
