#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares linear-attention and SSM layers on a CPU, forward and backward, with other ways to compute them.

    python benchmarks/linear_attention.py

At 8,192 tokens, the gated delta rule and Mamba2's: in blocks, as this program does, against transformers' form in
blocks without a GPU's kernels (Qwen3-Next, Mamba2). The gated delta rule also against the recurrence, and Ring 2
against one process with two threads. At 16,384 tokens a complete linear-attention layer against one with
attention, without MLPs. What is compared takes turns, in new processes; CPU seconds are those of all threads and ranks
together.
Figures are medians, and ratios those of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait do not count as CPU time
import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import megatron.context_parallel as cp
from benchmarks.forked_ranks import on_each_rank
from benchmarks.parallel_attention import world_layout
from megatron.context_parallel.linear_attention.mixer import linear_attention
from megatron.context_parallel.linear_attention.rules import GATED_DELTA, MAMBA2, recurrence
from megatron.context_parallel.linear_attention.short_convolution import short_convolution

HIDDEN, HEADS, KEY_HEADS, WIDTH = 512, 8, 4, 4  # of the complete layers, whose heads have 64 numbers
TOLERANCE = 1e-4  # of results, relative to the largest entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4, help="value heads; half as many key heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-recurrence", action="store_true", help="leave the recurrence out, which keeps all states")
    args = parser.parse_args()
    sizes = args.seq_length, args.heads, args.head_dim
    print(f"{args.seq_length} tokens, {args.heads} heads of {args.head_dim}, fp32; seconds: wall, CPU")
    forms = {"blocks": (1, 1), "transformers": (1, 1), "recurrence": (1, 1)}
    forms = {name: how for name, how in forms.items() if name != "recurrence" or not args.no_recurrence}
    compare({name: (how, sizes) for name, how in forms.items()}, args.repeats)
    compare({name: ((1, 1), sizes) for name in ("Mamba2 blocks", "Mamba2 transf.")}, args.repeats)
    compare({"blocks": ((1, 2), sizes), "ring of 2": ((2, 1), sizes)}, args.repeats)
    layers = 2 * args.seq_length, HEADS, 64
    print(f"complete layers, {layers[0]} tokens, {HIDDEN} wide")
    compare({"state": ((1, 1), layers), "attention": ((1, 1), layers)}, args.repeats)


How = tuple[tuple[int, int], tuple[int, int, int]]
"""(processes, threads of each), (tokens, heads, size of a head)."""


def compare(ways: dict[str, How], repeats: int) -> None:
    """Print a line for each way; its results must be those of the first, unless it is another kind of layer."""
    first = next(iter(ways))
    rounds = []
    for turn in range(repeats):
        order = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
        taken = {}
        for name in order:
            (processes, threads), sizes = ways[name]
            ranks = on_each_rank(timed, processes, name, threads, sizes, patience=1200)
            taken[name] = max(wall for wall, _, _ in ranks), sum(cpu for _, cpu, _ in ranks), ranks
        if first.endswith("blocks"):
            check(taken, first)
        rounds.append({name: figures[:2] for name, figures in taken.items()})
    for name in ways:
        wall, cpu = (statistics.median(one[name][i] for one in rounds) for i in (0, 1))
        ratio = statistics.median(one[name][1] / one[first][1] for one in rounds)
        processes, threads = ways[name][0]
        print(f"{name:14} {processes} x {threads} | {wall:8.3f} {cpu:8.3f} | CPU x {ratio:.2f}", flush=True)


def check(taken: dict[str, tuple], first: str) -> None:
    """Stop if a way has other sums of results than the first."""
    right = sum(sums for _, _, sums in taken[first][2])
    for name, (_, _, ranks) in taken.items():
        error = float(((sum(sums for _, _, sums in ranks) - right).abs() / right).max())
        if not error < TOLERANCE:
            raise SystemExit(f"error: {name}: results differ by {error:.1e}")


def timed(name: str, threads: int, sizes: tuple[int, int, int]) -> tuple[float, float, Tensor]:
    """(wall seconds, CPU seconds, sums of squares of the output and of all gradients) of this rank."""
    torch.set_num_threads(threads)
    layout = world_layout(sizes[0], ulysses=1, ring=torch.distributed.get_world_size())
    run, leaves, dout = WAYS[name](layout, *sizes)
    for _ in range(1 if name == "recurrence" else 2):  # the first warms up
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        out = run(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, torch.stack([x.double().square().sum() for x in (out.detach(), *grads)])


Made = tuple[Callable[..., Tensor], list[Tensor], Tensor]
"""A function, its inputs, and the gradient of its result."""


def made_inputs(layout: cp.SequenceLayout, tokens: int, heads: int, size: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g and beta of this rank's tokens, and dout."""
    how = {"generator": torch.Generator().manual_seed(5)}
    q, k = (functional.normalize(torch.randn(tokens, 1, heads // 2, size, **how), dim=-1) for _ in range(2))
    v, dout = (torch.randn(tokens, 1, heads, size, **how) for _ in range(2))
    g, beta = -0.1 * torch.rand(tokens, 1, heads, **how), torch.rand(tokens, 1, heads, **how)
    *leaves, dout = (x[layout.positions].clone() for x in (q * size**-0.5, k, v, g, beta, dout))
    return [x.requires_grad_() for x in leaves], dout


def blocks(layout: cp.SequenceLayout, *sizes: int) -> Made:
    return (lambda *x: linear_attention(*x, rule=GATED_DELTA, layout=layout)), *made_inputs(layout, *sizes)


def by_token(layout: cp.SequenceLayout, *sizes: int) -> Made:
    return (lambda *x: recurrence(GATED_DELTA, *x)[0]), *made_inputs(layout, *sizes)


def transformers_form(layout: cp.SequenceLayout, tokens: int, heads: int, size: int) -> Made:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def run(q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
        q, k = (x.repeat_interleave(2, dim=2) for x in (q * size**0.5, k))  # it scales the queries itself
        return torch_chunk_gated_delta_rule(*(x.transpose(0, 1) for x in (q, k, *others)))[0].transpose(0, 1)

    return run, *made_inputs(layout, tokens, heads, size)


def mamba2_blocks(layout: cp.SequenceLayout, *sizes: int) -> Made:
    def run(C: Tensor, B: Tensor, x: Tensor, dt: Tensor) -> Tensor:
        return linear_attention(C, B, x, decay(dt) * dt, dt, rule=MAMBA2, layout=layout)

    return run, *mamba2_inputs(layout, *sizes)


def mamba2_transformers(layout: cp.SequenceLayout, *sizes: int) -> Made:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    def run(C: Tensor, B: Tensor, x: Tensor, dt: Tensor) -> Tensor:
        C, B, x, dt = (one.transpose(0, 1) for one in (C, B, x, dt))
        return mamba2_chunk_scan(x, dt, decay(dt), B, C, chunk_size=256).transpose(0, 1)

    return run, *mamba2_inputs(layout, *sizes)


def mamba2_inputs(layout: cp.SequenceLayout, *sizes: int) -> tuple[list[Tensor], Tensor]:
    """C, B, x and dt; and dout."""
    (q, k, v, _, beta), dout = made_inputs(layout, *sizes)
    return [q, k, v, beta], dout


def decay(dt: Tensor) -> Tensor:
    """Mamba2's A for each head."""
    return -0.1 * torch.arange(1, dt.size(-1) + 1, dtype=dt.dtype)


def state_layer(layout: cp.SequenceLayout, tokens: int, heads: int, size: int) -> Made:
    """Projections, convolution, rule, and gated norm."""
    keys, values = KEY_HEADS * size, heads * size
    rows = [2 * keys + values, values, heads, heads]

    def run(x: Tensor, into: Tensor, taps: Tensor, out: Tensor) -> Tensor:
        mixed, gate, g, beta = (x @ into).split(rows, dim=-1)
        q, k, v = short_convolution(mixed, taps, layout=layout, activation="silu").split([keys, keys, values], dim=-1)
        q, k = (functional.normalize(part.unflatten(-1, (-1, size)), dim=-1) for part in (q, k))
        inputs = q * size**-0.5, k, v.unflatten(-1, (-1, size)), -functional.softplus(g), beta.sigmoid()
        mixed = linear_attention(*inputs, rule=GATED_DELTA, layout=layout)
        return (functional.rms_norm(mixed, (size,)).flatten(-2) * functional.silu(gate)) @ out

    return run, *weights(tokens, (HIDDEN, sum(rows)), (rows[0], WIDTH), (values, HIDDEN))


def attention_layer(layout: cp.SequenceLayout, tokens: int, heads: int, size: int) -> Made:
    """Projections and attention, with a key/value head for four heads."""
    rows = [heads * size, heads * size // 4, heads * size // 4]

    def run(x: Tensor, into: Tensor, out: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, size)) for part in (x @ into).split(rows, dim=-1))
        return cp.attention(q, k, v, layout=layout).flatten(-2) @ out

    return run, *weights(tokens, (HIDDEN, sum(rows)), (heads * size, HIDDEN))


def weights(tokens: int, *shapes: tuple[int, int]) -> tuple[list[Tensor], Tensor]:
    """An input, weights, and the gradient of the output."""
    how = {"generator": torch.Generator().manual_seed(5)}
    x, dout = (torch.randn(tokens, 1, HIDDEN, **how) for _ in range(2))
    return [one.requires_grad_() for one in (x, *(torch.randn(shape, **how) * 0.05 for shape in shapes))], dout


WAYS = {
    "blocks": blocks,
    "ring of 2": blocks,
    "transformers": transformers_form,
    "recurrence": by_token,
    "Mamba2 blocks": mamba2_blocks,
    "Mamba2 transf.": mamba2_transformers,
    "state": state_layer,
    "attention": attention_layer,
}

if __name__ == "__main__":
    main()
