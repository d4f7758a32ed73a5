#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count what learned sparsity moves, computes and holds on a ring, as Markdown tables. No GPU is needed.

    python benchmarks/sparse_counts.py                       # about ten minutes on one core
    python benchmarks/sparse_counts.py --lengths 131072 --queries 1024
    python benchmarks/sparse_counts.py --memory              # one of the tables, in 20 seconds

Shapes are those of DeepSeek V3.2: latents of 576 numbers, index keys of 128, 64 index heads, 2,048 keys a query.

- choices: the distinct keys of other ranks that queries of zigzag rank 0 choose, as a share of the keys that
  these queries may choose. ``random``: an untrained indexer's projections of independent tokens. ``local``: queries
  look for keys like themselves among tokens whose subject changes slowly and returns. The choices are real, by
  choose_keys, for evenly spaced blocks of 128 queries; all queries of the rank choose at least as many keys.
- bytes: received by a rank for one forward pass of a layer. Around the ring and gathered, each rank gets all latents of
  the others. Fetched, it gets the chosen ones for 4 bytes of request each.
- work: multiply-adds of the indexer on the busiest rank, over the mean.
- memory: of a training step of one layer, on a rank, by a dry run; and what scores of all pairs in fp32 would take.
  megatron-core 0.19 without fused kernels makes these for each index head (dsa.py, _compute_index_scores).
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import cache

import torch
from torch import Tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.masks import Causal
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Spans, positions_of
from megatron.context_parallel.sparse_attention.choice import ROWS, choose_among
from megatron.simulator.dry_run.dry_run import with_layers
from megatron.simulator.dry_run.one_rank import run_rank
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.settings.models import LLAMA_DEFAULTS

LATENT, INDEX, INDEX_HEADS, TOP = 576, 128, 64, 2048
HEADS, DIM = 4, 32  # of the indexers that choose here
SUBJECT, SUBJECTS = 2048, 64  # tokens for which a subject stays, and their number
K = 1024


@cache
def indexer(kind: str, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [s, 1, heads, d], keys [s, 1, d] and weights [s, 1, heads] of all tokens."""
    torch.manual_seed(5)
    hidden = torch.randn(length, 64)
    if kind == "local":
        order = torch.randint(SUBJECTS, (length // SUBJECT + 1,)).repeat_interleave(SUBJECT)[:length]
        near = torch.randn(length // 64 + 1, 64).repeat_interleave(64, 0)[:length]  # what a paragraph shares
        hidden = 0.5 * hidden + torch.randn(SUBJECTS, 64)[order] + near
    k = torch.nn.functional.layer_norm(hidden @ torch.randn(64, DIM), (DIM,))
    if kind == "local":
        q = k.unsqueeze(1).expand(-1, HEADS, -1) + 0.3 * torch.randn(length, HEADS, DIM)
        weights = torch.ones(length, HEADS)
    else:
        q, weights = torch.einsum("sc,chd->shd", hidden, torch.randn(64, HEADS, DIM)), torch.randn(length, HEADS)
    return q.unsqueeze(1), k.unsqueeze(1), weights.unsqueeze(1)


def some_queries(spans: Spans, count: int) -> Spans:
    """Blocks of 128 of the rows at ``spans``, evenly spaced, from the end."""
    total = sum(stop - start for start, stop in spans)
    blocks = max(1, min(count, total) // ROWS)
    starts = [total - ROWS - i * (total // blocks) for i in range(blocks)]
    return positions_of([(start, start + ROWS) for start in reversed(starts)], spans)


def choices(kind: str, length: int, ring: int, count: int) -> tuple[int, float, float]:
    """Distinct keys of other ranks; their share of those that may be chosen; and the share of the keys before it that
    one block of 128 queries chooses."""
    layout = SequenceLayout(length, abstract_grid(ring=ring))
    q, k, weights = indexer(kind, length)
    spans = some_queries(layout.local_spans, count)
    rows = torch.cat([torch.arange(*span) for span in spans])
    chosen = choose_among(q[rows], k, weights[rows], spans=spans, top_k=TOP, masks=[Causal()])[:, 0]
    other = torch.ones(length, dtype=torch.bool)
    other[layout.positions] = False
    met = torch.zeros(length + 1, dtype=torch.bool)
    met[chosen.long() % (length + 1)] = True
    found = int((met[:length] & other).sum())
    last = chosen[-ROWS:].unique().numel() / (int(rows[-1]) + 1)
    return found, found / int(other[: int(rows[-1]) + 1].sum()), last


def gibi(count: float) -> str:
    return f"{count / 2**30:.2f}"


def tables(lengths: list[int], degrees: list[int], count: int) -> None:
    print(f"| tokens | ring | choices | queries | keys of others, share | of 128 queries | GiB around the ring "
          f"| GiB gathered | GiB fetched, at least |\n|{'---|' * 9}")  # fmt: skip
    for length in lengths:
        for ring in degrees:
            for kind in ("random", "local"):
                found, share, block = choices(kind, length, ring, count)
                whole = length * (ring - 1) // ring * LATENT * 2
                fetched = found * (LATENT * 2 + 4)
                print(f"| {length // K}K | {ring} | {kind} | {min(count, length // ring)} | {found:,}, {share:.0%} "
                      f"| {block:.0%} | {gibi(whole)} | {gibi(whole)} | {gibi(fetched)} |", flush=True)  # fmt: skip
    length, ring = max(lengths), max(degrees)
    print(
        f"\n| indexer at {length // K}K on {ring} ranks | busiest rank, multiply-adds | over the mean |\n|---|---|---|"
    )
    for balance in ("contiguous", "zigzag"):
        work = []
        for rank in range(ring):
            spans = SequenceLayout(length, abstract_grid(ring=ring).at(ring=rank), balance).local_spans
            pairs = sum((stop - start) * (start + stop + 1) // 2 for start, stop in spans)
            work.append(pairs * INDEX_HEADS * INDEX)
        print(f"| {balance} | {max(work):.3g} | {max(work) / (sum(work) / ring):.3f} |")
    memory(lengths, min(degrees))


def memory(lengths: list[int], ring: int) -> None:
    print(f"\n| tokens, on {ring} ranks | model | largest tensor, GiB | in a step | FPDT | scores of all pairs "
          f"| with heads |\n|{'---|' * 7}")  # fmt: skip
    for length in lengths:
        for model, heads in (("deepseek-v3.2", 64), ("glm-5", 32)):
            largest, peak = layer(model, length, ring)
            _, chunked = layer(model, length, ring, f" --fpdt --fpdt-chunk-size {64 * K}")
            pairs = length // ring * length * 4
            print(f"| {length // K}K | {model} | {gibi(largest)} | {gibi(peak)} | {gibi(chunked)} | {gibi(pairs)} "
                  f"| {gibi(pairs * heads)} |", flush=True)  # fmt: skip


def layer(model: str, length: int, ring: int, more: str = "") -> tuple[int, int]:
    """(bytes of the largest tensor, peak of activations and temporary tensors) of a layer whose FFN is an expert's."""
    words = (
        f"--model {model} --num-layers 2 --moe-layer-freq [0,1] --ffn-hidden-size 2048 --seq-length {length} --bf16 "
        "--vocab-size 1023 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 --mock-data "
        f"--ring-parallel-size {ring} --zero-stage 3{more}"
    )
    config = with_layers(parse(words.split(), LLAMA_DEFAULTS, ring), 1)
    config.model.num_experts = None  # this layer has none
    step = run_rank(config, ring, 0, 1024, machine=load("H100-80G"))
    largest = max(change for _, change in step.allocations.changes)
    return largest, max(kinds["activations"] + kinds["temporary"] for kinds in step.peaks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128 * K, 512 * K, 1024 * K])
    parser.add_argument("--degrees", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--memory", action="store_true", help="only the table of memory")
    parser.add_argument("--queries", type=int, default=2048, help="of the rank, that choose")
    args = parser.parse_args()
    if args.memory:
        memory(args.lengths, min(args.degrees))
    else:
        tables(args.lengths, args.degrees, args.queries)


if __name__ == "__main__":
    main()
