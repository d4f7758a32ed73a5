#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times of saving and loading, by part, and the time that training waits, for this package's saves and core's.

    python benchmarks/checkpoint.py --json checkpoint.json
    python benchmarks/checkpoint.py --ranks 1 --steps 6 --writers ours async -- --num-layers 4 --hidden-size 1024 \\
        --num-attention-heads 8

Default: the Llama of examples/quickstart.sh on 4 processes. Flags after `--` are pretrain_llama.py's. Each repetition
starts new processes, which save twice and run `--steps` steps after each save; with `async`, writing overlaps them.
`still`: time that the training loop waited for the save. `slower`: additional time of the steps after a save. Seconds
are those of the slowest rank in each part; CPU seconds are those of all processes, including the ones that core's
writer starts. `check`: verification of all files before loading, on one process.

    python benchmarks/checkpoint.py --parts

For busy machines: CPU seconds of each part of a save on one process, 1 GB, three saves. With --async-save, training
waits for `begin` and `finish`, and for the time by which `copy` exceeds the forward and backward pass of a step.
Without --async-save, training also waits for `write`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GOAL = 2.0  # seconds, our first save
QUICKSTART = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--zero-stage 1"
).split()
RUN = (
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --train-iters 99 --lr 1e-3 --eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --num-workers 0"
).split()
PARTS = ("still", "slower", "state", "plan", "write", "publish")
ONE_GB = "--num-layers 5 --hidden-size 1024 --num-attention-heads 8".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--writers", nargs="+", choices=("core", "ours", "async"), default=["core", "ours", "async"])
    parser.add_argument("--steps", type=int, default=2, help="training steps after each save")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--folder", help="folder to save in; default: a temporary one")
    parser.add_argument("--parts", action="store_true", help="print CPU seconds of the parts of a save on one process")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of pretrain_llama.py")
    args = parser.parse_args()
    if args.worker:
        work(args.writers[0], args.folder, args.flags, args.steps, Path(args.worker))
        return
    if args.parts:
        parts()
        return
    flags = args.flags or QUICKSTART
    grid = [] if args.flags or args.ranks != 4 else "--ulysses-parallel-size 2 --ring-parallel-size 2".split()
    repetitions = {writer: [] for writer in args.writers}
    for _ in range(args.repeats):
        for writer in args.writers:
            repetitions[writer].append(run_repetition(writer, args.ranks, args.folder, args.steps, [*flags, *grid]))
    first = next(iter(repetitions.values()))[0]
    size = f"{first['parameters'] / 1e6:.1f}M parameters per rank, {first['bytes'] / 1e6:.0f} MB"
    print(
        f"{size}, {args.ranks} processes; median of {args.repeats} repetitions, load {os.getloadavg()[0]:.1f}; seconds"
    )
    print(f"{'':14}{'all':>7}{'CPU':>7}" + "".join(f"{part:>{len(part) + 2}}" for part in PARTS) + "   load  check")
    report: dict[str, Any] = {"ranks": args.ranks, "turns": repetitions}
    report |= {key: first[key] for key in ("parameters", "bytes")}
    for writer, results in repetitions.items():
        for number in range(2):
            saves = [one["saves"][number] for one in results]
            median = {key: statistics.median(save[key] for save in saves) for key in ("all", "cpu", *PARTS)}
            report[f"{writer} {number + 1}"] = median
            line = f"{writer}, save {number + 1:<2}".ljust(14) + f"{median['all']:7.2f}{median['cpu']:7.2f}"
            line += "".join(f"{median[part]:{len(part) + 2}.2f}" for part in PARTS)
            print(line + "".join(f"{statistics.median(one[key] for one in results):7.2f}" for key in ("load", "check")))
    if "ours" in repetitions and not args.flags:
        best = min(one["saves"][0]["all"] for one in repetitions["ours"])
        print(f"our first save: best {best:.2f} s; goal {GOAL:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


def run_repetition(writer: str, ranks: int, folder: str | None, steps: int, flags: list[str]) -> dict[str, Any]:
    """Start the processes, save twice, load once; returns rank 0's figures."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        answer = Path(place, "answer.json")
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        own = [__file__, "--writers", writer, "--folder", f"{place}/saved", "--steps", str(steps)]
        own += ["--worker", str(answer), "--"]
        subprocess.run([*start, *own, *flags], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(answer.read_text())


def parts() -> None:
    from megatron.platform.streams import streams_of
    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint import checkpoint, checksums
    from megatron.training.checkpoint.rank_file import HostCopies
    from megatron.training.job import batches_for, prepare
    from megatron.training.settings.models import LLAMA_DEFAULTS
    from megatron.training.setup import start, stop
    from megatron.training.step import train_step

    def timed(name: str, action: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = action()
        print(f"{name:6} {time.thread_time() - cpu:6.3f} CPU s, {time.perf_counter() - wall:6.2f} s", flush=True)
        return result

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29818"}
    config = parse([*RUN, *ONE_GB, "--global-batch-size", "1"], LLAMA_DEFAULTS, 1)
    job = prepare(config, start(config))
    batches, state = batches_for(job, job.datasets[0], 0, 0), (job.model_chunks, job.optimizer, job.schedule)
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


def work(writer: str, folder: str, flags: list[str], steps: int, answer: Path) -> None:
    """One rank of a repetition."""
    import torch.distributed as dist

    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint import checkpoint, checksums
    from megatron.training.checkpoint.megatron_lm.checked import examine
    from megatron.training.features.save_policy import Saver
    from megatron.training.features.stopping import Stopper
    from megatron.training.job import batches_for, prepare
    from megatron.training.settings.models import LLAMA_DEFAULTS
    from megatron.training.setup import start
    from megatron.training.step import train_step

    world = int(os.environ["WORLD_SIZE"])
    save = ["--save", folder, *(["--async-save"] if writer == "async" else [])]
    config = parse([*RUN, "--global-batch-size", str(world), *save, *flags], LLAMA_DEFAULTS, world)
    job = prepare(config, start(config))
    batches = batches_for(job, job.datasets[0], 0, 0)
    stopper, lines = Stopper(job.runtime.device, None), []
    saver = Saver(job, SimpleNamespace(say=lines.append))
    state = (job.model_chunks, job.optimizer, job.schedule, config)

    def train(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            mark = saver.before_update(None)
            train_step(job.runtime, *state[:3], batches, config, job.batch_sizes.get(), mark)
            job.progress.iteration += 1
            (writing,) = stopper.agree(int(saver.writing))
            saver.advance(writing)
        return time.perf_counter() - begin

    train(2)  # the first step allocates the optimizer's states
    alone, saves, spent = train(max(steps, 1)), [], measure_parts(checkpoint)
    for _ in range(2):
        dist.barrier()
        spent.clear()
        begin, cpu = time.perf_counter(), cpu_seconds()
        if writer == "core":
            core_save(checkpoint, folder, job)
            mine = {"all": time.perf_counter() - begin}
            mine |= {"still": mine["all"], "slower": 0.0}
        else:
            saver.save()
            called = time.perf_counter() - begin
            overlapped = train(steps)
            saver.finish()
            mine = {"all": float(lines[-1].split(" in ")[-1].split()[0]), "still": saver.stall or called}
            mine["slower"] = max(overlapped - alone, 0.0) if steps else 0.0
        mine |= {"cpu": cpu_seconds() - cpu} | {key: spent[key] for key in PARTS[2:]}
        every: list[dict[str, float]] = [{} for _ in range(world)]
        dist.all_gather_object(every, mine)
        slowest = {key: max(one[key] for one in every) for key in mine}
        saves.append(slowest | {"cpu": sum(one["cpu"] for one in every)})
        if writer == "core":
            train(1)  # the next save's folder is named by another iteration
    path = sorted(Path(folder).glob("iter_*"))[-1]
    dist.barrier()
    checked = examine(path)
    begin = time.perf_counter()
    checkpoint.load(checked, *state)
    dist.barrier()
    load, begin = time.perf_counter() - begin, time.perf_counter()
    if dist.get_rank() == 0:
        assert checksums.damage(path) is None
        check = time.perf_counter() - begin
        size = sum(file.stat().st_size for file in path.iterdir())
        parameters = sum(parameter.numel() for chunk in job.model_chunks for parameter in chunk.parameters())
        figures = {"saves": saves, "load": load, "check": check, "bytes": size, "parameters": parameters, "step": alone}
        answer.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def core_save(checkpoint: Any, folder: str, job: Any) -> None:
    """Save like Megatron-LM: with core's writer and its processes."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    path = Path(folder, f"iter_{job.progress.iteration:07d}")
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    state = checkpoint._state(job.model_chunks, job.optimizer, job.schedule, job.progress, job.config, loading=False)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(state, str(path), strategy, content_metadata=dict(checkpoint.METADATA))


def measure_parts(checkpoint: Any) -> Counter[str]:
    """An empty counter of seconds by part; later saves of this package add to it, on any thread."""
    from megatron.training.checkpoint import rank_file, save_job

    spent: Counter[str] = Counter()

    def timed(part: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - begin

        return run

    checkpoint._state = timed("state", checkpoint._state)
    save_job._planned = timed("plan", save_job._planned)
    rank_file.Writer.write = timed("write", rank_file.Writer.write)
    save_job.Save._publish = timed("publish", save_job.Save._publish)
    return spent


def cpu_seconds() -> float:
    """CPU seconds of this process and its children, including those that have ended."""
    import psutil

    own = psutil.Process()
    times = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


if __name__ == "__main__":
    main()
