# SPDX-License-Identifier: Apache-2.0
"""Runs the stages in separate processes with a time limit. See benchmarks/gpu.sh."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.inside import STAGES, inside
from benchmarks.gpu.pictures import draw_all
from benchmarks.gpu.report import write_report
from benchmarks.gpu.stage import BROKEN, read, write

GRACE = 20.0  # seconds beyond its limit after which a stage is stopped
RESTARTS = 3  # of a stage whose GPU context was lost


def main(argv: list[str] | None = None, start: str = "spawn") -> int:
    """Run the stages that the command line names; returns the exit code.

    Args:
        start: how processes of stages start; a GPU needs ``spawn``. Tests that replace functions use ``fork``.
    """
    args = arguments(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    device = args.device if args.device != "auto" else ("cuda" if gpus() else "cpu")
    failed, names = [], list(args.stage or STAGES)
    end = time.monotonic() + 60 * args.minutes
    for at, name in enumerate(names):
        before = read(args.output, name)
        if before and before.get("finished") and not args.again:
            print(f"[{name}] is done: {args.output / name}.json; repeat it with --again", flush=True)
            continue
        if args.again:
            (args.output / f"{name}.json").unlink(missing_ok=True)
        shares = [STAGES[later][2] for later in names[at:]]
        minutes = max(end - time.monotonic(), 1.0) / 60 * shares[0] / sum(shares)
        why = run_stage(name, args, device, start, minutes)
        if why:
            failed.append(name)
            print(f"[{name}] failed: {why}", flush=True)
            report = read(args.output, name) or {}
            if "device" in report:  # otherwise the stage did not begin
                write(args.output, name, report | {"failed": why})
        write_report(args.output, list(STAGES))
    path = write_report(args.output, list(STAGES))
    pictures = draw_all(args.output)
    print(f"wrote {', '.join(map(str, [path, *pictures]))}", flush=True)
    return int(bool(failed))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    stages = "\n".join(f"  {name:10} {what}" for name, (_, what, _) in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="gpu.sh",
        description="Measurements that need a GPU, in stages. A stage that is done is not repeated, one that was "
        f"stopped is continued.\n\nstages:\n{stages}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="folder of the JSON files, report.md and pictures")
    parser.add_argument("--stage", action="append", choices=list(STAGES), help="run this stage; may be repeated")
    parser.add_argument("--again", action="store_true", help="repeat stages that are done")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes that a CPU runs in seconds; the default on a CPU"
    )
    later = "limit for the run (14), shared by its stages; the next run into this folder measures what was left out"
    parser.add_argument("--minutes", type=float, default=14.0, help=later)
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: give a number above 0")
    return args


def gpus() -> int:
    """Number of GPUs, without a CUDA context in this process, which would need memory that stages measure."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count()


def run_stage(name: str, args: argparse.Namespace, device: str, start: str, minutes: float) -> str | None:
    """Run a stage for at most ``minutes``; returns why it failed, or None."""
    context = mp.get_context(start)
    for attempt in range(1 + RESTARTS):
        tiny = args.tiny or device == "cpu"
        process = context.Process(target=inside, args=(name, args.output, device, tiny, minutes, attempt > 0))
        process.start()
        process.join(60 * minutes + GRACE)
        if process.is_alive():
            process.terminate()  # this also ends the programs that it has started
            process.join(10)
            process.kill()
            process.join()
            return f"stopped after {minutes:.2g} minutes"
        if process.exitcode != BROKEN:
            break
    report = read(args.output, name) or {}
    if process.exitcode:
        return report.get("failed") or f"its process ended with code {process.exitcode}"
    return None


if __name__ == "__main__":
    sys.exit(main())
