# SPDX-License-Identifier: Apache-2.0
"""Linear-attention and SSM layers: kernels of fla-core and ours, forward and both ways; the same results first."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import megatron.context_parallel as cp
from benchmarks.gpu.rates import dtype_of
from benchmarks.gpu.stage import Case, Figures, Sizes, Stage
from benchmarks.parallel_attention import largest_error
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.linear_attention import decay_spans, fla_kernels
from megatron.context_parallel.linear_attention.rules import RULES
from megatron.simulator.machines.measure_device import seconds_of

TOLERANCE = 3e-2  # fla keeps states in bf16
GUESS = 2e-6  # assumed seconds of a token both ways with 32 heads


def run(stage: Stage, sizes: Sizes, device: torch.device) -> None:
    size = sizes.model.head_dim
    stage.report["why_not"], kernels = {}, {}
    for rule in ("gated_delta", "kda", "mamba2"):
        how = {"device": device, "dtype": dtype_of(device), "keys": size, "values": values_of(rule, size)}
        found = {name: one.why_not(RULES[rule], **how) for name, one in (("fla", fla_kernels), ("triton", decay_spans))}
        stage.report["why_not"] |= {f"{name}, {rule}": reason for name, reason in found.items() if reason}
        kernels[rule] = [name for name, reason in found.items() if not reason] + ["blocks"]
    cases = []
    for length in sizes.linear:
        for rule, names in kernels.items():
            for kernel in names:
                run_it = partial(measured, rule, kernel, length, sizes, device, compare=kernel != "blocks")
                name = f"{rule}, {kernel}, {length}"
                cases.append(Case(name, run_it, 5 * sizes.window + GUESS * length, f"{rule}, {kernel}"))
    stage.run(cases)


def values_of(rule: str, size: int) -> int:
    """Half as many values as keys in Mamba2, as its models have."""
    return size // 2 if rule == "mamba2" else size


def inputs(rule: str, length: int, sizes: Sizes, device: torch.device) -> list[Tensor]:
    """q, k, v, g, beta and the gradient of the output; half as many key heads as value heads, a quarter in Mamba2."""
    heads, size, draw = sizes.model.heads, sizes.model.head_dim, torch.Generator(device).manual_seed(7)
    make = partial(torch.randn, generator=draw, device=device)
    key_heads = heads // (4 if rule == "mamba2" and not heads % 4 else 2)
    q, k = (F.normalize(make(length, 1, key_heads, size), dim=-1) for _ in range(2))
    v, dout = (make(length, 1, heads, values_of(rule, size)) for _ in range(2))
    g = -F.softplus(make(length, 1, heads, *([size] if RULES[rule].channels else [])) - 2)
    beta = make(length, 1, heads).sigmoid()
    narrow = dtype_of(device)
    return [(q * size**-0.5).to(narrow), k.to(narrow), v.to(narrow), g, beta, dout.to(narrow)]


def measured(rule: str, kernel: str, length: int, sizes: Sizes, device: torch.device, compare: bool) -> Figures:
    """Figures of cp.linear_attention as a program calls it; on the shortest sequence the kernels are compared."""
    layout = cp.SequenceLayout(length, abstract_grid())
    *leaves, dout = inputs(rule, length, sizes, device)
    leaves = [x.requires_grad_() for x in leaves]

    def forward(name: str = kernel) -> Tensor:
        return cp.linear_attention(*leaves, rule=rule, layout=layout, kernel=name)

    def both(name: str = kernel) -> list[Tensor]:
        out = forward(name)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    result: Figures = {"rule": rule, "form": kernel, "length": length}
    if compare and length == min(sizes.linear):
        result["error"] = error = largest_error(both(), both("blocks"))
        if not error <= TOLERANCE:
            raise ValueError(f"differs from blocks by {error:.1e}: not measured")
    result["forward_seconds"] = seconds_of(forward, device, sizes.window)
    result["seconds"] = seconds_of(both, device, sizes.window)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        both()
        result["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return result
