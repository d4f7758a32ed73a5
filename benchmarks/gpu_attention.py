# SPDX-License-Identifier: Apache-2.0
"""The GPU part of benchmarks/attention.py: local kernels against the GEMM rate; under torchrun, Ulysses and Ring."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.parallel_attention import Problem, largest_error, run_kernel, run_parallel, world_layout
from megatron import platform
from megatron.context_parallel.attention import kernels
from megatron.training.report.mfu import gemm_rate

TOLERANCE = 2e-2  # bf16 keeps 8 bits


def run_on_gpu(problem: Problem, repeats: int, console: Console, device: str = "cuda") -> dict:
    """All figures of one device and, under torchrun, of the job. Every rank measures, rank 0 reports."""
    hardware = platform.select(device, int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(hardware.backend)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    console = Console(quiet=True) if rank else console
    try:
        console.print(f"{ranks} x {hardware.device_name()}; {problem}, causal; forward + backward")
        rate = gemm_rate(hardware.device, problem.dtype, size=8192 if hardware.name == "cuda" else 1024)
        console.print(f"measured GEMM rate: {rate / 1e12:.1f} TFLOP/s")
        local, results = compare_kernels(problem, hardware, repeats, rate, console)
        report = {"device": hardware.device_name(), "ranks": ranks, "gemm_tflops": rate / 1e12, "kernels": local}
        if ranks > 1:
            fastest = min(local, key=lambda name: local[name]["median_seconds"])
            report["parallel"] = compare_paths(problem, hardware, repeats, fastest, local[fastest], results, console)
        return {} if rank else {**report, "problem": {**vars(problem), "dtype": str(problem.dtype)}}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def compare_kernels(
    problem: Problem, hardware: platform.Platform, repeats: int, rate: float, console: Console
) -> tuple[dict, list[Tensor]]:
    """The figures of each usable kernel on the complete sequence, and [out, dq, dk, dv] of the first kernel."""
    inputs = problem.inputs(str(hardware.device))
    names = kernels.available(hardware.device, problem.dtype, problem.head_dim)
    names = [name for name in names if name != "math"] or names
    expected: list[Tensor] = []
    result: dict = {}
    table = Table("local kernel", "median ms", "TFLOP/s", "of the GEMM rate", f"difference from {names[0]}")
    for name in names:
        kernel = kernels.KERNELS[name]
        results = run_kernel(kernel, *inputs)
        expected = expected or results
        error = largest_error(results, expected)
        del results
        seconds = measure(lambda kernel=kernel: run_kernel(kernel, *inputs), hardware, repeats)
        median = statistics.median(seconds)
        tflops, share = problem.flops / median / 1e12, problem.flops / median / rate
        figures = {"seconds": seconds, "median_seconds": median, "tflops": tflops, "of_gemm_rate": share}
        result[name] = figures | {"difference": error}
        table.add_row(name, f"{1e3 * median:.2f}", f"{tflops:.1f}", f"{share:.1%}", f"{error:.0e}")
        if not error <= TOLERANCE:
            raise SystemExit(f"error: kernel {name} differs from {names[0]} by {error:.1e}: not benchmarked")
    console.print(table)
    return result, expected


def compare_paths(
    problem: Problem,
    hardware: platform.Platform,
    repeats: int,
    kernel: str,
    local: dict,
    expected: list[Tensor],
    console: Console,
) -> dict:
    """Ulysses and Ring over all ranks; 100 % is the local kernel's time divided by the number of ranks."""
    ranks = dist.get_world_size()
    inputs = problem.inputs(str(hardware.device))
    table = Table(f"{ranks} ranks, kernel {kernel}", "median ms", "TFLOP/s per rank", "of local", "largest error")
    result: dict = {}
    for path, shape in (("ulysses", {"ulysses": ranks, "ring": 1}), ("ring", {"ulysses": 1, "ring": ranks})):
        if path == "ulysses" and problem.heads % ranks:
            continue
        layout = world_layout(problem.seq_length, **shape)
        mine = [layout.shard(x) for x in inputs]
        results = [layout.gather(x) for x in run_parallel(layout, kernel, *mine)]
        error = largest_error(results, expected)
        del results
        if not error <= TOLERANCE:
            raise SystemExit(f"error: {path} differs from the local kernel by {error:.1e}: not benchmarked")
        run = lambda layout=layout, mine=mine: run_parallel(layout, kernel, *mine)  # noqa: E731
        seconds = measure(run, hardware, repeats)
        median = statistics.median(seconds)
        share = local["median_seconds"] / (ranks * median)
        tflops = problem.flops / ranks / median / 1e12
        result[path] = {"seconds": seconds, "tflops_per_rank": tflops, "of_local": share, "error": error}
        table.add_row(path, f"{1e3 * median:.2f}", f"{tflops:.1f}", f"{share:.1%}", f"{error:.0e}")
    console.print(table)
    return result


def measure(run: Callable[[], object], hardware: platform.Platform, repeats: int) -> list[float]:
    """Seconds of each run after two warm-up runs; with several ranks, those of the slowest."""
    seconds = torch.zeros(repeats, dtype=torch.float64, device=hardware.device)
    for turn in range(-2, repeats):
        if dist.is_initialized():
            dist.barrier()
        _wait(hardware)
        start = time.perf_counter()
        run()
        _wait(hardware)
        if turn >= 0:
            seconds[turn] = time.perf_counter() - start
    if dist.is_initialized():
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.tolist()


def _wait(hardware: platform.Platform) -> None:
    if hardware.name == "cuda":
        torch.cuda.synchronize()
