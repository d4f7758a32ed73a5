#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""MFU of the real training program against this machine's measured GEMM rate.

    python benchmarks/train.py --json train.json

Runs pretrain_llama.py for a few steps and reads its --log-jsonl. The GEMM rate is the best of several square products,
measured before and after the run with the same number of threads, by wall-clock or CPU time, whichever is better. On a
CPU the first two steps meter memory and do not count. Steps during which other programs used more than 3 % of the
machine do not count either, if at least two others remain.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.machine import QUIET, busy_seconds, cpu_seconds_of, foreign_share  # noqa: E402

GOAL = 0.60
NOT_COUNTED = 2  # steps in which the program meters its memory
SIZES = (1024, 1536, 2048, 3072, 4096)
MEASURE = """
import sys, time, torch
from megatron.training.report.mfu import gemm_rate
threads, dtype, device = int(sys.argv[1]), getattr(torch, sys.argv[2]), torch.device(sys.argv[3])
torch.set_num_threads(threads)

def by_cpu_time(size):  # without the time of other programs
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    torch.mm(a, b)
    seconds, end = [], time.perf_counter() + 0.5
    while not seconds or time.perf_counter() < end:
        start = time.process_time()
        torch.mm(a, b)
        seconds.append((time.process_time() - start) / threads)
    return 2 * size**3 / min(seconds)

for size in map(int, sys.argv[4:]):
    rates = [gemm_rate(device, dtype, size=size, windows=2)]
    rates += [by_cpu_time(size)] if device.type == "cpu" else []
    print(size, max(rates))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-attention-heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="key/value heads; default: as many as query heads")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=6, help=f"the first {NOT_COUNTED} do not count")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("more", nargs="*", metavar="-- FLAG", help="further flags of pretrain_llama.py")
    args = parser.parse_args()
    if args.steps <= NOT_COUNTED:
        parser.error(f"--steps must be above {NOT_COUNTED}")

    environment = dict(
        os.environ, OMP_NUM_THREADS=str(args.threads), PYTHONPATH=_python_path(), PYTHONWARNINGS="ignore"
    )
    load = os.getloadavg()[0]
    rates = [gemm_rates(args, environment)]
    rows = run_program(args, environment)
    rates.append(gemm_rates(args, environment))
    best = {size: max(rate[size] for rate in rates) for size in SIZES}
    report = summarize(args, rows, best) | {"load_at_start": load}
    show(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def gemm_rates(args: argparse.Namespace, environment: dict[str, str]) -> dict[int, float]:
    """FLOP/s of square products by size, in a process like the one that trains."""
    dtype = "bfloat16" if args.dtype == "bf16" else "float32"
    command = [sys.executable, "-c", MEASURE, str(args.threads), dtype, args.device, *map(str, SIZES)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"error: the GEMM rate could not be measured:\n{answer.stderr[-2000:]}")
    return {int(size): float(rate) for size, rate in (line.split() for line in answer.stdout.splitlines())}


def run_program(args: argparse.Namespace, environment: dict[str, str]) -> list[dict]:
    """A row for each step, with its CPU seconds and the share of the machine that other programs used meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        log, console = Path(folder) / "log.jsonl", Path(folder) / "console.txt"
        command = [sys.executable, str(ROOT / "pretrain_llama.py"), *flags(args), "--log-jsonl", str(log), *args.more]
        rows: list[dict] = []
        with console.open("w") as output:
            process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            before: tuple[float, float, float] | None = None
            try:
                while process.poll() is None:
                    time.sleep(0.02)
                    lines = log.read_text().splitlines()[len(rows) :] if log.exists() else []
                    if not lines:
                        continue
                    rows += map(json.loads, lines)
                    cpu, now = cpu_seconds_of(process.pid), time.perf_counter()
                    if cpu is not None and before is not None and len(lines) == 1:
                        busy, own, start = before
                        rows[-1]["cpu_seconds"] = cpu - own
                        rows[-1]["foreign_share"] = foreign_share(busy, cpu - own, now - start)
                    before = None if cpu is None else (busy_seconds(), cpu, now)
            finally:
                if process.poll() is None:
                    process.kill()
        if process.returncode:
            text = console.read_text()[-4000:]
            raise SystemExit(f"error: the training program ended with exit code {process.returncode}:\n{text}")
        return rows + [json.loads(line) for line in log.read_text().splitlines()[len(rows) :]]


def flags(args: argparse.Namespace) -> list[str]:
    settings = {
        "--num-layers": args.num_layers,
        "--hidden-size": args.hidden_size,
        "--num-attention-heads": args.num_attention_heads,
        "--seq-length": args.seq_length,
        "--max-position-embeddings": args.seq_length,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.micro_batch_size,
        "--train-iters": args.steps,
        "--lr": 1e-4,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": args.vocab_size,
        "--num-workers": 0,
        "--eval-iters": 0,
        "--device": args.device,
    }
    result = [str(word) for pair in settings.items() for word in pair] + ["--mock-data", "--no-progress"]
    if args.kv_heads:
        result += ["--group-query-attention", "--num-query-groups", str(args.kv_heads)]
    return result + ["--bf16"] * (args.dtype == "bf16")


def summarize(args: argparse.Namespace, rows: list[dict], rates: dict[int, float]) -> dict:
    """Medians over the steps that count: those without disturbance by other programs if there are at least two."""
    steps = rows[NOT_COUNTED:]
    quiet = [row for row in steps if row.get("foreign_share", 1.0) <= QUIET]
    counted = quiet if len(quiet) >= 2 else steps
    peak = max(rates.values())
    tflops = [row["model_tflops_per_device"] for row in counted]
    # The work of a step over its CPU time: about the rate on an idle machine.
    by_cpu_time = [
        row["model_tflops_per_device"] * row["iteration_ms"] / 1e3 * args.threads / row["cpu_seconds"]
        for row in counted
        if row.get("cpu_seconds")
    ]
    return {
        "problem": {name: value for name, value in vars(args).items() if name != "json"},
        "gemm_gflops": {size: rate / 1e9 for size, rate in rates.items()},
        "peak_gflops": peak / 1e9,
        "steps": rows,
        "steps_that_count": [row["iteration"] for row in counted],
        "undisturbed": counted is quiet,
        "iteration_ms": statistics.median(row["iteration_ms"] for row in counted),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in counted),
        "model_gflops": 1e3 * statistics.median(tflops),
        "mfu": 1e12 * statistics.median(tflops) / peak,
        "mfu_best_step": 1e12 * max(tflops) / peak,
        "mfu_by_cpu_time": 1e12 * statistics.median(by_cpu_time) / peak if by_cpu_time else None,
        "mfu_of_the_program": statistics.median(row["mfu"] for row in counted),
        "goal": GOAL,
    }


def show(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    problem, console = report["problem"], Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"Llama, {problem['num_layers']} layers of {problem['hidden_size']}, {problem['seq_length']} tokens, "
        f"vocabulary {problem['vocab_size']}, {problem['dtype']}, {problem['threads']} threads; "
        f"load at start {report['load_at_start']:.2f}"
    )
    rates = ", ".join(f"{size}: {rate:.0f}" for size, rate in report["gemm_gflops"].items())
    console.print(f"GEMM rate by size, GFLOP/s: {rates}; the best is the peak")
    by_cpu_time = report["mfu_by_cpu_time"]
    table = Table(
        "step, median",
        "tokens/s",
        "model GFLOP/s",
        "peak GFLOP/s",
        "MFU",
        "best step",
        "by CPU time",
        "the program's own",
    )
    table.add_row(
        f"{report['iteration_ms']:.0f} ms",
        f"{report['tokens_per_second']:.0f}",
        f"{report['model_gflops']:.1f}",
        f"{report['peak_gflops']:.1f}",
        f"{report['mfu']:.1%}",
        f"{report['mfu_best_step']:.1%}",
        f"{by_cpu_time:.1%}" if by_cpu_time else "",
        f"{report['mfu_of_the_program']:.1%}",
    )
    console.print(table)
    if not report["undisturbed"]:
        console.print("Other programs ran during every step: MFU by the wall clock is too low; use the CPU time.")


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    sys.exit(main())
