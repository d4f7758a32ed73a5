# SPDX-License-Identifier: Apache-2.0
"""Copies of the training state in host memory: a run that restarts from them equals one that never stopped."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from megatron.training.checkpoint.checksums import list_files
from megatron.training.checkpoint.in_memory import copy_file
from tests.distributed.flags import SP
from tests.distributed.training_runs import make_job, save_job, train_job
from tests.pairs import also_in_full

SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
P2 = "--pipeline-model-parallel-size 2 --micro-batch-size 1"


def with_copies(folder, flags, nodes):
    """Flags of a run on several nodes; a folder stands for the memory of each node."""
    import torch.distributed as dist

    local = dist.get_world_size() // nodes
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    return (
        f"{SMALL} {flags} --save {folder}/c --load {folder}/c --non-persistent-save-interval 2 "
        f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {folder}/node{dist.get_rank() // local}"
    )


SIZES = (2500, 1000, 0)  # bytes that each rank sends to the next; a message has at most 1000


def swap_files(folder, missing):
    """Each rank's file goes to the next rank; whether this rank received what the previous one has, or its error."""
    import torch.distributed as dist

    rank = dist.get_rank()
    before, own, got = (rank - 1) % 3, Path(folder, f"own{rank}"), Path(folder, f"got{rank}")
    own.write_bytes(bytes((rank + at) % 251 for at in range(SIZES[rank])))
    got = got / "missing" if rank == missing else got
    size, copy_file.MESSAGE = copy_file.MESSAGE, 1000
    dist.barrier()
    try:
        copy_file.swap((own, (rank + 1) % 3), (got, before, SIZES[before]), dist.group.WORLD)
    except OSError as error:
        return type(error).__name__
    finally:
        copy_file.MESSAGE = size
    return got.read_bytes() == bytes((before + at) % 251 for at in range(SIZES[before]))


@pytest.mark.parametrize("missing", [None, 1])
def test_files_are_exchanged_in_messages(pool, tmp_path, missing):
    """A rank that cannot write its file still receives it, so that the others go on."""
    expected = ["FileNotFoundError" if rank == missing else True for rank in range(3)]
    assert pool.run(swap_files, 3, tmp_path, missing) == expected


def run(folder, flags, nodes=1, copies=(), more=0, save_at=()):
    """Start or continue; make a copy after each of some steps, then take more steps.

    Returns (iteration at the start, losses of the last steps, notes, lines about copies).
    """
    from megatron.training.checkpoint.in_memory.state import TrainingState

    before, output, job = os.environ.get("LOCAL_WORLD_SIZE"), [], None
    try:
        job = make_job(with_copies(folder, flags, nodes))
        first = job.progress.iteration
        state = (job.model_chunks, job.optimizer, job.schedule, job.config)
        for count in copies:
            train_job(job, count)
            if job.progress.iteration in save_at:
                save_job(f"{folder}/c", job)
            job.copies.begin(job.progress, TrainingState(*state).tensors())
            job.copies.finish()
            output += job.copies.take_lines()
        return first, train_job(job, more)[0], job.config.notes, output
    finally:
        if job and job.owner:
            job.owner.release()  # another process of the tests may continue from a copy of the folder
        os.environ.pop("LOCAL_WORLD_SIZE")
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


def files(folder, node=0):
    """Names of the copies on a node, without the hidden ones."""
    return sorted(path.name.removesuffix(".safetensors") for path in Path(folder, f"node{node}").glob("run-*/iter_*"))


def the_file(folder, node, name):
    (path,) = Path(folder, f"node{node}").glob(f"run-*/{name}.safetensors")
    return path


@pytest.mark.parametrize(
    "world, flags",
    [
        (2, "--zero-stage 1 --bf16 --hidden-dropout 0.1 --partition-position-embedding --ring-parallel-size 2 GPT"),
        (4, f"{SP} --fp16 --initial-loss-scale 256 --loss-scale-window 2 --lr-warmup-iters 3"),
        (
            2,
            "--zero-stage 1 --bf16 --ring-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32",
        ),
        *also_in_full(
            (2, "--zero-stage 3 --bf16 --micro-batch-size 1"),
            (4, f"{P2} --zero-stage 1 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
            (4, f"{SP} --zero-stage 2 --non-persistent-local-ckpt-algo atomic"),
            (2, "--optimizer sgd --ulysses-parallel-size 2 --non-persistent-local-ckpt-algo atomic"),
            (2, "--zero-stage 1 --overlap-param-gather --overlap-grad-reduce"),
            (1, ""),
        ),
    ],
)
def test_a_run_continues_exactly_from_memory(pool, tmp_path, world, flags):
    flags = flags.replace("GPT", "--position-embedding-type learned_absolute")
    _, losses, notes, output = pool.run(run, world, tmp_path, flags, 1, (1, 2), 3, timeout=120)[0]
    assert files(tmp_path) == [f"iter_0000003.rank_{rank:05d}" for rank in range(world)]
    assert not [note for note in notes if "cop" in note] and len(output) == 1 and "training waited" in output[0]
    first, resumed, notes, _ = pool.run(run, world, tmp_path, flags, 1, (), 3, timeout=120)[0]
    assert first == 3 and resumed == losses  # to the last bit
    assert "loaded iteration 3 from the copies in memory; the disk has no checkpoint" in notes


REPLICATED = "--zero-stage 1 --ring-parallel-size 2 --replication"


@pytest.fixture(scope="module")
def two_nodes(pool, shared, tmp_path_factory):
    """Four ranks on two nodes: a checkpoint of iteration 1, copies of iteration 3, and the next two losses."""

    def make():
        folder = tmp_path_factory.mktemp("nodes")
        _, losses, _, output = pool.run(run, 4, folder, REPLICATED, 2, (1, 2), 2, (1,), timeout=120)[0]
        assert "and on rank n + 2" in output[0]
        return str(folder), losses

    return shared("two nodes with copies", make)


@pytest.fixture
def nodes(two_nodes, tmp_path):
    """A copy of that folder, and the losses after iteration 3."""
    return Path(shutil.copytree(two_nodes[0], tmp_path / "nodes")), two_nodes[1]


def test_every_copy_lies_on_two_nodes(nodes):
    folder, _ = nodes
    for node in range(2):
        assert files(folder, node) == [f"iter_0000003.rank_{rank:05d}" for rank in range(4)]
        (inner,) = folder.glob(f"node{node}/run-*")
        assert inner.stat().st_mode & 0o777 == 0o700
        assert all(not path.name.startswith(".") for path in inner.iterdir())
    mine, other = (the_file(folder, node, "iter_0000003.rank_00001") for node in range(2))
    assert mine.read_bytes() == other.read_bytes()
    assert "model0.decoder.layers.0.mlp.linear_fc2.weight" in {
        name for rank in range(4) for name in load_file(the_file(folder, 0, f"iter_0000003.rank_{rank:05d}"))
    }


def lose_a_node(folder):
    shutil.rmtree(folder / "node1")
    return "for ranks 2, 3 from another node"


def exchange_nodes(folder):
    """The ranks get other hosts, and one copy is missing."""
    (folder / "node0").rename(folder / "x")
    (folder / "node1").rename(folder / "node0")
    (folder / "x").rename(folder / "node1")
    the_file(folder, 0, "iter_0000003.rank_00000").unlink()
    return "for rank 0 from another node"


def flip_a_bit(folder):
    path = the_file(folder, 0, "iter_0000003.rank_00001")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return "for rank 1 from another node"


def flip_a_bit_of_a_header(folder):
    """The iteration in the file is not a number."""
    path = the_file(folder, 0, "iter_0000003.rank_00001")
    data = path.read_bytes()
    assert b'"iteration":"3"' in data
    path.write_bytes(data.replace(b'"iteration":"3"', b'"iteration":"s"'))
    return "for rank 1 from another node"


def cut_off_while_writing(folder):
    """An incomplete newer step, an unfinished file, a file with another rank's name, and a truncated file."""
    for node, rank in ((0, 0), (0, 1), (1, 2), (1, 3)):
        path = the_file(folder, node, f"iter_0000003.rank_{rank:05d}")
        newer = path.with_name(path.name.replace("iter_0000003", "iter_0000005"))
        if rank == 1:
            newer = newer.with_name(f".{newer.name}.by_1.partial")
        if rank == 3:
            shutil.copy(path, newer)
            continue
        with safe_open(path, "pt") as file:
            about = {key: value for key, value in file.metadata().items() if key != "crc32"} | {"iteration": "5"}
            copy_file.write(newer, [(name, file.get_tensor(name)) for name in file.keys()], about)  # noqa: SIM118
        copy_file.seal(newer)
    os.truncate(the_file(folder, 1, "iter_0000003.rank_00002"), 1000)
    return "for rank 2 from another node"


HARM = [lose_a_node, flip_a_bit, flip_a_bit_of_a_header, *also_in_full(exchange_nodes, cut_off_while_writing)]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.usual(0, 2)
def test_a_lost_copy_comes_from_the_neighbour(pool, nodes, harm):
    folder, losses = nodes
    expected = harm(folder)
    first, after, notes, _ = pool.run(run, 4, folder, REPLICATED, 2, (), 2, timeout=120)[0]
    (note,) = [note for note in notes if "in memory" in note]
    assert first == 3 and expected in note and "the disk has iteration 1" in note
    assert after == losses  # to the last bit
    for node in range(2):  # no newer file remains that could be loaded by mistake
        assert {name.partition(".")[0] for name in files(folder, node)} == {"iter_0000003"}


def lose_both(folder):
    flip_a_bit(folder)
    the_file(folder, 1, "iter_0000003.rank_00001").unlink()
    return REPLICATED, "no undamaged copy of rank 1 at iteration 3 is left"


def another_grid(folder):
    return "--tensor-model-parallel-size 2 --zero-stage 1 --replication", "Ring 2"


def another_run(folder):
    (folder / "c" / "copies_in_memory.txt").write_text("0" * 32)
    return REPLICATED, ""


def disk_is_newer(folder):
    shutil.copytree(folder / "c" / "iter_0000001", folder / "c" / "iter_0000003")  # another state
    list_files(folder / "c" / "iter_0000003")
    (folder / "c" / "latest_checkpointed_iteration.txt").write_text("3")
    return REPLICATED, ""


@pytest.mark.parametrize("harm", [lose_both, another_grid, *also_in_full(another_run, disk_is_newer)])
def test_without_a_complete_newer_step_the_run_continues_from_the_disk(pool, nodes, harm):
    folder, _ = nodes
    flags, reason = harm(folder)
    first, _, notes, _ = pool.run(run, 4, folder, flags, 2, (), timeout=120)[0]
    lines = [note for note in notes if "in memory" in note]
    assert first == 1 and any(note.startswith("loaded ") and "/c/iter_" in note for note in notes)
    assert len(lines) == bool(reason) and all(reason in line and "\n" not in line for line in lines)
    assert harm is another_run or not files(folder)  # the copies are of no more use


def without_room(folder, flags):
    """Two copies; there is no room for the second one on rank 1."""
    import torch.distributed as dist

    from megatron.training.checkpoint.in_memory.state import TrainingState

    job = make_job(with_copies(folder, flags, 1))
    os.environ.pop("LOCAL_WORLD_SIZE")
    lines = []
    for _ in range(2):
        train_job(job, 1)
        held = TrainingState(job.model_chunks, job.optimizer, job.schedule, job.config)
        job.copies.begin(job.progress, held.tensors())
        job.copies.finish()
        lines += job.copies.take_lines()
        if dist.get_rank() == 1:
            job.copies.folder = replace(job.copies.folder, number=10**6)  # no such descriptor
    return lines


def test_a_copy_that_has_no_room_is_one_line(pool, tmp_path):
    for _, line in pool.run(without_room, 2, tmp_path, "--zero-stage 1", timeout=120):
        assert line.startswith("WARNING: no copy of iteration 2 in memory (rank 1: FileNotFoundError")
        assert "the previous one is kept" in line and "\n" not in line
    assert files(tmp_path) == [f"iter_0000001.rank_{rank:05d}" for rank in range(2)]
    assert not list(tmp_path.glob("node0/run-*/.*"))
