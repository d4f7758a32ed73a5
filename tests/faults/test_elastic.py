# SPDX-License-Identifier: Apache-2.0
"""Machines come and go: the run goes on, on another grid, with the losses of an undisturbed one."""

import os
import random
from pathlib import Path

from tests.distributed.test_program import PROGRAM, rows
from tests.program import run_ranks

CHANGES = int(os.environ.get("CHANGES", "1"))
STEPS = 2 if CHANGES == 1 else 10  # from one change to the next
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 --max-position-embeddings 96 "
    "--micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --num-workers 0 "
    "--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --eval-iters 0 "
    "--attention-dropout 0.1 --hidden-dropout 0.1"
)
GRIDS = "8: tp2 u2 r2; 6: u2 r3; 4: pp2 r2; 3: r3; 2: u2; 1: u1"
WORLDS = (2, 1, 8, 6, 4, 3)
MORE = ("--zero-stage 1", "--sequence-parallel --zero-stage 1", "--fpdt --fpdt-chunk-size 48",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(folder: Path, flags: str, grids: list[str], processes: int) -> None:
    save = f"--save {folder}/c --load {folder}/c --log-jsonl {folder}/log.jsonl"
    done = run_ranks(PROGRAM, [*f"{FLAGS} {save} {flags}".split(), *grids], ENVIRONMENT, processes, timeout=200)
    said = "".join(one.stdout + one.stderr for one in done)
    assert [one.returncode for one in done] == [0] * processes, said


def test_losses_after_changes_are_those_of_an_undisturbed_run(tmp_path):
    draw, iterations = random.Random(2), STEPS * (CHANGES + 1)
    run(tmp_path / "whole", f"--train-iters {iterations}", [], 1)
    whole = rows(tmp_path / "whole" / "log.jsonl")
    took = []
    for number in range(CHANGES + 1):
        processes, more = WORLDS[number % len(WORLDS)], draw.choice(MORE) if number else MORE[0]
        flags = f"--train-iters {iterations} --exit-interval {STEPS} {more}"
        run(tmp_path / "elastic", flags, ["--elastic-grids", GRIDS], processes)
        took.append(processes)
    elastic = rows(tmp_path / "elastic" / "log.jsonl")
    assert [row["iteration"] for row in elastic] == list(range(1, iterations + 1))
    assert [row["tokens"] for row in elastic] == [row["tokens"] for row in whole]
    worst = max(abs(a["lm_loss"] / b["lm_loss"] - 1) for a, b in zip(elastic, whole))
    assert worst < 1e-5
    print(f"\n{iterations} steps on {took} processes: losses within {worst:.1e} of one process")
