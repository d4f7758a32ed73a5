#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cost of masks relative to full causal attention, forward and backward.

    python benchmarks/masks.py --json masks.json

Figures are CPU seconds of this process with one thread, the best of several rounds of all cases, so that other programs
on the machine have little effect. Packed documents are divided over 8 ring ranks, whose tiles run one rank after
another without transfers; the slowest rank is compared with the sum of the documents' separate costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import megatron.context_parallel as cp
from benchmarks.parallel_attention import log_normal
from megatron.context_parallel.attention.attend import tiled_attention
from megatron.context_parallel.attention.kernels.sums import KeyGradients
from megatron.context_parallel.attention.ring import KeyBlock
from megatron.context_parallel.attention.ring_plan import RingPlan, attention_plan
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.spans import Spans
from megatron.context_parallel.layout.tiles import tiles
from megatron.platform.cpu import processor_name

WINDOW, RANKS, DOCUMENTS = 2048, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    length, console = args.seq_length, Console(width=None if sys.stdout.isatty() else 120)
    ends = log_normal(DOCUMENTS, length)
    sparse = {f"block-sparse {name}": mask for name, mask in patterns(length).items()}
    masks = {"causal": cp.Causal(), f"window {WINDOW}": cp.Window(WINDOW - 1), **sparse}
    masks["ALiBi, causal"] = cp.Causal()
    console.print(
        f"{processor_name()}; {length} tokens, {args.heads} heads of {args.head_dim}, fp32, one thread, "
        "forward + backward"
    )
    runs: dict[str, Callable[[], None]] = {}
    for name, mask in masks.items():
        slopes = cp.alibi_slopes(args.heads) if name.startswith("ALiBi") else None
        runs[name] = run_of(mask, length, args, slopes)
    runs["documents, each alone"] = alone(ends, args)
    runs["documents, packed"] = run_of(cp.Documents(ends), length, args)
    for rank in range(RANKS):
        runs[f"documents, rank {rank} of {RANKS}"] = share_of_rank(ends, rank, args)
    seconds = fastest(runs, args, console)

    pairs = {name: sum(t.pairs for t in tiles(((0, length),), ((0, length),), mask)) for name, mask in masks.items()}
    rows = [(name, seconds[name], seconds[name] / seconds["causal"], pairs[name] / pairs["causal"]) for name in masks]
    table = Table("mask", "CPU seconds", "of causal", "pairs of causal", "goal", title="Cost of masks")
    for name, cost, share, work in rows:
        goal = 0.12 if name.startswith("window") else 0.20 if work <= 0.13 else None
        table.add_row(name, f"{cost:.2f}", f"{share:.1%}", f"{work:.1%}", f"<= {goal:.0%}" if goal else "")
    own = seconds["documents, each alone"]
    slowest = max(seconds[f"documents, rank {rank} of {RANKS}"] for rank in range(RANKS))
    dealt = slowest * RANKS / own
    table.add_row("documents, each alone", f"{own:.2f}")
    table.add_row("documents, packed", f"{seconds['documents, packed']:.2f}")
    table.add_row(f"documents on {RANKS} ranks, slowest x {RANKS}", f"{slowest * RANKS:.2f}")
    console.print(table)
    console.print(f"documents: slowest rank x {RANKS} = {dealt:.3f} of the sum of their separate costs (goal <= 1.15)")
    if args.json:
        report = {
            "processor": processor_name(),
            "torch": torch.__version__,
            "seconds": seconds,
            "share_of_causal": {name: share for name, _, share, _ in rows},
            "pairs_of_causal": {name: work for name, _, _, work in rows},
            "documents_on_ranks": dealt,
        }
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


def patterns(length: int) -> dict[str, cp.BlockSparse]:
    """Sparse patterns, the first with 12.5 % of the causal pairs."""
    block = 128
    longformers = (cp.BlockSparse(block, cp.LongformerBlocks(size, 1), length) for size in range(length // block))
    return {
        "longformer 12.5 %": next(mask for mask in longformers if density(mask) >= 0.123),
        "bigbird": cp.BlockSparse(block, cp.BigBirdBlocks(3, 1, 3), length),
        "strided": cp.BlockSparse(block, cp.StridedBlocks(16), length),
    }


def density(mask: cp.BlockSparse) -> float:
    """Pairs kept, as a share of the causal ones."""
    whole = ((0, mask.seq_length),)
    kept = sum(tile.pairs for tile in tiles(whole, whole, mask))
    return kept / (mask.seq_length * (mask.seq_length + 1) / 2)


@lru_cache(maxsize=1)
def longest(length: int, heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, [s, 1, heads, d]."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(length, 1, heads, head_dim, generator=generator) for _ in range(4))


def tensors(length: int, args: argparse.Namespace) -> list[Tensor]:
    """The first tokens of the longest inputs, which are made once, outside of the measured time."""
    return [x[:length].detach() for x in longest(args.seq_length, args.heads, args.head_dim)]


def run_of(mask, length: int, args: argparse.Namespace, slopes: Tensor | None = None) -> Callable[[], None]:
    layout = cp.SequenceLayout(length, abstract_grid())

    def run() -> None:
        *qkv, dout = tensors(length, args)
        leaves = [x.requires_grad_() for x in qkv]
        out = cp.attention(*leaves, layout=layout, mask=mask, alibi_slopes=slopes)
        torch.autograd.grad(out, leaves, dout)

    return run


def alone(ends: tuple[int, ...], args: argparse.Namespace) -> Callable[[], None]:
    runs = [run_of(cp.Causal(), stop - start, args) for start, stop in zip((0, *ends), ends)]

    def run() -> None:
        for each in runs:
            each()

    return run


def share_of_rank(ends: tuple[int, ...], rank: int, args: argparse.Namespace) -> Callable[[], None]:
    """The tiles of one ring rank, with keys and values read from this process's memory."""
    layout = cp.SequenceLayout(ends[-1], abstract_grid(ring=RANKS), "documents", document_ends=ends)
    mask = cp.Documents(ends)
    plan = attention_plan(layout, mask).ring(rank=rank)
    q, k, v, dout = tensors(ends[-1], args)
    mine = [_rows(x, layout.ring_spans(rank)).requires_grad_() for x in (q, k, v)]
    source = LocalSource(plan, layout, k, v)
    kernel = cp.AttentionRule(mask).tile_kernel(q, layout.grid.ulysses, ends[-1])
    my_dout = _rows(dout, layout.ring_spans(rank))

    def run() -> None:
        out = tiled_attention(*mine, source=source, kernel=kernel)
        torch.autograd.grad(out, mine, my_dout)

    return run


class LocalSource:
    """A ring's blocks without transfers."""

    def __init__(self, plan: RingPlan, layout: cp.SequenceLayout, k: Tensor, v: Tensor) -> None:
        self.held = []
        for hop in plan.hops:
            spans = layout.ring_spans(hop.source)
            if hop.tiles:
                self.held.append((hop, *(_rows(_rows(x, spans), hop.held) for x in (k, v))))

    def blocks(self, k: Tensor, v: Tensor, own: KeyGradients | None = None) -> Iterator[KeyBlock]:
        for index, (hop, *kv) in enumerate(self.held):
            yield KeyBlock(*kv, hop, grads=KeyGradients(*kv) if index else own)


def _rows(x: Tensor, spans: Spans) -> Tensor:
    return torch.cat([x[start:stop] for start, stop in spans]).detach()


def fastest(runs: dict[str, Callable[[], None]], args: argparse.Namespace, console: Console) -> dict[str, float]:
    """The least CPU seconds of each run over several rounds; each round runs all of them."""
    best: dict[str, float] = {}
    tensors(args.seq_length, args)
    with console.status("") as status:
        for index in range(args.repeats):
            for name, run in runs.items():
                status.update(f"round {index + 1} of {args.repeats}: {name}")
                start = time.process_time()
                run()
                took = time.process_time() - start
                best[name] = min(took, best.get(name, took))
    return best


if __name__ == "__main__":
    main()
