# SPDX-License-Identifier: Apache-2.0
"""All usable attention kernels against the GEMM rate, forward and backward; masks compared with causal."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import megatron.context_parallel as cp
from benchmarks.gpu.ahead import compile_ahead
from benchmarks.gpu.rates import dtype_of, gemm_rate
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage
from benchmarks.parallel_attention import largest_error, log_normal, run_kernel
from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Call, Launch
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.tiles import tiles
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.decisions import kernel_order
from megatron.simulator.machines.measure_device import passes, seconds_of

TOLERANCE = 2e-2  # bf16 keeps 8 bits
GUESS = 2e14  # assumed FLOP/s, for the expected time of a case


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    """Measure all kernels on short sequences first, so that only the longest are left out if time is short."""
    rate = gemm_rate(stage.folder, sizes, device)
    stage.report["gemm_flops_per_second"] = rate
    names = usable(sizes, device)
    stage.report["kernels"] = names
    stage.report["why_not"] = missing(sizes, device)
    if "triton" in names:
        jobs = [partial(masked_launches, name, sizes) for name in rules(sizes, min(sizes.masked))]
        compile_ahead(stage, jobs, device)
    stage.report["chosen"] = {str(rows): usable(sizes, device, float(rows))[0] for rows in sizes.tiles}
    causal, masked = [], []
    for length in sizes.lengths:
        for name in names:
            run_it = partial(bare, name, length, names[0], sizes, device, rate)
            causal.append(Case(f"{name} {length}", run_it, seconds(sizes, length), name))
    for length in sizes.masked:
        for name, rule in rules(sizes, length).items():
            libraries = [] if {"alibi_slopes", "dropout"} & set(rule) else kernel_order.BY_NAME
            for kernel in ("auto", *(name for name in ("triton", *libraries) if name in names)):
                run_it = partial(masked_case, rule, kernel, length, sizes, device)
                expected = 4 * seconds(sizes, length)
                masked.append(Case(f"{name}, {kernel}, {length}", run_it, expected, f"{name}, {kernel}"))
    masked += by_tiles(names, sizes, device)
    cut = len(names) * sum(length <= max(sizes.masked) for length in sizes.lengths)
    stage.run(causal[:cut] + masked + causal[cut:])


def by_tiles(names: list[str], sizes: Sizes, device: torch.device) -> list[Case]:
    """Every kernel on a sequence of equal documents, by their length: from which length on is it faster than Triton?"""
    length, cases = max(sizes.masked), []
    for rows in sizes.tiles:
        rule = {"mask": cp.Documents(tuple(range(rows, length + 1, rows)))}
        for kernel in names:
            run_it, name = partial(masked_case, rule, kernel, length, sizes, device), f"documents of {rows}, {kernel}"
            cases.append(Case(name, run_it, 4 * seconds(sizes, rows) * length / rows, name))
    return cases


def usable(sizes: Sizes, device: torch.device, tile_rows: float | None = None) -> list[str]:
    """Kernels that can run on this device, best first; the slow reference kernel only if there is no other."""
    names = kernels.available(device, dtype_of(device), sizes.model.head_dim, tile_rows=tile_rows)
    return [name for name in names if name != "math"] or names


def missing(sizes: Sizes, device: torch.device) -> Figures:
    """Why other kernels cannot run."""
    how = {"device": device, "dtype": dtype_of(device), "head_dim": sizes.model.head_dim}
    why = {name: kernel.why_not(**how) for name, kernel in kernels.KERNELS.items()}
    return {name: reason for name, reason in why.items() if reason}


def seconds(sizes: Sizes, length: int) -> float:
    return 3 * sizes.window + 2 * flops(sizes, length * (length + 1) / 2) * 3.5 / GUESS


def flops(sizes: Sizes, pairs: float) -> float:
    """FLOPs of the forward pass; the backward pass has 2.5 times as many."""
    return 4.0 * pairs * sizes.model.heads * sizes.model.head_dim


def inputs(sizes: Sizes, length: int, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of the output, [s, 1, heads, d]."""
    model, draw = sizes.model, torch.Generator(device).manual_seed(7)
    heads = (model.heads, model.kv_heads, model.kv_heads, model.heads)
    make = partial(torch.randn, generator=draw, device=device, dtype=dtype_of(device))
    return [make(length, 1, n, model.head_dim) for n in heads]


def bare(name: str, length: int, first: str, sizes: Sizes, device: torch.device, rate: float) -> Figures:
    """Figures of a kernel on a causal sequence; on the shortest one also its difference from the first kernel."""
    tensors, result = inputs(sizes, length, device), {}
    if length == min(sizes.lengths) and name != first:
        mine, theirs = (run_kernel(kernels.KERNELS[kernel], *tensors) for kernel in (name, first))
        result["error"] = error = largest_error(mine, theirs)
        if not error <= TOLERANCE:
            raise ValueError(f"differs from {first} by {error:.1e}: not measured")
    *qkv, dout = tensors
    run, run_back = passes(kernels.KERNELS[name], *qkv)
    out, lse = run()
    forward = seconds_of(run, device, sizes.window)
    backward = seconds_of(lambda: run_back(dout, out, lse), device, sizes.window)
    work = flops(sizes, length * (length + 1) / 2)
    result |= {"kernel": name, "length": length}
    for way, took, done in (("forward", forward, work), ("backward", backward, 2.5 * work)):
        result[way] = {"seconds": took, "flops_per_second": done / took, "of_gemm": done / took / rate}
    return result


def rules(sizes: Sizes, length: int) -> dict[str, Figures]:
    """Arguments of cp.attention, by name."""
    ends = log_normal(sizes.documents, length)
    result: dict[str, Figures] = {"causal": {"mask": cp.Causal()}}
    result |= {f"window {left + 1}": {"mask": cp.Window(left)} for left in sizes.windows}
    result[f"{len(ends)} documents"] = {"mask": cp.Documents(ends)}
    result["ALiBi"] = {"mask": cp.Causal(), "alibi_slopes": cp.alibi_slopes(sizes.model.heads)}
    result["dropout 0.1"] = {"mask": cp.Causal(), "dropout": Dropout(0.1, 1234, 1, samples=(0,))}
    return result


def masked_launches(name: str, sizes: Sizes, capability: int) -> list[Launch]:
    """The launches of our Triton kernels for a rule, of tensors without memory."""
    length, model = min(sizes.masked), sizes.model
    rule, kind = rules(sizes, length)[name], {"device": "meta", "dtype": torch.bfloat16}
    heads = (model.heads, model.kv_heads, model.kv_heads)
    q, k, v = (torch.empty(length, 1, n, model.head_dim, **kind) for n in heads)
    slopes = torch.empty(model.heads, device="meta") if "alibi_slopes" in rule else None
    call = Call(
        q, k, v, model.head_dim**-0.5, rule["mask"], slopes, dropout=rule.get("dropout"), capability=capability
    )  # fmt: skip
    work, row = tiles(((0, length),), ((0, length),), rule["mask"]), torch.empty(length, 1, model.heads, device="meta")
    return [call.forward(work, q, row, first=True), *call.backward(work, q, row, row, q, k, v, first=("q", "k"))]


def masked_case(rule: Figures, kernel: str, length: int, sizes: Sizes, device: torch.device) -> Figures:
    """Figures of cp.attention as a program calls it, forward and backward."""
    layout = cp.SequenceLayout(length, abstract_grid())
    q, k, v, dout = inputs(sizes, length, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both() -> None:
        out = cp.attention(*leaves, layout=layout, kernel=kernel, **rule)
        torch.autograd.grad(out, leaves, dout)

    took, peak = seconds_of(both, device, sizes.window), None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        both()
        peak = torch.cuda.max_memory_allocated(device)
    pairs = pairs_of(rule["mask"], length)
    return {
        "length": length,
        "seconds": took,
        "pairs_of_causal": pairs / (length * (length + 1) / 2),
        "flops_per_second": 3.5 * flops(sizes, pairs) / took,
        "device_peak_bytes": peak,
    }


def pairs_of(mask: Mask, length: int) -> int:
    """Number of pairs of query and key that the mask allows."""
    whole = (0, length)
    return sum(piece.pairs for band in mask.bands(whole, whole) for piece in band.clip(whole))
