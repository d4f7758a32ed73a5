#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a save and a load take, by part: with our writer and with megatron-core's own, in turns.

    python benchmarks/checkpoint.py --json checkpoint.json
    python benchmarks/checkpoint.py --ranks 1 --writers core alone -- --num-layers 4 --hidden-size 1024 \\
        --num-attention-heads 8

Default: the Llama of examples/quickstart.sh on 4 processes. Flags after `--` are pretrain_llama.py's. `ours` leaves to
core's writer what is large; `alone` never does. Every turn is a fresh start of the processes, as core's writer is slow
at the first save. Seconds are of the slowest rank in each part; CPU seconds of all processes together, those that
core's writer starts included.
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
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GOAL = 2.0  # seconds, our first save
LLAMA = {
    "model.normalization": "RMSNorm",
    "model.swiglu": True,
    "model.position_embedding_type": "rope",
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
}
QUICKSTART = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--zero-stage 1"
).split()
RUN = (
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --num-workers 0"
).split()
PARTS = ("state", "checks", "plan", "write", "metadata", "rename")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--writers", nargs="+", choices=("core", "ours", "alone"), default=["core", "ours"])
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--folder", help="where to save; default: a temporary folder")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of pretrain_llama.py")
    args = parser.parse_args()
    if args.worker:
        work(args.writers[0], args.folder, args.flags, Path(args.worker))
        return 0
    flags = args.flags or QUICKSTART
    grid = [] if args.flags or args.ranks != 4 else "--ulysses-parallel-size 2 --ring-parallel-size 2".split()
    turns = {writer: [] for writer in args.writers}
    for _ in range(args.repeats):
        for writer in args.writers:
            turns[writer].append(turn(writer, args.ranks, args.folder, [*flags, *grid]))
    first = next(iter(turns.values()))[0]
    size = f"{first['parameters'] / 1e6:.1f}M parameters a rank, {first['bytes'] / 1e6:.0f} MB"
    print(f"{size}, {args.ranks} processes; median of {args.repeats} turns, load {os.getloadavg()[0]:.1f}; seconds")
    print(f"{'':14}{'all':>7}{'CPU':>7}" + "".join(f"{part:>{len(part) + 2}}" for part in PARTS) + "   load")
    report: dict[str, Any] = {"ranks": args.ranks, "turns": turns}
    report |= {key: first[key] for key in ("parameters", "bytes")}
    for writer, found in turns.items():
        for number in range(2):
            saves = [one["saves"][number] for one in found]
            median = {key: statistics.median(save[key] for save in saves) for key in ("all", "cpu", *PARTS)}
            report[f"{writer} {number + 1}"] = median
            line = f"{writer}, save {number + 1:<2}".ljust(14) + f"{median['all']:7.2f}{median['cpu']:7.2f}"
            line += "".join(f"{median[part]:{len(part) + 2}.2f}" for part in PARTS)
            print(line + f"{statistics.median(one['load'] for one in found):7.2f}")
    if "ours" in turns and not args.flags:
        print(f"our first save: best {min(one['saves'][0]['all'] for one in turns['ours']):.2f} s; goal {GOAL:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def turn(writer: str, ranks: int, folder: str | None, flags: list[str]) -> dict[str, Any]:
    """Start the processes, save twice, load once; what rank 0 reports."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        answer = Path(place, "answer.json")
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        own = [__file__, "--writers", writer, "--folder", f"{place}/saved", "--worker", str(answer), "--"]
        subprocess.run([*start, *own, *flags], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(answer.read_text())


def work(writer: str, folder: str, flags: list[str], answer: Path) -> None:
    """One rank of a turn."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint import checkpoint
    from megatron.training.job import batches_for, prepare
    from megatron.training.setup import start
    from megatron.training.step import train_step

    world = int(os.environ["WORLD_SIZE"])
    config = parse([*RUN, "--global-batch-size", str(world), *flags], LLAMA, world)
    job = prepare(config, start(config))
    batches = batches_for(job, job.datasets[0], 0, 0)
    train_step(job.runtime, job.chunks, job.optimizer, job.schedule, batches, config, job.batch_sizes.get())
    job.progress.iteration = 1
    core = partial(TorchDistSaveShardedStrategy, "torch_dist", 1)
    own = checkpoint.SaveStrategy
    checkpoint.SaveStrategy = {"core": core, "ours": own, "alone": partial(own, much=sys.maxsize)}[writer]
    spent = measure_parts(checkpoint)
    state, saves = (job.chunks, job.optimizer, job.schedule, config), []
    for _ in range(2):
        dist.barrier()
        spent.clear()
        begin, cpu = time.perf_counter(), cpu_seconds()
        path = checkpoint.save(folder, job.progress, *state)
        mine = {"all": time.perf_counter() - begin, "cpu": cpu_seconds() - cpu, **{key: spent[key] for key in PARTS}}
        every: list[dict[str, float]] = [{} for _ in range(world)]
        dist.all_gather_object(every, mine)
        slowest = {key: max(one[key] for one in every) for key in mine}
        saves.append(slowest | {"cpu": sum(one["cpu"] for one in every)})
    dist.barrier()
    begin = time.perf_counter()
    checkpoint.load(path, *state)
    dist.barrier()
    load = time.perf_counter() - begin
    if dist.get_rank() == 0:
        size = sum(file.stat().st_size for file in path.iterdir())
        parameters = sum(parameter.numel() for chunk in job.chunks for parameter in chunk.parameters())
        answer.write_text(json.dumps({"saves": saves, "load": load, "bytes": size, "parameters": parameters}))
    dist.barrier()
    dist.destroy_process_group()


def measure_parts(checkpoint: Any) -> Counter[str]:
    """Seconds by part, filled by the saves that follow; a part within another one does not count in both."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
    from megatron.core.dist_checkpointing.strategies import torch as core
    from torch.distributed.checkpoint import FileSystemWriter

    from megatron.training.checkpoint import writer

    spent: Counter[str] = Counter()

    def timed(part: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin, before = time.perf_counter(), sum(spent.values())
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - begin - (sum(spent.values()) - before)

        return run

    async_writer = filesystem_async.FileSystemWriterAsync
    checkpoint._state = timed("state", checkpoint._state)
    serialization.save_preprocess = timed("checks", serialization.save_preprocess)
    for module in (core, writer):
        module.save_state_dict_async_plan = timed("plan", state_dict_saver.save_state_dict_async_plan)
    filesystem_async._get_write_results_queue = timed("write", filesystem_async._get_write_results_queue)
    FileSystemWriter.write_data = timed("write", FileSystemWriter.write_data)
    async_writer.write_preloaded_data_multiproc = staticmethod(
        timed("write", async_writer.write_preloaded_data_multiproc)
    )
    core.save_state_dict_async_finalize = timed("metadata", core.save_state_dict_async_finalize)
    checkpoint._publish = timed("rename", checkpoint._publish)
    return spent


def cpu_seconds() -> float:
    """Of this process and its children, those that have ended included."""
    import psutil

    own = psutil.Process()
    times = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


if __name__ == "__main__":
    sys.exit(main())
