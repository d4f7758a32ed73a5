#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""MFU of the real training program against this machine's measured GEMM rate.

    python benchmarks/train.py --json train.json

Runs pretrain_llama.py for a few steps and reads its --log-jsonl. The GEMM rate is the best of several square products,
measured before and after the run with the same number of threads. On a CPU the first two steps are metered and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GOAL = 0.60
NOT_COUNTED = 2  # steps in which the program meters its memory
SIZES = (1024, 1536, 2048, 3072, 4096)
MEASURE = """
import sys, torch
from megatron.training.flops import gemm_rate
threads, dtype, device = int(sys.argv[1]), getattr(torch, sys.argv[2]), torch.device(sys.argv[3])
torch.set_num_threads(threads)
for size in map(int, sys.argv[4:]):
    print(size, gemm_rate(device, dtype, size=size, seconds=0.5))
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

    environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads), PYTHONPATH=_python_path(), PYTHONWARNINGS="ignore")
    load = os.getloadavg()[0]
    rates = [gemm_rates(args, environment)]
    rows = run_program(args, environment)
    rates.append(gemm_rates(args, environment))
    best = {size: max(rate[size] for rate in rates) for size in SIZES}
    report = summarize(args, rows, best, load)
    show(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def gemm_rates(args: argparse.Namespace, environment: dict[str, str]) -> dict[int, float]:
    """FLOP/s of square products by size, in a process like the one that trains."""
    dtype = "bfloat16" if args.dtype == "bf16" else "float32"
    command = [sys.executable, "-c", MEASURE, str(args.threads), dtype, args.device, *map(str, SIZES)]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return {int(size): float(rate) for size, rate in (line.split() for line in answer.stdout.splitlines())}


def run_program(args: argparse.Namespace, environment: dict[str, str]) -> list[dict]:
    """One row a step."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [sys.executable, str(ROOT / "pretrain_llama.py"), *flags(args), "--log-jsonl", str(log), *args.more]
        done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"error: the training program ended with exit code {done.returncode}:\n{done.stdout[-4000:]}")
        return [json.loads(line) for line in log.read_text().splitlines()]


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
    found = [str(word) for pair in settings.items() for word in pair] + ["--mock-data", "--no-progress"]
    if args.kv_heads:
        found += ["--group-query-attention", "--num-query-groups", str(args.kv_heads)]
    return found + ["--bf16"] * (args.dtype == "bf16")


def summarize(args: argparse.Namespace, rows: list[dict], rates: dict[int, float], load: float) -> dict:
    counted = rows[NOT_COUNTED:]
    peak = max(rates.values())
    milliseconds = statistics.median(row["iteration_ms"] for row in counted)
    tflops = statistics.median(row["model_tflops_per_device"] for row in counted)
    return {
        "problem": {name: value for name, value in vars(args).items() if name not in ("json", "more")} | {"more": args.more},
        "load_at_start": load,
        "gemm_gflops": {size: rate / 1e9 for size, rate in rates.items()},
        "peak_gflops": peak / 1e9,
        "iteration_ms": milliseconds,
        "iteration_ms_of_counted_steps": [row["iteration_ms"] for row in counted],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in counted),
        "model_gflops": 1e3 * tflops,
        "mfu": 1e12 * tflops / peak,
        "mfu_best_step": 1e12 * max(row["model_tflops_per_device"] for row in counted) / peak,
        "mfu_of_the_program": statistics.median(row["mfu"] for row in counted),
        "device_peak_bytes": rows[-1]["device_peak_bytes"],
        "lm_loss": [row["lm_loss"] for row in rows],
        "goal": GOAL,
    }


def show(report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    problem, console = report["problem"], Console()
    console.print(
        f"Llama, {problem['num_layers']} layers of {problem['hidden_size']}, {problem['seq_length']} tokens, vocabulary "
        f"{problem['vocab_size']}, {problem['dtype']}, {problem['threads']} threads; load at start {report['load_at_start']:.2f}"
    )
    rates = ", ".join(f"{size}: {rate:.0f}" for size, rate in report["gemm_gflops"].items())
    console.print(f"GEMM rate by size, GFLOP/s: {rates}; the best is the peak")
    table = Table("step, median", "tokens/s", "model GFLOP/s", "peak GFLOP/s", "MFU", "best step", "the program's own")
    table.add_row(
        f"{report['iteration_ms']:.0f} ms",
        f"{report['tokens_per_second']:.0f}",
        f"{report['model_gflops']:.1f}",
        f"{report['peak_gflops']:.1f}",
        f"{report['mfu']:.1%}",
        f"{report['mfu_best_step']:.1%}",
        f"{report['mfu_of_the_program']:.1%}",
    )
    console.print(table)


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    sys.exit(main())
