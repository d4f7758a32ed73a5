#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the local attention kernel with Ulysses and Ring on the same cores, forward and backward.

    python benchmarks/attention.py --json attention.json

On a CPU, the local kernel (one process, two threads), Ulysses 2 and Ring 2 (two processes of one thread) are measured
alternately, so that other programs affect all of them; rounds in which those programs used more than 3 % of the machine
are repeated. Then zigzag and contiguous are compared by the work of a Ring of 4. On a GPU, every local kernel is
compared with the device's GEMM rate; under torchrun, Ulysses and Ring are measured, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import megatron.context_parallel as cp
from benchmarks.machine import QUIET
from benchmarks.parallel_attention import Problem, Sample, Team, largest_error, run_kernel, time_local
from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels.tile_by_tile import TileScores
from megatron.context_parallel.attention.ring_plan import RingPlan, attention_plan
from megatron.platform.cpu import processor_name
from megatron.training.report.mfu import gemm_rate

PATHS = {"ulysses": "Ulysses 2, 2 processes", "ring": "Ring 2 zigzag, 2 processes"}
GOAL, RING4_GOAL = 0.95, 1.6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

Round = dict[str, Sample]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seq-length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: fp32, on a GPU bf16")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count; figures are medians over them")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    dtype = DTYPES[args.dtype or ("bf16" if on_gpu else "fp32")]
    problem = Problem(args.seq_length, args.heads, args.kv_heads or args.heads, args.head_dim, dtype)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if on_gpu:
        from benchmarks.gpu_attention import run_on_gpu

        report = run_on_gpu(problem, args.repeats, console)
    else:
        report = run_on_cpu(problem, args.repeats, console)
    if args.json and report:
        Path(args.json).write_text(json.dumps({"torch": torch.__version__, **report}, indent=2) + "\n")


def run_on_cpu(problem: Problem, repeats: int, console: Console) -> dict:
    """All figures of a CPU."""
    torch.set_num_threads(2)
    kernel = kernels.select("auto", device="cpu", dtype=problem.dtype, head_dim=problem.head_dim)
    machine = {"processor": processor_name(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load_at_start']:.2f}; {problem}, kernel "
        f"{kernel.name}, causal; forward + backward"
    )
    return {
        "machine": machine,
        "problem": {**vars(problem), "dtype": str(problem.dtype), "kernel": kernel.name},
        "gemm_gflops_2_threads": gemm_rate(torch.device("cpu"), problem.dtype) / 1e9,
        "parallel": compare_paths(problem, kernel, repeats, console),
        "ring4": compare_balance(problem, kernel, max(1, repeats // 2), console),
    }


def compare_paths(problem: Problem, kernel: kernels.Kernel, repeats: int, console: Console) -> dict:
    """Local kernel, Ulysses 2 and Ring 2, measured alternately."""
    inputs = problem.inputs()
    team = Team(2, problem, kernel.name)
    try:
        expected = [x.float() for x in run_kernel(kernel, *inputs)]
        errors = {path: largest_error(team.results(path), expected) for path in PATHS}
        del expected
        for path, error in errors.items():
            if not error <= TOLERANCE[problem.dtype]:
                raise SystemExit(f"error: {PATHS[path]} differs from the local kernel by {error:.1e}: not benchmarked")
        rounds: list[Round] = []
        while len(rounds) < 3 * repeats and sum(map(is_quiet, rounds)) < repeats:
            rounds.append({"local": time_local(kernel, 2, *inputs), **{path: team.time(path) for path in PATHS}})
    finally:
        team.close()
    quiet = [each for each in rounds if is_quiet(each)]
    counted = quiet if len(quiet) >= 3 or len(quiet) == repeats else rounds
    console.print(
        f"{len(rounds)} rounds, {len(quiet)} of them undisturbed by other programs"
        + ("" if counted is quiet else ": too few, so all count and wall-clock figures are NOISE; use the CPU time")
    )
    return report_paths(problem, rounds, counted, errors, console)


def is_quiet(samples: Round) -> bool:
    return all(sample.foreign <= QUIET for sample in samples.values())


def report_paths(problem: Problem, rounds: list[Round], counted: list[Round], errors: dict, console: Console) -> dict:
    """Medians of the rounds that count; ratios are taken round by round."""
    table = Table("", "median s", "GFLOP/s", "of local", "best round", "of local by CPU time", "largest error")
    result: dict = {"rounds": len(rounds), "rounds_that_count": len(counted), "undisturbed": is_quiet(counted[0])}
    for path in ("local", *PATHS):
        wall = statistics.median(each[path].wall for each in counted)
        result[path] = {
            "median_seconds": wall,
            "gflops": problem.flops / wall / 1e9,
            "rounds": [{**asdict(each[path]), "counts": each in counted} for each in rounds],
        }
        row = [PATHS.get(path, "local kernel, 2 threads"), f"{wall:.3f}", f"{problem.flops / wall / 1e9:.0f}"]
        if path in PATHS:
            ratios = [each["local"].wall / each[path].wall for each in counted]
            by_cpu_time = statistics.median(each["local"].core / each[path].core for each in counted)
            shares = {"median": statistics.median(ratios), "best": max(ratios), "by_cpu_time": by_cpu_time}
            result[path] |= {"of_local": shares | {"goal": GOAL}, "largest_relative_error": errors[path]}
            row += [*(f"{share:.1%}" for share in shares.values()), f"{errors[path]:.0e}"]
        table.add_row(*row)
    console.print(table)
    return result


def compare_balance(problem: Problem, kernel: kernels.Kernel, repeats: int, console: Console) -> dict:
    """A Ring of 4: the busiest rank of zigzag against the busiest of contiguous, by pairs and by CPU seconds.

    The ranks' tiles run one rank after another in this process, on one thread and without communication.
    """
    plans = {balance: plans_of(4, balance, problem.seq_length) for balance in ("zigzag", "contiguous")}
    seconds = time_balances(plans, problem, kernel, repeats)
    table = Table("Ring 4", "pairs of the busiest rank", "GFLOP", "its CPU seconds", "CPU seconds by rank")
    result: dict = {}
    for balance in plans:
        pairs = [plan.pairs for plan in plans[balance]]
        medians = [statistics.median(rank) for rank in seconds[balance]]
        result[balance] = {"pairs": pairs, "median_cpu_seconds": medians}
        gflop, by_rank = problem.flops_of(max(pairs)) / 1e9, "  ".join(f"{x:.3f}" for x in medians)
        table.add_row(balance, f"{max(pairs):,}", f"{gflop:.0f}", f"{max(medians):.3f}", by_rank)
    result["contiguous_over_zigzag"] = ratio = {
        "counted": max(result["contiguous"]["pairs"]) / max(result["zigzag"]["pairs"]),
        "timed": max(result["contiguous"]["median_cpu_seconds"]) / max(result["zigzag"]["median_cpu_seconds"]),
        "goal": RING4_GOAL,
    }
    console.print(table)
    console.print(
        f"The busiest contiguous rank does {ratio['counted']:.2f} times the pairs of the busiest zigzag rank, in "
        f"{ratio['timed']:.2f} times the CPU seconds"
    )
    return result


def plans_of(ring: int, balance: str, length: int) -> list[RingPlan]:
    """Every rank's plan of a causal ring."""
    layout = cp.SequenceLayout(length, cp.abstract_grid(ring=ring), balance)
    return [attention_plan(layout, cp.Causal()).ring(rank=rank) for rank in range(ring)]


def time_balances(
    plans: dict[str, list[RingPlan]], problem: Problem, kernel: kernels.Kernel, repeats: int
) -> dict[str, list[list[float]]]:
    """CPU seconds by balance, rank and repetition, on one thread; ranks and balances alternate."""
    ranks = len(plans["zigzag"])
    inputs = [x[: problem.seq_length // ranks] for x in problem.inputs()]
    seconds: dict[str, list[list[float]]] = {balance: [[] for _ in range(ranks)] for balance in plans}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    time_tiles(plans["zigzag"][0], kernel, *inputs)  # the first call of a kernel is slower
    for _ in range(repeats):
        for rank in range(ranks):
            for balance in plans:
                seconds[balance][rank].append(time_tiles(plans[balance][rank], kernel, *inputs))
    torch.set_num_threads(threads)
    return seconds


def time_tiles(plan: RingPlan, kernel: kernels.Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """CPU seconds of one rank's tiles, forward and backward, with the same tensors as every key block."""
    start = time.process_time()
    for hop in plan.hops:
        for tile in hop.tiles:
            rows, keys = slice(*tile.q), slice(*tile.k)
            parts = [x.permute(1, 2, 0, 3) for x in (q[rows], k[keys], v[keys])]
            how = TileScores(q.size(3) ** -0.5, tile.kind == "causal")
            out, lse = kernel.forward(*parts, how)
            kernel.backward(dout[rows].permute(1, 2, 0, 3), *parts, out, lse, how)
    return time.process_time() - start


if __name__ == "__main__":
    main()
