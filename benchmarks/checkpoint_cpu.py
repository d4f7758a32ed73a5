#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of each part of a save on one process, for busy machines: 1 GB, three saves.

    python benchmarks/checkpoint_cpu.py

With --async-save, training waits for `begin` and `finish`, and for `copy` as far as it takes longer than the forward
and backward pass of a step; without it, also for `write`. `check` is the verification of all files before loading.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MODEL = "--num-layers 5 --hidden-size 1024 --num-attention-heads 8 --global-batch-size 1".split()


def main() -> None:
    from benchmarks.checkpoint import RUN
    from megatron.platform.streams import streams_of
    from megatron.training.arguments.models import LLAMA_DEFAULTS
    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint import checkpoint, checksums
    from megatron.training.checkpoint.rank_file import HostCopies
    from megatron.training.job import batches_for, prepare
    from megatron.training.setup import start, stop
    from megatron.training.step import train_step

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29818"}
    config = parse([*RUN, *MODEL], LLAMA_DEFAULTS, 1)
    job = prepare(config, start(config))
    batches, state = batches_for(job, job.datasets[0], 0, 0), (job.chunks, job.optimizer, job.schedule)
    for _ in range(2):
        timed("step", lambda: train_step(job.runtime, *state, batches, config, 1))
    copies = HostCopies(streams_of(job.runtime.device))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            job.progress.iteration += 1
            save = timed("begin", lambda: checkpoint.begin_save(folder, job.progress, *state, config))
            print(f"{save.bytes / 1e6:.0f} MB")
            timed("copy", lambda save=save: copies.take(save._writer, copies.begin()))
            timed("write", save.write)
            path = timed("finish", save.finish)
        timed("check", lambda: checksums.damage(path))
    stop()


def timed(name: str, action: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.thread_time()
    result = action()
    print(f"{name:6} {time.thread_time() - cpu:6.3f} CPU s, {time.perf_counter() - wall:6.2f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
