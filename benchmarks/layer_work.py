#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Launches and bytes of one layer of a training step, and of the rest of the step, by the names of operations.

    python benchmarks/layer_work.py                                # Llama-3-8B's layers on an H200, without a GPU
    python benchmarks/layer_work.py --mode fpdt --length 131072 --chunk 32768

The real program runs one step with fake tensors, with two layers and with three; a layer is the difference. An
operation that a GPU runs as one kernel counts once; one that works on the parameters of all layers has bytes of each
layer, but no further launches. Bytes are those that it reads and writes if nothing stays in a cache. Products and
attention are listed too, but only the others are limited by memory: `seconds` are their bytes over its bandwidth.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks.gpu.program import MODES, Plan, flags
from benchmarks.gpu.stage import GPU, TINY, Sizes
from megatron.simulator.cost.trace import Kernel
from megatron.simulator.dry_run.one_rank import run_rank
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.settings.models import LLAMA_DEFAULTS

Work = dict[tuple[str, str, bool], tuple[float, float]]
"""By kind, name and whether it is of a backward pass: launches and bytes."""


def counted(plan: Plan, sizes: Sizes, machine: Machine) -> Work:
    """The work of a step on one GPU."""
    words = [*flags(plan, sizes, "cpu"), "--bf16", "--device", "auto"]
    config = parse(words, LLAMA_DEFAULTS, 1)
    trace = run_rank(config, 1, 0, sizes.model.vocab, machine=machine).trace
    launches, moved = Counter(), Counter()
    for event in trace.events:
        if isinstance(event, Kernel):
            key = event.kind, event.name, event.backward
            launches[key] += event.count
            moved[key] += event.count * event.bytes
    return {key: (launches[key], moved[key]) for key in launches}


def layer_and_rest(plan: Plan, sizes: Sizes, machine: Machine) -> tuple[Work, Work]:
    """The work of one layer, and what a step has besides its layers."""
    two, three = (counted(Plan(n, plan.length, plan.mode, plan.chunk), sizes, machine) for n in (2, 3))
    layer, rest = {}, {}
    for key in two | three:
        a, b = two.get(key, (0, 0)), three.get(key, (0, 0))
        layer[key] = b[0] - a[0], b[1] - a[1]
        rest[key] = a[0] - 2 * layer[key][0], a[1] - 2 * layer[key][1]
    return layer, rest


def totals(work: Work) -> tuple[float, float]:
    """Launches and bytes of all that is neither a product nor attention."""
    found = [pair for (kind, _, _), pair in work.items() if kind == "memory"]
    return sum(n for n, _ in found), sum(size for _, size in found)


def table(title: str, work: Work, rate: float) -> list[str]:
    lines = [f"\n{title}", "", "| operation | launches | GB | seconds |", "|---|---|---|---|"]
    for (kind, name, _), (n, size) in sorted(by_name(work).items(), key=lambda item: -item[1][1]):
        if n or size:
            seconds = f"{size / rate:.5f}" if kind == "memory" else kind
            lines.append(f"| {name} | {n:.0f} | {size / 1e9:.3f} | {seconds} |")
    n, size = totals(work)
    return [*lines, f"| **elementwise and copies** | **{n:.0f}** | **{size / 1e9:.3f}** | **{size / rate:.5f}** |"]


def by_name(work: Work) -> Work:
    """The same, forward and backward together."""
    result: Work = {}
    for (kind, name, _), pair in work.items():
        launches, moved = result.get((kind, name, False), (0, 0))
        result[kind, name, False] = launches + pair[0], moved + pair[1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["none", "recompute", "fpdt"])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk of FPDT")
    parser.add_argument("--gpu", default="H200-141G", help="a machine file")
    parser.add_argument("--tiny", action="store_true", help="the small model of the tests")
    args = parser.parse_args()
    machine, sizes = load(args.gpu), TINY if args.tiny else GPU
    for mode in args.mode:
        plan = Plan(2, args.length, mode, args.chunk if mode.startswith("fpdt") else 0)
        layer, rest = layer_and_rest(plan, sizes, machine)
        print("\n".join(table(f"{mode}: one layer, {args.length} tokens", layer, machine.memory_bandwidth)), flush=True)
        print("\n".join(table(f"{mode}: the rest of the step", rest, machine.memory_bandwidth)), flush=True)


if __name__ == "__main__":
    main()
