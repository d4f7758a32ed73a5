#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cost of dropout of attention weights on this machine: attention with and without it, measured alternately.

    python benchmarks/dropout.py --seq-length 4096 --head-dim 64

One process, forward and backward, causal. The ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import megatron.context_parallel as cp

GOAL = 1.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    grid = cp.initialize_grid()
    layout = cp.SequenceLayout(args.seq_length, grid)
    heads = (args.heads, *(2 * [args.kv_heads or args.heads]))
    inputs = [torch.randn(args.seq_length, 1, count, args.head_dim, requires_grad=True) for count in heads]
    dout = torch.randn(args.seq_length, 1, args.heads, args.head_dim)
    drawn = {"without": None, "with": cp.Dropout(args.dropout, seed=1)}

    def step(dropout: cp.Dropout | None) -> float:
        begin = time.perf_counter()
        torch.autograd.grad(cp.attention(*inputs, layout=layout, dropout=dropout), inputs, dout)
        return time.perf_counter() - begin

    for dropout in drawn.values():
        step(dropout)
    seconds: dict[str, list[float]] = {name: [] for name in drawn}
    for _ in range(args.repeats):
        for name, dropout in drawn.items():
            seconds[name].append(step(dropout))
    ratio = statistics.median(b / a for a, b in zip(seconds["without"], seconds["with"]))
    table = Table("dropout", "seconds", title=f"{args.seq_length} tokens, {args.heads} heads of {args.head_dim}")
    for name, times in seconds.items():
        table.add_row(name, f"{statistics.median(times):.3f}")
    Console().print(table, f"ratio {ratio:.2f}, goal: at most {GOAL}")


if __name__ == "__main__":
    main()
