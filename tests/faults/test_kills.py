# SPDX-License-Identifier: Apache-2.0
"""``kill -9`` of the whole job or of one rank at random moments: the resumed run equals the undisturbed one."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.distributed.test_program import FLAGS, PROGRAM, ROOT, rows
from tests.faults.kills import ENVIRONMENT, Ended, losses, run_and_kill, text
from tests.patience import patience
from tests.program import meeting, run_ranks, start_forked

KILLS = int(os.environ.get("KILLS", "1"))
ITERATIONS, INTERVAL, RANKS = 6 if KILLS == 1 else 10, 2, 2


def flags(folder: Path, more: str = "") -> list[str]:
    return (
        f"{FLAGS} --ring-parallel-size 2 --zero-stage 1 --train-iters {ITERATIONS} --eval-iters 0 "
        f"--save-interval {INTERVAL} --save {folder}/checkpoints --load {folder}/checkpoints "
        f"--log-jsonl {folder}/log.jsonl {more}"
    ).split()


def saved(folder: Path) -> int:
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


@pytest.mark.lab
def test_kills_at_random_moments(tmp_path):
    draw, counts, repeated = random.Random(1), Counter(), 0
    begin = time.monotonic()
    whole = tmp_path / "whole"
    done = run_ranks(PROGRAM, flags(whole), ENVIRONMENT, RANKS)
    assert [one.returncode for one in done] == [0] * RANKS, done[0].stderr
    seconds, reference = defaultdict(lambda whole=time.monotonic() - begin: whole), losses(whole)
    assert list(reference) == list(range(1, ITERATIONS + 1))

    folder, attempt = tmp_path / "killed", 0
    while counts["job"] + counts["rank"] < KILLS:
        attempt += 1
        before = saved(folder)
        output = flags(folder, draw.choice(("", "--async-save --keep-last-checkpoints 1")))
        end = run_and_kill([output] * RANKS, tmp_path / f"logs{attempt}", draw, (0.05, seconds[before]))
        counts[end.what] += 1
        if end.what == "over":  # the speed of machines varies
            seconds[before] = end.seconds
        result = losses(folder)
        assert result == {one: reference[one] for one in result}, f"after {end.what} was killed\n{end.errors}"
        assert saved(folder) >= before, end.errors
        assert "common state dict differs" not in end.errors, end.errors  # megatron-core would warn so
        repeated = max(repeated, max(result, default=0) - saved(folder))
        if saved(folder) >= ITERATIONS - INTERVAL:
            shutil.rmtree(folder)
            counts["runs"] += 1
    done = run_ranks(PROGRAM, flags(folder), ENVIRONMENT, RANKS)
    assert [one.returncode for one in done] == [0] * RANKS, done[0].stderr
    assert losses(folder) == reference
    # The last step may be logged while its save, or with --async-save the previous one, is interrupted.
    assert repeated <= 2 * INTERVAL
    print(f"\n{dict(counts)} in {attempt} starts; at most {repeated} steps repeated; every loss and norm the same")


# Machines come and go: the run continues on another grid with the losses of an undisturbed run.


CHANGES = int(os.environ.get("CHANGES", "1"))
STEPS = 2 if CHANGES == 1 else 10  # from one change to the next
ELASTIC_FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 --max-position-embeddings 96 "
    "--micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --num-workers 0 "
    "--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --eval-iters 0 "
    "--attention-dropout 0.1 --hidden-dropout 0.1"
)
GRIDS = "8: tp2 u2 r2; 6: u2 r3; 4: pp2 r2; 3: r3; 2: u2; 1: u1"
WORLDS = (2, 1, 8, 6, 4, 3)
MORE = ("--zero-stage 1", "--sequence-parallel --zero-stage 1", "--fpdt --fpdt-chunk-size 48",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")  # fmt: skip


def run(folder: Path, flags: str, grids: list[str], processes: int) -> None:
    save = f"--save {folder}/c --load {folder}/c --log-jsonl {folder}/log.jsonl"
    done = run_ranks(PROGRAM, [*f"{ELASTIC_FLAGS} {save} {flags}".split(), *grids], ENVIRONMENT, processes, timeout=200)
    output = "".join(one.stdout + one.stderr for one in done)
    assert [one.returncode for one in done] == [0] * processes, output


@pytest.mark.full
def test_losses_after_changes_are_those_of_an_undisturbed_run(tmp_path):
    draw, iterations = random.Random(2), STEPS * (CHANGES + 1)
    run(tmp_path / "whole", f"--train-iters {iterations}", [], 1)
    whole = rows(tmp_path / "whole" / "log.jsonl")
    worlds = []
    for number in range(CHANGES + 1):
        processes, more = WORLDS[number % len(WORLDS)], draw.choice(MORE) if number else MORE[0]
        flags = f"--train-iters {iterations} --exit-interval {STEPS} {more}"
        run(tmp_path / "elastic", flags, ["--elastic-grids", GRIDS], processes)
        worlds.append(processes)
    elastic = rows(tmp_path / "elastic" / "log.jsonl")
    assert [row["iteration"] for row in elastic] == list(range(1, iterations + 1))
    assert [row["tokens"] for row in elastic] == [row["tokens"] for row in whole]
    worst = max(abs(a["lm_loss"] / b["lm_loss"] - 1) for a, b in zip(elastic, whole))
    assert worst < 1e-5
    print(f"\n{iterations} steps on {worlds} processes: losses within {worst:.1e} of one process")


# A run over three lengths is killed within the second one, and goes on there on another grid.


STAGES = "0:32 {} 2:64 {} 8:128 {}"
U2, R2, TP2, PP2 = (f"--{name}-parallel-size 2" for name in ("ulysses", "ring", "tensor-model", "pipeline-model"))


@pytest.mark.full
def test_a_run_over_three_lengths_is_killed(tmp_path):
    documents = np.random.default_rng(0).integers(0, 100, (300, 40)).astype(np.uint16)
    builder = IndexedDatasetBuilder(f"{tmp_path}/data.bin", dtype=np.uint16)
    for number, document in enumerate(documents):
        builder.add_document(np.append(document[: 2 + number % 38], 100), [3 + number % 38])
    builder.finalize(f"{tmp_path}/data.idx")
    flags = f"{ELASTIC_FLAGS} --position-embedding-type rope --train-iters 9 --save-interval 2 --packing by-work "
    flags = flags.replace("--seq-length 96 --max-position-embeddings 96", "").replace("--global-batch-size 12", "")
    flags = flags.replace("--mock-data", f"--data-path {tmp_path}/data --split 1,0,0 --reset-attention-mask")

    def words(name: str, *grids: str) -> list[str]:
        folder = f"{tmp_path}/{name}"
        files = f"--save {folder}/checkpoints --load {folder}/checkpoints --log-jsonl {folder}/log.jsonl"
        return [*f"{flags} --global-batch-size 4 {files}".split(), "--seq-length-schedule", STAGES.format(*grids)]

    done = run_ranks(PROGRAM, words("whole", "", "", ""), ENVIRONMENT, 1)[0]
    assert done.returncode == 0, done.stderr
    with meeting(ENVIRONMENT, 2) as environments:
        ranks = [start_forked(PROGRAM, words("killed", "", R2, U2), one, tmp_path / f"rank{number}")
                 for number, one in enumerate(environments)]  # fmt: skip
        end = time.monotonic() + patience(60)
        while 5 not in losses(tmp_path / "killed"):
            assert time.monotonic() < end and all(rank.is_alive() for rank in ranks), text(tmp_path / "rank0" / "err")
            time.sleep(0.02)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
    assert saved(tmp_path / "killed") in (4, 6)
    other = words("killed", PP2, f"{TP2} --sequence-parallel", f"{PP2} --zero-stage 1")
    done = run_ranks(PROGRAM, other, ENVIRONMENT, 2)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert "stage 2 of 3: iterations 3 to 8, 64 tokens per sample" in done[0].stdout
    whole, killed = (rows(tmp_path / name / "log.jsonl") for name in ("whole", "killed"))
    assert [(row["iteration"], row["stage"], row["seq_length"]) for row in killed] == [
        (number, 1 + (number > 2) + (number > 8), 32 if number <= 2 else 64 if number <= 8 else 128)
        for number in range(1, 10)
    ]
    worst = max(abs(a["lm_loss"] / b["lm_loss"] - 1) for a, b in zip(killed, whole))
    assert worst < 1e-5 and [row["tokens"] for row in killed] == [row["tokens"] for row in whole]
    print(f"\nlosses within {worst:.1e} of one process that was never killed")


# ``kill -9`` at random moments of a run with copies in memory; every second time a node's memory is lost too.


LOST_NODES = int(os.environ.get("LOST_NODES", "0"))
LOST_NODE_STEPS, ON_DISK, NODES = 12, 5, 2  # one rank a node
LOADED = re.compile(r"loaded iteration (\d+) from the copies in memory(, of rank)?")


def lost_node_flags(folder: Path, node: int) -> list[str]:
    return (
        f"{FLAGS} --ring-parallel-size 2 --zero-stage 1 --bf16 --hidden-dropout 0.1 --train-iters {LOST_NODE_STEPS} "
        f"--eval-iters 0 --save-interval {ON_DISK} --save {folder}/c --load {folder}/c --log-jsonl {folder}/log.jsonl "
        f"--async-save --non-persistent-save-interval 1 --non-persistent-ckpt-type local --replication "
        f"--non-persistent-local-ckpt-dir {folder}/memory{node}"
    ).split()


def start(folder: Path, logs: Path, draw: random.Random | None, seconds: float = 0.0) -> Ended:
    """Run until the end, or until something is killed."""
    argv = [lost_node_flags(folder, node) for node in range(NODES)]
    return run_and_kill(argv, logs, draw, (0.2 * seconds, seconds), {"LOCAL_WORLD_SIZE": "1"})


@pytest.mark.skipif(not LOST_NODES, reason="LOST_NODES=20 runs it, as tests/faults/run.sh does")
def test_kills_and_lost_nodes(tmp_path):
    draw, counts, begin = random.Random(3), Counter(), time.monotonic()
    whole = tmp_path / "whole"
    end = start(whole, tmp_path / "logs", None)
    assert end.codes == [0] * NODES, end.output
    seconds, reference = defaultdict(lambda whole=time.monotonic() - begin: whole), losses(whole)
    assert list(reference) == list(range(1, LOST_NODE_STEPS + 1))
    assert not list(whole.glob("memory*/*")) and not list(whole.glob("c/copies*"))  # a normal end removes them

    folder, attempt, most = tmp_path / "killed", 0, 0
    while counts["kills"] < LOST_NODES or folder.exists():
        attempt += 1
        before = max(losses(folder), default=0)
        last = counts["kills"] >= LOST_NODES
        end = start(folder, tmp_path / f"logs{attempt}", None if last else draw, seconds[before])
        result = losses(folder)
        assert result == {iteration: reference[iteration] for iteration in result}, end.output
        if "ready after" in end.output:
            loaded = LOADED.search(end.output)
            counts["from memory" if loaded else "from the disk or anew"] += 1
            counts["with a neighbour's copy"] += bool(loaded and loaded[2])
            if loaded:
                most = max(most, before - int(loaded[1]))
            assert loaded or before <= 2, end.output  # a complete step exists from the second one on
        if end.codes == [0] * NODES:
            assert result == reference and not list(folder.glob("memory*/*"))
            shutil.rmtree(folder)
            counts["runs"] += 1
            if not last:  # the speed of machines varies
                seconds[before] = end.seconds
            continue
        counts["kills"] += 1
        if draw.random() < 0.5:
            shutil.rmtree(folder / f"memory{draw.randrange(NODES)}", ignore_errors=True)
            counts["lost nodes"] += 1
    assert most <= 2  # the copies of the last two steps may be incomplete
    print(f"\n{dict(counts)} in {attempt} starts; at most {most} steps repeated; every loss and norm the same")


# After many steps and saves, memory, threads and open files have not grown.


SOAK_STEPS = int(os.environ.get("SOAK", "0"))
EVERY = 20  # steps between saves
SOAK_RANKS = 2


def count(process: psutil.Process) -> dict[str, int]:
    """Memory, threads and files of a process, from /proc."""
    folder = Path("/proc", str(process.pid))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "memory, MiB": int(status["VmRSS"].split()[0]) // 1024,
        "threads": int(status["Threads"]),
        "files": len(list((folder / "fd").iterdir())),
        "children": len(process.children(recursive=True)),
    }


@pytest.mark.skipif(not SOAK_STEPS, reason="minutes: bash tests/faults/run.sh")
def test_nothing_grows(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SOAK_RANKS)]
    command += [str(PROGRAM), *FLAGS.split(), *"--ring-parallel-size 2 --zero-stage 1 --eval-iters 0".split()]
    command += f"--train-iters {SOAK_STEPS} --save-interval {EVERY} --save-retain-interval {10 * SOAK_STEPS}".split()
    command += f"--save {tmp_path}/c --log-jsonl {tmp_path}/log.jsonl".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    rows: list[tuple[int, list[dict[str, int]]]] = []
    text, begin = "", time.monotonic()
    for line in launcher.stdout:
        text = (text + line)[-20000:]
        result = re.search(r"iteration +(\d+)/", line)
        if result and int(result[1]) % EVERY == EVERY // 2 and int(result[1]) > 3 * EVERY:  # between two saves
            workers = sorted(psutil.Process(launcher.pid).children(), key=lambda one: one.environ()["RANK"])
            rows.append((int(result[1]), [count(worker) for worker in workers]))
        assert time.monotonic() - begin < patience(SOAK_STEPS), text
    assert launcher.wait() == 0, text
    tenth = max(1, len(rows) // 10)
    output = []
    for rank in range(SOAK_RANKS):
        for name in rows[0][1][rank]:
            first = max(counts[rank][name] for _, counts in rows[:tenth])
            last = max(counts[rank][name] for _, counts in rows[-tenth:])
            output.append(f"rank {rank} {name}: {first} at first, {last} at last")
            allowed = first + 16 if "memory" in name else first  # MiB: tolerance for the allocator
            assert last <= allowed, "\n".join(output)
    assert [path.name for path in (tmp_path / "c").glob("iter_*")] == [f"iter_{SOAK_STEPS:07d}"]
    print(f"\n{SOAK_STEPS} steps, {SOAK_STEPS // EVERY} saves in {time.monotonic() - begin:.0f} s: {'; '.join(output)}")
