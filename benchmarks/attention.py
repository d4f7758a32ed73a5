#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention side by side: the bare kernel, Ulysses and Ring on the same cores, forward and backward.

    python benchmarks/attention.py --json attention.json

On a CPU: the local kernel (one process, two threads) against Ulysses 2 and Ring 2 (two processes of one thread), taken in
turn, round after round, so that whatever else the machine does hits all alike; then the work of a Ring of 4, zigzag
against contiguous. On a GPU: every local kernel against the device's GEMM rate; under torchrun Ulysses and Ring too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import megatron.context_parallel as cp
from benchmarks.parallel_attention import Problem, Team, run_kernel
from megatron.context_parallel import kernels
from megatron.context_parallel.ring import RingPlan, ring_plan
from megatron.platform.cpu import processor_name
from megatron.training.flops import gemm_rate

PATHS = {"ulysses": "Ulysses 2", "ring": "Ring 2 zigzag"}
GOAL, RING4_GOAL = 0.95, 1.6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seq-length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp64"], help="default: fp32, on a GPU bf16")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; figures are medians over them")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[
        args.dtype or ("bf16" if on_gpu else "fp32")
    ]
    problem = Problem(args.seq_length, args.heads, args.kv_heads or args.heads, args.head_dim, dtype)
    if on_gpu:
        from benchmarks.gpu_attention import run_on_gpu

        report = run_on_gpu(problem, args.repeats)
    else:
        report = run_on_cpu(problem, args.repeats)
    if args.json and report is not None:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
    return 0


def run_on_cpu(problem: Problem, repeats: int) -> dict:
    """All figures of a CPU."""
    console = Console()
    torch.set_num_threads(2)
    kernel = kernels.select("auto", device="cpu", dtype=problem.dtype, head_dim=problem.head_dim)
    console.print(
        f"{processor_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; {problem.seq_length} tokens, "
        f"{problem.heads} heads ({problem.kv_heads} for keys and values) of {problem.head_dim}, {problem.dtype}, causal, "
        f"kernel {kernel.name}; forward + backward, {repeats} rounds in turn"
    )
    report = {
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "problem": {**vars(problem), "dtype": str(problem.dtype), "kernel": kernel.name},
        "gemm_gflops_2_threads": gemm_rate(torch.device("cpu"), problem.dtype) / 1e9,
        "parallel": compare_paths(problem, kernel, repeats, console),
        "ring4": compare_balance(problem, kernel, max(1, repeats // 2), console),
    }
    return report


def compare_paths(problem: Problem, kernel: kernels.Kernel, repeats: int, console: Console) -> dict:
    """Local, Ulysses 2 and Ring 2, in turn."""
    inputs = problem.inputs()
    team = Team(2, problem, kernel.name)
    try:
        expected = [x.float() for x in run_kernel(kernel, *inputs)]
        errors = {path: largest_error(team.results(path), expected) for path in PATHS}
        del expected
        for path, error in errors.items():
            if not error <= TOLERANCE[problem.dtype]:
                raise SystemExit(f"error: {PATHS[path]} differs from the local kernel by {error:.1e}: no benchmark of that")
        seconds: dict[str, list[float]] = {"local": [], **{path: [] for path in PATHS}}
        for _ in range(repeats):
            start = time.perf_counter()
            run_kernel(kernel, *inputs)
            seconds["local"].append(time.perf_counter() - start)
            for path in PATHS:
                seconds[path].append(team.seconds(path))
    finally:
        team.close()
    table = Table("", "median s", "GFLOP/s", "of local, median", "of local, best", "largest error")
    local = seconds["local"]
    table.add_row("local kernel, 2 threads", *_speed(problem.flops, local), "", "", "")
    found: dict = {"local": {"seconds": local, "gflops": problem.flops / statistics.median(local) / 1e9}}
    for path, name in PATHS.items():
        ratios = [a / b for a, b in zip(local, seconds[path])]
        found[path] = {
            "seconds": seconds[path],
            "gflops": problem.flops / statistics.median(seconds[path]) / 1e9,
            "of_local": {"median": statistics.median(ratios), "best": max(ratios), "rounds": ratios},
            "largest_relative_error": errors[path],
            "goal": GOAL,
        }
        table.add_row(
            f"{name}, 2 processes", *_speed(problem.flops, seconds[path]), f"{statistics.median(ratios):.1%}",
            f"{max(ratios):.1%}", f"{errors[path]:.1e}",
        )  # fmt: skip
    console.print(table)
    return found


def compare_balance(problem: Problem, kernel: kernels.Kernel, repeats: int, console: Console) -> dict:
    """A Ring of 4: the busiest rank of zigzag against the busiest of contiguous, counted and timed.

    Each rank's own tiles run one rank after another in this process, on one thread and without communication.
    """
    grid = cp.abstract_grid(ring=4)
    plans = {
        balance: [ring_plan(cp.SequenceLayout(problem.seq_length, grid, balance), cp.Causal(), r) for r in range(4)]
        for balance in ("zigzag", "contiguous")
    }
    inputs = [x[: problem.seq_length // 4] for x in problem.inputs()]
    seconds: dict[str, list[list[float]]] = {balance: [[] for _ in range(4)] for balance in plans}
    torch.set_num_threads(1)
    for turn in range(repeats + 1):
        for rank in range(4):
            for balance in plans:
                took = time_tiles(plans[balance][rank], kernel, *inputs)
                if turn:  # the first is a warm-up
                    seconds[balance][rank].append(took)
    torch.set_num_threads(2)
    found: dict = {}
    table = Table("Ring 4", "pairs of the busiest rank", "GFLOP", "its median s", "all ranks, s")
    for balance in plans:
        pairs = [plan.pairs for plan in plans[balance]]
        medians = [statistics.median(rank) for rank in seconds[balance]]
        found[balance] = {"pairs": pairs, "seconds": seconds[balance], "median_seconds": medians}
        table.add_row(
            balance, f"{max(pairs):,}", f"{problem.flops_of(max(pairs)) / 1e9:.0f}", f"{max(medians):.3f}",
            "  ".join(f"{x:.3f}" for x in medians),
        )  # fmt: skip
    found["contiguous_over_zigzag"] = {
        "counted": max(found["contiguous"]["pairs"]) / max(found["zigzag"]["pairs"]),
        "timed": max(found["contiguous"]["median_seconds"]) / max(found["zigzag"]["median_seconds"]),
        "goal": RING4_GOAL,
    }
    console.print(table)
    ratio = found["contiguous_over_zigzag"]
    console.print(
        f"Ring 4: the busiest rank of contiguous does {ratio['counted']:.2f} x the work of zigzag's (counted), "
        f"{ratio['timed']:.2f} x (timed)"
    )
    return found


def time_tiles(plan: RingPlan, kernel: kernels.Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """Seconds of one rank's tiles, forward and backward; every key block is stood in for by the same tensors."""
    start = time.perf_counter()
    for hop in plan.hops:
        for tile in hop.tiles:
            rows, keys = slice(*tile.q), slice(*tile.k)
            parts = [x.permute(1, 2, 0, 3) for x in (q[rows], k[keys], v[keys])]
            settings = {"causal": tile.kind == "causal", "mask": None, "scale": q.size(3) ** -0.5}
            out, lse = kernel.forward(*parts, **settings)
            kernel.backward(dout[rows].permute(1, 2, 0, 3), *parts, out, lse, **settings)
    return time.perf_counter() - start


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Over out, dq, dk, dv: the largest difference, relative to the tensor's largest entry."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected))


def _speed(flops: float, seconds: list[float]) -> tuple[str, str]:
    median = statistics.median(seconds)
    return f"{median:.3f}", f"{flops / median / 1e9:.0f}"


if __name__ == "__main__":
    sys.exit(main())
